"""Where the keys of a query lie: packed training segments, or a paged cache.

Legend: T query rows, S key rows, H query heads, G key/value heads, D head size, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

KEY_BLOCK = 128
"""Keys per step of the online softmax, at absolute positions. Part of the precision plan."""

SPLIT_KEYS = 1024
"""Keys per split: (max, sum, accumulator) restart there and are folded in order. Ditto."""

TILE_TOKENS = 128
"""Tokens of a forward tile. A scheduling choice: no bits depend on it."""


@dataclass(frozen=True)
class PackedLayout:
    """Training sequences laid end to end, samples sharing their prompt's key rows.

    segments: int32 [n, 4], rows (start, length, prefix_start, prefix_length). The keys of a
        segment's tokens are the prefix's rows, then its own; position = index in that sequence.
    forward_tiles: int32 [f, 8], rows (start, length, prefix_start, prefix_length, first token, 0,
        0, 0) of the tiles of 128 tokens, those with most keys first.
    backward_items: int32 [w, 4], rows (key segment, first query segment, number of query
        segments, first partial row or -1 to write the result directly).
    reduce_items: int32 [r, 3], rows (key segment, first partial row, number of partials).
    num_tokens, num_rows, max_length, max_keys, num_partial_rows: host-side sizes that fix every
        grid; num_tokens is the end of the last segment, num_rows the rows in segments.
    """

    segments: torch.Tensor
    forward_tiles: torch.Tensor
    backward_items: torch.Tensor
    reduce_items: torch.Tensor
    num_tokens: int
    num_rows: int
    max_length: int
    max_keys: int
    num_partial_rows: int
    has_prefix: bool

    @classmethod
    def build(
        cls,
        segments: Sequence[tuple[int, int, int, int]],
        device: torch.device | str = "cpu",
        samples_per_item: int = 1,
    ) -> PackedLayout:
        """The layout of `segments` (start, length, prefix_start, prefix_length), lengths >= 1.

        A prefix is a whole earlier segment without a prefix of its own, and the segments that
        share it follow one another. `samples_per_item` samples of one prompt are accumulated by
        one backward program; their partial sums are then added in order.
        """
        rows = [tuple(int(x) for x in segment) for segment in segments]
        children = _children(rows)
        items: list[tuple[int, int, int, int]] = []
        reduces: list[tuple[int, int, int]] = []
        partial = 0
        for index, (_, length, _, _) in enumerate(rows):
            first, count = children.get(index, (0, 0))
            chunks = [
                (first + c, min(samples_per_item, count - c))
                for c in range(0, count, samples_per_item)
            ]
            if not chunks:
                items.append((index, index, 1, -1))
                continue
            reduces.append((index, partial, len(chunks) + 1))
            for query_first, query_count in [(index, 1), *chunks]:
                items.append((index, query_first, query_count, partial))
                partial += length
        # Work on a prompt takes longest; its programs start first.
        items.sort(key=lambda item: -sum(rows[item[1] + i][1] for i in range(item[2])))

        tiles = [(*row, token, 0, 0, 0) for row in rows for token in range(0, row[1], TILE_TOKENS)]
        tiles.sort(key=lambda tile: -(tile[3] + min(tile[4] + TILE_TOKENS, tile[1])))

        def table(values: list, width: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).reshape(-1, width).to(device)

        return cls(
            segments=table(rows, 4),
            forward_tiles=table(tiles, 8),
            backward_items=table(items, 4),
            reduce_items=table(reduces, 3),
            num_tokens=max(start + length for start, length, _, _ in rows),
            num_rows=sum(length for _, length, _, _ in rows),
            max_length=max(length for _, length, _, _ in rows),
            max_keys=max(length + prefix for _, length, _, prefix in rows),
            num_partial_rows=partial,
            has_prefix=any(prefix for _, _, _, prefix in rows),
        )


def _children(rows: list[tuple[int, ...]]) -> dict[int, tuple[int, int]]:
    """Prompt index -> (first sample index, number of samples); ValueError on a bad table."""
    if not rows:
        raise ValueError("segments is empty; pass at least one (start, length, 0, 0)")
    by_start = {row[0]: index for index, row in enumerate(rows)}
    children: dict[int, tuple[int, int]] = {}
    for index, (start, length, prefix_start, prefix_length) in enumerate(rows):
        if length < 1 or start < 0 or prefix_length < 0:
            raise ValueError(f"segments[{index}] = {rows[index]}; lengths must be at least 1")
        if prefix_length == 0:
            continue
        prompt = by_start.get(prefix_start, -1)
        if prompt < 0 or rows[prompt][1] != prefix_length or rows[prompt][3] != 0:
            raise ValueError(
                f"segments[{index}] has prefix ({prefix_start}, {prefix_length}), which is not a "
                "whole segment without a prefix; add the prompt as a segment of its own"
            )
        first, count = children.get(prompt, (index, 0))
        if first + count != index:
            raise ValueError(f"segments[{index}] must follow the other samples of its prompt")
        children[prompt] = (first, count + 1)
    return children


@dataclass(frozen=True)
class PagedLayout:
    """Sequences over a paged cache; the query rows are the last tokens of each sequence.

    block_table: int32 [B, P], page numbers in order of position.
    context_lens: int32 [B], keys of each sequence, the query tokens included (0: an idle slot).
    query_starts: int32 [B + 1], first query row of each sequence; None when each has one (decode).
        Output rows of idle slots are left as they are.
    max_query_length, max_context: host-side bounds that fix every grid.
    order: int32 [B], sequences by falling context, so that decode shares work out evenly; None: as they
        come. No bits depend on it.
    """

    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor | None
    max_query_length: int
    max_context: int
    order: torch.Tensor | None = None


PLAIN_STAGES = 1
"""Of the plain kernels' loops. More would bring operands by `cp.async`, and Triton 3.6 puts no proxy fence
between that and `wgmma`."""


def on_card(x: torch.Tensor) -> bool:
    """Whether the warp-specialised kernels can run; the interpreter knows only the plain ones."""
    return x.is_cuda


def rows_like(x: torch.Tensor, layout: PackedLayout | PagedLayout, dtype: torch.dtype):
    """A tensor shaped like x for a kernel to fill; zeros where rows lie outside every segment."""
    whole = isinstance(layout, PagedLayout) or layout.num_rows == x.shape[0]
    make = torch.empty if whole else torch.zeros
    return make(x.shape, dtype=dtype, device=x.device)


Layout = PackedLayout | PagedLayout
