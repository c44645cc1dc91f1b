"""KV storage: one pair of row arrays a layer. Which row is whose is the layout's business."""

from __future__ import annotations

import torch


class KVStore:
    """BF16 rows [num_rows, G, D] for keys and values of every layer."""

    def __init__(
        self, layers: int, num_rows: int, kv_heads: int, head_dim: int, device: torch.device
    ):
        shape = (num_rows, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V [T, G, D] of a layer at rows `slots` int64 [T]."""
        self.keys[layer][slots] = k
        self.values[layer][slots] = v

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows between places in every layer (copy-on-write of a half-filled page)."""
        for rows in (*self.keys, *self.values):
            rows[target] = rows[source]
