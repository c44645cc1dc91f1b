"""Codes back to BF16: y = bf16(code * scale), one FP32 product and one rounding, for BF16 backwards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import cdiv, launch
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, round_to_bf16

ROWS, COLUMNS = 16, 256


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    R,
    K,
    codes_stride,
    scale_stride_r,
    scale_stride_g,
    ROWS_A_SCALE: tl.constexpr,
    COLUMNS_A_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (k < K)[None, :]
    codes = tl.load(codes_ptr + r[:, None] * codes_stride + k[None, :], mask=inside, other=0.0)
    row = (r // ROWS_A_SCALE) * scale_stride_r
    if COLUMNS_A_SCALE > 0:
        address = row[:, None] + (k // COLUMNS_A_SCALE)[None, :] * scale_stride_g
        scale = tl.load(scale_ptr + address, mask=inside, other=0.0)
    else:
        scale = tl.load(scale_ptr + row, mask=r < R, other=0.0)[:, None]
    y = round_to_bf16(codes.to(tl.float32) * scale)
    tl.store(out_ptr + r[:, None] * K + k[None, :], y, mask=inside)


def dequantize(
    codes_RK: torch.Tensor, scale_RG: torch.Tensor, width: int, block: tuple[int, int]
) -> torch.Tensor:
    """BF16 [R, width] of e4m3 or INT8 codes [R, >= width], FP32 scales [R / rows, groups].

    block: (rows, columns) that share a scale; 0 columns means the whole row. Any strides of scales.
    """
    R = codes_RK.shape[0]
    assert codes_RK.stride(1) == 1 and scale_RG.dim() == 2 and block[0] > 0
    out = torch.empty((R, width), dtype=torch.bfloat16, device=codes_RK.device)
    if R:
        launch(
            _dequantize_kernel,
            (cdiv(R, ROWS), cdiv(width, COLUMNS)),
            codes_RK,
            scale_RG,
            out,
            R,
            width,
            codes_RK.stride(0),
            scale_RG.stride(0),
            scale_RG.stride(1),
            ROWS_A_SCALE=block[0],
            COLUMNS_A_SCALE=block[1],
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
            **NUMERIC_OPTIONS,
        )
    return out
