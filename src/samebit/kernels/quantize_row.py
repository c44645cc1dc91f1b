"""Quantise whole rows: INT8 or e4m3, one scale per token or per output channel (QuRL section 3)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import E4M3, INT8, Format
from samebit.kernels.launch import launch, next_power_of_2
from samebit.kernels.quantize_common import (
    E4M3_LARGEST,
    INT8_LARGEST,
    NUMERIC_OPTIONS,
    e4m3_code,
    e4m3_quotient,
    int8_group_codes,
    magnitude_bits,
    padded,
    quotient,
    scale_from_bits,
)

WIDEST = 32768
"""A row is held in one program's registers."""


@triton.jit
def row_codes(x, bits, IS_INT8: tl.constexpr, BF16: tl.constexpr):
    """Codes (int8 or uint8) and scale of whole rows; `bits` broadcasts against `x`."""
    if IS_INT8:
        scale = scale_from_bits(bits, INT8_LARGEST, BF16)
        return int8_group_codes(quotient(x, scale, BF16), bits), scale
    else:
        scale = scale_from_bits(bits, E4M3_LARGEST, BF16)
        return e4m3_code(e4m3_quotient(x, scale, BF16)), scale


@triton.jit
def _quantize_row_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    codes_stride,
    K,
    K_PADDED,
    IS_INT8: tl.constexpr,
    WIDTH: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + t * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    bits = tl.max(magnitude_bits(x), axis=0, keep_dims=True)
    codes, scale = row_codes(x, bits, IS_INT8, x_ptr.dtype.element_ty == tl.bfloat16)
    tl.store(codes_ptr + t * codes_stride + k, codes, mask=k < K_PADDED)
    tl.store(scale_ptr + t + tl.arange(0, 1), scale)


def quantize_rows(
    x_RK: torch.Tensor,
    fmt: Format,
    codes: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, ceil128(K)] in `fmt` (INT8 or E4M3) and scales FP32 [R] of BF16 or FP32 x [R, K].

    Rows are tokens (activations) or output channels (weights, from the FP32 master). `codes` may
    have more rows than R (a fused buffer's padding); only the first R are written. ValueError for
    other formats (INT4 is a stress format of the CPU reference).
    """
    R, K = x_RK.shape
    if fmt not in (INT8, E4M3):
        raise ValueError(f"the Hopper kernels quantise rows to int8 or e4m3, not {fmt.name}")
    if K > WIDEST:
        raise ValueError(f"row quantisation holds at most {WIDEST} columns, got {K}; use blocks")
    if codes is None:
        codes = torch.empty((R, padded(K)), dtype=fmt.dtype, device=x_RK.device)
    if scale is None:
        scale = torch.empty((R,), dtype=torch.float32, device=x_RK.device)
    assert x_RK.stride(1) == 1 and codes.dtype == fmt.dtype and scale.stride(0) == 1
    if R == 0:
        return codes, scale
    width = next_power_of_2(padded(K))
    is_int8 = fmt is INT8
    launch(
        _quantize_row_kernel,
        (R,),
        x_RK,
        codes if is_int8 else codes.view(torch.uint8),
        scale,
        x_RK.stride(0),
        codes.stride(0),
        K,
        padded(K),
        IS_INT8=is_int8,
        WIDTH=width,
        num_warps=min(max(width // 1024, 1), 16),
        **NUMERIC_OPTIONS,
    )
    return codes, scale
