"""Token embedding: BF16 rows of the FP32 master."""

from __future__ import annotations

import torch


def embed(ids_T: torch.Tensor, master_VK: torch.Tensor) -> torch.Tensor:
    """BF16 [T, K]: each row rounded from the FP32 master."""
    return master_VK[ids_T].bfloat16()


def embed_backward(
    dy_TK: torch.Tensor, ids_T: torch.Tensor, rows: int, into: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 [V, K]; rows are added in batch order, to `into` when given."""
    grad = torch.zeros(rows, dy_TK.shape[1], device=dy_TK.device) if into is None else into
    return grad.index_add_(0, ids_T, dy_TK.float())
