"""Rotary embedding of one tensor, rotate-half convention: FP32 products, one rounding to BF16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import launch, next_power_of_2
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, round_to_bf16


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, x_stride,
    BACKWARD: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = h < H
    source = x_ptr + t * x_stride + h * (2 * HALF) + d
    x1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + t * HALF + d)
    sin = tl.load(sin_ptr + t * HALF + d)
    if BACKWARD:
        sin = -sin
    target = y_ptr + t * (2 * H * HALF) + h * (2 * HALF) + d
    tl.store(target, round_to_bf16(x1 * cos - x2 * sin), mask=inside)
    tl.store(target + HALF, round_to_bf16(x2 * cos + x1 * sin), mask=inside)


def rotate(
    x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, *, backward: bool
) -> torch.Tensor:
    """BF16 [T, H, D] rotated by FP32 tables [T, D/2] of each row; by the negative angle backwards.

    A token's rows may be a view of a fused buffer (heads and D contiguous within a token).
    """
    T, H, D = x_THD.shape
    assert x_THD.dtype == torch.bfloat16 and cos_TC.is_contiguous() and sin_TC.is_contiguous()
    assert cos_TC.shape == sin_TC.shape == (T, D // 2)
    if x_THD.stride(2) != 1 or (H > 1 and x_THD.stride(1) != D):
        x_THD = x_THD.contiguous()
    half = D // 2
    if half & (half - 1):
        raise ValueError(f"head size {D} is not supported by the rotary kernel; use a power of two")
    y = torch.empty((T, H, D), dtype=torch.bfloat16, device=x_THD.device)
    if T:
        launch(_rotate_kernel, (T,),
            x_THD, cos_TC, sin_TC, y, x_THD.stride(0),
            BACKWARD=backward, H=H, HEADS=next_power_of_2(H), HALF=half,
            num_warps=4, **NUMERIC_OPTIONS,
        )  # fmt: skip
    return y
