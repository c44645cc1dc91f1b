"""Causal attention over KV blocks at absolute positions; the same bits packed, paged or one token at a time.

Query rows are tokens x the query heads of one KV head, in tiles of ROWS rows of one sequence. Every
product is a batched matmul of one fixed shape (ROWS x D by D x KV block), so the library has one
kernel to choose; everything else is elementwise on a row (reference/exact.py). A key's block is decided by its
absolute position alone, and an absent key contributes an exact zero.
"""

from __future__ import annotations

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
_CHUNK_SCORES = 1 << 20
"""Scores alive at once (4 MB): bounds memory over long contexts. Changes no bit."""


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
    key = f"tiles/{group}/{kv_heads}/{spec.kv_block}"
    tiles = layout.derived(key, lambda: _Tiles(layout, group, kv_heads, spec.kv_block))
    per_row = lambda x: tiles.gather(x.unflatten(0, (-1, heads)), kv_heads).float()  # noqa: E731
    q = per_row(queries.data.bfloat16())
    factor = None if queries.scale is None else per_row(queries.scale) * scale
    outs, lses = [], []
    for chunk in tiles.chunks:
        factors = scale if factor is None else factor[chunk.tiles][:, :, : chunk.rows]
        restart = spec.kv_split // spec.kv_block or len(chunk.counts)
        out, lse = _attend(q[chunk.tiles], keys, values, chunk, factors, restart)
        outs.append(out if factor is None else out * (1.0 / LIFT))
        lses.append(lse)
    return tiles.scatter(tuple(outs), heads).bfloat16(), tiles.scatter(tuple(lses), heads)[..., 0]


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

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values or codes FP32 [..., D], scales [..., 1] or None) of some rows."""
        if self.scale is None:
            return _take(self.data, rows).float(), None
        codes = _take(self.data.view(torch.uint8), rows).view(self.data.dtype)
        return codes.float(), _take(self.scale, rows)


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
    (k, k_scale), (v, v_scale) = (x.take(chunk.key_rows) for x in (keys, values))
    if chunk.absent is not None:
        # storage past a sequence's end holds anything, NaN included: 0 * NaN must not reach P V
        for x in (v,) if v_scale is None else (v, v_scale):
            x.view(-1, x.shape[-1]).index_fill_(0, chunk.absent, 0.0)
    if not isinstance(factor, (int, float)):
        factor = factor.index_select(0, chunk.pair_tile)
    k, v, k_scale, v_scale = (chunk.of_pairs(x) for x in (k, v, k_scale, v_scale))
    scores = _batched(q.index_select(0, chunk.pair_tile), k.transpose(2, 3))[:, :, :rows]
    if k_scale is not None:
        scores = scores * k_scale.transpose(2, 3)
    scores = scores * factor
    partial, hidden = chunk.hidden
    scores[partial] = scores[partial].masked_fill_(hidden, float("-inf"))
    maxima, keeps = _running_maxima(scores, chunk.counts, restart)
    p = exp(scores.sub_(maxima[..., None]))
    sums = row_sum(p)
    padded = torch.zeros(*p.shape[:2], ROWS, p.shape[3], device=p.device)
    rounded = p.bfloat16() if v_scale is None else (p * (v_scale.transpose(2, 3) * LIFT)).half()
    padded[:, :, :rows] = rounded
    products = _batched(padded, v)[:, :, :rows]
    state = _fold_blocks(chunk, maxima, exp(keeps), sums, products, restart)
    return state.acc.div_(state.total[..., None]), (state.m + log(state.total))[..., None]


def _fold_blocks(
    chunk: _Chunk,
    maxima: torch.Tensor,
    keep: torch.Tensor,
    sums: torch.Tensor,
    products: torch.Tensor,
    restart: int,
) -> _State:
    """Every tile's state after its last block, from the pairs' maxima, rescalings, sums and products."""
    n, first, before = chunk.counts[0], 0, 0
    total = torch.zeros(n, *sums.shape[1:], device=sums.device)
    acc = torch.zeros(n, *products.shape[1:], device=sums.device)
    whole: _State | None = None
    for block, count in enumerate(chunk.counts):
        if block and block % restart == 0:
            if whole is None:
                whole = _State(torch.full_like(total, _NEVER), *map(torch.zeros_like, (total, acc)))
            # these tiles go on into a next split; the others' last split is folded in at the end
            whole.fold(count, _State(maxima[before : before + count], total[:count], acc[:count]))
            total[:count] = 0.0
            acc[:count] = 0.0
        pairs = slice(first, first + count)
        total[:count].mul_(keep[pairs]).add_(sums[pairs])
        acc[:count].mul_(keep[pairs, ..., None]).add_(products[pairs])
        before, first = first, first + count
    # a tile leaves the loop after its last block: its final maximum stands in that block's pair
    last = _State(maxima[chunk.last_pair], total, acc)
    if whole is None:
        return last
    whole.fold(n, last)
    return whole


@dataclass
class _State:
    """Running maximum and sum [n, G, rows] and accumulator [n, G, rows, D] of tiles."""

    m: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per pair: the split's maximum up to and including its block, and maximum before - after it."""
    maxima = scores.amax(-1)
    keeps = torch.empty_like(maxima)
    empty = torch.full_like(maxima[: counts[0]], _NEVER)
    m, first = empty, 0
    for block, count in enumerate(counts):
        if block % restart == 0:
            m = empty
        after = torch.maximum(m[:count], maxima[first : first + count])
        torch.sub(m[:count], after, out=keeps[first : first + count])
        maxima[first : first + count] = after
        m, first = after, first + count
    return maxima, keeps


