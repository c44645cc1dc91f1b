"""Containers that operators take and return: quantised activations and quantised weights.

They hold tensors and their meaning, no arithmetic: reference/ and kernels/ fill and read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from samebit.formats import BLOCK, get_format
from samebit.spec import Precision


def pad_to_block(n: int) -> int:
    """The smallest multiple of BLOCK that is >= n."""
    return -(-n // BLOCK) * BLOCK


@dataclass(frozen=True)
class Operand:
    """An activation as a GEMM reads it.

    codes: [T, features] bf16, or [T, K padded to 128] e4m3 / int8 (padding codes are zero).
    scale: fp32, multiply to dequantise; [T, K/128] for 1x128 groups, [T, 1] per token; None for bf16.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    precision: Precision
    features: int


@dataclass(frozen=True)
class HeadCodes:
    """Q, K or V as FP8 attention reads it: e4m3 codes [S, heads, D], FP32 scale [S, heads].

    A paged store has pages and rows in S's place: [pages, page size, heads, D].
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where the codes live."""
        return self.codes.device

    def dequantised(self) -> torch.Tensor:
        """BF16 [S, heads, D]: what the backward differentiates at."""
        return (self.codes.float() * self.scale[..., None]).bfloat16()

    def put(self, rows: torch.Tensor | tuple[torch.Tensor, ...], other: HeadCodes) -> None:
        """Write `other` to these rows, or (pages, offsets)."""
        self.codes.view(torch.uint8)[rows] = other.codes.view(torch.uint8)
        self.scale[rows] = other.scale

    def take(self, rows: torch.Tensor | tuple[torch.Tensor, ...]) -> HeadCodes:
        """A copy of these rows, or (pages, offsets)."""
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)
        return HeadCodes(codes, self.scale[rows])


Heads = torch.Tensor | HeadCodes
"""Q, K or V: BF16 [S, heads, D], or its codes."""


@dataclass(frozen=True)
class Rotation:
    """How one forward turns the rows of the projections of queries and keys.

    positions: int64 [T]. cos, sin: FP32 [positions, D/2], the whole table. eps: of the norms of
    queries and keys, where there are any.
    """

    heads: int
    kv_heads: int
    head_dim: int
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) FP32 [T, D/2] of each row."""
        return self.cos[self.positions], self.sin[self.positions]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of Q, K and V."""
        kv = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, kv, kv


@dataclass
class QuantizedWeight:
    """A linear's weight as GEMMs read it; trainer and engine hold this one object.

    rows: output rows of each named part, in order. Scaled formats are quantised per named part, each
    padded with zero rows to a multiple of 128, so a block never mixes two matrices
    (docs/numerics.md). codes [sum of padded rows, K padded], scale fp32 [blocks_n, blocks_k] for
    128x128 or [padded rows, 1] per output channel. BF16 codes are [N, K], unpadded, without scales.
    `refresh` writers keep the storage addresses and raise `version`.
    """

    rows: tuple[int, ...]
    features: int
    precision: Precision
    codes: torch.Tensor
    scale: torch.Tensor | None
    version: int = 0
    _derived: dict[str, tuple[int, Any]] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)

    @property
    def out_features(self) -> int:
        """N: output rows over all parts, without padding."""
        return sum(self.rows)

    @property
    def padded_offsets(self) -> tuple[int, ...]:
        """First row of each part in `codes` (equal to the logical offset for BF16)."""
        step = pad_to_block if self.scale is not None else int
        offsets = [0]
        for n in self.rows[:-1]:
            offsets.append(offsets[-1] + step(n))
        return tuple(offsets)

    def logical_rows(self) -> torch.Tensor:
        """int64 [N]: the row of `codes` that holds each logical output row; made once."""

        def make() -> torch.Tensor:
            parts = [
                torch.arange(o, o + n) for o, n in zip(self.padded_offsets, self.rows, strict=True)
            ]
            return torch.cat(parts).to(self.codes.device)

        return self.kept("logical_rows", make)

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """A value computed from the codes, made once per version (backends keep layouts here)."""
        held = self._derived.get(name)
        if held is None or held[0] != self.version:
            held = (self.version, make())
            self._derived[name] = held
        return held[1]

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that depends on the layout only, made once for good (storage keeps its address)."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def last_part_padded(self) -> bool:
        """Whether the logical rows are the first rows of `codes`: only the last part is padded."""
        offsets = [0]
        for n in self.rows[:-1]:
            offsets.append(offsets[-1] + n)
        return tuple(offsets) == self.padded_offsets


def allocate_weight(
    rows: tuple[int, ...], features: int, precision: Precision, device: torch.device
) -> QuantizedWeight:
    """An empty QuantizedWeight (version 0) with storage for `precision`."""
    dtype = get_format(precision.format).dtype
    if precision.block is None:
        codes = torch.zeros(sum(rows), features, dtype=dtype, device=device)
        return QuantizedWeight(rows, features, precision, codes, None)
    n, k = sum(pad_to_block(r) for r in rows), pad_to_block(features)
    codes = torch.zeros(n, k, dtype=torch.uint8, device=device).view(dtype)
    shape = {(BLOCK, BLOCK): (n // BLOCK, k // BLOCK), (1, 0): (n, 1)}.get(precision.block)
    if shape is None:
        raise ValueError(f"weights cannot be stored as {precision}; use 128x128 or 1xall blocks")
    scale = torch.ones(shape, dtype=torch.float32, device=device)
    return QuantizedWeight(rows, features, precision, codes, scale)
