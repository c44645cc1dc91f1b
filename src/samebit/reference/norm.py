"""RMSNorm and the residual add, FP32 inside, BF16 between; row sums are one fixed tree."""

from __future__ import annotations

import torch

from samebit.reference.exact import row_sum, sqrt


def rms_norm(
    x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [..., K] -> (BF16 normed, FP32 rstd [..., 1]). gain: BF16 values."""
    x = x_TK.float()
    mean = row_sum(x * x).div_(x.shape[-1])
    rstd = sqrt(mean.add_(eps)).reciprocal_()[..., None]
    return (x * rstd).mul_(gain_K.float()).bfloat16(), rstd


def rms_norm_backward(
    dy_TK: torch.Tensor,
    x_TK: torch.Tensor,
    gain_K: torch.Tensor,
    rstd_T1: torch.Tensor,
    dsum_TK: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx BF16, dgain FP32 [K]) of `rms_norm`.

    dsum: BF16 gradient that reaches x past the norm (the residual stream), added to dx.
    """
    dy, x = dy_TK.float(), x_TK.float()
    normed = x * rstd_T1
    dgain = (dy * normed).flatten(0, -2).sum(0)
    weighted = dy * gain_K.float()
    inner = (weighted * normed).mean(-1, keepdim=True)
    dx = ((weighted - normed * inner) * rstd_T1).bfloat16()
    if dsum_TK is not None:
        dx = dx + dsum_TK
    return dx, dgain if into is None else into.add_(dgain)


def residual_add(x_TK: torch.Tensor, update_TK: torch.Tensor) -> torch.Tensor:
    """x + update, added in FP32, rounded to BF16 (the residual stream is BF16)."""
    return x_TK + update_TK  # what torch does for two BF16 tensors
