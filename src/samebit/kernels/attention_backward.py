"""Attention backward over packed segments: deterministic, two passes, no atomics.

Pass one owns key rows and walks their queries in a fixed order (dK, dV); pass two owns query rows
and walks their keys (dQ). Probabilities are rebuilt from the log-sum-exp of the forward.
"""

import triton
import triton.language as tl

from samebit.kernels.attention_block import LOG2E


@triton.jit
def attention_delta_kernel(
    out_ptr, dout_ptr, lse_ptr, lse_out_ptr, delta_out_ptr, num_tokens, scale,
    H: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, H): -lse / scale and -sum over D of out * dout, both fp32 [H, T].

    Transposed, a tile's values are contiguous; negated, they are what the products start from.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    row = token.to(tl.int64) * H + head
    offset = row[:, None] * D + tl.arange(0, D)[None, :]
    inside = token < num_tokens
    out = tl.load(out_ptr + offset, mask=inside[:, None], other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + offset, mask=inside[:, None], other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    column = head.to(tl.int64) * num_tokens + token
    tl.store(delta_out_ptr + column, -tl.sum(out * dout, 1), mask=inside)
    tl.store(lse_out_ptr + column, -lse / scale, mask=inside)


@triton.jit
def attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dk_part_ptr, dv_part_ptr,
    segments, items, row_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (items x G, key tiles): one item's share of dK and dV of KEYS rows of one head.

    lse (-lse / scale) and delta (negated): fp32 [H, row_width].
    """
    GROUP: tl.constexpr = H // G
    item = items + (tl.program_id(0) // G) * 4
    head = tl.program_id(0) % G
    key_segment = tl.load(item)
    first = tl.load(item + 1)
    count = tl.load(item + 2)
    partial = tl.load(item + 3)
    start = tl.load(segments + key_segment * 4)
    length = tl.load(segments + key_segment * 4 + 1)
    key0 = tl.program_id(1) * KEYS
    if key0 >= length:
        return
    d = tl.arange(0, D)
    key_N = key0 + tl.arange(0, KEYS)
    inside_N = key_N < length
    kv_off = ((start + key_N).to(tl.int64) * G + head)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + kv_off, mask=inside_N[:, None], other=0.0)
    v = tl.load(v_ptr + kv_off, mask=inside_N[:, None], other=0.0)
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    factor = scale * LOG2E
    for segment in range(first, first + count):
        q_start = tl.load(segments + segment * 4)
        q_length = tl.load(segments + segment * 4 + 1)
        own = segment == key_segment
        first_tile = 0
        offset = q_length + length
        if own:
            first_tile = key0 // QUERIES
            offset = 0
        tiles = tl.cdiv(q_length, QUERIES) - first_tile
        for step in tl.range(0, tiles * GROUP, num_stages=STAGES):
            query_M = (first_tile + step % tiles) * QUERIES + tl.arange(0, QUERIES)
            inside_M = query_M < q_length
            row = (q_start + query_M).to(tl.int64) * H + head * GROUP + step // tiles
            q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=inside_M[:, None], other=0.0)
            do = tl.load(
                dout_ptr + row[:, None] * D + d[None, :], mask=inside_M[:, None], other=0.0
            )
            column = (head * GROUP + step // tiles).to(tl.int64) * row_width + q_start + query_M
            # An infinite log-sum-exp makes the probabilities of absent rows zero.
            lse = tl.load(lse_ptr + column, mask=inside_M, other=float("-inf"))
            delta = tl.load(delta_ptr + column, mask=inside_M, other=0.0)
            s_NM = tl.dot(k, tl.trans(q))
            p_NM = tl.exp2((s_NM + lse[None, :]) * factor)
            p_NM = tl.where(key_N[:, None] <= query_M[None, :] + offset, p_NM, 0.0)
            dp_NM = tl.dot(v, tl.trans(do))
            dv = tl.dot(p_NM.to(do.dtype), do, dv)
            ds_NM = p_NM * (dp_NM + delta[None, :])
            dk = tl.dot(ds_NM.to(q.dtype), q, dk)
    dk = dk * scale
    if partial < 0:
        tl.store(dk_ptr + kv_off, dk.to(dk_ptr.dtype.element_ty), mask=inside_N[:, None])
        tl.store(dv_ptr + kv_off, dv.to(dv_ptr.dtype.element_ty), mask=inside_N[:, None])
    else:
        part_off = ((partial + key_N).to(tl.int64) * G + head)[:, None] * D + d[None, :]
        tl.store(dk_part_ptr + part_off, dk, mask=inside_N[:, None])
        tl.store(dv_part_ptr + part_off, dv, mask=inside_N[:, None])


@triton.jit
def attention_reduce_kernel(
    dk_part_ptr, dv_part_ptr, dk_ptr, dv_ptr, segments, reduce_items,
    GD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (prompts, rows): partial dK and dV of a prompt's samples added in sample order."""
    item = reduce_items + tl.program_id(0) * 3
    segment = tl.load(item)
    partial = tl.load(item + 1)
    count = tl.load(item + 2)
    start = tl.load(segments + segment * 4)
    length = tl.load(segments + segment * 4 + 1)
    row = tl.program_id(1)
    if row >= length:
        return
    column = tl.arange(0, COLUMNS)
    inside = column < GD
    dk = tl.zeros([COLUMNS], tl.float32)
    dv = tl.zeros([COLUMNS], tl.float32)
    for index in range(0, count):
        offset = (partial + index * length + row).to(tl.int64) * GD + column
        dk += tl.load(dk_part_ptr + offset, mask=inside, other=0.0)
        dv += tl.load(dv_part_ptr + offset, mask=inside, other=0.0)
    offset = (start + row).to(tl.int64) * GD + column
    tl.store(dk_ptr + offset, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, segments, row_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (segments x H, query tiles): dQ of QUERIES tokens of one head."""
    index = tl.program_id(0) // H
    head = tl.program_id(0) % H
    kv_head = head // (H // G)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    start = tl.load(segments + index * 4)
    length = tl.load(segments + index * 4 + 1)
    prefix_start = tl.load(segments + index * 4 + 2)
    prefix_length = tl.load(segments + index * 4 + 3)
    if tile * QUERIES >= length:
        return
    d = tl.arange(0, D)
    query_M = tile * QUERIES + tl.arange(0, QUERIES)
    inside_M = query_M < length
    row = (start + query_M).to(tl.int64) * H + head
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=inside_M[:, None], other=0.0)
    do = tl.load(dout_ptr + row[:, None] * D + d[None, :], mask=inside_M[:, None], other=0.0)
    column = head.to(tl.int64) * row_width + start + query_M
    lse = tl.load(lse_ptr + column, mask=inside_M, other=float("-inf"))
    delta = tl.load(delta_ptr + column, mask=inside_M, other=0.0)
    factor = scale * LOG2E
    dq = tl.zeros([QUERIES, D], tl.float32)
    end = prefix_length + length
    last = tl.minimum(prefix_length + (tile + 1) * QUERIES, end)
    for block in tl.range(0, tl.cdiv(last, KEYS), num_stages=STAGES):
        position = block * KEYS + tl.arange(0, KEYS)
        base = tl.where(position < prefix_length, prefix_start, start - prefix_length)
        kv_off = ((base + position).to(tl.int64) * G + kv_head)[:, None] * D + d[None, :]
        inside = (position < end)[:, None]
        k = tl.load(k_ptr + kv_off, mask=inside, other=0.0)
        v = tl.load(v_ptr + kv_off, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k))
        p = tl.exp2((s + lse[:, None]) * factor)
        p = tl.where(position[None, :] <= (prefix_length + query_M)[:, None], p, 0.0)
        dp = tl.dot(do, tl.trans(v))
        ds = p * (dp + delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    dq = dq * scale
    tl.store(
        dq_ptr + row[:, None] * D + d[None, :],
        dq.to(dq_ptr.dtype.element_ty),
        mask=inside_M[:, None],
    )
