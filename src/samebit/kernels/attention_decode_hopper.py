"""Attention decode over a paged cache: one producer warp, one consumer warp group, two programs
on a multiprocessor.

The same steps and partial results as attention_decode.py. Keys and values of 128 tokens arrive by
bulk tensor copies in one ring of slots (K0, V0, K1, ...). Needs pages of whole key blocks.
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
from samebit.kernels.attention_hopper import ROWS, _softmax


@gluon.jit
def _values(slot, v16_smem, inside, KB: gl.constexpr, D: gl.constexpr, FP8: gl.constexpr,
            TAIL: gl.constexpr):
    """Value rows ready for the product: FP16 copies of codes; rows past the end are zero."""
    WIDTH: gl.constexpr = 16 if FP8 else 8
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, WIDTH], [32 * WIDTH // D, D // WIDTH], [4, 1], [1, 0])
    v = slot
    if FP8:
        x = slot.load(LAYOUT).to(gl.float16)
        if TAIL:
            row = gl.arange(0, KB, gl.SliceLayout(1, LAYOUT))
            x = gl.where((row < inside)[:, None], x, 0.0)
        v16_smem.store(x)
        fence_async_shared()
        v = v16_smem
    elif TAIL:
        x = slot.load(LAYOUT)
        row = gl.arange(0, KB, gl.SliceLayout(1, LAYOUT))
        slot.store(gl.where((row < inside)[:, None], x, 0.0))
        fence_async_shared()
    return v


@gluon.jit
def _blocks(
    first, last, lo, end, acc, m, den, q_smem, ring, v16_smem, ks_smem, vs_smem, ready, free,
    s_ready, factor, position_R, TAIL: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SLOTS: gl.constexpr, FP8: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):
    """Blocks first..last-1 of the split that starts at block lo."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    for block in range(first, last):
        item = 2 * (block - lo)
        k_slot = item % SLOTS
        v_slot = (item + 1) % SLOTS
        mbarrier.wait(ready.index(k_slot), (item // SLOTS) & 1)
        zero = gl.zeros([ROWS, KB], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_smem, ring.index(k_slot).permute((1, 0)), zero, use_acc=False,
                          is_async=True)
        inside = end - block * KB
        mbarrier.wait(ready.index(v_slot), ((item + 1) // SLOTS) & 1)
        v = _values(ring.index(v_slot), v16_smem, inside, KB, D, FP8, TAIL)
        if FP8:
            mbarrier.wait(s_ready.index(block - lo), 0)
            k_scale = ks_smem.index(block - lo).load(COLUMN)
            v_scale = vs_smem.index(block - lo).load(COLUMN) * PV_LIFT
            if TAIL:
                v_scale = gl.where(gl.arange(0, KB, COLUMN) < inside, v_scale, 0.0)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(free.index(k_slot), count=1)
        if FP8:
            mbarrier.arrive(free.index(v_slot), count=1)
            s = s * k_scale[None, :]
        p, m, den, alpha = _softmax(s, m, den, factor, position_R, block * KB, TAIL, S_LAYOUT, KB)
        if FP8:
            p = p * v_scale[None, :]
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        if not FP8:
            mbarrier.arrive(free.index(v_slot), count=1)
    return acc, m, den


@gluon.jit
def _consume(
    q_smem, ring, v16_smem, ks_smem, vs_smem, ready, free, s_ready,
    q_ptr, q_scale_ptr, out_ptr, lse_ptr, part_acc_ptr, part_m_ptr, part_l_ptr,
    index, head, split, end, lo, hi, num_blocks, num_splits, factor,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr,
):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KB, 32 if FP8 else 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    DTYPE: gl.constexpr = gl.float16 if FP8 else gl.bfloat16
    WIDTH: gl.constexpr = 16 if FP8 else 8
    LOAD: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 * WIDTH // D, D // WIDTH], [4, 1], [1, 0])
    r_Q = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    d_Q = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    first_row = index.to(gl.int64) * H + head * GROUP
    q = gl.load(q_ptr + (first_row + r_Q)[:, None] * D + d_Q[None, :],
                mask=(r_Q < GROUP)[:, None], other=0.0)
    q_smem.store(q)
    fence_async_shared()
    gl.thread_barrier()
    r_S = gl.arange(0, ROWS, ROW)
    factor_R = gl.full([ROWS], 1.0, gl.float32, ROW) * factor
    if FP8:
        factor_R = factor_R * gl.load(q_scale_ptr + first_row + r_S, mask=r_S < GROUP, other=1.0)
    position_R = gl.full([ROWS], 0, gl.int32, ROW) + (end - 1)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    den = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    mid = gl.minimum(hi, end // KB)
    acc, m, den = _blocks(
        lo, mid, lo, end, acc, m, den, q_smem, ring, v16_smem, ks_smem, vs_smem, ready, free,
        s_ready, factor_R, position_R, False, D, KB, SLOTS, FP8,
        S_LAYOUT, O_LAYOUT, DTYPE)
    acc, m, den = _blocks(
        mid, hi, lo, end, acc, m, den, q_smem, ring, v16_smem, ks_smem, vs_smem, ready, free,
        s_ready, factor_R, position_R, True, D, KB, SLOTS, FP8,
        S_LAYOUT, O_LAYOUT, DTYPE)
    r_O = gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
    d_O = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    if num_blocks <= SPLIT_BLOCKS:
        inverse = gl.div_rn(1.0, den)
        if FP8:
            inverse = inverse * (1.0 / PV_LIFT)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
        gl.store(out_ptr + (first_row + r_O)[:, None] * D + d_O[None, :],
                 acc.to(out_ptr.dtype.element_ty), mask=(r_O < GROUP)[:, None])
        gl.store(lse_ptr + first_row + r_S, (m + gl.log2(den)) * LN2, mask=r_S < GROUP)
    else:
        part_S = (first_row + r_S) * num_splits + split
        part_O = (first_row + r_O) * num_splits + split
        gl.store(part_acc_ptr + part_O[:, None] * D + d_O[None, :], acc,
                 mask=(r_O < GROUP)[:, None])
        gl.store(part_m_ptr + part_S, m, mask=r_S < GROUP)
        gl.store(part_l_ptr + part_S, den, mask=r_S < GROUP)


@gluon.jit
def _produce(
    k_desc, v_desc, k_scale_ptr, v_scale_ptr, ring, ks_smem, vs_smem, ready, free, s_ready,
    table, head, lo, hi, k_page, k_head, k_column, v_page, v_head, v_column,
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head,
    KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr,
):
    VEC: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    page = gl.load(table + lo * KB // PAGE)
    for block in range(lo, hi):
        base = block * KB
        # The next page number travels while this block waits for a free slot.
        following = gl.load(table + gl.minimum(block + 1, hi - 1) * KB // PAGE)
        inside = base % PAGE
        item = 2 * (block - lo)
        slot = item % SLOTS
        mbarrier.wait(free.index(slot), ((item // SLOTS) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, [page * k_page + head * k_head + inside, head * k_column],
            ready.index(slot), ring.index(slot))
        if FP8:
            row = inside + gl.arange(0, KB, VEC)
            async_copy.async_copy_global_to_shared(
                ks_smem.index(block - lo),
                k_scale_ptr + page.to(gl.int64) * ks_page + head * ks_head + row * ks_row)
            async_copy.async_copy_global_to_shared(
                vs_smem.index(block - lo),
                v_scale_ptr + page.to(gl.int64) * vs_page + head * vs_head + row * vs_row)
            async_copy.mbarrier_arrive(s_ready.index(block - lo), increment_count=False)
        slot = (item + 1) % SLOTS
        mbarrier.wait(free.index(slot), (((item + 1) // SLOTS) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_desc, [page * v_page + head * v_head + inside, head * v_column],
            ready.index(slot), ring.index(slot))
        page = following


@gluon.jit
def attention_decode_hopper_kernel(
    k_desc, v_desc, q_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    part_acc_ptr, part_m_ptr, part_l_ptr, block_table, context_lens, table_width, factor,
    k_page, k_head, k_column, v_page, v_head, v_column,
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Grid (B x G, splits). Page strides count rows of the descriptors."""
    GROUP: gl.constexpr = H // G
    index = gl.program_id(0) // G
    head = gl.program_id(0) % G
    split = gl.program_id(1)
    end = gl.load(context_lens + index)
    lo = split * SPLIT_BLOCKS
    num_blocks = gl.cdiv(end, KB)
    if lo < num_blocks:
        hi = gl.minimum(lo + SPLIT_BLOCKS, num_blocks)
        table = block_table + index.to(gl.int64) * table_width
        DTYPE: gl.constexpr = k_desc.dtype
        BAR: gl.constexpr = mbarrier.MBarrierLayout()
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        V16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        Q_LAYOUT: gl.constexpr = k_desc.layout
        SCALED: gl.constexpr = SPLIT_BLOCKS if FP8 else 1
        q_smem = gl.allocate_shared_memory(DTYPE, [ROWS, D], Q_LAYOUT)
        ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KB, D], k_desc.layout)
        v16_smem = gl.allocate_shared_memory(gl.float16, [KB if FP8 else 16, D], V16)
        ks_smem = gl.allocate_shared_memory(gl.float32, [SCALED, KB if FP8 else 1], FLAT)
        vs_smem = gl.allocate_shared_memory(gl.float32, [SCALED, KB if FP8 else 1], FLAT)
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
        free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
        s_ready = gl.allocate_shared_memory(gl.int64, [SCALED, 1], BAR)
        for slot in gl.static_range(SLOTS):
            mbarrier.init(ready.index(slot), count=1)
            mbarrier.init(free.index(slot), count=1)
        for block in gl.static_range(SCALED):
            mbarrier.init(s_ready.index(block), count=32)
        gl.warp_specialize([
            (_consume, (q_smem, ring, v16_smem, ks_smem, vs_smem, ready, free, s_ready,
                        q_ptr, q_scale_ptr, out_ptr, lse_ptr, part_acc_ptr, part_m_ptr,
                        part_l_ptr, index, head, split, end, lo, hi, num_blocks,
                        gl.num_programs(1), factor, H, GROUP, D, KB, SPLIT_BLOCKS, SLOTS, FP8)),
            (_produce, (k_desc, v_desc, k_scale_ptr, v_scale_ptr, ring, ks_smem, vs_smem, ready,
                        free, s_ready, table, head, lo, hi, k_page, k_head, k_column,
                        v_page, v_head, v_column, ks_page, ks_row, ks_head,
                        vs_page, vs_row, vs_head, KB, PAGE, SLOTS, FP8)),
        ], [1], [PRODUCER_REGS])
