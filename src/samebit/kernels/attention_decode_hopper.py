"""Attention decode over a paged cache: a feeder and one consumer warp group, two programs on a
multiprocessor.

The same steps and partial results as attention_decode.py. Keys and values of one key block arrive
by bulk tensor copies in a ring of slots (K0, V0, K1, ...); e4m3 values are converted to FP16 by the
feeder. Needs pages of whole key blocks.

Of the 64 rows that wgmma wants, a group of query heads fills few. They are laid on rows 0-7 of each
warp's 16, whose registers are then the only ones that the softmax touches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebit.kernels.attention_block import LN2, PV_LIFT
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
    count, block, end, acc, m, den, q_smem, data, bars, factor, position_R,
    TAIL: gl.constexpr, D: gl.constexpr, KB: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, L_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One block of keys, the count-th of this program."""
    ring, v16_smem, ks_smem, vs_smem = data
    ready, free, s_ready, v16_ready, v16_free = bars
    COLUMN: gl.constexpr = gl.SliceLayout(0, L_LAYOUT)
    item = 2 * count
    k_slot = item % SLOTS
    v_slot = (item + 1) % SLOTS
    mbarrier.wait(ready.index(k_slot), (item // SLOTS) & 1)
    zero = gl.zeros([ROWS, KB], gl.float32, S_LAYOUT)
    s = warpgroup_mma(
        q_smem, ring.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    SCALED: gl.constexpr = SLOTS // 2 + 2
    if FP8:
        mbarrier.wait(s_ready.index(count % SCALED), (count // SCALED) & 1)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(free.index(k_slot), count=1)
    s = _live(s, KB)
    if FP8:
        s = s * ks_smem.index(count % SCALED).load(COLUMN)[None, :]
    p, m, den, alpha = block_softmax(s, m, den, factor, position_R, block * KB, TAIL, L_LAYOUT, KB)
    if FP8:
        v_scale = vs_smem.index(count % SCALED).load(COLUMN) * PV_LIFT
        if TAIL:
            v_scale = gl.where(block * KB + gl.arange(0, KB, COLUMN) < end, v_scale, 0.0)
        p = p * v_scale[None, :]
    acc = _rescaled(acc, alpha, D, O_LAYOUT)
    p = _operand(p.to(DTYPE), KB, gl.DotOperandLayout(0, O_LAYOUT, 2))
    if FP8:
        mbarrier.wait(v16_ready, count & 1)
        acc = warpgroup_mma(p, v16_smem, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v16_free, count=1)
    else:
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
def _consume(
    given,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Every block of this program's splits; finishes the rows if no other program has more."""
    q_smem, data, bars = given[0]
    q_ptr, q_scale_ptr, out_ptr, lse_ptr, part_acc_ptr, part_m_ptr, part_l_ptr = given[1]
    index, head, end, lo, hi, num_blocks, max_splits, factor = given[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KB, 32 if FP8 else 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    shape_S = _live(gl.zeros([ROWS, KB], gl.float32, S_LAYOUT), KB)
    L_LAYOUT: gl.constexpr = shape_S.type.layout
    shape_O = _live(gl.zeros([ROWS, D], gl.float32, O_LAYOUT), D)
    OUT: gl.constexpr = shape_O.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, L_LAYOUT)
    DTYPE: gl.constexpr = gl.float16 if FP8 else gl.bfloat16
    WIDTH: gl.constexpr = 16 if FP8 else 8
    LOAD: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 * WIDTH // D, D // WIDTH], [4, 1], [1, 0])
    t_Q = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    r_Q = t_Q // 16 * 8 + t_Q % 8
    d_Q = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    first_row = index.to(gl.int64) * H + head * GROUP
    q = gl.load(
        q_ptr + (first_row + r_Q)[:, None] * D + d_Q[None, :],
        mask=((t_Q % 16 < 8) & (r_Q < GROUP))[:, None],
        other=0.0,
    )
    q_smem.store(q)
    fence_async_shared()
    gl.thread_barrier()
    r_S = gl.arange(0, LIVE, ROW)
    factor_R = gl.full([LIVE], 1.0, gl.float32, ROW) * factor
    if FP8:
        factor_R = factor_R * gl.load(q_scale_ptr + first_row + r_S, mask=r_S < GROUP, other=1.0)
    position_R = gl.full([LIVE], 0, gl.int32, ROW) + (end - 1)
    r_O = gl.arange(0, LIVE, gl.SliceLayout(1, OUT))
    d_O = gl.arange(0, D, gl.SliceLayout(0, OUT))
    mask_O = (r_O < GROUP)[:, None]
    whole = num_blocks <= SPLITS * SPLIT_BLOCKS
    m_total = gl.full([LIVE], float("-inf"), gl.float32, ROW)
    l_total = gl.zeros([LIVE], gl.float32, ROW)
    count = 0
    for split in range(lo // SPLIT_BLOCKS, gl.cdiv(hi, SPLIT_BLOCKS)):
        first = split * SPLIT_BLOCKS
        last = gl.minimum(first + SPLIT_BLOCKS, hi)
        m = gl.full([LIVE], float("-inf"), gl.float32, ROW)
        den = gl.zeros([LIVE], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        full = gl.minimum(last, end // KB)
        for block in range(first, full):
            acc, m, den = _block(
                count, block, end, acc, m, den, q_smem, data, bars, factor_R, position_R,
                False, D, KB, SLOTS, FP8, S_LAYOUT, O_LAYOUT, L_LAYOUT, DTYPE,
            )  # fmt: skip
            count += 1
        for block in range(full, last):
            acc, m, den = _block(
                count, block, end, acc, m, den, q_smem, data, bars, factor_R, position_R,
                True, D, KB, SLOTS, FP8, S_LAYOUT, O_LAYOUT, L_LAYOUT, DTYPE,
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
                if FP8:
                    inverse = inverse * (1.0 / PV_LIFT)
                live = live * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
                out_O = out_ptr + (first_row + r_O)[:, None] * D + d_O[None, :]
                gl.store(out_O, live.to(out_ptr.dtype.element_ty), mask=mask_O)
                lse = (m_total + gl.log2(l_total)) * LN2
                gl.store(lse_ptr + first_row + r_S, lse, mask=r_S < GROUP)


@gluon.jit
def _fetch_k(
    count, page, inside, k_desc, scales, ring, copied, ready, s_ready, head, strides,
    KB: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Starts the copies of one block's keys and, with codes, of both scales."""
    k_scale_ptr, v_scale_ptr = scales
    ks_smem, vs_smem = copied
    k_page, k_head, k_column = strides[0]
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head = strides[2]
    slot = (2 * count) % SLOTS
    mbarrier.expect(ready.index(slot), k_desc.block_type.nbytes)
    row = page * k_page + head * k_head + inside
    tma.async_copy_global_to_shared(
        k_desc, [row, head * k_column], ready.index(slot), ring.index(slot)
    )
    if FP8:
        SCALED: gl.constexpr = SLOTS // 2 + 2
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        row = inside + gl.arange(0, KB, FLAT)
        page = page.to(gl.int64)
        async_copy.async_copy_global_to_shared(
            ks_smem.index(count % SCALED),
            k_scale_ptr + page * ks_page + head * ks_head + row * ks_row,
        )
        async_copy.async_copy_global_to_shared(
            vs_smem.index(count % SCALED),
            v_scale_ptr + page * vs_page + head * vs_head + row * vs_row,
        )
        async_copy.mbarrier_arrive(s_ready.index(count % SCALED), increment_count=False)


@gluon.jit
def _fetch_v(count, page, inside, v_desc, ring, ready, head, strides, SLOTS: gl.constexpr):
    """Starts the copy of one block's values."""
    v_page, v_head, v_column = strides[1]
    slot = (2 * count + 1) % SLOTS
    mbarrier.expect(ready.index(slot), v_desc.block_type.nbytes)
    row = page * v_page + head * v_head + inside
    tma.async_copy_global_to_shared(
        v_desc, [row, head * v_column], ready.index(slot), ring.index(slot)
    )


@gluon.jit
def _feed(given, KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr):
    """BF16: copies alone, as far ahead as there are free slots."""
    k_desc, v_desc, scales = given[0]
    ring, ks_smem, vs_smem, ready, free, s_ready = given[1]
    table, head, lo, hi = given[2]
    strides = given[3]
    page = gl.load(table + lo * KB // PAGE)
    for block in range(lo, hi):
        # The next page number travels while this block waits for a free slot.
        following = gl.load(table + gl.minimum(block + 1, hi - 1) * KB // PAGE)
        inside = block * KB % PAGE
        count = block - lo
        item = 2 * count
        mbarrier.wait(free.index(item % SLOTS), ((item // SLOTS) & 1) ^ 1)
        _fetch_k(
            count, page, inside, k_desc, scales, ring, (ks_smem, vs_smem), ready, s_ready, head,
            strides, KB, SLOTS, False,
        )  # fmt: skip
        item += 1
        mbarrier.wait(free.index(item % SLOTS), ((item // SLOTS) & 1) ^ 1)
        _fetch_v(count, page, inside, v_desc, ring, ready, head, strides, SLOTS)
        page = following


@gluon.jit
def _feed_codes(given, D: gl.constexpr, KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr):
    """E4M3: copies SLOTS // 2 blocks ahead, and the conversion of each block's values."""
    k_desc, v_desc, scales = given[0]
    ring, v16_smem, ks_smem, vs_smem = given[1]
    ready, free, s_ready, v16_ready, v16_free = given[2]
    table, head, end, lo, hi = given[3]
    strides = given[4]
    DEPTH: gl.constexpr = SLOTS // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for ahead in gl.static_range(DEPTH):
        if lo + ahead < hi:
            page = gl.load(table + (lo + ahead) * KB // PAGE)
            inside = (lo + ahead) * KB % PAGE
            _fetch_k(
                ahead, page, inside, k_desc, scales, ring, (ks_smem, vs_smem), ready, s_ready, head,
                strides, KB, SLOTS, True,
            )  # fmt: skip
            _fetch_v(ahead, page, inside, v_desc, ring, ready, head, strides, SLOTS)
    for block in range(lo, hi):
        count = block - lo
        item = 2 * count
        further = block + DEPTH
        page = gl.load(table + gl.minimum(further, hi - 1) * KB // PAGE)
        inside = further * KB % PAGE
        v_slot = (item + 1) % SLOTS
        mbarrier.wait(ready.index(v_slot), ((item + 1) // SLOTS) & 1)
        v = ring.index(v_slot).load(LAYOUT).to(gl.float16)
        if (block + 1) * KB > end:
            # Rows past the end may hold NaN, and 0 x NaN would reach every output.
            row = block * KB + gl.arange(0, KB, gl.SliceLayout(1, LAYOUT))
            v = gl.where((row < end)[:, None], v, 0.0)
        mbarrier.wait(v16_free, (count & 1) ^ 1)
        v16_smem.store(v)
        fence_async_shared()
        mbarrier.arrive(v16_ready, count=1)
        if further < hi:
            _fetch_v(count + DEPTH, page, inside, v_desc, ring, ready, head, strides, SLOTS)
            mbarrier.wait(free.index(item % SLOTS), (item // SLOTS) & 1)
            _fetch_k(
                count + DEPTH, page, inside, k_desc, scales, ring, (ks_smem, vs_smem), ready, s_ready, head,
                strides, KB, SLOTS, True,
            )  # fmt: skip


@gluon.jit
def attention_decode_hopper_kernel(
    k_desc, v_desc, q_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    part_acc_ptr, part_m_ptr, part_l_ptr, block_table, context_lens, table_width, factor, max_splits,
    k_page, k_head, k_column, v_page, v_head, v_column,
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, SPLITS: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
    FP8: gl.constexpr, FEEDER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid (B x G, ceil(splits / SPLITS)). Page strides count rows of the descriptors."""
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
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        SCALED: gl.constexpr = SLOTS // 2 + 2
        q_smem = gl.allocate_shared_memory(DTYPE, [ROWS, D], k_desc.layout)
        ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KB, D], k_desc.layout)
        ks_smem = gl.allocate_shared_memory(gl.float32, [SCALED, KB], FLAT)
        vs_smem = gl.allocate_shared_memory(gl.float32, [SCALED, KB], FLAT)
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
        free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
        s_ready = gl.allocate_shared_memory(gl.int64, [SCALED, 1], BAR)
        v16_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
        v16_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(v16_ready, count=1)
        mbarrier.init(v16_free, count=1)
        for slot in gl.static_range(SLOTS):
            mbarrier.init(ready.index(slot), count=1)
            mbarrier.init(free.index(slot), count=1)
        for slot in gl.static_range(SCALED):
            mbarrier.init(s_ready.index(slot), count=128)
        pointers = (q_ptr, q_scale_ptr, out_ptr, lse_ptr, part_acc_ptr, part_m_ptr, part_l_ptr)
        rows = (index, head, end, lo, hi, num_blocks, max_splits, factor)
        sources = (k_desc, v_desc, (k_scale_ptr, v_scale_ptr))
        bars = (ready, free, s_ready, v16_ready, v16_free)
        scale_strides = (ks_page, ks_row, ks_head, vs_page, vs_row, vs_head)
        strides = ((k_page, k_head, k_column), (v_page, v_head, v_column), scale_strides)
        if FP8:
            V16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
            v16_smem = gl.allocate_shared_memory(gl.float16, [KB, D], V16)
            data = (ring, v16_smem, ks_smem, vs_smem)
            consumed = ((q_smem, data, bars), pointers, rows)
            fed = (sources, data, bars, (table, head, end, lo, hi), strides)
            gl.warp_specialize(
                [
                    (_consume, (consumed, H, GROUP, D, KB, SPLIT_BLOCKS, SPLITS, SLOTS, FP8)),
                    (_feed_codes, (fed, D, KB, PAGE, SLOTS)),
                ],
                [4],
                [FEEDER_REGS],
            )
        else:
            data = (ring, ring.index(0), ks_smem, vs_smem)
            consumed = ((q_smem, data, bars), pointers, rows)
            copied = (ring, ks_smem, vs_smem, ready, free, s_ready)
            fed = (sources, copied, (table, head, lo, hi), strides)
            gl.warp_specialize(
                [
                    (_consume, (consumed, H, GROUP, D, KB, SPLIT_BLOCKS, SPLITS, SLOTS, FP8)),
                    (_feed, (fed, KB, PAGE, SLOTS)),
                ],
                [1],
                [FEEDER_REGS],
            )
