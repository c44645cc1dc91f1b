"""Where tokens sit: the one description of a batch that attention, rotary and weight gradients read.

A row of the batch is one token of one *sequence view*: the keys it may see are the sequence's tokens
at absolute positions 0..its own. Training packs segments (`PackedLayout`), where a segment may share
a prefix (the prompt of its group); the engine addresses a paged cache (`PagedLayout`). Both say the
same thing, and `key_rows` is that thing: for each sequence, the storage row of each absolute position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from samebit.formats import BLOCK


@dataclass(frozen=True)
class Segment:
    """Rows [start, start+length) of the pack; they continue rows [prefix_start, +prefix_length)."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


class _Derived:
    """What operators work out from a layout once and read in every layer."""

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """The value kept under `name`, made now when it is not there yet (layouts never change)."""
        held = self.__dict__.setdefault("_derived", {})
        if name not in held:
            held[name] = make()
        return held[name]


@dataclass(frozen=True)
class PackedLayout(_Derived):
    """A packed training batch: segments in row order, covering every row once."""

    segments: tuple[Segment, ...]
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        row = 0
        for s in self.segments:
            assert s.start == row and s.length > 0, "segments must tile the rows in order"
            assert s.prefix_length == 0 or s.prefix_start + s.prefix_length <= s.start
            row += s.length

    @property
    def num_tokens(self) -> int:
        """Rows in the pack."""
        return sum(s.length for s in self.segments)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]: absolute position of each row."""
        parts = [torch.arange(s.prefix_length, s.prefix_length + s.length) for s in self.segments]
        return torch.cat(parts).to(self.device)

    @cached_property
    def query_sequence(self) -> torch.Tensor:
        """int64 [T]: which sequence (segment) each row belongs to."""
        lengths = torch.tensor([s.length for s in self.segments])
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(self.device)

    @cached_property
    def context_lengths(self) -> torch.Tensor:
        """int64 [B]: tokens of each sequence, prefix included."""
        return torch.tensor([s.prefix_length + s.length for s in self.segments]).to(self.device)

    @cached_property
    def key_rows(self) -> torch.Tensor:
        """int64 [B, L]: storage row of each absolute position; 0 past the end (masked by position)."""
        longest = max(s.prefix_length + s.length for s in self.segments)
        rows = torch.zeros(len(self.segments), longest, dtype=torch.int64)
        for i, s in enumerate(self.segments):
            prefix = torch.arange(s.prefix_start, s.prefix_start + s.prefix_length)
            own = torch.arange(s.start, s.start + s.length)
            rows[i, : s.prefix_length + s.length] = torch.cat([prefix, own])
        return rows.to(self.device)

    @cached_property
    def token_groups(self) -> torch.Tensor:
        """int32 [n, 2]: (first row, rows <= 128) of each weight-gradient group.

        Groups start at each segment's first row and never span two segments, so the codes of a
        segment's gradient do not depend on what it was packed with (docs/numerics.md).
        """
        groups = [
            (s.start + i, min(BLOCK, s.length - i))
            for s in self.segments
            for i in range(0, s.length, BLOCK)
        ]
        return torch.tensor(groups, dtype=torch.int32).to(self.device)


@dataclass(frozen=True)
class PagedLayout(_Derived):
    """A batch over a paged KV cache: prefill, chunked prefill and decode alike.

    block_table: int [B, P], page ids of each sequence in order. query_sequence, positions:
    int64 [T]. page_size: tokens a page. The row of K and V for (page, offset) is
    page * page_size + offset. max_context: set where every sequence has one row, whose contexts the
    host bounds by this but does not know (`of_step`).
    """

    block_table: torch.Tensor
    query_sequence: torch.Tensor
    positions: torch.Tensor
    page_size: int
    max_context: int | None = None

    @classmethod
    def of_chunks(
        cls,
        chunks: Sequence[tuple[Sequence[int], int, int]],
        page_size: int,
        device: torch.device,
    ) -> PagedLayout:
        """Of (pages, first position, tokens) of each sequence: one copy to the device, none back."""
        width = max(len(pages) for pages, _, _ in chunks)
        lengths = [length for _, _, length in chunks]
        table = [[*pages, *([0] * (width - len(pages)))] for pages, _, _ in chunks]
        positions = np.concatenate([np.arange(start, start + n) for _, start, n in chunks])
        sequence = np.repeat(np.arange(len(chunks)), lengths)
        packed = np.concatenate([np.array(table).reshape(-1), sequence, positions])
        numbers = to_device(packed.astype(np.int64), device)
        block_table, rest = numbers[: len(chunks) * width], numbers[len(chunks) * width :]
        query, position = rest.view(2, len(positions)).unbind(0)
        layout = cls(block_table.view(len(chunks), width), query, position, page_size)
        layout.derived(
            "host_rows", lambda: (lengths, [start + length for _, start, length in chunks])
        )
        return layout

    @classmethod
    def of_step(
        cls,
        block_table: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_lengths: torch.Tensor,
        page_size: int,
        max_context: int,
    ) -> PagedLayout:
        """One row a sequence, in tensors that a captured graph reads anew at every replay.

        context_lengths int32 [B], 0 for idle rows; slots int64 [B].
        """
        rows = torch.arange(positions.numel(), device=positions.device)
        layout = cls(block_table, rows, positions, page_size, max_context)
        # the values that the cached properties would compute, and that must not be kept over steps
        layout.__dict__.update(slots=slots, context_lengths=context_lengths)
        return layout

    @property
    def num_tokens(self) -> int:
        """Rows in the batch."""
        return int(self.positions.numel())

    @cached_property
    def context_lengths(self) -> torch.Tensor:
        """int [B]: 1 + the largest position queried in each sequence (0: not queried)."""
        out = torch.zeros(
            self.block_table.shape[0], dtype=torch.int64, device=self.positions.device
        )
        return out.scatter_reduce_(0, self.query_sequence, self.positions + 1, "amax")

    @cached_property
    def key_rows(self) -> torch.Tensor:
        """int64 [B, P * page_size]: storage row of each absolute position."""
        offsets = torch.arange(self.page_size, device=self.block_table.device)
        return (self.block_table[:, :, None] * self.page_size + offsets).flatten(1)

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: the cache row each batch row's K and V are written to."""
        page = self.block_table[self.query_sequence, self.positions // self.page_size]
        return page * self.page_size + self.positions % self.page_size


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`; a GPU takes it from pinned memory while the host goes on."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


Layout = PackedLayout | PagedLayout
