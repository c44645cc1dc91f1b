"""Gradients of packed causal attention in FP32, segment by segment, each shared prompt visited once."""

from __future__ import annotations

import torch

from samebit.layout import PackedLayout, Segment
from samebit.operand import HeadCodes, Heads


def attention_backward(
    dout_THD: torch.Tensor,
    q_THD: Heads,
    k_THD: Heads,
    v_THD: Heads,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) BF16 of packed attention (codes: at what they dequantise to).

    Two partitions a segment: its own keys, and its prefix.

    The backward is additive over KV partitions once each is given the global output and log-sum-exp,
    so a prompt shared by a group is visited once for all its samples together. Deterministic:
    segments are walked in order.
    """
    heads = (x.dequantised() if isinstance(x, HeadCodes) else x for x in (q_THD, k_THD, v_THD))
    dout, q, k, v = (x.float() for x in (dout_THD, *heads))
    group = q.shape[1] // k.shape[1]
    delta = (dout * out_THD.float()).sum(-1)
    grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
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
