"""Causal attention over KV blocks at absolute positions; the same bits packed, paged or one token at a time.

Query rows are tokens x the query heads of one KV head, in tiles of ROWS rows of one sequence. Every
product is a batched matmul of one fixed shape (ROWS x D by D x KV block), so the library has one
kernel to choose; everything else is elementwise on a row (reference/exact.py). A key's block is decided by its
absolute position alone, and an absent key contributes an exact zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebit.layout import Layout, PackedLayout, Segment
from samebit.operand import HeadCodes, Heads
from samebit.reference.exact import exp, fma, log, row_sum
from samebit.spec import Attention

ROWS = 16
LIFT = 256.0
"""Lifts P x (scale of V) into FP16's normal range; divided out at the end. A power of two: exact."""
_NEVER = -1.0e30
"""Running maximum before any key: finite, so that differences never make NaN."""


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
    the cache). All BF16, or all codes with a scale per row and head (spec.kv): scores are then the codes'
    product times the scales, and P times the scale of V is rounded to FP16 before it meets V's codes.
    (m, sum, accumulator) restart every spec.kv_split keys and are folded in order.
    """
    q_codes, q_scale = _parts(q_THD)
    heads, kv_heads = q_codes.shape[1], _parts(k_SGD)[0].shape[1]
    if heads // kv_heads > ROWS:
        raise ValueError(
            f"{heads // kv_heads} query heads per KV head; at most {ROWS} are supported"
        )
    assert spec.kv_split % spec.kv_block == 0, "a split is whole blocks"
    tiles = _Tiles(layout, heads // kv_heads)
    q = tiles.gather(q_codes, kv_heads).float()
    factor = scale if q_scale is None else tiles.gather(q_scale[..., None], kv_heads) * scale
    key_rows = _padded_key_rows(layout.key_rows, spec.kv_block)
    num_blocks = tiles.num_blocks(spec.kv_block)
    per_split = spec.kv_split // spec.kv_block or num_blocks
    whole: _State | None = None
    for first in range(0, num_blocks, per_split):
        state = _State.empty(q)
        for block in range(first, min(first + per_split, num_blocks)):
            active = tiles.active(block * spec.kv_block)
            sequence = tiles.sequence[active]
            position = torch.arange(spec.kv_block, device=q.device) + block * spec.kv_block
            absent = position[None] >= layout.context_lengths[sequence, None]
            keys = _Keys.load(k_SGD, v_SGD, key_rows[sequence][:, position], absent)
            scores = _batched(q[active], keys.k).mul_(keys.k_scale)
            scores.mul_(factor if isinstance(factor, float) else factor[active])
            hidden = position[None, None, None, :] > tiles.row_position[active][:, None, :, None]
            scores.masked_fill_(hidden, float("-inf"))
            state.put(active, _online_step(scores, keys, hidden, *state.take(active)))
        whole = state if whole is None else whole.fold(state, tiles, first * spec.kv_block)
    assert whole is not None
    out = tiles.scatter((whole.acc / whole.total[..., None]), heads)
    if q_scale is not None:
        out = out * (1.0 / LIFT)
    lse = tiles.scatter((whole.m + log(whole.total))[..., None], heads)[..., 0]
    return out.bfloat16(), lse


def _parts(x: Heads) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(BF16 values or codes as BF16, scale or None); every e4m3 number is a BF16 number."""
    return (x.codes.bfloat16(), x.scale) if isinstance(x, HeadCodes) else (x, None)