def _take(x_RD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] by index_select, which copies whole rows many times faster than advanced indexing."""
    return x_RD.index_select(0, rows.flatten()).view(*rows.shape, x_RD.shape[1])


def _batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, G, ROWS, K] x [n, G, K, N]: one fixed-shape product per (tile, KV head)."""
    out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
    return out.view(*a.shape[:3], b.shape[-1])


@dataclass(frozen=True)
class _Chunk:
    """Tiles worked on together, those that reach furthest first, and their (block, tile) pairs.

    Pairs are in block order; block j has the first counts[j] tiles. rows: used rows of ROWS.
    tiles: which n. key_rows: int64 [U, G, KB], storage row * G + KV head of each distinct
    (sequence, block). absent: int64 [A], those of the U * G * KB rows past their sequence's end
    (None: no such row). pair_keys: int64 [P], which of the U a pair reads (None: pair i reads i).
    pair_tile: int64 [P]. last_pair: int64 [n]. hidden: int64 [M], pairs with a key after a query,
    and bool [M, 1, rows, KB], where.
    """

    rows: int
    tiles: slice
    counts: list[int]
    key_rows: torch.Tensor
    absent: torch.Tensor | None
    pair_keys: torch.Tensor | None
    pair_tile: torch.Tensor
    last_pair: torch.Tensor
    hidden: tuple[torch.Tensor, torch.Tensor]

    def of_pairs(self, x: Any) -> Any:
        """Rows of the distinct (sequence, block)s as rows of the pairs that read them; None stays."""
        return x if x is None or self.pair_keys is None else x.index_select(0, self.pair_keys)


