"""Rotary embedding, rotate-half convention: FP32 products of an FP32 table, rounded once to BF16."""

from __future__ import annotations

import torch


def rotary(x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """BF16 [T, H, D], tables FP32 [T, D/2] of each row's position -> BF16 [T, H, D]."""
    half = x_THD.shape[-1] // 2
    x = x_THD.float()
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).bfloat16()


def rotary_backward(
    dy_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
) -> torch.Tensor:
    """The transpose of the rotation: rotate by the negative angle."""
    return rotary(dy_THD, cos_TC, -sin_TC)
