"""Attention decode over a paged cache of e4m3 keys and values: a feeder and one consumer warp group.

The same steps and partial results as attention_decode.py, turned: keys and features lie on the M side
of the products and the few query heads of a group on the N side, because a `wgmma` fills 64 rows but
as few as 8 columns. So a block's softmax is a few elements a thread and the accumulator a few
registers. An element of a product has the same bits on either side; a row's sum is read back from
shared memory in the layout, and so added in the order, that the other kernels have. Values become
FP16 in the feeder (attention_decode_feed.py). Needs pages of whole key blocks.

A program walks item after item (a head's splits of a sequence), so that the copies of the next are under
way while one ends. Sequences come by falling context where their order is known.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebit.kernels._quantize_gluon import codes_of, magnitude_bits, scale_from_bits, widened
from samebit.kernels.attention_block import LN2, PV_LIFT
from samebit.kernels.attention_decode_feed import (
    blocks_of,
    feed_codes,
    item_of,
    sequence_of,
    turns_of,
)


@gluon.constexpr_function
def sum_layout(N, KB):
    """[N, KB]: a row over four threads, as `wgmma` gives the scores of a query: that fixes a sum's order."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, 1 << bit] for bit in range(3, KB.bit_length() - 1))],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[row if row < N else 0, 0] for row in (8, 16)],
        block_bases=[],
        shape=[N, KB],
    )


@gluon.jit
def _softmax(
    s, m, factor, end, base, TAIL: gl.constexpr, KB: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """(probabilities [KB, N], new maximum, factor of the old sums) of one block's scores."""
    if TAIL:
        key = base + gl.arange(0, KB, gl.SliceLayout(1, LAYOUT))
        s = gl.where((key < end)[:, None], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 0) * factor)
    m_safe = m_new
    if TAIL:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(gl.fma(s, gl.broadcast(factor[None, :], s)[0], -m_safe[None, :]))
    return p, m_new, gl.exp2(m - m_safe)


