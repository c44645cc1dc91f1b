"""Query rows in tiles of one sequence, and the blocks of keys that each tile reads, for attention."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from samebit.layout import Layout

ROWS = 16
"""Query rows of a tile, padded: tokens x the query heads of one KV head."""
_CHUNK_KEYS = 1 << 21
"""Elements of K alive at once (8 MB): bounds memory over long contexts. Changes no bit."""


_BUFFERS = threading.local()


def buffer(
    use: Any, rows: int, shape: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[rows, *shape], overwritten by the next call with the same use: fresh megabytes cost page faults."""
    held: dict[Any, torch.Tensor] = vars(_BUFFERS).setdefault("held", {})
    key = (use, *shape, dtype, device)
    if key not in held or held[key].shape[0] < rows:
        held[key] = torch.zeros(rows, *shape, dtype=dtype, device=device)
    return held[key][:rows]


def padding(
    use: str, n: int, groups: int, rows: int, width: int, device: torch.device
) -> torch.Tensor:
    """FP32 [n, groups, ROWS, width] for `rows` rows that the caller fills; the others are zero.

    Nobody writes the other rows of this use and shape, so they stay zero.
    """
    held = buffer((use, rows), n * groups, (ROWS, width), torch.float32, device)
    return held.view(n, groups, ROWS, width)