class _Tiles:
    """Rows of the batch cut into tiles of one sequence: ROWS // group tokens x group query heads."""

    def __init__(self, layout: Layout, group: int, kv_heads: int, block: int) -> None:
        self.group, self.kv_heads, self.block = group, kv_heads, block
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
        self.num_tiles = int(tiles_of.sum())
        slot = tile * self.tokens_per_tile + within % self.tokens_per_tile
        self.slot_of_row = torch.empty_like(slot)
        self.slot_of_row[order] = slot
        position = torch.full(
            (self.num_tiles * self.tokens_per_tile,), -1, device=order.device, dtype=torch.int64
        )
        position[self.slot_of_row] = layout.positions
        self.position = position.view(self.num_tiles, self.tokens_per_tile)
        cuts = self._cut()
        self._renumber([t for tiles, _, _ in cuts for t in tiles])
        key_rows = F.pad(layout.key_rows, (0, -layout.key_rows.shape[1] % block))
        self._keys = key_rows.view(key_rows.shape[0], -1, block)
        self._ends = layout.context_lengths
        self.chunks: list[_Chunk] = []
        first = 0
        for tiles, blocks, rows in cuts:
            self.chunks.append(self._chunk(slice(first, first + len(tiles)), blocks, rows))
            first += len(tiles)

    def _renumber(self, order: list[int]) -> None:
        """Put the tiles in `order`, so that a chunk's tiles lie side by side."""
        index = torch.tensor(order, device=self.position.device)
        place = torch.empty_like(index)
        place[index] = torch.arange(len(order), device=index.device)
        n = self.tokens_per_tile
        self.slot_of_row = place[self.slot_of_row // n] * n + self.slot_of_row % n
        self.position, self.sequence = self.position[index], self.sequence[index]

    def _cut(self) -> list[tuple[list[int], list[int], int]]:
        """(tiles, blocks of each, used rows): one-token tiles apart, the furthest reaching first."""
        blocks = (self.position.amax(1) // self.block + 1).tolist()
        single = ((self.position >= 0).sum(1) == 1).tolist()
        cuts: list[tuple[list[int], list[int], int]] = []
        room = 0
        for t in sorted(range(self.num_tiles), key=lambda t: (single[t], -blocks[t], t)):
            rows = self.group if single[t] else self.group * self.tokens_per_tile
            size = blocks[t] * self.kv_heads * rows * self.block
            if not cuts or size > room or cuts[-1][2] != rows:
                cuts.append(([], [], rows))
                room = _CHUNK_SCORES
            cuts[-1][0].append(t)
            cuts[-1][1].append(blocks[t])
            room -= size
        return cuts

    def _chunk(self, tiles: slice, blocks: list[int], rows: int) -> _Chunk:
        device = self.position.device
        index = lambda x: torch.tensor(x, dtype=torch.int64, device=device)  # noqa: E731
        counts = [sum(b > j for b in blocks) for j in range(blocks[0])]
        pair_tile = [i for count in counts for i in range(count)]
        pair_block = [j for j, count in enumerate(counts) for _ in range(count)]
        firsts = [sum(counts[:j]) for j in range(len(counts))]
        sequence = self.sequence[tiles]
        pairs = list(zip((sequence.tolist()[i] for i in pair_tile), pair_block, strict=True))
        number = {pair: n for n, pair in enumerate(dict.fromkeys(pairs))}
        distinct_sequence, distinct_block = index(list(number)).unbind(1)
        offsets = torch.arange(self.block, device=device)
        key_position = distinct_block[:, None] * self.block + offsets
        absent = key_position >= self._ends[distinct_sequence, None]
        absent = absent[:, None].expand(-1, self.kv_heads, -1).flatten().nonzero().flatten()
        query_position = self.position[tiles][:, : rows // self.group][index(pair_tile)]
        first_key = index(pair_block)[:, None, None, None] * self.block
        hidden = (
            first_key + offsets > query_position.repeat_interleave(self.group, 1)[:, None, :, None]
        )
        partial = hidden.flatten(1).any(1).nonzero().flatten()
        rows_of_keys = self._keys[distinct_sequence, distinct_block][:, None] * self.kv_heads
        return _Chunk(
            rows=rows,
            tiles=tiles,
            counts=counts,
            key_rows=rows_of_keys + torch.arange(self.kv_heads, device=device)[:, None],
            absent=absent if len(absent) else None,
            pair_keys=None if len(number) == len(pairs) else index([number[p] for p in pairs]),
            pair_tile=index(pair_tile),
            last_pair=index([firsts[b - 1] + i for i, b in enumerate(blocks)]),
            hidden=(partial, hidden[partial]),
        )

    def gather(self, q_THD: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[T, H, D] -> [tiles, G, ROWS, D], zero rows where there is no query."""
        _, heads, dim = q_THD.shape
        slots = self.num_tiles * self.tokens_per_tile
        rows = torch.zeros(slots, heads, dim, dtype=q_THD.dtype, device=q_THD.device)
        rows.index_copy_(0, self.slot_of_row, q_THD)
        rows = rows.view(self.num_tiles, self.tokens_per_tile, kv_heads, self.group, dim)
        rows = rows.permute(0, 2, 1, 3, 4).reshape(self.num_tiles, kv_heads, -1, dim)
        return F.pad(rows, (0, 0, 0, ROWS - rows.shape[2]))

    def scatter(self, chunks: tuple[torch.Tensor, ...], heads: int) -> torch.Tensor:
        """[tiles, G, rows, C] of each chunk -> [T, H, C]."""
        rows = self.tokens_per_tile * self.group
        x = torch.cat([F.pad(c, (0, 0, 0, rows - c.shape[2])) for c in chunks])
        tiles, kv_heads, _, width = x.shape
        x = x.view(tiles, kv_heads, self.tokens_per_tile, self.group, width)
        x = x.permute(0, 2, 1, 3, 4).reshape(-1, heads, width)
        return x.index_select(0, self.slot_of_row)
