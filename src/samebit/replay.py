"""Runs a bundle's step again on its own weights and compares every number with what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samebit.bundle import Bundle, environment, read_bundle
from samebit.diagnosis import diagnose_mismatch, first_nonfinite, token_faults
from samebit.engine.api import load_engine
from samebit.loop import build_trainer
from samebit.models.load import load_model
from samebit.models.source import resolve
from samebit.models.tokenizer import Tokenizer
from samebit.quant.ops import missing_for_cuda
from samebit.run_checks import (
    Checks,
    available_memory,
    choose_device,
    planned_memory,
    set_threads,
)
from samebit.train.checkpoint import load_weights, problem_of, trainer_state
from samebit.train.rollout import Rollout
from samebit.train.step import Trainer
from samebit.types import Group


@dataclass(frozen=True)
class Replay:
    """What a second execution gave. Counts are of completion tokens.

    trainer_repeats: trainer log-probs equal to the recorded ones, bit for bit. differing: trainer
    against the recorded sampler. redrawn_equal: tokens that a fresh engine draws again with the same id
    and log-prob bits (None: not tried). older: tokens drawn under older weights, which cannot be.
    lines: the diagnosis of this execution.
    """

    kind: str
    tokens: int
    trainer_repeats: int
    differing: int
    differing_recorded: int
    redrawn_equal: int | None
    metrics: Mapping[str, float]
    lines: tuple[str, ...]
    environment_changes: tuple[str, ...]
    older: int = 0

    @property
    def repeats(self) -> bool:
        """Whether the trainer's numbers came out as recorded, in every bit."""
        return self.trainer_repeats == self.tokens

    def describe(self) -> list[str]:
        """For people."""
        out = [
            f"trainer: {self.trainer_repeats} of {self.tokens} log-probs have the recorded bits",
            f"sampler against trainer: {self.differing} tokens differ "
            f"({self.differing_recorded} when recorded)",
        ]
        if self.redrawn_equal is not None:
            fresh = self.tokens - self.older
            out.append(f"drawn again: {self.redrawn_equal} of {fresh} tokens are the same")
        out += self.lines
        out += [f"environment: {change}" for change in self.environment_changes]
        return out


class _Stop(Exception):  # noqa: N818
    """Ends an update before it moves anything."""


def replay(folder: str | Path, redraw: bool = True) -> Replay:
    """Execute a bundle again; ValueError for a bundle or checkpoint that cannot be used.

    redraw: also draw the samples again with a fresh engine.
    """
    bundle = read_bundle(folder)
    problem = problem_of(bundle.checkpoint)
    if problem is not None:
        raise ValueError(f"{folder}: its checkpoint {bundle.checkpoint} is unreadable: {problem}")
    config = bundle.config
    set_threads(config)
    checks = Checks(config)
    try:
        source, device = resolve(config.model), _recorded_device(bundle)
        available = available_memory(config, device)
        model = load_model(source, checks.recipe, device)
        model.recompute = planned_memory(config, checks, source, available).recompute
        trainer = build_trainer(model, config, checks, source)
        model.plan.require_same(bundle.about["plan"], f"bundle {folder}")
        load_weights(bundle.checkpoint, model)
        model.version = int(bundle.about["version"])
        trainer_state(bundle.checkpoint, trainer)
        redrawn = None
        if redraw:
            tokenizer = Tokenizer(source, model.config)
            engine = load_engine(config.rollout.engine)(
                model, config.rollout, tokenizer, config.seed
            )
            redrawn = _draw_again(bundle, engine, checks)
        return _compare(bundle, trainer, redrawn)
    finally:
        checks.task.close()


def _recorded_device(bundle: Bundle) -> torch.device:
    """Where the bundle's bits were made; ValueError where no such device is here."""
    asked = bundle.config.run.device
    name = bundle.about["environment"].get("device", asked)
    if name == "cpu":
        return torch.device(name)
    if name == "auto":  # of a bundle that does not say
        return choose_device(bundle.config)
    device = torch.device(asked if asked.startswith("cuda") else "cuda")
    missing = missing_for_cuda(device)
    if missing is None:
        return device
    raise ValueError(
        f"{bundle.folder}: recorded on {name}, and only such a device gives its bits again; here, {missing}. "
        "Copy the run's folder to one and replay it there"
    )


def _forward_again(trainer: Trainer, groups: tuple[Group, ...]) -> Rollout:
    """Forward and backward of the first update, and nothing of the optimiser."""
    seen: list[Rollout] = []

    def look(rollout: Rollout) -> None:
        seen.append(rollout)
        raise _Stop

    trainer.before_update = look
    try:
        trainer.step(groups)
    except _Stop:
        trainer.optimizer.zero_grad(set_to_none=True)
    return seen[0]


def _draw_again(bundle: Bundle, engine: Any, checks: Checks) -> int:
    """Tokens of the recorded samples that come out again, one sample at a time.

    What older weights drew of a sample is where it goes on from.
    """
    equal, version = 0, int(bundle.about["version"])
    for group in bundle.groups:
        for sample in group.samples:
            older = int((sample.versions != version).sum())
            begun = replace(
                sample,
                ids=sample.ids[:older],
                logps=sample.logps[:older],
                versions=sample.versions[:older],
                finish_reason="partial",
            )
            (again,) = engine.advance([Group(group.prompt, (begun,))], checks.sampling)
            (fresh,) = again.samples
            for i in range(older, min(len(sample.ids), len(fresh.ids))):
                same = sample.ids[i] == fresh.ids[i]
                equal += int(same and sample.logps[i].tobytes() == fresh.logps[i].tobytes())
    engine.close()
    return equal


def _compare(bundle: Bundle, trainer: Trainer, redrawn: int | None) -> Replay:
    rollout = _forward_again(trainer, bundle.groups)
    logp, recorded = rollout.trainer_logp().numpy(), bundle.trainer_logp_C
    diagnosis = bundle.about["diagnosis"]
    version, step = trainer.model.version, int(bundle.about["step"])
    faults = token_faults(bundle.groups, logp, version)
    before = token_faults(bundle.groups, recorded, version)
    lines: list[str] = []
    if diagnosis["kind"] == "non-finite":
        role, where = first_nonfinite(trainer.model, bundle.groups)
        lines = [f"first not finite: {where}", f"role: {role or diagnosis['role']}"]
    elif faults and not bool(torch.from_numpy(logp).isnan().any()):
        transform = trainer.scorer.transform
        lines = diagnose_mismatch(trainer.model, bundle.groups, logp, transform, step).lines()
    now, then = environment(trainer.model.device), bundle.about["environment"]
    changes = [f"{k} was {then[k]!r}, is {v!r}" for k, v in now.items() if v != then.get(k, v)]
    return Replay(
        kind=diagnosis["kind"],
        tokens=len(logp),
        trainer_repeats=int((logp.view(np.int32) == recorded.view(np.int32)).sum()),
        differing=len(faults),
        differing_recorded=len(before),
        redrawn_equal=redrawn,
        metrics=rollout.numbers(),
        lines=tuple(lines),
        environment_changes=tuple(changes),
        older=sum(int((s.versions != version).sum()) for g in bundle.groups for s in g.samples),
    )
