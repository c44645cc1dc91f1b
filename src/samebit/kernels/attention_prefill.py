"""Attention forward for many query tokens: packed segments or chunks over a paged cache.

A program owns tokens x query heads of one key/value head and walks the key blocks in order.
"""

import triton
import triton.language as tl

from samebit.kernels.attention_block import (
    PV_LIFT,
    attend_block,
    finish_scales,
    fold_scales,
    key_rows,
)


@triton.jit
def query_range(
    segments, block_table, context_lens, query_starts, index, table_width, PAGED: tl.constexpr
):
    """(first query row, number of rows, prefix start, keys before the first row, table row)."""
    if PAGED:
        start = tl.load(query_starts + index)
        length = tl.load(query_starts + index + 1) - start
        before = tl.load(context_lens + index) - length
        return start, length, 0, before, block_table + index.to(tl.int64) * table_width
    row = segments + index * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), block_table


@triton.jit
def _walk(
    q, acc, m, den, first, last, position_R, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, end,
    start, prefix_start, prefix_length, block_row, k_page, k_row, v_page, v_row, ks_page, ks_row,
    vs_page, vs_row,
    D: tl.constexpr, KB: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, FP8: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks first..last-1 folded into (acc, m, den)."""
    d = tl.arange(0, D)
    uniform: tl.constexpr = PAGE % KB == 0
    for block in tl.range(first, last, num_stages=STAGES):
        base = block * KB
        position = base + tl.arange(0, KB)
        k_off = key_rows(
            position, end, start, prefix_start, prefix_length, block_row, k_page, k_row, PAGE,
            uniform, PAGED, KB, base,
        )  # fmt: skip
        v_off = key_rows(
            position, end, start, prefix_start, prefix_length, block_row, v_page, v_row, PAGE,
            uniform, PAGED, KB, base,
        )  # fmt: skip
        k_scale = 0.0
        v_scale = 0.0
        if MASKED:
            # Rows past the end may hold anything; 0 x NaN would reach every output of the tile.
            inside = position < end
            k = tl.load(k_ptr + k_off[:, None] + d[None, :], mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + v_off[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + k_off[:, None] + d[None, :])
            v = tl.load(v_ptr + v_off[:, None] + d[None, :])
        if FP8:
            ks_off = key_rows(
                position, end, start, prefix_start, prefix_length, block_row, ks_page, ks_row, PAGE,
                uniform, PAGED, KB, base,
            )  # fmt: skip
            vs_off = key_rows(
                position, end, start, prefix_start, prefix_length, block_row, vs_page, vs_row, PAGE,
                uniform, PAGED, KB, base,
            )  # fmt: skip
            k_scale = tl.load(k_scale_ptr + ks_off, mask=position < end, other=0.0)
            v_scale = tl.load(v_scale_ptr + vs_off, mask=position < end, other=0.0) * PV_LIFT
        keep = position[None, :] <= position_R[:, None]
        acc, m, den = attend_block(
            q, k, v, acc, m, den, keep, factor, k_scale, v_scale, MASKED, FP8
        )
    return acc, m, den


@triton.jit
def attention_prefill_kernel(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, segments,
    block_table, context_lens, query_starts, table_width, factor, k_page, k_row, k_head, v_page,
    v_row, v_head, ks_page, ks_row, ks_head, vs_page, vs_row, vs_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KB: tl.constexpr, SPLIT_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr, PAGED: tl.constexpr, FP8: tl.constexpr, ONE_SPLIT: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (sequences x G, tiles of ROWS // (H // G) tokens); the longest tiles start first."""
    GROUP: tl.constexpr = H // G
    TOKENS: tl.constexpr = ROWS // GROUP
    index = tl.program_id(0) // G
    head = tl.program_id(0) % G
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    start, length, prefix_start, before, block_row = query_range(
        segments, block_table, context_lens, query_starts, index, table_width, PAGED
    )
    if tile * TOKENS >= length:
        return
    r = tl.arange(0, ROWS)
    token_R = tile * TOKENS + r // GROUP
    valid_R = (r < TOKENS * GROUP) & (token_R < length)
    head_R = head * GROUP + r % GROUP
    position_R = before + token_R
    out_row = (start + token_R).to(tl.int64) * H + head_R
    d = tl.arange(0, D)
    q = tl.load(q_ptr + out_row[:, None] * D + d[None, :], mask=valid_R[:, None], other=0.0)
    factor_R = tl.full([ROWS], 1.0, tl.float32) * factor
    if FP8:
        factor_R = factor_R * tl.load(q_scale_ptr + out_row, mask=valid_R, other=1.0)

    end = before + length
    first_position = before + tile * TOKENS
    last_position = tl.minimum(first_position + TOKENS, end) - 1
    num_blocks = last_position // KB + 1
    num_full = (first_position + 1) // KB
    m_total = tl.full([ROWS], float("-inf"), tl.float32)
    l_total = tl.zeros([ROWS], tl.float32)
    acc_total = tl.zeros([ROWS, D], tl.float32)
    for split in range(0, tl.cdiv(num_blocks, SPLIT_BLOCKS)):
        lo = split * SPLIT_BLOCKS
        hi = tl.minimum(lo + SPLIT_BLOCKS, num_blocks)
        if ONE_SPLIT:
            hi = num_blocks
        mid = tl.minimum(tl.maximum(num_full, lo), hi)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        den = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        acc, m, den = _walk(
            q, acc, m, den, lo, mid, position_R, factor_R, k_ptr + head * k_head,
            v_ptr + head * v_head, k_scale_ptr + head * ks_head, v_scale_ptr + head * vs_head, end,
            start, prefix_start, before, block_row, k_page, k_row, v_page, v_row, ks_page, ks_row,
            vs_page, vs_row, D, KB, PAGE, PAGED, FP8, False, STAGES,
        )  # fmt: skip
        acc, m, den = _walk(
            q, acc, m, den, mid, hi, position_R, factor_R, k_ptr + head * k_head,
            v_ptr + head * v_head, k_scale_ptr + head * ks_head, v_scale_ptr + head * vs_head, end,
            start, prefix_start, before, block_row, k_page, k_row, v_page, v_row, ks_page, ks_row,
            vs_page, vs_row, D, KB, PAGE, PAGED, FP8, True, 1,
        )  # fmt: skip
        if ONE_SPLIT:
            acc_total = acc
            m_total = m
            l_total = den
        else:
            # A row whose position precedes the split skips it: no rounding, no change of sign.
            seen = position_R >= lo * KB
            m_new, l_new, old, new = fold_scales(m_total, l_total, m, den)
            acc_total = tl.where(
                seen[:, None], tl.fma(acc_total, old[:, None], acc * new[:, None]), acc_total
            )
            m_total = tl.where(seen, m_new, m_total)
            l_total = tl.where(seen, l_new, l_total)
    scale_R, lse_R = finish_scales(m_total, l_total, FP8)
    out = (acc_total * scale_R[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * D + d[None, :], out, mask=valid_R[:, None])
    tl.store(lse_ptr + out_row, lse_R, mask=valid_R)
