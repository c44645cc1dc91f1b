"""Digests of every operator's output on both sides, and the first place where they differ.

The training side is one packed forward; the rollout side decodes token by token through a paged
cache. Each row of each operator's output is hashed over its bytes: equal digests, equal bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from samebit.layers.kv import AnyStore, page_size_for
from samebit.layers.linear import Linear
from samebit.layout import PackedLayout, PagedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.reference.sampling import Transform

Token = tuple[int, int]
"""(sequence, position)."""

PLAIN = Transform(1.0, 0, 1.0)
"""The model's own distribution: temperature 1, nothing cut off."""


@dataclass(frozen=True)
class Trace:
    """What one side computed.

    rows: operator -> token -> digest of the row's bytes; operators in the order they ran.
    logp_T: FP32, log-prob of each token's successor, tokens in (sequence, position) order.
    """

    rows: dict[str, dict[Token, bytes]]
    tokens: tuple[Token, ...]
    logp_T: torch.Tensor


@dataclass(frozen=True)
class Difference:
    """The first operator, layer and token at which two traces differ."""

    operator: str
    layer: int | None
    sequence: int
    position: int
    left: str
    right: str
    tokens_differing: int

    def describe(self) -> str:
        """One sentence."""
        where = "" if self.layer is None else f" of layer {self.layer}"
        return (
            f"first difference: operator {self.operator}{where}, sequence {self.sequence}, "
            f"position {self.position} ({self.tokens_differing} tokens differ there; digests "
            f"{self.left[:12]} and {self.right[:12]})"
        )


