"""Causal attention over KV blocks at absolute positions; the same bits packed, paged or one token at a time.

Query rows are tokens x the query heads of one KV head, in tiles of ROWS rows of one sequence. Every
product is a batched matmul of one fixed shape (ROWS x D by D x KV block), so the library has one
kernel to choose; everything else is elementwise on a row (reference/exact.py). A key's block is decided by its
absolute position alone, and an absent key contributes an exact zero.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from samebit.layout import Layout, PackedLayout
from samebit.operand import HeadCodes, Heads
from samebit.reference.exact import exp, fma, log, row_sum
from samebit.spec import Attention

ROWS = 16
LIFT = 256.0
"""Lifts P x (scale of V) into FP16's normal range; divided out at the end. A power of two: exact."""
_NEVER = -1.0e30
"""Running maximum before any key: finite, so that differences never make NaN."""
_CHUNK_KEYS = 1 << 21
"""Elements of K alive at once (8 MB): bounds memory over long contexts. Changes no bit."""


def prepare_packed(layout: PackedLayout) -> None:
    """Work out now what a training forward reads of a layout; nothing waits for a copy here."""


def attention(
    q_THD: Heads,
    k_SGD: Heads,
    v_SGD: Heads,
    layout: Layout,
    scale: float,
    spec: Attention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out BF16 [T, H, D], log-sum-exp FP32 [T, H], natural log).

    q: queries of the batch's rows. k, v: rows that layout.key_rows points into (the packed rows, or
    the cache). All BF16, or all codes with a scale per row and head: scores are then the codes'
    products times the scales, and P times the scale of V is rounded to FP16 before it meets V's codes.
    (maximum, sum, accumulator) restart every spec.kv_split keys; the splits are folded in order.
    """
    queries, keys, values = (_Rows.of(x) for x in (q_THD, k_SGD, v_SGD))
    heads, kv_heads = queries.heads, keys.heads
    group = heads // kv_heads
    if group > ROWS:
        raise ValueError(f"{group} query heads per KV head; at most {ROWS} are supported")
    assert spec.kv_split % spec.kv_block == 0, "a split is whole blocks"
    shape = (group, kv_heads, keys.data.shape[1], spec.kv_block)
    tiles = layout.derived(f"tiles/{shape}", lambda: _Tiles(layout, *shape))
    q = queries.data.bfloat16().unflatten(0, (-1, heads))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], device=q.device)
    for chunk in tiles.chunks:
        factor: float | torch.Tensor = scale
        if queries.scale is not None:
            scales = chunk.take(queries.scale.view(-1, heads, 1), "scale")
            factor = scales[:, :, : chunk.rows] * scale
        restart = spec.kv_split // spec.kv_block or len(chunk.counts)
        tile_out, tile_lse = _attend(chunk.take(q, "q"), keys, values, chunk, factor, restart)
        if queries.scale is not None:
            tile_out = tile_out * (1.0 / LIFT)
        chunk.put(out, tile_out.bfloat16())
        chunk.put(lse[..., None], tile_lse)
    return out, lse


@dataclass(frozen=True)
class _Rows:
    """K, V or Q with one row per (storage row, head): a block's gather is whole rows in their order.

    data: BF16 [S * heads, D], or e4m3 codes; scale: FP32 [S * heads, 1], or None.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    heads: int

    @classmethod
    def of(cls, x: Heads) -> _Rows:
        """Rows of BF16 or coded heads [S, heads, D]."""
        if isinstance(x, HeadCodes):
            return cls(x.codes.flatten(0, 1), x.scale.reshape(-1, 1), x.codes.shape[1])
        return cls(x.reshape(-1, x.shape[-1]), None, x.shape[1])

    def take(self, chunk: _Chunk, use: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values or codes FP32 [P, G, KB, D], scales [P, G, KB, 1] or None) that a chunk's pairs read."""
        rows, shape = chunk.key_rows.flatten(), (*chunk.key_rows.shape, -1)
        coded = self.scale is not None
        data = self.data.view(torch.uint8) if coded else self.data
        found = _buffer(use, len(rows), data.shape[1:], data.dtype, data.device)
        torch.index_select(data, 0, rows, out=found)
        wide = _buffer(use, len(rows), data.shape[1:], torch.float32, data.device)
        wide = wide.copy_(found.view(self.data.dtype)).view(shape)
        if self.scale is None:
            return chunk.of_pairs(wide), None
        return chunk.of_pairs(wide), chunk.of_pairs(self.scale.index_select(0, rows).view(shape))


