"""Backward of QK norm and rotary: gradients of Q, K and V into the fused projection's gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import cdiv, launch, next_power_of_2
from samebit.kernels.norm_backward import column_sum
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, fold_rows, round_to_bf16
from samebit.kernels.rope import head_rstd

PROGRAMS = 528
"""Token chunks at most; fixed, so that the gain gradient's sum order is."""
WARPS = 4
STAGES = 1


@triton.jit
def _rope_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    dx_stride,
    T,
    rows,
    eps,
    NORM: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (h < H) & (d < HALF)
    offset = h * (2 * HALF) + d
    dweight1 = tl.zeros((HEADS, HALF), dtype=tl.float32)
    dweight2 = tl.zeros((HEADS, HALF), dtype=tl.float32)
    first = program * rows
    for i in tl.range(0, tl.minimum(rows, T - first), num_stages=STAGES):
        t = (first + i).to(tl.int64)
        position = tl.load(positions_ptr + t).to(tl.int64)
        cos = tl.load(cos_ptr + position * HALF + d)
        sin = tl.load(sin_ptr + position * HALF + d)
        source = dy_ptr + t * (H * 2 * HALF) + offset
        dy1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        dy2 = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        dx1 = dy1 * cos + dy2 * sin
        dx2 = dy2 * cos - dy1 * sin
        if NORM:
            source = x_ptr + t * x_stride + offset
            x1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
            rstd = head_rstd(x1, x2, eps, HALF)
            x1 = x1 * rstd
            x2 = x2 * rstd
            dweight1 += dx1 * x1
            dweight2 += dx2 * x2
            dx1 = dx1 * tl.load(weight_ptr + d).to(tl.float32)
            dx2 = dx2 * tl.load(weight_ptr + HALF + d).to(tl.float32)
            mean = tl.sum(dx1 * x1 + dx2 * x2, axis=1, keep_dims=True) * (0.5 / HALF)
            dx1 = (dx1 - x1 * mean) * rstd
            dx2 = (dx2 - x2 * mean) * rstd
        target = dx_ptr + t * dx_stride + offset
        tl.store(target, round_to_bf16(dx1), mask=inside)
        tl.store(target + HALF, round_to_bf16(dx2), mask=inside)
    if NORM:
        address = partial_ptr + program.to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)
        tl.store(address, tl.reshape(fold_rows(dweight1, 1), (HALF,)))
        tl.store(address + HALF, tl.reshape(fold_rows(dweight2, 1), (HALF,)))


def rope_backward(
    dy_THD: torch.Tensor,
    positions_T: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    *,
    dx_TN: torch.Tensor | None = None,
    x_TN: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx BF16 [T, H*D], dweight FP32 [D] or None) of one of Q and K from dy BF16 [T, H, D].

    `dx_TN` may be a view of the fused projection's gradient (first H*D columns are written). With
    QK norm give `x_TN`, the projection's output before the norm, and the gain; `dweight` is
    accumulated into when given. Deterministic. V's gradient needs no kernel: copy it.
    """
    T, H, D = dy_THD.shape
    assert dy_THD.is_contiguous() and T > 0
    if dx_TN is None:
        dx_TN = torch.empty((T, H * D), dtype=torch.bfloat16, device=dy_THD.device)
    norm = norm_weight is not None
    assert not norm or x_TN is not None
    rows = cdiv(T, PROGRAMS)
    programs = cdiv(T, rows)
    shape = (programs if norm else 1, D)
    partial = torch.empty(shape, dtype=torch.float32, device=dy_THD.device)
    cos, sin = table
    launch(
        _rope_backward_kernel,
        (programs,),
        dy_THD,
        dy_THD if x_TN is None else x_TN,
        dy_THD if norm_weight is None else norm_weight,
        cos,
        sin,
        positions_T,
        dx_TN,
        partial,
        0 if x_TN is None else x_TN.stride(0),
        dx_TN.stride(0),
        T,
        rows,
        eps,
        NORM=norm,
        H=H,
        HEADS=next_power_of_2(H),
        HALF=D // 2,
        STAGES=STAGES,
        num_warps=WARPS,
        **NUMERIC_OPTIONS,
    )
    return dx_TN, (column_sum(partial, dweight) if norm else None)
