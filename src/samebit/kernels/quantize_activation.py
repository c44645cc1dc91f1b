"""Quantise activations to e4m3 in groups of 1x128 (Jet-RL section 4.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK
from samebit.kernels.launch import cdiv, launch
from samebit.kernels.quantize_common import (
    NUMERIC_OPTIONS,
    amax_bits,
    block_codes,
    empty_activation_scale,
    padded,
    widened_once,
)

WARPS = 4


def rows_for(tokens: int) -> int:
    """Tokens per program; a group's result depends on its own elements only."""
    return 16 if tokens <= 256 else 32


@triton.jit
def _quantize_activation_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    T,
    K,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = g * BLOCK + tl.arange(0, BLOCK)
    rows = t < T
    inside = rows[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + t[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
    if BF16:
        x = widened_once(x)
    else:
        x = x.to(tl.float32)
    codes, scale = block_codes(x, amax_bits(x, 1), BF16)
    tl.store(codes_ptr + t[:, None] * codes_stride + k[None, :], codes, mask=rows[:, None])
    scale_row = tl.reshape(scale, (ROWS,))
    tl.store(scale_ptr + t * scale_stride_t + g * scale_stride_g, scale_row, mask=rows)


def quantize_activation(
    x_TK: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3 [T, ceil128(K)] and scales FP32 [T, ceil(K/128)] of BF16 (or FP32) x [T, K].

    Rows of `x` may be strided. Code columns past K are zero. Fresh scales are stored group-major
    (contiguous along tokens) and returned as the transposed view; `codes` and `scale` may be given.
    """
    T, K = x_TK.shape
    assert x_TK.stride(1) == 1 or K == 1
    if codes is None:
        codes = torch.empty((T, padded(K)), dtype=torch.float8_e4m3fn, device=x_TK.device)
    if scale is None:
        scale = empty_activation_scale(T, K, x_TK.device)
    if T == 0:
        return codes, scale
    rows = rows_for(T)
    launch(
        _quantize_activation_kernel,
        (padded(K) // BLOCK, cdiv(T, rows)),
        x_TK,
        codes.view(torch.uint8),
        scale,
        x_TK.stride(0),
        codes.stride(0),
        scale.stride(0),
        scale.stride(1),
        T,
        K,
        BF16=x_TK.dtype == torch.bfloat16,
        ROWS=rows,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **NUMERIC_OPTIONS,
    )
    return codes, scale
