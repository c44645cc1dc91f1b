"""A head whose gradient is known before the forward: the same update, bit for bit."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from samebit import reference
from samebit.config import RunConfig
from samebit.models.load import load_model
from samebit.quant.plan import load_recipe
from tests.tiny import tiny_folder
from tests.train.groups import config_for, rollout, trainer_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("planned"), "qwen2")


class Planning:
    """The reference, as a backend that gains by planning; counts its planned heads."""

    PLANS_HEAD = True

    def __init__(self) -> None:
        self.planned = 0

    def log_prob_planned(self, *arguments):
        self.planned += 1
        return reference.log_prob_planned(*arguments)

    def __getattr__(self, name: str):
        return getattr(reference, name)


def build(folder, recipe="fp8", correction="none", rl=None, **options):
    model = load_model(folder, load_recipe(recipe))
    return trainer_for(model, config_for(micro_batch_tokens=60, rl=rl), correction, **options)


def steps(trainer, ops, change=lambda groups: groups):
    """Two steps; (masters, metrics without times)."""
    trainer.model.ops = ops
    numbers = {}
    for step in range(2):
        found = trainer.step(change(rollout(trainer.model, first_id=100 * step)))
        numbers |= {(step, k): v for k, v in found.items() if not k.startswith("time/")}
    return [p.detach().clone() for p in trainer.parameters().values()], numbers


def same_number(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_a_planned_update_is_the_update(folder, correction):
    ops = Planning()
    plain, numbers = steps(build(folder, correction=correction), reference)
    planned, others = steps(build(folder, correction=correction), ops)
    assert ops.planned >= 4
    assert numbers.keys() == others.keys()
    assert all(same_number(numbers[k], others[k]) for k in numbers)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


@pytest.mark.parametrize(
    ("recipe", "rl", "options"),
    [
        ("fp8-rollout", None, {}),
        ("fp8", {"mini_batches": 2}, {}),
        ("fp8", None, {"entropy_coefficient": 0.1}),
    ],
)
def test_what_cannot_be_known_before_is_not_planned(folder, recipe, rl, options):
    ops = Planning()
    steps(build(folder, recipe, rl=rl, **options), ops)
    assert ops.planned == 0


@pytest.mark.parametrize("sample", [0, 2])
@pytest.mark.parametrize("change", ["version", "gap"])
def test_batches_with_older_or_unknown_log_probs_are_not_planned(folder, change, sample):
    """One token is enough: the first of a pack, or one further on."""

    def altered(groups):
        out = []
        for group in groups:
            samples = list(group.samples)
            old = samples[sample]
            versions, logps = old.versions.copy(), old.logps.copy()
            if change == "version":
                versions[0] -= 1
            else:
                logps[0] = np.nan
            samples[sample] = dataclasses.replace(old, versions=versions, logps=logps)
            out.append(dataclasses.replace(group, samples=tuple(samples)))
        return out

    ops = Planning()
    steps(build(folder), ops, altered)
    assert ops.planned == 0


def test_a_run_that_goes_on_after_a_mismatch_trains_on_its_own_log_probs(folder):
    def drifted(groups):
        moved = lambda s: dataclasses.replace(s, logps=s.logps + np.float32(0.5))  # noqa: E731
        return [dataclasses.replace(g, samples=tuple(map(moved, g.samples))) for g in groups]

    ops, found = Planning(), []
    for backend in (reference, ops):
        trainer = build(folder)
        run = RunConfig(on_mismatch="warn")
        trainer.config = dataclasses.replace(trainer.config, run=run)
        found.append(steps(trainer, backend, drifted)[0])
    assert ops.planned == 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
