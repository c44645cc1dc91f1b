"""Causal attention over KV blocks at absolute positions; the same bits packed, paged or one token at a time.

Query rows are tokens x the query heads of one KV head, in tiles of ROWS rows of one sequence. Every
product is a batched matmul of one fixed shape (ROWS x D by D x KV block), so the library has one
kernel to choose; everything else is elementwise on a row (reference/exact.py). A key's block is decided by its
absolute position alone, and an absent key contributes an exact zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from samebit.layout import Layout, PackedLayout, Segment
from samebit.reference.exact import exp, log, row_sum
from samebit.spec import Attention

ROWS = 16
_NEVER = -1.0e30
"""Running maximum before any key: finite, so that differences never make NaN."""
_CHUNK_SCORES = 1 << 15
"""Scores alive at once: a chunk's keys, values and scores stay in cache. Changes no bit."""


def attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    layout: Layout,
    scale: float,
    spec: Attention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out BF16 [T, H, D], log-sum-exp FP32 [T, H], natural log).

    q: BF16 queries of the batch's rows. k, v: BF16 rows that layout.key_rows points into (the packed
    rows, or the cache). ValueError for a KV precision this backend does not implement.
    """
    if spec.kv.format != "bf16" or spec.kv_split:
        raise ValueError(
            f"the CPU reference has no attention over a {spec.kv} KV cache (split "
            f"{spec.kv_split}); use a recipe with a BF16 KV cache there"
        )
    _, heads, _ = q_THD.shape
    kv_heads = k_SGD.shape[1]
    group = heads // kv_heads
    if group > ROWS:
        raise ValueError(f"{group} query heads per KV head; at most {ROWS} are supported")
    key = f"tiles/{group}/{kv_heads}/{spec.kv_block}"
    tiles = layout.derived(key, lambda: _Tiles(layout, group, kv_heads, spec.kv_block))
    q = tiles.gather(q_THD, kv_heads).float()
    # one row per (storage row, KV head): a block's gather is then whole rows in their final order
    k, v = (x.reshape(-1, x.shape[-1]) for x in (k_SGD, v_SGD))
    outs, lses = zip(
        *[_attend(q[chunk.tiles], k, v, chunk, scale) for chunk in tiles.chunks], strict=True
    )
    return tiles.scatter(outs, heads).bfloat16(), tiles.scatter(lses, heads)[..., 0]


def _attend(
    q: torch.Tensor, k_RD: torch.Tensor, v_RD: torch.Tensor, chunk: _Chunk, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, G, rows, D], lse [n, G, rows, 1]) of a chunk's tiles, q FP32 [n, G, ROWS, D].

    k, v: BF16 [storage rows * G, D].

    Online softmax: products and exponentials of all (block, tile) pairs at once, then folded in
    block order. P is rounded to BF16 before P V.
    """
    rows = chunk.rows
    k, v = (_take(x, chunk.key_rows).float() for x in (k_RD, v_RD))
    if chunk.absent is not None:
        # storage past a sequence's end holds anything, NaN included: 0 * NaN must not reach P V
        v.view(-1, v.shape[-1]).index_fill_(0, chunk.absent, 0.0)
    if chunk.pair_keys is not None:
        k, v = k.index_select(0, chunk.pair_keys), v.index_select(0, chunk.pair_keys)
    scores = _batched(q.index_select(0, chunk.pair_tile), k.transpose(2, 3))[:, :, :rows] * scale
    partial, hidden = chunk.hidden
    scores[partial] = scores[partial].masked_fill_(hidden, float("-inf"))
    maxima, keeps = _running_maxima(scores, chunk.counts)
    p = exp(scores.sub_(maxima[..., None]))
    sums = row_sum(p)
    padded = torch.zeros(*p.shape[:2], ROWS, p.shape[3], device=p.device)
    padded[:, :, :rows] = p.bfloat16()
    products = _batched(padded, v)[:, :, :rows]
    keep, first = exp(keeps), 0
    total = torch.zeros(chunk.counts[0], *sums.shape[1:], device=p.device)
    acc = torch.zeros(chunk.counts[0], *products.shape[1:], device=p.device)
    for count in chunk.counts:
        pairs = slice(first, first + count)
        total[:count].mul_(keep[pairs]).add_(sums[pairs])
        acc[:count].mul_(keep[pairs, ..., None]).add_(products[pairs])
        first += count
    # a tile leaves the loop after its last block: its final maximum stands in that block's pair
    lse = maxima[chunk.last_pair] + log(total)
    return acc.div_(total[..., None]), lse[..., None]


def _running_maxima(scores: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Per pair: the maximum up to and including its block, and maximum before - after it."""
    maxima = scores.amax(-1)
    keeps = torch.empty_like(maxima)
    m = torch.full_like(maxima[: counts[0]], _NEVER)
    first = 0
    for count in counts:
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


def attention_backward(
    dout_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) BF16 of packed attention. Two partitions a segment: its own keys, and its prefix.

    The backward is additive over KV partitions once each is given the global output and log-sum-exp,
    so a prompt shared by a group is visited once for all its samples together. Deterministic:
    segments are walked in order.
    """
    group = q_THD.shape[1] // k_THD.shape[1]
    dout, q, k, v = (x.float() for x in (dout_THD, q_THD, k_THD, v_THD))
    delta = (dout * out_THD.float()).sum(-1)
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    tensors = (dout, q, k, v, lse_TH, delta)
    for s in layout.segments:
        own = slice(s.start, s.start + s.length)
        _partition(tensors, grads, own, own, True, scale, group)
    for prefix, rows in _shared_prefixes(layout.segments):
        _partition(tensors, grads, rows, prefix, False, scale, group)
    dq, dk, dv = (g.bfloat16() for g in grads)
    return dq, dk, dv


def _shared_prefixes(segments: tuple[Segment, ...]) -> list[tuple[slice, torch.Tensor]]:
    """(prefix rows, all rows of the segments that continue it), in order of first use."""
    users: dict[tuple[int, int], list[torch.Tensor]] = {}
    for s in segments:
        if s.prefix_length:
            rows = torch.arange(s.start, s.start + s.length)
            users.setdefault((s.prefix_start, s.prefix_length), []).append(rows)
    return [(slice(p, p + n), torch.cat(rows)) for (p, n), rows in users.items()]


def _partition(
    tensors: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    queries: slice | torch.Tensor,
    keys: slice,
    causal: bool,
    scale: float,
    group: int,
) -> None:
    """Accumulate the gradients of `queries` attending to `keys` into (dq, dk, dv)."""
    dout, q, k, v, lse, delta = tensors
    dq, dk, dv = grads
    heads_first = lambda x: x.transpose(0, 1)  # noqa: E731
    q_, do = heads_first(q[queries]), heads_first(dout[queries])
    k_ = heads_first(k[keys]).repeat_interleave(group, 0)
    v_ = heads_first(v[keys]).repeat_interleave(group, 0)
    scores = q_ @ k_.transpose(1, 2) * scale
    p = torch.exp(scores - lse[queries].t()[..., None])
    if causal:
        p = p.tril()
    ds = p * (do @ v_.transpose(1, 2) - delta[queries].t()[..., None]) * scale
    dq[queries] += heads_first(ds @ k_)
    fold = lambda x: heads_first(x.unflatten(0, (-1, group)).sum(1))  # noqa: E731
    dk[keys] += fold(ds.transpose(1, 2) @ q_)
    dv[keys] += fold(p.transpose(1, 2) @ do)
