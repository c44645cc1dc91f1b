"""Where a mismatch or a non-finite number comes from: phase, operator, role, layer and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from samebit.layout import PackedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.reference.sampling import Transform
from samebit.trace import Difference, Trace, first_difference, rollout_side, training_side
from samebit.types import Group, Sample

ROLE_OF = {
    "norm_attention": "norm",
    "norm_attention_codes": "norm",
    "qkv": "qkv",
    "rotary_q": "qkv",
    "rotary_q_codes": "qkv",
    "rotary_k": "qkv",
    "rotary_k_codes": "qkv",
    "value": "qkv",
    "value_codes": "qkv",
    "attention": "attention",
    "attention_codes": "out",
    "out": "out",
    "norm_mlp": "norm",
    "norm_mlp_codes": "norm",
    "silu_mul": "gate_up",
    "silu_mul_codes": "down",
    "down": "down",
    "norm_final": "norm",
    "log_prob": "head",
}
"""Role of the parameters behind each operator that a trace names."""


@dataclass(frozen=True)
class TokenFault:
    """One completion token whose two log-probs differ. index: within its completion, from 0."""

    prompt_id: str
    sample_id: int
    index: int
    position: int
    token: int
    sampler: float
    trainer: float

    def describe(self) -> str:
        """One line."""
        return (
            f"prompt {self.prompt_id!r}, sample {self.sample_id}, completion token {self.index} "
            f"(id {self.token}, position {self.position}): sampler {self.sampler!r}, trainer "
            f"{self.trainer!r}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """kind: `mismatch` or `non-finite`. phase and role: where it arises, as far as it is known."""

    kind: str
    step: int
    phase: str
    role: str
    where: str
    tokens: tuple[TokenFault, ...]
    tokens_at_fault: int
    tokens_compared: int

    def lines(self) -> list[str]:
        """For people, most important first."""
        seen = f"{self.tokens_at_fault} of {self.tokens_compared} tokens"
        return [
            f"{self.kind} at step {self.step}: {seen}",
            f"  phase: {self.phase}",
            f"  role: {self.role}",
            f"  first: {self.where}",
            *(f"  token: {t.describe()}" for t in self.tokens[:5]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite as text."""
        found = asdict(self)
        for token in found["tokens"]:
            for key in ("sampler", "trainer"):
                if not math.isfinite(token[key]):
                    token[key] = repr(token[key])
        return found


def token_faults(
    groups: Sequence[Group], trainer_logp_C: np.ndarray, version: int | None
) -> list[TokenFault]:
    """Tokens whose log-probs are not the same 32 bits, in rollout order.

    A trainer's NaN differs; a sampler's NaN means that it gave none, and is left out.
    version: tokens drawn under another weight version are left out; None compares all.
    """
    found: list[TokenFault] = []
    start = 0
    for group in groups:
        for sample in group.samples:
            trainer = trainer_logp_C[start : start + len(sample.ids)].astype(np.float32)
            sampler = sample.logps.astype(np.float32)
            start += len(sample.ids)
            differs = (trainer.view(np.int32) != sampler.view(np.int32)) | np.isnan(trainer)
            differs &= ~np.isnan(sampler)
            if version is not None:
                differs &= sample.versions == version
            for i in np.flatnonzero(differs).tolist():
                found.append(
                    TokenFault(
                        group.prompt.id,
                        sample.sample_id,
                        i,
                        len(group.prompt.ids) + i,
                        sample.ids[i],
                        float(sampler[i]),
                        float(trainer[i]),
                    )
                )
    assert start == len(trainer_logp_C), "log-probs and samples disagree in number"
    return found


