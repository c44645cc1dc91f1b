"""Attention decode over a paged BF16 cache: a feeder and one consumer warp group, two programs on a
multiprocessor.

The same steps and partial results as attention_decode.py. Keys and values of one key block arrive
by bulk tensor copies in a ring of slots (K0, V0, K1, ...; attention_decode_feed.py). Needs pages of whole
key blocks.

Of the 64 rows that wgmma wants, a group of query heads fills few. They are laid on rows 0-7 of each
warp's 16, whose registers are then the only ones that the softmax touches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebit.kernels._quantize_gluon import codes_of, scale_of, widened
from samebit.kernels.attention_block import LN2
from samebit.kernels.attention_decode_feed import feed
from samebit.kernels.attention_feed import ROWS
from samebit.kernels.attention_walk import block_softmax

LIVE = gl.constexpr(32)
"""Rows of the tile that carry query heads."""


@gluon.jit
def _live(x, W: gl.constexpr):
    """The live rows of x [64, W] as [32, W]; no data moves."""
    live, _ = x.reshape([4, 2, 8, W]).permute((0, 2, 3, 1)).split()
    return live.reshape([LIVE, W])


@gluon.jit
def _operand(p, W: gl.constexpr, LAYOUT: gl.constexpr):
    """p [32, W] of 16-bit elements on the live rows of zeros [64, W]; no data moves."""
    p = p.reshape([4, 8, W])
    # The compiler must not know these zeros: it would rebuild them between products in flight.
    zero = gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2
    )
    full = gl.join(p, zero).permute((0, 3, 1, 2)).reshape([ROWS, W])
    return gl.convert_layout(full, LAYOUT, assert_trivial=True)


@gluon.jit
def _rescaled(acc, alpha, W: gl.constexpr, LAYOUT: gl.constexpr):
    """acc [64, W] with its live rows multiplied by alpha [32]."""
    live, dead = acc.reshape([4, 2, 8, W]).permute((0, 2, 3, 1)).split()
    factor = gl.convert_layout(alpha.reshape([4, 8]), gl.SliceLayout(2, live.type.layout))
    live = live * factor[:, :, None]
    full = gl.join(live, dead).permute((0, 3, 1, 2)).reshape([ROWS, W])
    return gl.convert_layout(full, LAYOUT, assert_trivial=True)


@gluon.jit
def _block(
    count, block, end, acc, m, den, q_smem, ring, bars, factor, position_R,
    TAIL: gl.constexpr, D: gl.constexpr, KB: gl.constexpr, SLOTS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, L_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One block of keys, the count-th of this program."""
    ready, free = bars
    item = 2 * count
    k_slot = item % SLOTS
    v_slot = (item + 1) % SLOTS
    mbarrier.wait(ready.index(k_slot), (item // SLOTS) & 1)
    zero = gl.zeros([ROWS, KB], gl.float32, S_LAYOUT)
    s = warpgroup_mma(
        q_smem, ring.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(free.index(k_slot), count=1)
    s = _live(s, KB)
    p, m, den, alpha = block_softmax(s, m, den, factor, position_R, block * KB, TAIL, L_LAYOUT, KB)
    acc = _rescaled(acc, alpha, D, O_LAYOUT)
    p = _operand(p.to(gl.bfloat16), KB, gl.DotOperandLayout(0, O_LAYOUT, 2))
    v = ring.index(v_slot)
    mbarrier.wait(ready.index(v_slot), ((item + 1) // SLOTS) & 1)
    if TAIL:
        V_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        row = block * KB + gl.arange(0, KB, gl.SliceLayout(1, V_LAYOUT))
        # Rows past the end may hold NaN, and 0 x NaN would reach every output.
        v.store(gl.where((row < end)[:, None], v.load(V_LAYOUT), 0.0))
        fence_async_shared()
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(free.index(v_slot), count=1)
    return acc, m, den


@gluon.jit
def _queries(q_ptr, first_row, GROUP: gl.constexpr, D: gl.constexpr):
    """Query heads of one group on the live rows of zeros [64, D]."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    t_Q = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    r_Q = t_Q // 16 * 8 + t_Q % 8
    d_Q = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    return gl.load(
        q_ptr + (first_row + r_Q)[:, None] * D + d_Q[None, :],
        mask=((t_Q % 16 < 8) & (r_Q < GROUP))[:, None],
        other=0.0,
    )


@gluon.jit
def _store_result(live, results, first_row, index, head, r_O, d_O, D: gl.constexpr,
                  GROUP: gl.constexpr, QUANTIZE: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Finished rows [32, D], rounded to BF16: as they are, or as codes with a scale per head."""
    out_ptr, out_scale_ptr, scale_stride_t, scale_stride_g = results
    y = live.to(gl.bfloat16)
    out_O = out_ptr + (first_row + r_O)[:, None] * D + d_O[None, :]
    mask_O = (r_O < GROUP)[:, None]
    if QUANTIZE:
        scale = scale_of(y, OUT)
        gl.store(out_O, codes_of(widened(y), scale[:, None]), mask=mask_O)
        place = index.to(gl.int64) * scale_stride_t + (head * GROUP + r_O) * scale_stride_g
        gl.store(out_scale_ptr + place, scale, mask=r_O < GROUP)
    else:
        gl.store(out_O, y, mask=mask_O)


@gluon.jit
def _consume(
    given,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr,
    QUANTIZE: gl.constexpr,
):  # fmt: skip
    """Every block of this program's splits; finishes the rows if no other program has more."""
    q_smem, ring, bars = given[0]
    q_ptr, results, lse_ptr, part_acc_ptr, part_m_ptr, part_l_ptr = given[1]
    index, head, end, lo, hi, num_blocks, max_splits, factor = given[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KB, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    shape_S = _live(gl.zeros([ROWS, KB], gl.float32, S_LAYOUT), KB)
    L_LAYOUT: gl.constexpr = shape_S.type.layout
    shape_O = _live(gl.zeros([ROWS, D], gl.float32, O_LAYOUT), D)
    OUT: gl.constexpr = shape_O.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, L_LAYOUT)
    first_row = index.to(gl.int64) * H + head * GROUP
    q_smem.store(_queries(q_ptr, first_row, GROUP, D))
    fence_async_shared()
    gl.thread_barrier()
    r_S = gl.arange(0, LIVE, ROW)
    factor_R = gl.full([LIVE], 1.0, gl.float32, ROW) * factor
    position_R = gl.full([LIVE], 0, gl.int32, ROW) + (end - 1)
    r_O = gl.arange(0, LIVE, gl.SliceLayout(1, OUT))
    d_O = gl.arange(0, D, gl.SliceLayout(0, OUT))
    mask_O = (r_O < GROUP)[:, None]
    whole = num_blocks <= SPLITS * SPLIT_BLOCKS
    count = 0
    m_total = gl.full([LIVE], float("-inf"), gl.float32, ROW)
    l_total = gl.zeros([LIVE], gl.float32, ROW)
    for split in range(lo // SPLIT_BLOCKS, gl.cdiv(hi, SPLIT_BLOCKS)):
        first = split * SPLIT_BLOCKS
        last = gl.minimum(first + SPLIT_BLOCKS, hi)
        m = gl.full([LIVE], float("-inf"), gl.float32, ROW)
        den = gl.zeros([LIVE], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        full = gl.minimum(last, end // KB)
        for block in range(first, full):
            acc, m, den = _block(
                count, block, end, acc, m, den, q_smem, ring, bars, factor_R, position_R,
                False, D, KB, SLOTS, S_LAYOUT, O_LAYOUT, L_LAYOUT,
            )  # fmt: skip
            count += 1
        for block in range(full, last):
            acc, m, den = _block(
                count, block, end, acc, m, den, q_smem, ring, bars, factor_R, position_R,
                True, D, KB, SLOTS, S_LAYOUT, O_LAYOUT, L_LAYOUT,
            )  # fmt: skip
            count += 1
        live = _live(acc, D)
        if not whole:
            part_S = (first_row + r_S) * max_splits + split
            part_O = (first_row + r_O) * max_splits + split
            gl.store(part_acc_ptr + part_O[:, None] * D + d_O[None, :], live, mask=mask_O)
            gl.store(part_m_ptr + part_S, m, mask=r_S < GROUP)
            gl.store(part_l_ptr + part_S, den, mask=r_S < GROUP)
        else:
            total_O = part_acc_ptr + ((first_row + r_O) * max_splits)[:, None] * D + d_O[None, :]
            if split > 0:
                m_new = gl.maximum(m_total, m)
                old = gl.exp2(m_total - m_new)
                new = gl.exp2(m - m_new)
                l_total = gl.fma(l_total, old, den * new)
                m_total = m_new
                # Each thread reads back what it wrote itself.
                total = gl.load(total_O, mask=mask_O, other=0.0)
                old_O = gl.convert_layout(old, gl.SliceLayout(1, OUT))
                new_O = gl.convert_layout(new, gl.SliceLayout(1, OUT))
                live = gl.fma(total, old_O[:, None], live * new_O[:, None])
            else:
                m_total = m
                l_total = den
            if last < num_blocks:
                gl.store(total_O, live, mask=mask_O)
            else:
                inverse = gl.div_rn(1.0, l_total)
                live = live * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
                _store_result(
                    live, results, first_row, index, head, r_O, d_O, D, GROUP, QUANTIZE,
                    OUT,
                )  # fmt: skip
                lse = (m_total + gl.log2(l_total)) * LN2
                gl.store(lse_ptr + first_row + r_S, lse, mask=r_S < GROUP)


@gluon.jit
def attention_decode_hopper_kernel(
    k_desc, k_desc_half, k_desc_quarter, v_desc, v_desc_half, v_desc_quarter,
    q_ptr, out_ptr, out_scale_ptr, lse_ptr,
    part_acc_ptr, part_m_ptr, part_l_ptr, block_table, context_lens, table_width, factor, max_splits,
    scale_stride_t, scale_stride_g, k_page, k_head, k_column, v_page, v_head, v_column,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, SPLITS: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
    FEEDER_REGS: gl.constexpr, QUANTIZE: gl.constexpr,
):  # fmt: skip
    """Grid (B x G, ceil(splits / SPLITS)). Page strides count rows of the descriptors.

    QUANTIZE: `out` holds e4m3 codes, with one scale per token and head (D = 128).
    """
    GROUP: gl.constexpr = H // G
    index = gl.program_id(0) // G
    head = gl.program_id(0) % G
    end = gl.load(context_lens + index)
    lo = gl.program_id(1) * (SPLITS * SPLIT_BLOCKS)
    num_blocks = gl.cdiv(end, KB)
    if lo < num_blocks:
        hi = gl.minimum(lo + SPLITS * SPLIT_BLOCKS, num_blocks)
        table = block_table + index.to(gl.int64) * table_width
        DTYPE: gl.constexpr = k_desc.dtype
        BAR: gl.constexpr = mbarrier.MBarrierLayout()
        q_smem = gl.allocate_shared_memory(DTYPE, [ROWS, D], k_desc.layout)
        ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KB, D], k_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
        free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
        for slot in gl.static_range(SLOTS):
            mbarrier.init(ready.index(slot), count=1)
            mbarrier.init(free.index(slot), count=1)
        results = (out_ptr, out_scale_ptr, scale_stride_t, scale_stride_g)
        pointers = (q_ptr, results, lse_ptr, part_acc_ptr, part_m_ptr, part_l_ptr)
        rows = (index, head, end, lo, hi, num_blocks, max_splits, factor)
        descs = (
            (k_desc, k_desc_half, k_desc_quarter),
            (v_desc, v_desc_half, v_desc_quarter),
        )
        strides = ((k_page, k_head, k_column), (v_page, v_head, v_column))
        consumed = ((q_smem, ring, (ready, free)), pointers, rows)
        fed = (descs, (ring, ready, free), (table, head, end, lo, hi), strides)
        gl.warp_specialize(
            [
                (_consume, (consumed, H, GROUP, D, KB, SPLIT_BLOCKS, SPLITS, SLOTS, QUANTIZE)),
                (feed, (fed, KB, PAGE, SLOTS)),
            ],
            [1],
            [FEEDER_REGS],
        )  # fmt: skip
