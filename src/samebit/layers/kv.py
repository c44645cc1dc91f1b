"""KV storage: one pair of row arrays a layer. Which row is whose is the layout's business."""

from __future__ import annotations

import torch

from samebit.formats import get_format
from samebit.operand import HeadCodes, Heads
from samebit.spec import BF16, Precision


class KVStore:
    """Rows [num_rows, G, D] for keys and values of every layer: BF16, or codes with scales per head."""

    def __init__(
        self,
        layers: int,
        num_rows: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        precision: Precision = BF16,
    ):
        def rows() -> Heads:
            dtype = get_format(precision.format).dtype
            shape = (num_rows, kv_heads, head_dim)
            if precision.block is None:
                return torch.zeros(shape, dtype=dtype, device=device)
            codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
            return HeadCodes(codes, torch.ones(shape[:2], device=device))

        self.keys = [rows() for _ in range(layers)]
        self.values = [rows() for _ in range(layers)]

    def write(self, layer: int, slots: torch.Tensor, k: Heads, v: Heads) -> None:
        """Store K and V [T, G, D] of a layer at rows `slots` int64 [T]."""
        _put(self.keys[layer], slots, k)
        _put(self.values[layer], slots, v)

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows between places in every layer (copy-on-write of a half-filled page)."""
        for rows in (*self.keys, *self.values):
            _put(rows, target, rows.take(source) if isinstance(rows, HeadCodes) else rows[source])


def _put(rows: Heads, slots: torch.Tensor, new: Heads) -> None:
    if isinstance(rows, HeadCodes):
        assert isinstance(new, HeadCodes), "an FP8 cache takes codes"
        rows.put(slots, new)
    else:
        assert isinstance(new, torch.Tensor), "a BF16 cache takes BF16"
        rows[slots] = new


def row_bytes(head_dim: int, precision: Precision) -> int:
    """Bytes of one head of one row of keys (or of values)."""
    scale = 0 if precision.block is None else 4
    return head_dim * get_format(precision.format).bytes + scale