def diagnose_mismatch(
    model: Decoder,
    groups: Sequence[Group],
    trainer_logp_C: np.ndarray,
    transform: Transform,
    step: int,
) -> Diagnosis:
    """Name what differs, by tracing the first faulty sample on both sides at the present weights."""
    faults = token_faults(groups, trainer_logp_C, model.version)
    assert faults, "nothing differs"
    first = min(faults, key=lambda f: (f.position, f.sample_id))
    ids, prompt_length, sample, packed = _sample_of(groups, first.sample_id, trainer_logp_C)
    train = training_side(model, [ids], transform=transform)
    rollout = rollout_side(model, [ids], transform=transform)
    difference = first_difference(train, rollout)
    tail = slice(prompt_length - 1, len(ids) - 1)
    if difference is not None:
        phase, role, where = _of_difference(difference, prompt_length)
    else:
        fresh = sample.versions == model.version
        phase, role, where = _of_sides(sample.logps, packed, train, rollout, tail, fresh)
    compared = sum(int((s.versions == model.version).sum()) for g in groups for s in g.samples)
    return Diagnosis(
        "mismatch", step, phase, role, where, tuple(faults[:50]), len(faults), compared
    )


def _sample_of(
    groups: Sequence[Group], sample_id: int, trainer_logp_C: np.ndarray
) -> tuple[list[int], int, Sample, np.ndarray]:
    start = 0
    for group in groups:
        for sample in group.samples:
            if sample.sample_id == sample_id:
                ids = [*group.prompt.ids, *sample.ids]
                packed = trainer_logp_C[start : start + len(sample.ids)]
                return ids, len(group.prompt.ids), sample, packed
            start += len(sample.ids)
    raise AssertionError(f"no sample {sample_id}")


def _of_difference(difference: Difference, prompt_length: int) -> tuple[str, str, str]:
    part = "prefill" if difference.position < prompt_length else "decode"
    phase = f"forward: rollout and training are different functions, seen in {part}"
    return phase, ROLE_OF.get(difference.operator, difference.operator), difference.describe()


def _of_sides(
    sampler: np.ndarray,
    packed: np.ndarray,
    train: Trace,
    rollout: Trace,
    tail: slice,
    fresh: np.ndarray,
) -> tuple[str, str, str]:
    """No operator differs when the sample is run alone: which of the two numbers is the odd one?

    fresh: the tokens of the present weight version; of others the sampler's number is another's.
    """
    alone = train.logp_T[tail].cpu().numpy()
    assert np.array_equal(alone.view(np.int32), rollout.logp_T[tail].cpu().numpy().view(np.int32))

    def same(a: np.ndarray) -> bool:
        found = a.astype(np.float32).view(np.int32)
        return np.array_equal(found[fresh], alone.view(np.int32)[fresh])

    both = "all operators agree when the sample is run alone through a fresh cache"
    if same(packed) and not same(sampler):
        phase = "rollout: the sampler's number cannot be had from the present weights"
        where = f"{both}: a stale cache or stale weights in the engine, or weights changed since"
        return phase, "engine state", where
    if same(sampler) and not same(packed):
        phase = "train: the packed batch gives another number than the sample alone"
        return phase, "packing", f"{both}: look at positions, segments and the shared prompt"
    return "rollout and train: neither number is repeated", "unknown", f"{both}: not deterministic"


@torch.no_grad()
def first_nonfinite(model: Decoder, groups: Sequence[Group]) -> tuple[str, str]:
    """(role, description) of the first operator of the training forward with NaN or infinity."""
    for group in groups:
        for sample in group.samples:
            ids = [*group.prompt.ids, *sample.ids]
            found: list[str] = []

            def tap(name: str, x: torch.Tensor, found: list[str] = found) -> None:
                bad = ~torch.isfinite(x.float().flatten(1)).all(1)
                if bool(bad.any()) and not found:
                    found.extend((name, str(int(bad.nonzero()[0]))))

            layout = PackedLayout((Segment(0, len(ids)),), model.device)
            tap("norm_final", model(torch.tensor(ids).to(model.device), layout, "train", tap=tap))
            if found:
                name, position = found
                role = ROLE_OF.get(name.rsplit(".", 1)[-1], name)
                where = f"output of {name}, sample {sample.sample_id}, position {position}"
                return role, where
    return "", "every operator of the forward is finite: it arises in the loss or the backward"