@dataclass
class _Keys:
    """One KV block of every active tile, FP32: k [n, G, D, KB], v [n, G, KB, D].

    k_scale: [n, G, 1, KB], or 1.0 in BF16. v_scale: [n, G, 1, KB] times LIFT; None in BF16.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | float = 1.0
    v_scale: torch.Tensor | None = None

    @classmethod
    def load(cls, k: Heads, v: Heads, rows: torch.Tensor, absent: torch.Tensor) -> _Keys:
        """Gather the block; `absent` keys are exact zeros.

        Storage past a sequence's end holds anything, NaN included: 0 * NaN must not reach P V.
        """
        if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
            values = v[rows].permute(0, 2, 1, 3).float()
            values.masked_fill_(absent[:, None, :, None], 0.0)
            return cls(k[rows].permute(0, 2, 3, 1).float(), values)
        assert isinstance(k, HeadCodes) and isinstance(v, HeadCodes)
        k, v = k.take(rows), v.take(rows)
        values = v.codes.float().permute(0, 2, 1, 3).masked_fill(absent[:, None, :, None], 0.0)
        v_scale = v.scale.permute(0, 2, 1)[:, :, None].masked_fill(absent[:, None, None, :], 0.0)
        k_scale = k.scale.permute(0, 2, 1)[:, :, None]
        return cls(k.codes.float().permute(0, 2, 3, 1), values, k_scale, v_scale * LIFT)


@dataclass
class _State:
    """Running maximum, sum and accumulator of every tile row: [tiles, G, ROWS] and [.., D]."""

    m: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor

    @classmethod
    def empty(cls, q: torch.Tensor) -> _State:
        """Before any key."""
        m = torch.full(q.shape[:3], _NEVER, device=q.device)
        return cls(m, torch.zeros_like(m), torch.zeros_like(q))

    def take(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The state of some tiles."""
        return self.m[tiles], self.total[tiles], self.acc[tiles]

    def put(self, tiles: torch.Tensor, new: tuple[torch.Tensor, ...]) -> None:
        """Replace the state of some tiles."""
        self.m[tiles], self.total[tiles], self.acc[tiles] = new

    def fold(self, split: _State, tiles: _Tiles, first_key: int) -> _State:
        """This and the next split together; a row before the split's first key keeps its own state."""
        seen = (tiles.row_position >= first_key)[:, None, :]
        m = torch.maximum(self.m, split.m)
        old, new = exp(self.m - m), exp(split.m - m)
        total = fma(self.total, old, split.total * new)
        acc = fma(self.acc, old[..., None], split.acc * new[..., None])
        return _State(
            torch.where(seen, m, self.m),
            torch.where(seen, total, self.total),
            torch.where(seen[..., None], acc, self.acc),
        )


def _batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, G, ROWS, K] x [n, G, K, N]: one fixed-shape product per (tile, KV head)."""
    out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
    return out.view(*a.shape[:3], b.shape[-1])


def _online_step(
    scores: torch.Tensor,
    keys: _Keys,
    hidden: torch.Tensor,
    m: torch.Tensor,
    total: torch.Tensor,
    acc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fold one KV block into (running maximum, sum, accumulator); the sum takes P unrounded."""
    new_m = torch.maximum(m, scores.amax(-1))
    p = exp(scores - new_m[..., None]).masked_fill_(hidden, 0.0)
    keep = exp(m - new_m)
    total = total * keep + row_sum(p)
    p = p.bfloat16() if keys.v_scale is None else (p * keys.v_scale).half()
    acc = acc * keep[..., None] + _batched(p.float(), keys.v)
    return new_m, total, acc


def _padded_key_rows(key_rows: torch.Tensor, block: int) -> torch.Tensor:
    missing = -key_rows.shape[1] % block
    return torch.nn.functional.pad(key_rows, (0, missing))


class _Tiles:
    """Rows of the batch cut into tiles of one sequence: ROWS // group tokens x group query heads."""

    def __init__(self, layout: Layout, group: int) -> None:
        self.group = group
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
        position = position.view(self.num_tiles, self.tokens_per_tile)
        self.last_position = position.amax(1)
        self.row_position = self._fill_rows(position.repeat_interleave(group, dim=1), -1)

    def _fill_rows(self, x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, ROWS - x.shape[1]), value=value)

    def num_blocks(self, block: int) -> int:
        """KV blocks the longest tile reaches into."""
        return int(self.last_position.max()) // block + 1

    def active(self, first_key: int) -> torch.Tensor:
        """Tiles with a query at or after absolute position `first_key` (others would add zeros)."""
        return torch.nonzero(self.last_position >= first_key).flatten()

    def gather(self, q_THD: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[T, H, D] -> [tiles, G, ROWS, D], zero rows where there is no query."""
        _, heads, dim = q_THD.shape
        slots = self.num_tiles * self.tokens_per_tile
        rows = torch.zeros(slots, heads, dim, dtype=q_THD.dtype, device=q_THD.device)
        rows[self.slot_of_row] = q_THD
        rows = rows.view(self.num_tiles, self.tokens_per_tile, kv_heads, self.group, dim)
        rows = rows.permute(0, 2, 1, 3, 4).reshape(self.num_tiles, kv_heads, -1, dim)
        return torch.nn.functional.pad(rows, (0, 0, 0, ROWS - rows.shape[2]))

    def scatter(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """[tiles, G, ROWS, C] -> [T, H, C]."""
        tiles, kv_heads, _, width = x.shape
        x = x[:, :, : self.tokens_per_tile * self.group]
        x = x.reshape(tiles, kv_heads, self.tokens_per_tile, self.group, width)
        x = x.permute(0, 2, 1, 3, 4).reshape(-1, heads, width)
        return x[self.slot_of_row]


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
