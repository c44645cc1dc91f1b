"""Attention backward with one producer and two consumer warp groups.

Deterministic like attention_backward.py, whose two passes these are: the same products and the
same order of accumulation per element, other tiles. A consumer keeps its last product in flight
while the next block's scores are computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebit.kernels.attention_block import LOG2E
from samebit.kernels.attention_feed import ROWS, gather, place, read_segment
from samebit.kernels.attention_walk import store_tile

QUERIES = gl.constexpr(64)
"""Query rows of a stage of the key-owning pass."""


@gluon.jit
def _start(x, zero):
    """x broadcast to the shape of zero, each element in a register of its own.

    Copies that the compiler would sink between two wgmma in flight make it wait for the first.
    """
    return gl.inline_asm_elementwise(
        "mov.f32 $0, $1;", "=f,f", [x + zero], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _dkdv_consume(
    given,
    GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 key rows against every query that sees them."""
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem = given[0]
    kv_ready, ready, s_ready, free = given[1]
    dk_ptr, dv_ptr, dk_part_ptr, dv_part_ptr = given[2]
    segments, key_segment, first, count, partial, start, length, key0, head, scale = given[3]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k = k_smem.index(GROUP_INDEX)
    v = v_smem.index(GROUP_INDEX)
    key_N = key0 + GROUP_INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    factor = scale * LOG2E
    dk = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    zero = gl.zeros([ROWS, QUERIES], gl.float32, S_LAYOUT)
    mbarrier.wait(kv_ready, 0)
    step = 0
    for segment in range(first, first + count):
        q_length = gl.load(segments + segment * 4 + 1)
        own = segment == key_segment
        first_tile = gl.where(own, key0 // QUERIES, 0)
        offset = gl.where(own, 0, length)
        tiles = gl.cdiv(q_length, QUERIES) - first_tile
        for index in range(0, tiles * GROUP):
            query0 = (first_tile + index % tiles) * QUERIES
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(s_ready.index(stage), phase)
            # Both products start from what would be subtracted after them.
            s = _start(lse_smem.index(stage).load(COLUMN)[None, :], zero)
            dp = _start(delta_smem.index(stage).load(COLUMN)[None, :], zero)
            mbarrier.wait(ready.index(stage), phase)
            s = warpgroup_mma(k, q_smem.index(stage).permute((1, 0)), s, is_async=True)
            dp = warpgroup_mma(v, do_smem.index(stage).permute((1, 0)), dp, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            prob = gl.exp2(s * factor)
            masked = (query0 < key0 + 2 * ROWS + offset) | (query0 + QUERIES > q_length)
            if masked:
                query = query0 + gl.arange(0, QUERIES, COLUMN)
                keep = (key_N[:, None] <= query[None, :] + offset) & (query < q_length)[None, :]
                prob = gl.where(keep, prob, 0.0)
            p = gl.convert_layout(prob.to(DTYPE), P_LAYOUT)
            dv = warpgroup_mma(p, do_smem.index(stage), dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            grad = prob * dp
            ds = gl.convert_layout(grad.to(DTYPE), P_LAYOUT)
            dk = warpgroup_mma(ds, q_smem.index(stage), dk, is_async=True)
            dk, dv, ds, p = warpgroup_mma_wait(0, deps=(dk, dv, ds, p))
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
    dk = dk * scale
    row = key0 + GROUP_INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
    d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    inside = (row < length)[:, None]
    if partial < 0:
        offset_ND = ((start + row).to(gl.int64) * G + head)[:, None] * D + d[None, :]
        gl.store(dk_ptr + offset_ND, dk.to(DTYPE), mask=inside)
        gl.store(dv_ptr + offset_ND, dv.to(DTYPE), mask=inside)
    else:
        part_ND = ((partial + row).to(gl.int64) * G + head)[:, None] * D + d[None, :]
        gl.store(dk_part_ptr + part_ND, dk, mask=inside)
        gl.store(dv_part_ptr + part_ND, dv, mask=inside)


@gluon.jit
def _dkdv_produce(given, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """The keys and values once, then the queries' stages in the order they are consumed."""
    q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, row_width = given[0]
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem = given[1]
    kv_ready, ready, s_ready, free = given[2]
    segments, key_segment, first, count, start, key0, head = given[3]
    mbarrier.expect(kv_ready, 4 * k_desc.block_type.nbytes)
    for group in gl.static_range(2):
        row = start + key0 + group * ROWS
        tma.async_copy_global_to_shared(k_desc, [row, head * D], kv_ready, k_smem.index(group))
        tma.async_copy_global_to_shared(v_desc, [row, head * D], kv_ready, v_smem.index(group))
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step = 0
    for segment in range(first, first + count):
        q_start = gl.load(segments + segment * 4)
        q_length = gl.load(segments + segment * 4 + 1)
        first_tile = gl.where(segment == key_segment, key0 // QUERIES, 0)
        tiles = gl.cdiv(q_length, QUERIES) - first_tile
        for index in range(0, tiles * GROUP):
            query0 = (first_tile + index % tiles) * QUERIES
            q_head = head * GROUP + index // tiles
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [q_start + query0, q_head * D], ready.index(stage), q_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                do_desc, [q_start + query0, q_head * D], ready.index(stage), do_smem.index(stage)
            )
            column = q_start + query0 + gl.arange(0, QUERIES, FLAT)
            offset = q_head.to(gl.int64) * row_width + column
            async_copy.async_copy_global_to_shared(
                lse_smem.index(stage), lse_ptr + offset, mask=column < row_width
            )
            async_copy.async_copy_global_to_shared(
                delta_smem.index(stage), delta_ptr + offset, mask=column < row_width
            )
            async_copy.mbarrier_arrive(s_ready.index(stage), increment_count=False)
            step += 1


@gluon.jit
def attention_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dk_part_ptr, dv_part_ptr,
    segments, items, row_width, scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid (items x G, tiles of 128 keys). lse (-lse / scale) and delta (negated): fp32
    [H, row_width]."""
    GROUP: gl.constexpr = H // G
    DTYPE: gl.constexpr = q_desc.dtype
    item = items + (gl.program_id(0) // G) * 4
    head = gl.program_id(0) % G
    key_segment = gl.load(item)
    first = gl.load(item + 1)
    count = gl.load(item + 2)
    partial = gl.load(item + 3)
    start = gl.load(segments + key_segment * 4)
    length = gl.load(segments + key_segment * 4 + 1)
    key0 = gl.program_id(1) * (2 * ROWS)
    if key0 < length:
        k_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], v_desc.layout)
        q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, D], q_desc.layout)
        do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, D], do_desc.layout)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], FLAT)
        delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], FLAT)
        BAR: gl.constexpr = mbarrier.MBarrierLayout()
        kv_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        s_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        mbarrier.init(kv_ready, count=1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(ready.index(stage), count=1)
            mbarrier.init(s_ready.index(stage), count=32)
            mbarrier.init(free.index(stage), count=2)
        consumed = (
            (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem),
            (kv_ready, ready, s_ready, free),
            (dk_ptr, dv_ptr, dk_part_ptr, dv_part_ptr),
            (segments, key_segment, first, count, partial, start, length, key0, head, scale),
        )
        produced = (
            (q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, row_width),
            (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem),
            (kv_ready, ready, s_ready, free),
            (segments, key_segment, first, count, start, key0, head),
        )
        gl.warp_specialize(
            [
                (_dkdv_consume, (consumed, 0, GROUP, G, D, STAGES, DTYPE)),
                (_dkdv_consume, (consumed, 1, GROUP, G, D, STAGES, DTYPE)),
                (_dkdv_produce, (produced, GROUP, D, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )


@gluon.jit
def _dq_consume(
    given,
    GROUP_INDEX: gl.constexpr, H: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 query rows of one head against every block of keys."""
    q_smem, do_smem, k_smem, v_smem, q_ready, ready, free = given[0]
    lse_ptr, delta_ptr, row_width, dq_ptr = given[1]
    start, length, before, token0, head, scale, num_blocks = given[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q = q_smem.index(GROUP_INDEX)
    do = do_smem.index(GROUP_INDEX)
    token = token0 + GROUP_INDEX * ROWS + gl.arange(0, ROWS, ROW)
    offset = head.to(gl.int64) * row_width + start + token
    lse = gl.load(lse_ptr + offset, mask=token < length, other=float("-inf"))
    delta = gl.load(delta_ptr + offset, mask=token < length, other=0.0)
    first_position = before + token0 + GROUP_INDEX * ROWS
    factor = scale * LOG2E
    dq = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    mbarrier.wait(q_ready, 0)
    for block in range(0, num_blocks):
        stage = block % STAGES
        s = _start(lse[:, None], zero)
        dp = _start(delta[:, None], zero)
        mbarrier.wait(ready.index(stage), (block // STAGES) & 1)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(do, v_smem.index(stage).permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        prob = gl.exp2(s * factor)
        if block * KEYS + KEYS - 1 > first_position:
            column = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
            prob = gl.where(column[None, :] <= (before + token)[:, None], prob, 0.0)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        grad = prob * dp
        ds = gl.convert_layout(grad.to(DTYPE), P_LAYOUT)
        dq = warpgroup_mma(ds, k_smem.index(stage), dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
        mbarrier.arrive(free.index(stage), count=1)
    q.store((dq * scale).to(DTYPE))
    store_tile(q, dq_ptr, start, token0 + GROUP_INDEX * ROWS, length, head, H, D)


@gluon.jit
def _dq_produce(given, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    """Q and dO once, then keys and values in block order."""
    q_desc, do_desc, k_desc, v_desc, k_ptr, v_ptr = given[0]
    q_smem, do_smem, k_smem, v_smem, q_ready, ready, free = given[1]
    start, prefix_start, before, end, token0, head, kv_head, kv_row, num_blocks = given[2]
    mbarrier.expect(q_ready, 4 * q_desc.block_type.nbytes)
    for group in gl.static_range(2):
        row = start + token0 + group * ROWS
        tma.async_copy_global_to_shared(q_desc, [row, head * D], q_ready, q_smem.index(group))
        tma.async_copy_global_to_shared(do_desc, [row, head * D], q_ready, do_smem.index(group))
    for block in range(0, num_blocks):
        stage = block % STAGES
        base = block * KEYS
        whole, row = place(base, start, prefix_start, before, end, KEYS)
        mbarrier.wait(free.index(stage), ((block // STAGES) & 1) ^ 1)
        if whole:
            mbarrier.expect(ready.index(stage), 2 * k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [row, kv_head * D], ready.index(stage), k_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                v_desc, [row, kv_head * D], ready.index(stage), v_smem.index(stage)
            )
        else:
            gather(
                k_ptr + kv_head * D, k_smem.index(stage), base, end, start, prefix_start, before,
                k_ptr, 0, kv_row, D, KEYS, 1, False,
            )  # fmt: skip
            gather(
                v_ptr + kv_head * D, v_smem.index(stage), base, end, start, prefix_start, before,
                v_ptr, 0, kv_row, D, KEYS, 1, False,
            )  # fmt: skip
            mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def attention_dq_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr,
    segments, row_width, scale, kv_row,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid (segments x H, tiles of 128 tokens of one head); the longest tiles start first."""
    DTYPE: gl.constexpr = q_desc.dtype
    index = gl.program_id(0) // H
    head = gl.program_id(0) % H
    kv_head = head // (H // G)
    token0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * (2 * ROWS)
    start, length, prefix_start, before = read_segment(segments, index)
    if token0 < length:
        end = before + length
        num_blocks = gl.cdiv(gl.minimum(before + token0 + 2 * ROWS, end), KEYS)
        q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], q_desc.layout)
        do_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], do_desc.layout)
        k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], v_desc.layout)
        BAR: gl.constexpr = mbarrier.MBarrierLayout()
        q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        mbarrier.init(q_ready, count=1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(ready.index(stage), count=1)
            mbarrier.init(free.index(stage), count=2)
        consumed = (
            (q_smem, do_smem, k_smem, v_smem, q_ready, ready, free),
            (lse_ptr, delta_ptr, row_width, dq_ptr),
            (start, length, before, token0, head, scale, num_blocks),
        )
        produced = (
            (q_desc, do_desc, k_desc, v_desc, k_ptr, v_ptr),
            (q_smem, do_smem, k_smem, v_smem, q_ready, ready, free),
            (start, prefix_start, before, end, token0, head, kv_head, kv_row, num_blocks),
        )
        gl.warp_specialize(
            [
                (_dq_consume, (consumed, 0, H, D, KEYS, STAGES, DTYPE)),
                (_dq_consume, (consumed, 1, H, D, KEYS, STAGES, DTYPE)),
                (_dq_produce, (produced, D, KEYS, STAGES)),
            ],
            [4, 4],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