def _attend(
    q: torch.Tensor,
    keys: _Rows,
    values: _Rows,
    chunk: _Chunk,
    factor: float | torch.Tensor,
    restart: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, G, rows, D], lse [n, G, rows, 1]) of a chunk's tiles, q FP32 [n, G, ROWS, D].

    factor: what scores are multiplied by, one number or [n, G, rows, 1]. restart: blocks a split.

    Online softmax: products and exponentials of all (block, tile) pairs at once, then folded in
    block order. P is rounded to BF16 (coded K and V: P * scale of V * LIFT to FP16) before P V; the sum
    takes P unrounded.
    """
    rows = chunk.rows
    k, k_scale = keys.take(chunk, "k")
    v, v_scale = values.take(chunk, "v")
    scores = _batched(chunk.of_tiles(q), k.transpose(2, 3))[:, :, :rows]
    if k_scale is not None:
        scores = scores * k_scale.transpose(2, 3)
    if not isinstance(factor, (int, float)):
        factor = chunk.of_tiles(factor)
    scores = chunk.hide(scores * factor)
    maxima, keeps = _running_maxima(scores, chunk.counts, restart)
    p = exp(scores.sub_(maxima[..., None]))
    sums = row_sum(p)
    padded = _padding("p", *p.shape[:2], rows, p.shape[3], p.device)
    rounded = p.bfloat16() if v_scale is None else (p * (v_scale.transpose(2, 3) * LIFT)).half()
    padded[:, :, :rows] = rounded
    products = _batched(padded, v)[:, :, :rows]
    state = _fold_blocks(chunk, _State(maxima, sums, products), keeps, restart)
    return state.acc / state.total[..., None], (state.m + log(state.total))[..., None]


def _fold_blocks(chunk: _Chunk, pairs: _State, keeps: torch.Tensor | None, restart: int) -> _State:
    """Every tile's state after its last block, from the states of the (block, tile) pairs alone.

    keeps: log of what the sums before a pair's block are multiplied by; None: no tile has two blocks.
    """
    # 0 * (what was kept) + product: the zero that turns -0 into +0 in a tile's first block too
    pairs.acc.add_(0.0)
    n = first = chunk.counts[0]
    state = pairs.part(slice(0, n))
    if keeps is None:
        return state
    keep = exp(keeps)
    whole: _State | None = None
    for block, count in enumerate(chunk.counts[1:], 1):
        new = pairs.part(slice(first, first + count))
        if block % restart == 0:
            # these tiles go on into a next split; the others' last split is folded in at the end
            if whole is None:
                empty = torch.full_like(state.m, _NEVER)
                whole = _State(empty, *map(torch.zeros_like, (state.total, state.acc)))
            whole.fold(count, state.part(slice(0, count)))
            state.total[:count], state.acc[:count] = new.total, new.acc
        else:
            kept = keep[first : first + count]
            state.total[:count].mul_(kept).add_(new.total)
            state.acc[:count].mul_(kept[..., None]).add_(new.acc)
        state.m[:count] = new.m
        first += count
    if whole is None:
        return state
    whole.fold(n, state)
    return whole


@dataclass
class _State:
    """Running maximum and sum [n, G, rows] and accumulator [n, G, rows, D] of tiles."""

    m: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor

    def part(self, which: slice) -> _State:
        """Views of some tiles."""
        return _State(self.m[which], self.total[which], self.acc[which])

    def fold(self, count: int, split: _State) -> None:
        """Add the next split of the first `count` tiles. Into an empty state it is a copy, and a split
        that a row does not reach (maximum _NEVER) adds exact zeros with weights 1 and 0."""
        m = torch.maximum(self.m[:count], split.m)
        old, new = exp(self.m[:count] - m), exp(split.m - m)
        self.m[:count] = m
        self.total[:count] = fma(self.total[:count], old, split.total * new)
        scaled = split.acc * new[..., None]
        self.acc[:count] = fma(self.acc[:count], old[..., None], scaled)


def _running_maxima(
    scores: torch.Tensor, counts: list[int], restart: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Per pair: the split's maximum up to and including its block, and maximum before - after it.

    The latter is None where no tile has two blocks, and 0 in a split's first block.
    """
    maxima = scores.amax(-1).clamp_(min=_NEVER)
    if len(counts) == 1:
        return maxima, None
    keeps = torch.zeros_like(maxima)
    before, first = 0, counts[0]
    for block, count in enumerate(counts[1:], 1):
        pairs = slice(first, first + count)
        if block % restart:
            m = maxima[before : before + count]
            after = torch.maximum(m, maxima[pairs])
            torch.sub(m, after, out=keeps[pairs])
            maxima[pairs] = after
        before, first = first, first + count
    return maxima, keeps


_BUFFERS = threading.local()


def _buffer(
    use: Any, rows: int, shape: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[rows, *shape], overwritten by the next call with the same use: fresh megabytes cost page faults."""
    held: dict[Any, torch.Tensor] = vars(_BUFFERS).setdefault("held", {})
    key = (use, *shape, dtype, device)
    if key not in held or held[key].shape[0] < rows:
        held[key] = torch.zeros(rows, *shape, dtype=dtype, device=device)
    return held[key][:rows]


def _padding(
    use: str, n: int, groups: int, rows: int, width: int, device: torch.device
) -> torch.Tensor:
    """FP32 [n, groups, ROWS, width] for `rows` rows that the caller fills; the others are zero.

    Nobody writes the other rows of this use and shape, so they stay zero.
    """
    held = _buffer((use, rows), n * groups, (ROWS, width), torch.float32, device)
    return held.view(n, groups, ROWS, width)


def _batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, G, ROWS, K] x [n, G, K, N]: one fixed-shape product per (tile, KV head)."""
    out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
    return out.view(*a.shape[:3], b.shape[-1])


@dataclass(frozen=True)
class _Chunk:
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
    places: tuple[torch.Tensor, torch.Tensor] | None
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
        tiles = _padding(use, n, self.kv_heads, self.rows, width, x.device)
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


class _Tiles:
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

    def _chunk(self, tiles: list[int], blocks: list[int], tokens: int) -> _Chunk:
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
        return _Chunk(
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