class Recorder:
    """Collects row digests; `tap` gives what Decoder.forward calls, for the tokens of one batch."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[Token, bytes]] = {}

    def tap(self, tokens: Sequence[Token]) -> Callable[[str, torch.Tensor], None]:
        """A tap whose row i belongs to tokens[i]."""

        def record(name: str, x: torch.Tensor) -> None:
            assert x.shape[0] == len(tokens), f"{name}: {x.shape[0]} rows for {len(tokens)} tokens"
            raw = x.detach().flatten(1).contiguous().view(torch.uint8).cpu().numpy()
            held = self.rows.setdefault(name, {})
            for token, row in zip(tokens, raw, strict=True):
                held[token] = hashlib.sha256(row.tobytes()).digest()

        return record


def _successors(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([t for ids in sequences for t in (*ids[1:], 0)])


def _tokens(sequences: Sequence[Sequence[int]]) -> tuple[Token, ...]:
    return tuple((s, p) for s, ids in enumerate(sequences) for p in range(len(ids)))


@torch.no_grad()
def training_side(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    digests: bool = True,
    side: str = "train",
    transform: Transform = PLAIN,
) -> Trace:
    """The packed forward over token ids of whole sequences."""
    starts = [sum(len(ids) for ids in sequences[:i]) for i in range(len(sequences))]
    segments = tuple(Segment(at, len(ids)) for at, ids in zip(starts, sequences, strict=True))
    tokens, recorder = _tokens(sequences), Recorder()
    tap = recorder.tap(tokens) if digests else None
    flat = torch.tensor([t for ids in sequences for t in ids]).to(model.device)
    hidden = model(flat, PackedLayout(segments, model.device), side, tap=tap)
    return _finished(model, hidden, sequences, recorder, tap, transform)


@torch.no_grad()
def rollout_side(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    chunk: int = 1,
    digests: bool = True,
    between: Callable[[int, AnyStore], None] | None = None,
    transform: Transform = PLAIN,
) -> Trace:
    """Every sequence through a paged cache, `chunk` tokens of each a forward (1: decode).

    Shorter sequences leave the batch when they end. between: called after each forward with its
    number and the cache (tests plant faults there).
    """
    page_size = page_size_for(model.device)
    pages = [-(-len(ids) // page_size) for ids in sequences]
    table = _scattered_pages(pages)
    cache = model.new_cache(sum(pages) * page_size)
    recorder, parts = Recorder(), {}
    longest = max(len(ids) for ids in sequences)
    for number, first in enumerate(range(0, longest, chunk)):
        batch = [
            (s, p)
            for s, ids in enumerate(sequences)
            for p in range(first, min(first + chunk, len(ids)))
        ]
        layout = PagedLayout(
            table.to(model.device),
            torch.tensor([s for s, _ in batch]).to(model.device),
            torch.tensor([p for _, p in batch]).to(model.device),
            page_size,
        )
        ids = torch.tensor([sequences[s][p] for s, p in batch]).to(model.device)
        tap = recorder.tap(batch) if digests else None
        hidden = model(ids, layout, "rollout", cache, tap)
        parts.update(zip(batch, hidden, strict=True))
        if between is not None:
            between(number, cache)
    tokens = _tokens(sequences)
    hidden = torch.stack([parts[token] for token in tokens])
    tap = recorder.tap(tokens) if digests else None
    return _finished(model, hidden, sequences, recorder, tap, transform)


def _scattered_pages(pages: Sequence[int]) -> torch.Tensor:
    """A block table whose pages are dealt out in reverse, so that no sequence is contiguous."""
    table = torch.zeros(len(pages), max(pages), dtype=torch.int64)
    free = list(range(sum(pages)))
    for column in range(max(pages)):
        for row, count in enumerate(pages):
            if column < count:
                table[row, column] = free.pop()
    return table


def _finished(
    model: Decoder,
    hidden: torch.Tensor,
    sequences: Sequence[Sequence[int]],
    recorder: Recorder,
    tap: Callable[[str, torch.Tensor], None] | None,
    transform: Transform,
) -> Trace:
    logp, _ = model.log_prob(hidden, _successors(sequences).to(model.device), transform)
    if tap is not None:
        tap("norm_final", hidden)
        tap("log_prob", logp[:, None])
    return Trace(recorder.rows, _tokens(sequences), logp.detach())


def first_difference(left: Trace, right: Trace) -> Difference | None:
    """The earliest operator (in execution order) with a differing row, and its earliest token.

    Of a mixed recipe only the operators are compared that both sides have: codes may be on one only.
    """
    assert left.tokens == right.tokens
    for name, rows in left.rows.items():
        if name not in right.rows:
            continue
        other = right.rows[name]
        differing = [token for token in left.tokens if rows[token] != other[token]]
        if differing:
            # the earliest position is the cause; later ones may only attend to it
            sequence, position = min(differing, key=lambda token: (token[1], token[0]))
            token = (sequence, position)
            layer, operator = _split(name)
            return Difference(
                operator,
                layer,
                sequence,
                position,
                rows[token].hex(),
                other[token].hex(),
                len(differing),
            )
    return None


def _split(name: str) -> tuple[int | None, str]:
    """("layers.3.qkv") -> (3, "qkv")."""
    parts = name.split(".")
    return (int(parts[1]), parts[2]) if parts[0] == "layers" else (None, name)


def differing_tokens(left: torch.Tensor, right: torch.Tensor) -> int:
    """Rows of two FP32 vectors whose 32 bits are not the same."""
    assert left.shape == right.shape and left.dtype == right.dtype == torch.float32
    return int((left.view(torch.int32) != right.view(torch.int32)).sum())


FAULTS = ("code", "scale")


def inject_fault(model: Decoder, kind: str, path: str) -> None:
    """Give the rollout side of one linear its own weight with a fault; the trainer's stays.

    kind: `code` negates the largest code of the first row, `scale` multiplies one scale by 1.01.
    """
    linears: dict[str, Linear] = dict(model.linears())
    if kind not in FAULTS:
        raise ValueError(f"unknown fault {kind!r}; known: {', '.join(FAULTS)}")
    if path not in linears:
        raise ValueError(f"no linear {path!r}; such as {next(iter(linears))!r}")
    module = linears[path]
    weight = module.weights["rollout"]
    changes: dict[str, Any] = {"codes": weight.codes.clone(), "_derived": {}}
    if kind == "scale":
        if weight.scale is None:
            raise ValueError(f"{path} has no scales under recipe {model.plan.recipe.name!r}")
        changes["scale"] = weight.scale.clone()
        changes["scale"].view(-1)[0] *= 1.01
    else:
        row = changes["codes"][0]
        column = int(row.float().abs().argmax())
        row[column] = (-row[column].float()).to(row.dtype)
    module.weights["rollout"] = replace(weight, **changes)