@dataclass(frozen=True)
class Chunk:
    """Tiles worked on together, those that reach furthest first, and their (block, tile) pairs.

    Pairs are in block order; block j has the first counts[j] tiles. tokens: places for tokens in a
    tile; rows: those times query heads a KV head, used of ROWS.
    batch_rows: int64 [m], the batch's rows in the tiles, tile after tile. places: int64 ([m], [m]),
    tile and place of each (None: every place is taken). in_order: the m rows are the batch, in order.
    key_rows: int64 [U, G, KB], storage row * G + KV head of each distinct (sequence, block); past a
    sequence's end its last row stands in, whose weight is 0 there: storage out there holds
    anything, NaN included. pair_keys: int64 [P], which of the U a pair reads (None: pair i reads i).
    pair_tile: int64 [P] (None: pair i is tile i). hidden: which pairs have a key after a query, and
    FP32 [M, 1, rows, KB], the most their scores may be: -inf there and inf elsewhere.
    """

    counts: list[int]
    tokens: int
    rows: int
    kv_heads: int
    batch_rows: torch.Tensor
    places: tuple[torch.Tensor, ...] | None
    in_order: bool
    key_rows: torch.Tensor
    pair_keys: torch.Tensor | None
    pair_tile: torch.Tensor | None
    hidden: tuple[slice | torch.Tensor, torch.Tensor] | None

    def of_pairs(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the distinct (sequence, block)s as rows of the pairs that read them."""
        return x if self.pair_keys is None else x.index_select(0, self.pair_keys)

    def of_tiles(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the tiles as rows of their pairs."""
        return x if self.pair_tile is None else x.index_select(0, self.pair_tile)

    def hide(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [P, G, rows, KB] with those of keys after their query at -inf, in place."""
        if self.hidden is not None:
            which, most = self.hidden
            part = scores[which]
            torch.minimum(part, most, out=part)
            if not isinstance(which, slice):
                scores[which] = part
        return scores

    def take(self, x_THC: torch.Tensor, use: str) -> torch.Tensor:
        """[T, H, C] -> FP32 [n, G, ROWS, C] of the tiles' queries, zero where there is none."""
        n, width = self.counts[0], x_THC.shape[2]
        x = x_THC if self.in_order else x_THC.index_select(0, self.batch_rows)
        x = x.view(x.shape[0], self.kv_heads, -1, width)
        tiles = padding(use, n, self.kv_heads, self.rows, width, x.device)
        tokens = tiles[:, :, : self.rows].unflatten(2, (self.tokens, -1)).transpose(1, 2)
        if self.places is None:
            tokens.copy_(x.view(tokens.shape))
        else:
            tokens.zero_()[self.places] = x.float()
        return tiles

    def put(self, out_THC: torch.Tensor, x: torch.Tensor) -> None:
        """[n, G, rows, C] of the tiles' queries to their rows of [T, H, C]."""
        x = x.unflatten(2, (self.tokens, -1)).transpose(1, 2)
        x = x.flatten(0, 1) if self.places is None else x[self.places]
        x = x.reshape(-1, *out_THC.shape[1:])
        if self.in_order:
            out_THC.copy_(x)
        else:
            out_THC.index_copy_(0, self.batch_rows, x)


class Tiles:
    """Rows of the batch cut into tiles of one sequence: ROWS // group tokens x group query heads."""

    def __init__(
        self, layout: Layout, group: int, kv_heads: int, head_dim: int, block: int
    ) -> None:
        self.group, self.kv_heads, self.head_dim, self.block = group, kv_heads, head_dim, block
        self.tokens_per_tile = ROWS // group
        sequence = layout.query_sequence
        order = torch.argsort(sequence, stable=True)
        counts = torch.bincount(sequence, minlength=0)
        counts = counts[counts > 0]
        ids = torch.unique_consecutive(sequence[order])
        tiles_of = (counts + self.tokens_per_tile - 1) // self.tokens_per_tile
        self.sequence = torch.repeat_interleave(ids, tiles_of)
        starts = torch.cumsum(counts, 0) - counts
        tile_first = torch.cumsum(tiles_of, 0) - tiles_of
        within = torch.arange(len(order), device=order.device) - torch.repeat_interleave(
            starts, counts
        )
        tile = torch.repeat_interleave(tile_first, counts) + within // self.tokens_per_tile
        slot = tile * self.tokens_per_tile + within % self.tokens_per_tile
        self.num_tiles = int(tiles_of.sum())
        shape = (self.num_tiles, self.tokens_per_tile)
        # the batch's row and the position of each place of each tile; -1: no token there
        self.row, self.position = (
            torch.full(shape, -1, device=order.device, dtype=torch.int64) for _ in range(2)
        )
        self.row.view(-1)[slot] = order
        self.position.view(-1)[slot] = layout.positions[order]
        key_rows = F.pad(layout.key_rows, (0, -layout.key_rows.shape[1] % block))
        self._keys, self._ends = key_rows, layout.context_lengths
        self.chunks = [self._chunk(*cut) for cut in self._cut()]

    def _cut(self) -> list[tuple[list[int], list[int], int]]:
        """(tiles, blocks of each, tokens a tile): one-token tiles apart, the furthest reaching first."""
        blocks = (self.position.amax(1) // self.block + 1).tolist()
        single = ((self.position >= 0).sum(1) == 1).tolist()
        cuts: list[tuple[list[int], list[int], int]] = []
        room = 0
        for t in sorted(range(self.num_tiles), key=lambda t: (single[t], -blocks[t], t)):
            tokens = 1 if single[t] else self.tokens_per_tile
            size = blocks[t] * self.kv_heads * self.block * self.head_dim
            if not cuts or size > room or cuts[-1][2] != tokens:
                cuts.append(([], [], tokens))
                room = _CHUNK_KEYS
            cuts[-1][0].append(t)
            cuts[-1][1].append(blocks[t])
            room -= size
        return cuts

    def _chunk(self, tiles: list[int], blocks: list[int], tokens: int) -> Chunk:
        device = self.position.device
        index = lambda x: torch.tensor(x, dtype=torch.int64, device=device)  # noqa: E731
        counts = [sum(b > j for b in blocks) for j in range(blocks[0])]
        pair_tile = [i for count in counts for i in range(count)]
        pair_block = [j for j, count in enumerate(counts) for _ in range(count)]
        chosen = index(tiles)
        sequence = self.sequence[chosen]
        pairs = list(zip((sequence.tolist()[i] for i in pair_tile), pair_block, strict=True))
        number = {pair: n for n, pair in enumerate(dict.fromkeys(pairs))}
        distinct_sequence, distinct_block = index(list(number)).unbind(1)
        key_position = distinct_block[:, None] * self.block + torch.arange(
            self.block, device=device
        )
        key_position = torch.minimum(key_position, self._ends[distinct_sequence, None] - 1)
        key_rows = self._keys[distinct_sequence[:, None], key_position][:, None] * self.kv_heads
        row, position = self.row[chosen, :tokens], self.position[chosen, :tokens]
        taken = row >= 0
        batch_rows = row[taken]
        return Chunk(
            counts=counts,
            tokens=tokens,
            rows=tokens * self.group,
            kv_heads=self.kv_heads,
            batch_rows=batch_rows,
            places=None if bool(taken.all()) else taken.nonzero(as_tuple=True),
            in_order=batch_rows.tolist() == list(range(int((self.row >= 0).sum()))),
            key_rows=key_rows + torch.arange(self.kv_heads, device=device)[:, None],
            pair_keys=None if len(number) == len(pairs) else index([number[p] for p in pairs]),
            pair_tile=None if len(counts) == 1 else index(pair_tile),
            hidden=self._hidden(position[index(pair_tile)], index(pair_block)),
        )

    def _hidden(
        self, position: torch.Tensor, block: torch.Tensor
    ) -> tuple[slice | torch.Tensor, torch.Tensor] | None:
        """(pairs, most of their scores), from the positions [P, tokens] and blocks [P] of all pairs."""
        keys = block[:, None] * self.block + torch.arange(self.block, device=block.device)
        hidden = keys[:, None] > position.repeat_interleave(self.group, 1)[:, :, None]
        partial = hidden.flatten(1).any(1).nonzero().flatten()
        if len(partial) == 0:
            return None
        # what lies close together is worked on in place, though it holds some pairs in full sight
        close = slice(int(partial[0]), int(partial[-1]) + 1)
        which = close if close.stop - close.start <= 2 * len(partial) else partial
        most = torch.where(hidden[which, None], -torch.inf, torch.inf)
        return which, most
