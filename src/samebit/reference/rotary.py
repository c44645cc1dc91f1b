"""Rotary embedding, rotate-half convention: FP32 products of an FP32 table, rounded once to BF16."""

from __future__ import annotations

import torch


def rotary(x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """BF16 [T, H, D], tables FP32 [T, D/2] of each row's position -> BF16 [T, H, D]."""
    tokens, heads, width = x_THD.shape
    x = x_THD.float().view(tokens, heads, 2, width // 2)
    a, b = x.unbind(2)
    sin = sin_TC[:, None]
    turned = x * cos_TC[:, None, None]
    turned[:, :, 0].sub_(b * sin)
    turned[:, :, 1].add_(a * sin)
    return turned.bfloat16().view(tokens, heads, width)


def rotary_backward(
    dy_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
) -> torch.Tensor:
    """The transpose of the rotation: rotate by the negative angle."""
    return rotary(dy_THD, cos_TC, -sin_TC)
