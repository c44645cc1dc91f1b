"""The steps that every attention kernel shares, so that they round alike.

Scores stay raw in FP32; `factor` = softmax scale x log2(e) (x the FP8 scale of Q) enters through
one fused multiply-add per score. Kernels that use these are compiled with contraction off.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
PV_LIFT = tl.constexpr(256.0)
"""Power of two that lifts P x (scale of V) into FP16's normal range; removed at the end."""


@triton.jit
def attend_block(
    q, k_KD, v_KD, acc, m, den, keep, factor, k_scale, v_scale,
    MASKED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One block of keys: the new (acc, m, den). m is in units of log2, NaN scores stay NaN."""
    s = tl.dot(q, tl.trans(k_KD))
    if FP8:
        s = s * k_scale[None, :]
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    m_safe = m_new
    if MASKED:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, factor[:, None], -m_safe[:, None]))
    alpha = tl.exp2(m - m_safe)
    den = tl.fma(den, alpha, tl.sum(p, 1))
    acc = acc * alpha[:, None]
    if FP8:
        p = p * v_scale[None, :]
        acc = tl.dot(p.to(tl.float16), v_KD.to(tl.float16), acc)
    else:
        acc = tl.dot(p.to(v_KD.dtype), v_KD, acc)
    return acc, m_new, den


@triton.jit
def fold_scales(m_total, l_total, m, den):
    """(new maximum, new sum, weight of the total, weight of the split); the split is not empty."""
    m_new = tl.maximum(m_total, m)
    weight_total = tl.exp2(m_total - m_new)
    weight_split = tl.exp2(m - m_new)
    l_new = tl.fma(l_total, weight_total, den * weight_split)
    return m_new, l_new, weight_total, weight_split


@triton.jit
def finish_scales(m, den, FP8: tl.constexpr):
    """(factor of the accumulator, natural log-sum-exp) of finished rows."""
    inverse = tl.div_rn(1.0, den)
    if FP8:
        inverse = inverse * (1.0 / PV_LIFT)
    return inverse, (m + tl.log2(den)) * LN2


@triton.jit
def key_rows(
    position, end, segment_start, prefix_start, prefix_length, block_row, stride_page, stride_row,
    PAGE: tl.constexpr, PAGE_UNIFORM: tl.constexpr, PAGED: tl.constexpr, KB: tl.constexpr,
    base,
):  # fmt: skip
    """Element offsets of the key rows at `position`; positions from `end` on are clamped."""
    if PAGED:
        if PAGE_UNIFORM:
            page = tl.load(block_row + base // PAGE).to(tl.int64)
            return page * stride_page + (base % PAGE + tl.arange(0, KB)) * stride_row
        inside = tl.minimum(position, end - 1)
        page = tl.load(block_row + inside // PAGE).to(tl.int64)
        return page * stride_page + (inside % PAGE) * stride_row
    row = tl.where(position < prefix_length, prefix_start, segment_start - prefix_length)
    return (row + position).to(tl.int64) * stride_row
