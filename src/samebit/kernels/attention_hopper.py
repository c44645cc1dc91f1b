"""Attention forward for packed BF16 segments with one producer and two consumer warp groups.

Each warp group is `given` its operands as tuples, which the kernel's last lines put together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from samebit.kernels.attention_block import LN2
from samebit.kernels.attention_feed import ROWS, gather, place, read_segment
from samebit.kernels.attention_walk import fold_split, store_tile, walk_split


@gluon.jit
def _consume(
    given,
    GROUP_INDEX: gl.constexpr, H: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 query rows against every block."""
    q_smem, k_smem, v_smem, total_smem, q_ready, k_ready, v_ready, k_free, v_free = given[0]
    out_ptr, lse_ptr, start, length, before, token0, head, factor, num_blocks, num_full = given[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KB, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q = q_smem.index(GROUP_INDEX)
    total = total_smem.index(GROUP_INDEX)
    rings = (k_smem, v_smem, k_ready, v_ready, k_free, v_free)
    position_R = before + token0 + GROUP_INDEX * ROWS + gl.arange(0, ROWS, ROW)
    factor = gl.full([ROWS], 1.0, gl.float32, ROW) * factor
    m_total = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l_total = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    mbarrier.wait(q_ready, 0)
    num_splits = gl.cdiv(num_blocks, SPLIT_BLOCKS)
    for split in range(0, num_splits):
        lo = split * SPLIT_BLOCKS
        hi = gl.minimum(lo + SPLIT_BLOCKS, num_blocks)
        mid = gl.minimum(gl.maximum(num_full, lo + 1), hi)
        # BF16 has no scales, and Q is loaded once: nobody waits for its end.
        acc, m, den = walk_split(
            lo, mid, hi, 0, 0, q, rings, (0, 0, 0), factor, position_R, split, num_splits, 0,
            False, D, KB, STAGES, False, S_LAYOUT, O_LAYOUT, DTYPE,
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
    inverse = gl.convert_layout(gl.div_rn(1.0, l_total), gl.SliceLayout(1, O_LAYOUT))
    # Every product with Q is done; its buffer carries the output to coalesced stores.
    q.store((acc * inverse[:, None]).to(DTYPE))
    token_R = token0 + GROUP_INDEX * ROWS + gl.arange(0, ROWS, ROW)
    lse = (m_total + gl.log2(l_total)) * LN2
    gl.store(lse_ptr + (start + token_R) * H + head, lse, mask=token_R < length)
    store_tile(q, out_ptr, start, token0 + GROUP_INDEX * ROWS, length, head, H, D)


@gluon.jit
def _fetch(
    whole, desc, ptr, smem, ready, stage, row, kv_head, where, stride,
    D: gl.constexpr, KB: gl.constexpr,
):  # fmt: skip
    """One block's keys or values: a bulk copy of whole blocks, a gather of others."""
    if whole:
        mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            desc, [row, kv_head * D], ready.index(stage), smem.index(stage)
        )
    else:
        base, end, start, prefix_start, before = where
        gather(
            ptr + kv_head * D, smem.index(stage), base, end, start, prefix_start, before, ptr, 0, stride,
            D, KB, 1, False,
        )  # fmt: skip
        mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def _produce(given, D: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr):
    """Fills the key and value stages in block order."""
    q_desc, k_desc, v_desc, k_ptr, v_ptr = given[0]
    q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free = given[1]
    start, prefix_start, before, end, token0, head, kv_head, k_row, v_row, num_blocks = given[2]
    mbarrier.expect(q_ready, 2 * q_desc.block_type.nbytes)
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(
            q_desc, [start + token0 + group * ROWS, head * D], q_ready, q_smem.index(group)
        )
    for block in range(0, num_blocks):
        stage = block % STAGES
        phase = ((block // STAGES) & 1) ^ 1
        base = block * KB
        whole, row = place(base, start, prefix_start, before, end, KB)
        mbarrier.wait(k_free.index(stage), phase)
        where = (base, end, start, prefix_start, before)
        _fetch(whole, k_desc, k_ptr, k_smem, k_ready, stage, row, kv_head, where, k_row, D, KB)
        mbarrier.wait(v_free.index(stage), phase)
        _fetch(whole, v_desc, v_ptr, v_smem, v_ready, stage, row, kv_head, where, v_row, D, KB)


@gluon.jit
def attention_hopper_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, out_ptr, lse_ptr, segments, factor, k_row, v_row,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid (segments x H, tiles of 128 tokens of one head); the longest tiles start first."""
    DTYPE: gl.constexpr = q_desc.dtype
    head = gl.program_id(0) % H
    kv_head = head // (H // G)
    token0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * (2 * ROWS)
    start, length, prefix_start, before = read_segment(segments, gl.program_id(0) // H)
    if token0 < length:
        end = before + length
        num_blocks = (gl.minimum(before + token0 + 2 * ROWS, end) - 1) // KB + 1
        num_full = (before + token0 + 1) // KB
        q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], q_desc.layout)
        k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KB, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KB, D], v_desc.layout)
        total_smem = gl.allocate_shared_memory(
            gl.float32, [2, ROWS, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        )
        BAR: gl.constexpr = mbarrier.MBarrierLayout()
        q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        mbarrier.init(q_ready, count=1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(stage), count=1)
            mbarrier.init(v_ready.index(stage), count=1)
            mbarrier.init(k_free.index(stage), count=2)
            mbarrier.init(v_free.index(stage), count=2)
        consumed = (
            (q_smem, k_smem, v_smem, total_smem, q_ready, k_ready, v_ready, k_free, v_free),
            (out_ptr, lse_ptr, start, length, before, token0, head, factor, num_blocks, num_full),
        )
        produced = (
            (q_desc, k_desc, v_desc, k_ptr, v_ptr),
            (q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free),
            (start, prefix_start, before, end, token0, head, kv_head, k_row, v_row, num_blocks),
        )
        gl.warp_specialize(
            [
                (_consume, (consumed, 0, H, D, KB, SPLIT_BLOCKS, STAGES, DTYPE)),
                (_consume, (consumed, 1, H, D, KB, SPLIT_BLOCKS, STAGES, DTYPE)),
                (_produce, (produced, D, KB, STAGES)),
            ],
            [4, 4],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
