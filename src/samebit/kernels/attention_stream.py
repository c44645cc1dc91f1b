"""Attention forward like attention_hopper.py for a paged cache and for FP8, and for many tiles a
program: the copies of the next tile run while this one ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from samebit.kernels.attention_block import LN2, PV_LIFT
from samebit.kernels.attention_feed import ROWS, SCALE_SLOTS, feed, turns, work_tile
from samebit.kernels.attention_walk import fold_split, walk_split


@gluon.jit
def _consume(
    given,
    GROUP_INDEX: gl.constexpr, H: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 query rows of every tile against every block."""
    q_smem, k_smem, v_smem, total_smem, ks_smem, vs_smem = given[0]
    q_ready, q_free, k_ready, v_ready, k_free, v_free, s_ready = given[1]
    q_scale_ptr, out_ptr, lse_ptr = given[2]
    work, context_lens, query_starts, num_sequences, num_tiles, scale_factor = given[3]
    DTYPE: gl.constexpr = gl.float16 if FP8 else gl.bfloat16
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KB, 32 if FP8 else 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q = q_smem.index(GROUP_INDEX)
    total = total_smem.index(GROUP_INDEX)
    rings = (k_smem, v_smem, k_ready, v_ready, k_free, v_free)
    scales = (ks_smem, vs_smem, s_ready)
    step0 = 0
    num_turns = turns(num_tiles)
    start, length, _prefix, before, token0, head, _sequence = work_tile(
        0, num_tiles, work, context_lens, query_starts, num_sequences, H, PAGED
    )
    for turn in range(0, num_turns):
        # The next tile's record travels while this tile is worked on.
        start_next, length_next, _prefix, before_next, token0_next, head_next, _sequence = (
            work_tile(
                turn + 1, num_tiles, work, context_lens, query_starts, num_sequences, H, PAGED
            )
        )
        end = before + length
        num_blocks = (gl.minimum(before + token0 + 2 * ROWS, end) - 1) // KB + 1
        if token0 >= length:
            num_blocks = 0
        num_full = (before + token0 + 1) // KB
        token_R = token0 + GROUP_INDEX * ROWS + gl.arange(0, ROWS, ROW)
        position_R = before + token_R
        row_R = (start + token_R).to(gl.int64) * H + head
        factor = gl.full([ROWS], 1.0, gl.float32, ROW) * scale_factor
        if FP8:
            factor = factor * gl.load(q_scale_ptr + row_R, mask=token_R < length, other=1.0)
        m_total = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        l_total = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        if num_blocks > 0:
            mbarrier.wait(q_ready, turn & 1)
        num_splits = gl.cdiv(num_blocks, SPLIT_BLOCKS)
        for split in range(0, num_splits):
            lo = split * SPLIT_BLOCKS
            hi = gl.minimum(lo + SPLIT_BLOCKS, num_blocks)
            mid = gl.minimum(gl.maximum(num_full, lo + 1), hi)
            acc, m, den = walk_split(
                lo, mid, hi, step0, end, q, rings, scales, factor, position_R, split, num_splits, q_free,
                True, D, KB, STAGES, FP8, S_LAYOUT, O_LAYOUT, DTYPE,
            )  # fmt: skip
            if split > 0:
                acc, m_total, l_total = fold_split(
                    acc, m, den, m_total, l_total, total, position_R >= lo * KB, O_LAYOUT
                )
            else:
                m_total = m
                l_total = den
            if split + 1 < num_splits:
                total.store(acc)
        inverse = gl.div_rn(1.0, l_total)
        if FP8:
            inverse = inverse * (1.0 / PV_LIFT)
        gl.store(lse_ptr + row_R, (m_total + gl.log2(l_total)) * LN2, mask=token_R < length)
        d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        offset = gl.convert_layout(row_R, ROW_O)[:, None] * D + d[None, :]
        inside = gl.convert_layout(token_R < length, ROW_O)[:, None]
        out = acc * gl.convert_layout(inverse, ROW_O)[:, None]
        gl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)
        step0 += num_blocks
        start, length, before = start_next, length_next, before_next
        token0, head = token0_next, head_next


@gluon.jit
def attention_stream_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    work, block_table, context_lens, query_starts, table_width, num_sequences, num_tiles, factor,
    k_rows, k_head_rows, k_column, v_rows, v_head_rows, v_column,
    k_page, k_row, k_head, v_page, v_row, v_head, ks_page, ks_row, ks_head, vs_page, vs_row, vs_head,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
    FP8: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Any grid of at most num_tiles programs; a tile is 128 tokens of one query head."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KB, D], k_desc.layout)
    total_smem = gl.allocate_shared_memory(
        gl.float32, [2, ROWS, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ks_smem = gl.allocate_shared_memory(gl.float32, [SCALE_SLOTS, KB if FP8 else 1], FLAT)
    vs_smem = gl.allocate_shared_memory(gl.float32, [SCALE_SLOTS, KB if FP8 else 1], FLAT)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v8_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    s_ready = gl.allocate_shared_memory(gl.int64, [SCALE_SLOTS, 1], BAR)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v8_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    for slot in gl.static_range(SCALE_SLOTS):
        mbarrier.init(s_ready.index(slot), count=128)
    if FP8:
        V16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        v_smem = gl.allocate_shared_memory(gl.float16, [STAGES, KB, D], V16)
        v8_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KB, D], v_desc.layout)
    else:
        v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KB, D], v_desc.layout)
        v8_smem = v_smem
    consumed = (
        (q_smem, k_smem, v_smem, total_smem, ks_smem, vs_smem),
        (q_ready, q_free, k_ready, v_ready, k_free, v_free, s_ready),
        (q_scale_ptr, out_ptr, lse_ptr),
        (work, context_lens, query_starts, num_sequences, num_tiles, factor),
    )
    fed = (
        (q_desc, k_desc, v_desc, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr),
        (work, block_table, context_lens, query_starts, table_width, num_sequences, num_tiles),
        (q_smem, k_smem, v_smem, v8_smem, ks_smem, vs_smem),
        (q_ready, q_free, k_ready, v_ready, k_free, v_free, v8_ready, s_ready),
        (k_rows, k_head_rows, k_column, v_rows, v_head_rows, v_column),
        (k_page, k_row, k_head, v_page, v_row, v_head),
        (ks_page, ks_row, ks_head, vs_page, vs_row, vs_head),
    )
    gl.warp_specialize(
        [
            (_consume, (consumed, 0, H, D, KB, SPLIT_BLOCKS, STAGES, PAGED, FP8)),
            (_consume, (consumed, 1, H, D, KB, SPLIT_BLOCKS, STAGES, PAGED, FP8)),
            (feed, (fed, H, G, D, KB, STAGES, PAGE, PAGED, FP8)),
        ],
        [4, 4],
        [CONSUMER_REGS, PRODUCER_REGS],
    )
