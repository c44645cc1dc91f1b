"""Causal attention over KV blocks at absolute positions; the same bits packed, paged or one token at a time.

Query rows are tokens x the query heads of one KV head, in tiles of ROWS rows of one sequence. Every
product is a batched matmul of one fixed shape (ROWS x D by D x KV block), so the library has one
kernel to choose; everything else is elementwise on a row (reference/exact.py). A key's block is decided by its
absolute position alone, and an absent key contributes an exact zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebit.layout import Layout, PackedLayout
from samebit.operand import HeadCodes, Heads
from samebit.reference.exact import exp, fma, log, row_sum
from samebit.reference.tiles import ROWS, Chunk, Tiles, buffer, padding
from samebit.spec import Attention

LIFT = 256.0
"""Lifts P x (scale of V) into FP16's normal range; divided out at the end. A power of two: exact."""
_NEVER = -1.0e30
"""Running maximum before any key: finite, so that differences never make NaN."""


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
    tiles = layout.derived(f"tiles/{shape}", lambda: Tiles(layout, *shape))
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

    def take(self, chunk: Chunk, use: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values or codes FP32 [P, G, KB, D], scales [P, G, KB, 1] or None) that a chunk's pairs read."""
        rows, shape = chunk.key_rows.flatten(), (*chunk.key_rows.shape, -1)
        coded = self.scale is not None
        data = self.data.view(torch.uint8) if coded else self.data
        found = buffer(use, len(rows), data.shape[1:], data.dtype, data.device)
        torch.index_select(data, 0, rows, out=found)
        wide = buffer(use, len(rows), data.shape[1:], torch.float32, data.device)
        wide = wide.copy_(found.view(self.data.dtype)).view(shape)
        if self.scale is None:
            return chunk.of_pairs(wide), None
        return chunk.of_pairs(wide), chunk.of_pairs(self.scale.index_select(0, rows).view(shape))


def _attend(
    q: torch.Tensor,
    keys: _Rows,
    values: _Rows,
    chunk: Chunk,
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
    padded = padding("p", p.shape[0], p.shape[1], rows, p.shape[3], p.device)
    rounded = p.bfloat16() if v_scale is None else (p * (v_scale.transpose(2, 3) * LIFT)).half()
    padded[:, :, :rows] = rounded
    products = _batched(padded, v)[:, :, :rows]
    state = _fold_blocks(chunk, _State(maxima, sums, products), keeps, restart)
    return state.acc / state.total[..., None], (state.m + log(state.total))[..., None]


def _fold_blocks(chunk: Chunk, pairs: _State, keeps: torch.Tensor | None, restart: int) -> _State:
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


def _batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, G, ROWS, K] x [n, G, K, N]: one fixed-shape product per (tile, KV head)."""
    out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
    return out.view(*a.shape[:3], b.shape[-1])
