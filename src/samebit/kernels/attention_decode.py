"""Attention forward for one query token a sequence over a paged cache.

Each program owns one split of one key/value head's keys; a second kernel folds the splits in order.
"""

import triton
import triton.language as tl

from samebit.kernels.attention_block import finish_scales, fold_scales
from samebit.kernels.attention_prefill import _walk
from samebit.kernels.quantize_common import amax_bits, block_codes, widened_once


@triton.jit
def attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, part_acc_ptr,
    part_m_ptr, part_l_ptr, block_table, context_lens, table_width, factor, k_page, k_row, k_head,
    v_page, v_row, v_head, ks_page, ks_row, ks_head, vs_page, vs_row, vs_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KB: tl.constexpr, SPLIT_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B x G, splits). Sequences of one split are finished here; others leave partials."""
    GROUP: tl.constexpr = H // G
    index = tl.program_id(0) // G
    head = tl.program_id(0) % G
    split = tl.program_id(1)
    end = tl.load(context_lens + index)
    lo = split * SPLIT_BLOCKS
    num_blocks = tl.cdiv(end, KB)
    if lo >= num_blocks:
        return
    r = tl.arange(0, ROWS)
    valid_R = r < GROUP
    out_row = index.to(tl.int64) * H + head * GROUP + r
    position_R = tl.full([ROWS], 0, tl.int32) + (end - 1)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + out_row[:, None] * D + d[None, :], mask=valid_R[:, None], other=0.0)
    factor_R = tl.full([ROWS], 1.0, tl.float32) * factor
    if FP8:
        factor_R = factor_R * tl.load(q_scale_ptr + out_row, mask=valid_R, other=1.0)
    hi = tl.minimum(lo + SPLIT_BLOCKS, num_blocks)
    mid = tl.minimum(hi, end // KB)
    block_row = block_table + index.to(tl.int64) * table_width
    m = tl.full([ROWS], float("-inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    acc, m, den = _walk(
        q, acc, m, den, lo, mid, position_R, factor_R, k_ptr + head * k_head, v_ptr + head * v_head,
        k_scale_ptr + head * ks_head, v_scale_ptr + head * vs_head, end, 0, 0, 0, block_row, k_page,
        k_row, v_page, v_row, ks_page, ks_row, vs_page, vs_row, D, KB, PAGE, True, FP8, False,
        STAGES,
    )  # fmt: skip
    acc, m, den = _walk(
        q, acc, m, den, mid, hi, position_R, factor_R, k_ptr + head * k_head, v_ptr + head * v_head,
        k_scale_ptr + head * ks_head, v_scale_ptr + head * vs_head, end, 0, 0, 0, block_row, k_page,
        k_row, v_page, v_row, ks_page, ks_row, vs_page, vs_row, D, KB, PAGE, True, FP8, True, 1,
    )  # fmt: skip
    if num_blocks <= SPLIT_BLOCKS:
        scale_R, lse_R = finish_scales(m, den, FP8)
        out = (acc * scale_R[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] * D + d[None, :], out, mask=valid_R[:, None])
        tl.store(lse_ptr + out_row, lse_R, mask=valid_R)
    else:
        part = out_row * tl.num_programs(1) + split
        tl.store(part_acc_ptr + part[:, None] * D + d[None, :], acc, mask=valid_R[:, None])
        tl.store(part_m_ptr + part, m, mask=valid_R)
        tl.store(part_l_ptr + part, den, mask=valid_R)


@triton.jit
def attention_fold_kernel(
    part_acc_ptr, part_m_ptr, part_l_ptr, out_ptr, out_scale_ptr, lse_ptr, context_lens, max_splits,
    scale_stride_t, scale_stride_h, H: tl.constexpr, D: tl.constexpr, KB: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr, FP8: tl.constexpr, FINISHED: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Grid (B, H): the splits of one row, folded in order as prefill folds them.

    Rows of up to FINISHED splits were finished by the kernel before. QUANTIZE: `out` holds e4m3
    codes (as uint8) with one scale a row.
    """
    row = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    num_splits = tl.cdiv(tl.cdiv(tl.load(context_lens + tl.program_id(0)), KB), SPLIT_BLOCKS)
    if num_splits <= FINISHED:
        return
    d = tl.arange(0, D)
    one = tl.arange(0, 1)
    m_total = tl.full([1], float("-inf"), tl.float32)
    l_total = tl.zeros([1], tl.float32)
    acc_total = tl.zeros([1, D], tl.float32)
    for split in range(0, num_splits):
        part = row * max_splits + split
        m = tl.load(part_m_ptr + part + one)
        den = tl.load(part_l_ptr + part + one)
        acc = tl.load(part_acc_ptr + part * D + d)[None, :]
        m_total, l_total, old, new = fold_scales(m_total, l_total, m, den)
        acc_total = tl.fma(acc_total, old[:, None], acc * new[:, None])
    scale, lse = finish_scales(m_total, l_total, FP8)
    out = acc_total * scale[:, None]
    if QUANTIZE:
        y = widened_once(out.to(tl.bfloat16))
        codes, out_scale = block_codes(y, amax_bits(y, 1), True)
        tl.store(out_ptr + row * D + d[None, :], codes)
        place = tl.program_id(0).to(tl.int64) * scale_stride_t + tl.program_id(1) * scale_stride_h
        tl.store(out_scale_ptr + place + one, tl.reshape(out_scale, (1,)))
    else:
        tl.store(out_ptr + row * D + d[None, :], out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row + one, lse)
