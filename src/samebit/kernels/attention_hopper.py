"""Attention forward for packed BF16 segments with one producer and two consumer warp groups.

The same steps, in the same order, as attention_prefill.py, hence the same bits; only the overlap
differs: the scores of block i+1 run on the tensor cores while the softmax of block i runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebit.kernels.attention_block import LN2
from samebit.kernels.attention_feed import ROWS, gather


@gluon.jit
def block_softmax(
    s,
    m,
    den,
    factor,
    position_R,
    base,
    MASKED: gl.constexpr,
    LAYOUT: gl.constexpr,
    KB: gl.constexpr,
):
    """(probabilities, new maximum, new sum, factor of the old accumulator) of one block."""
    if MASKED:
        column = base + gl.arange(0, KB, gl.SliceLayout(0, LAYOUT))
        s = gl.where(column[None, :] <= position_R[:, None], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    m_safe = m_new
    if MASKED:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(gl.fma(s, factor[:, None], -m_safe[:, None]))
    alpha = gl.exp2(m - m_safe)
    den = gl.fma(den, alpha, gl.sum(p, 1))
    return p, m_new, den, alpha


@gluon.jit
def block_scores(
    step, q, k_smem, k_ready, KB: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr
):
    """Q K^T of the step-th block, in flight."""
    stage = step % STAGES
    mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
    zero = gl.zeros([ROWS, KB], gl.float32, LAYOUT)
    return warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _advance(
    first,
    last,
    q,
    p,
    acc,
    m,
    den,
    k_smem,
    v_smem,
    k_ready,
    v_ready,
    k_free,
    v_free,
    factor,
    position_R,
    MASKED: gl.constexpr,
    D: gl.constexpr,
    KB: gl.constexpr,
    STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Blocks first..last-1, each overlapping the product of the block before with its softmax."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    for block in range(first, last):
        s = block_scores(block, q, k_smem, k_ready, KB, STAGES, S_LAYOUT)
        stage = (block - 1) % STAGES
        mbarrier.wait(v_ready.index(stage), ((block - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(block % STAGES), count=1)
        prob, m, den, alpha = block_softmax(
            s, m, den, factor, position_R, block * KB, MASKED, S_LAYOUT, KB
        )
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_free.index(stage), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(prob.to(DTYPE), P_LAYOUT)
    return p, acc, m, den


@gluon.jit
def _consume(
    q_smem,
    k_smem,
    v_smem,
    total_smem,
    q_ready,
    k_ready,
    v_ready,
    k_free,
    v_free,
    out_ptr,
    lse_ptr,
    start,
    length,
    before,
    token0,
    head,
    factor,
    num_blocks,
    num_full,
    GROUP_INDEX: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """One warp group: 64 query rows against every block."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KB, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q = q_smem.index(GROUP_INDEX)
    total = total_smem.index(GROUP_INDEX)
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
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        den = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        s = block_scores(lo, q, k_smem, k_ready, KB, STAGES, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(lo % STAGES), count=1)
        prob, m, den, _ = block_softmax(s, m, den, factor, position_R, lo * KB, True, S_LAYOUT, KB)
        p = gl.convert_layout(prob.to(DTYPE), P_LAYOUT)
        p, acc, m, den = _advance(
            lo + 1,
            mid,
            q,
            p,
            acc,
            m,
            den,
            k_smem,
            v_smem,
            k_ready,
            v_ready,
            k_free,
            v_free,
            factor,
            position_R,
            False,
            D,
            KB,
            STAGES,
            S_LAYOUT,
            O_LAYOUT,
            DTYPE,
        )
        p, acc, m, den = _advance(
            mid,
            hi,
            q,
            p,
            acc,
            m,
            den,
            k_smem,
            v_smem,
            k_ready,
            v_ready,
            k_free,
            v_free,
            factor,
            position_R,
            True,
            D,
            KB,
            STAGES,
            S_LAYOUT,
            O_LAYOUT,
            DTYPE,
        )
        stage = (hi - 1) % STAGES
        mbarrier.wait(v_ready.index(stage), ((hi - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_free.index(stage), count=1)
        if split > 0:
            seen = position_R >= lo * KB
            m_new = gl.maximum(m_total, m)
            old = gl.exp2(m_total - m_new)
            new = gl.exp2(m - m_new)
            l_new = gl.fma(l_total, old, den * new)
            m_total = gl.where(seen, m_new, m_total)
            l_total = gl.where(seen, l_new, l_total)
            before_acc = total.load(O_LAYOUT)
            old_O = gl.convert_layout(old, gl.SliceLayout(1, O_LAYOUT))
            new_O = gl.convert_layout(new, gl.SliceLayout(1, O_LAYOUT))
            seen_O = gl.convert_layout(seen, gl.SliceLayout(1, O_LAYOUT))
            acc = gl.where(
                seen_O[:, None],
                gl.fma(before_acc, old_O[:, None], acc * new_O[:, None]),
                before_acc,
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
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    token = token0 + GROUP_INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    d = gl.arange(0, D, gl.SliceLayout(0, OUT))
    offset = ((start + token).to(gl.int64) * H + head)[:, None] * D + d[None, :]
    gl.store(out_ptr + offset, q.load(OUT), mask=(token < length)[:, None])


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    q_smem,
    k_smem,
    v_smem,
    q_ready,
    k_ready,
    v_ready,
    k_free,
    v_free,
    start,
    prefix_start,
    before,
    end,
    token0,
    head,
    kv_head,
    k_row,
    v_row,
    num_blocks,
    D: gl.constexpr,
    KB: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the key and value stages in block order."""
    mbarrier.expect(q_ready, 2 * q_desc.block_type.nbytes)
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(
            q_desc, [start + token0 + group * ROWS, head * D], q_ready, q_smem.index(group)
        )
    for block in range(0, num_blocks):
        stage = block % STAGES
        phase = ((block // STAGES) & 1) ^ 1
        base = block * KB
        in_prefix = base + KB <= before
        whole = in_prefix | ((base >= before) & (base + KB <= end))
        row = gl.where(in_prefix, prefix_start, start - before) + base
        mbarrier.wait(k_free.index(stage), phase)
        if whole:
            mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [row, kv_head * D], k_ready.index(stage), k_smem.index(stage)
            )
        else:
            gather(
                k_ptr + kv_head * D,
                k_smem.index(stage),
                base,
                end,
                start,
                prefix_start,
                before,
                k_ptr,
                0,
                k_row,
                D,
                KB,
                1,
                False,
            )
            mbarrier.arrive(k_ready.index(stage), count=1)
        mbarrier.wait(v_free.index(stage), phase)
        if whole:
            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [row, kv_head * D], v_ready.index(stage), v_smem.index(stage)
            )
        else:
            gather(
                v_ptr + kv_head * D,
                v_smem.index(stage),
                base,
                end,
                start,
                prefix_start,
                before,
                v_ptr,
                0,
                v_row,
                D,
                KB,
                1,
                False,
            )
            mbarrier.arrive(v_ready.index(stage), count=1)


@gluon.jit
def attention_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    segments,
    factor,
    k_row,
    v_row,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Grid (segments x H, tiles of 128 tokens of one head); the longest tiles start first."""
    DTYPE: gl.constexpr = q_desc.dtype
    index = gl.program_id(0) // H
    head = gl.program_id(0) % H
    kv_head = head // (H // G)
    token0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * (2 * ROWS)
    start = gl.load(segments + index * 4)
    length = gl.load(segments + index * 4 + 1)
    prefix_start = gl.load(segments + index * 4 + 2)
    before = gl.load(segments + index * 4 + 3)
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
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        q_smem,
                        k_smem,
                        v_smem,
                        total_smem,
                        q_ready,
                        k_ready,
                        v_ready,
                        k_free,
                        v_free,
                        out_ptr,
                        lse_ptr,
                        start,
                        length,
                        before,
                        token0,
                        head,
                        factor,
                        num_blocks,
                        num_full,
                        0,
                        H,
                        D,
                        KB,
                        SPLIT_BLOCKS,
                        STAGES,
                        DTYPE,
                    ),
                ),
                (
                    _consume,
                    (
                        q_smem,
                        k_smem,
                        v_smem,
                        total_smem,
                        q_ready,
                        k_ready,
                        v_ready,
                        k_free,
                        v_free,
                        out_ptr,
                        lse_ptr,
                        start,
                        length,
                        before,
                        token0,
                        head,
                        factor,
                        num_blocks,
                        num_full,
                        1,
                        H,
                        D,
                        KB,
                        SPLIT_BLOCKS,
                        STAGES,
                        DTYPE,
                    ),
                ),
                (
                    _produce,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        k_ptr,
                        v_ptr,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_ready,
                        k_ready,
                        v_ready,
                        k_free,
                        v_free,
                        start,
                        prefix_start,
                        before,
                        end,
                        token0,
                        head,
                        kv_head,
                        k_row,
                        v_row,
                        num_blocks,
                        D,
                        KB,
                        STAGES,
                    ),
                ),
            ],
            [4, 4],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
