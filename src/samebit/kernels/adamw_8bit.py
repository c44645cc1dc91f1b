"""One pass of AdamW over a flat parameter with moments in a byte each; train/states_8bit.py defines it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import cdiv, launch
from samebit.kernels.quantize_common import NUMERIC_OPTIONS

ROWS = 8
"""Blocks of 256 values a program updates."""
VALUES = tl.constexpr(256)
FIRST_BASE = tl.constexpr(0x3F8 - 120)
SECOND_BASE = tl.constexpr(0x3F8 - 255)


@triton.jit
def _random_bits(element, key):
    """Below 2^20: a hash of (key, element)."""
    x = element.to(tl.uint32) ^ (key.to(tl.uint32) * 0x9E3779B1)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) >> 12).to(tl.int32)


@triton.jit
def _decode(codes, scale, BASE: tl.constexpr):
    values = ((codes + BASE) << 20).to(tl.float32, bitcast=True)
    return tl.where(codes == 0, 0.0, values) * scale[:, None]


@triton.jit
def _encode(magnitude, random, BASE: tl.constexpr, VANISHES: tl.constexpr):
    """(codes int32, scale) of magnitudes [rows, 256]."""
    scale = tl.max(magnitude, axis=1)
    y = tl.div_rn(
        magnitude, tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], magnitude.shape)
    )
    codes = ((y.to(tl.int32, bitcast=True) + random) >> 20) - BASE
    smallest = tl.full((), (BASE + 1) << 20, tl.int32).to(tl.float32, bitcast=True)
    if VANISHES:
        below = (random.to(tl.float32) * (smallest * 0.00000095367431640625) < y).to(tl.int32)
    else:
        below = (magnitude > 0).to(tl.int32)
    return tl.where(y < smallest, below, codes), scale


@triton.jit(do_not_specialize=["key"])
def _update_kernel(
    p_ptr,
    grad_ptr,
    m_ptr,
    m_scale_ptr,
    v_ptr,
    v_scale_ptr,
    size,
    blocks,
    beta1,
    new1,
    beta2,
    new2,
    epsilon,
    decay,
    rate,
    root,
    key,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = row.to(tl.int64)[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    inside, whole = element < size, (row < blocks)[:, None]
    grad = tl.load(grad_ptr + element, mask=inside, other=0.0)
    p = tl.load(p_ptr + element, mask=inside, other=0.0)
    m_codes = tl.load(m_ptr + element, mask=whole, other=0).to(tl.int32)
    v_codes = tl.load(v_ptr + element, mask=whole, other=0).to(tl.int32)
    m = _decode(
        m_codes & 0x7F, tl.load(m_scale_ptr + row, mask=row < blocks, other=0.0), FIRST_BASE
    )
    m = tl.where(m_codes >= 0x80, -m, m)
    v = _decode(v_codes, tl.load(v_scale_ptr + row, mask=row < blocks, other=0.0), SECOND_BASE)
    m = m * beta1 + grad * new1
    v = v * beta2 + grad * grad * new2
    denominator = tl.sqrt_rn(v) * root + epsilon
    p = p * decay - tl.div_rn(m, denominator) * rate
    tl.store(p_ptr + element, p, mask=inside)
    codes, scale = _encode(tl.abs(m), _random_bits(element, 2 * key), FIRST_BASE, True)
    codes = tl.where(m < 0, codes | 0x80, codes)
    tl.store(m_ptr + element, codes.to(tl.uint8), mask=whole)
    tl.store(m_scale_ptr + row, scale, mask=row < blocks)
    codes, scale = _encode(v, _random_bits(element, 2 * key + 1), SECOND_BASE, False)
    tl.store(v_ptr + element, codes.to(tl.uint8), mask=whole)
    tl.store(v_scale_ptr + row, scale, mask=row < blocks)


def update_8bit(
    p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], u: Any
) -> None:
    """One step on flat FP32 p [n]; codes uint8 [n padded to 256] and scales in `state` are rewritten.

    u: the step's scalars, train/states_8bit.py's Update.
    """
    assert p.is_contiguous() and grad.is_contiguous()
    blocks = len(state["exp_avg_scale"])
    launch(
        _update_kernel,
        (cdiv(blocks, ROWS),),
        p,
        grad,
        state["exp_avg"],
        state["exp_avg_scale"],
        state["exp_avg_sq"],
        state["exp_avg_sq_scale"],
        len(p),
        blocks,
        u.beta1,
        1.0 - u.beta1,
        u.beta2,
        1.0 - u.beta2,
        u.epsilon,
        u.decay,
        u.size,
        u.root,
        u.key,
        ROWS=ROWS,
        num_warps=8,
        **NUMERIC_OPTIONS,
    )