@gluon.jit
def _block(
    count, block, end, acc, m, den, smem, bars, factor,
    TAIL: gl.constexpr, N: gl.constexpr, D: gl.constexpr, KB: gl.constexpr, SLOTS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One block of keys, the count-th of this program."""
    q_smem, ring, v16_smem, ks_smem, vs_smem, p_smem, p16_smem = smem
    ready, free, s_ready, v16_ready, v16_free = bars
    KEY: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    QUERY: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    SCALED: gl.constexpr = SLOTS // 2 + 2
    item = 2 * count
    slot = item % SLOTS
    mbarrier.wait(ready.index(slot), (item // SLOTS) & 1)
    s = gl.zeros([KB, N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(ring.index(slot), q_smem.permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(s_ready.index(count % SCALED), (count // SCALED) & 1)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(free.index(slot), count=1)
    s = s * ks_smem.index(count % SCALED).load(KEY)[:, None]
    p, m, alpha = _softmax(s, m, factor, end, block * KB, TAIL, KB, S_LAYOUT)
    p_smem.permute((1, 0)).store(p)
    v_scale = vs_smem.index(count % SCALED).load(KEY) * PV_LIFT
    if TAIL:
        v_scale = gl.where(block * KB + gl.arange(0, KB, KEY) < end, v_scale, 0.0)
    p16_smem.permute((1, 0)).store((p * v_scale[:, None]).to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(0, O_LAYOUT))[None, :]
    mbarrier.wait(v16_ready, count & 1)
    acc = warpgroup_mma(v16_smem.permute((1, 0)), p16_smem.permute((1, 0)), acc, is_async=True)
    total = gl.sum(p_smem.load(sum_layout(N, KB)), 1)
    den = gl.fma(den, alpha, gl.convert_layout(total, QUERY))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v16_free, count=1)
    return acc, m, den


@gluon.jit
def _queries(q_ptr, first_row, GROUP: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Query heads of one group, [N, D], zeros behind them."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, D // 16], [2, 16], [4, 1], [1, 0])
    r_Q = gl.arange(0, N, gl.SliceLayout(1, LOAD))
    d_Q = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    pointers = q_ptr + (first_row + r_Q)[:, None] * D + d_Q[None, :]
    return gl.load(pointers, mask=(r_Q < GROUP)[:, None], other=0.0)


@gluon.jit
def _factor(factor, q_scale_ptr, first_row, r_Q, GROUP: gl.constexpr):
    """What the raw scores of each query are multiplied by, [N]."""
    scale = gl.load(q_scale_ptr + first_row + r_Q, mask=r_Q < GROUP, other=1.0)
    return gl.full(scale.shape, 1.0, gl.float32, scale.type.layout) * factor * scale


@gluon.jit
def _store_result(
    out, results, first_row, index, head, r_O, d_O, GROUP: gl.constexpr, D: gl.constexpr,
    QUANTIZE: gl.constexpr,
):  # fmt: skip
    """Finished queries [D, N], rounded to BF16: as they are, or as codes with a scale per head."""
    out_ptr, out_scale_ptr, scale_stride_t, scale_stride_g = results
    y = out.to(gl.bfloat16)
    target = out_ptr + (first_row + r_O)[None, :] * D + d_O[:, None]
    inside = (r_O < GROUP)[None, :]
    if QUANTIZE:
        scale = scale_from_bits(gl.max(magnitude_bits(y), axis=0))
        gl.store(target, codes_of(widened(y), scale[None, :]), mask=inside)
        place = index.to(gl.int64) * scale_stride_t + (head * GROUP + r_O) * scale_stride_g
        gl.store(out_scale_ptr + place, scale, mask=r_O < GROUP)
    else:
        gl.store(target, y, mask=inside)


@gluon.jit
def _walk(
    count, first, last, end, smem, bars, factor,
    N: gl.constexpr, D: gl.constexpr, KB: gl.constexpr, SLOTS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(blocks counted, accumulator [D, N], maxima, sums) of one split."""
    m = gl.full([N], float("-inf"), gl.float32, gl.SliceLayout(0, S_LAYOUT))
    den = gl.zeros([N], gl.float32, gl.SliceLayout(0, S_LAYOUT))
    acc = gl.zeros([D, N], gl.float32, O_LAYOUT)
    full = gl.minimum(last, end // KB)
    for block in range(first, full):
        acc, m, den = _block(
            count, block, end, acc, m, den, smem, bars, factor,
            False, N, D, KB, SLOTS, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        count += 1
    for block in range(full, last):
        acc, m, den = _block(
            count, block, end, acc, m, den, smem, bars, factor,
            True, N, D, KB, SLOTS, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        count += 1
    return count, acc, m, den


@gluon.jit
def _consume(
    given,
    H: gl.constexpr, G: gl.constexpr, N: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr, ORDERED: gl.constexpr,
    QUANTIZE: gl.constexpr,
):  # fmt: skip
    """Every item of this program; finishes the rows of sequences whose splits are one item."""
    smem, bars = given[0]
    q_ptr, q_scale_ptr, results, lse_ptr, part_acc_ptr, part_m_ptr, part_l_ptr = given[1]
    context_lens, order, num_items, chunks, max_splits, factor = given[2]
    q_smem = smem[0]
    GROUP: gl.constexpr = H // G
    CHUNK: gl.constexpr = SPLITS * SPLIT_BLOCKS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    QUERY: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    r_Q = gl.arange(0, N, QUERY)
    r_O = gl.arange(0, N, gl.SliceLayout(0, OUT))
    d_O = gl.arange(0, D, gl.SliceLayout(1, OUT))
    inside = (r_O < GROUP)[None, :]
    index = sequence_of(0, num_items, order, chunks, G, ORDERED)
    index1 = sequence_of(1, num_items, order, chunks, G, ORDERED)
    end = gl.load(context_lens + index)
    real, _, chunk, head = item_of(0, num_items, G, chunks)
    first_row = index.to(gl.int64) * H + head * GROUP
    q = _queries(q_ptr, first_row, GROUP, N, D)
    factor_Q = _factor(factor, q_scale_ptr, first_row, r_Q, GROUP)
    count = 0
    for turn in range(0, turns_of(num_items)):
        q_smem.store(q)
        fence_async_shared()
        gl.thread_barrier()
        lo, hi = blocks_of(real, chunk, end, CHUNK, KB)
        num_blocks = gl.cdiv(end, KB)
        whole = num_blocks <= CHUNK
        # What the next item needs travels while this one's keys are walked.
        next_real, _, next_chunk, next_head = item_of(turn + 1, num_items, G, chunks)
        next_row = index1.to(gl.int64) * H + next_head * GROUP
        next_end = gl.load(context_lens + index1)
        q = _queries(q_ptr, next_row, GROUP, N, D)
        next_factor = _factor(factor, q_scale_ptr, next_row, r_Q, GROUP)
        index2 = sequence_of(turn + 2, num_items, order, chunks, G, ORDERED)
        m_total = gl.full([N], float("-inf"), gl.float32, QUERY)
        l_total = gl.zeros([N], gl.float32, QUERY)
        for split in range(lo // SPLIT_BLOCKS, gl.cdiv(hi, SPLIT_BLOCKS)):
            last = gl.minimum((split + 1) * SPLIT_BLOCKS, hi)
            count, acc, m, den = _walk(
                count, split * SPLIT_BLOCKS, last, end, smem, bars, factor_Q,
                N, D, KB, SLOTS, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
            part = gl.convert_layout(acc, OUT)
            if not whole:
                part_Q = (first_row + r_Q) * max_splits + split
                part_O = (first_row + r_O) * max_splits + split
                gl.store(part_acc_ptr + part_O[None, :] * D + d_O[:, None], part, mask=inside)
                gl.store(part_m_ptr + part_Q, m, mask=r_Q < GROUP)
                gl.store(part_l_ptr + part_Q, den, mask=r_Q < GROUP)
            else:
                total_O = (
                    part_acc_ptr + ((first_row + r_O) * max_splits)[None, :] * D + d_O[:, None]
                )
                if split > 0:
                    m_new = gl.maximum(m_total, m)
                    old = gl.exp2(m_total - m_new)
                    new = gl.exp2(m - m_new)
                    l_total = gl.fma(l_total, old, den * new)
                    m_total = m_new
                    # Each thread reads back what it wrote itself.
                    total = gl.load(total_O, mask=inside, other=0.0)
                    old_O = gl.convert_layout(old, gl.SliceLayout(0, OUT))[None, :]
                    new_O = gl.convert_layout(new, gl.SliceLayout(0, OUT))[None, :]
                    part = gl.fma(total, gl.broadcast(old_O, total)[0], part * new_O)
                else:
                    m_total = m
                    l_total = den
                if last < num_blocks:
                    gl.store(total_O, part, mask=inside)
                else:
                    inverse = gl.div_rn(1.0, l_total) * (1.0 / PV_LIFT)
                    part = part * gl.convert_layout(inverse, gl.SliceLayout(0, OUT))[None, :]
                    _store_result(
                        part, results, first_row, index, head, r_O, d_O, GROUP, D, QUANTIZE
                    )
                    lse = (m_total + gl.log2(l_total)) * LN2
                    gl.store(lse_ptr + first_row + r_Q, lse, mask=r_Q < GROUP)
        index = index1
        index1 = index2
        end = next_end
        real = next_real
        chunk = next_chunk
        head = next_head
        first_row = next_row
        factor_Q = next_factor


@gluon.jit
def attention_decode_codes_kernel(
    k_desc, k_desc_half, k_desc_quarter, v_desc, v_desc_half, v_desc_quarter,
    q_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, out_scale_ptr, lse_ptr,
    part_acc_ptr, part_m_ptr, part_l_ptr, block_table, context_lens, table_width, factor, max_splits,
    scale_stride_t, scale_stride_g, order, num_items, chunks,
    k_page, k_head, k_column, v_page, v_head, v_column,
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head,
    H: gl.constexpr, G: gl.constexpr, N: gl.constexpr, D: gl.constexpr, KB: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, SPLITS: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
    FEEDER_REGS: gl.constexpr, ORDERED: gl.constexpr, QUANTIZE: gl.constexpr,
):  # fmt: skip
    """Grid: at most as many programs as run at once. Page strides count rows of the descriptors.

    num_items: sequences x chunks x G; chunks: ceil(splits / SPLITS). N: columns of the products, 8, 16 or
    32 >= H / G. QUANTIZE: `out` holds e4m3 codes, with one scale per token and head (D = 128).
    """
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SCALED: gl.constexpr = SLOTS // 2 + 2
    HALF: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # The pieces of eight probabilities are exchanged by row: no two rows meet in a bank.
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [N, D], k_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, KB, D], k_desc.layout)
    v16_smem = gl.allocate_shared_memory(gl.float16, [KB, D], HALF)
    p16_smem = gl.allocate_shared_memory(gl.float16, [N, KB], HALF)
    p_smem = gl.allocate_shared_memory(gl.float32, [N, KB], SUMS)
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
    results = (out_ptr, out_scale_ptr, scale_stride_t, scale_stride_g)
    pointers = (q_ptr, q_scale_ptr, results, lse_ptr, part_acc_ptr, part_m_ptr, part_l_ptr)
    items = (context_lens, order, num_items, chunks, max_splits, factor)
    smem = (q_smem, ring, v16_smem, ks_smem, vs_smem, p_smem, p16_smem)
    bars = (ready, free, s_ready, v16_ready, v16_free)
    descs = ((k_desc, k_desc_half, k_desc_quarter), (v_desc, v_desc_half, v_desc_quarter))
    scale_strides = (ks_page, ks_row, ks_head, vs_page, vs_row, vs_head)
    strides = ((k_page, k_head, k_column), (v_page, v_head, v_column), scale_strides)
    walked = (block_table, table_width, context_lens, order, num_items, chunks)
    consumed = ((smem, bars), pointers, items)
    data = (ring, v16_smem, ks_smem, vs_smem)
    fed = ((descs, (k_scale_ptr, v_scale_ptr)), data, bars, walked, strides)
    gl.warp_specialize(
        [
            (_consume, (consumed, H, G, N, D, KB, SPLIT_BLOCKS, SPLITS, SLOTS, ORDERED, QUANTIZE)),
            (feed_codes, (fed, G, D, KB, PAGE, SPLITS * SPLIT_BLOCKS, SLOTS, ORDERED)),
        ],
        [4],
        [FEEDER_REGS],
    )
