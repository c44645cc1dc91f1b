"""What every file in samebit/rl/corrections must fulfil; new files inherit it."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace

import pytest
import torch

from samebit.rl.api import Correction
from samebit.rl.registry import (
    list_algorithms,
    list_corrections,
    load_algorithm,
    load_correction,
)
from tests.rl.cases import fresh, gradients, normaliser_of, random_batch, take

NAMES = list_corrections()
LENGTHS = [5, 1, 4, 3]
VARIANTS: list[tuple[str, dict]] = [(name, {}) for name in NAMES] + [
    ("tis", {"level": "sequence"}),
    ("tis", {"level": "geometric"}),
    ("acr", {"level": "geometric"}),
    ("icepop", {"reweight": False}),
    ("mis", {"level": "geometric"}),
    ("mis", {"reweight": False}),
    *(
        ("reject", {"estimator": k, "over": over})
        for k in ("k1", "k2", "k3")
        for over in ("token", "sequence-sum", "sequence-mean", "sequence-max")
    ),
    ("tis+mis", {"mis": {"reweight": False}}),
    ("acr+reject", {"reject": {"over": "sequence-mean"}}),
    ("tis+calibrated", {}),
]


def prepared(name: str, table: dict, batch, bounds=(0.8, 1.2)) -> Correction:
    """The correction, prepared as a trainer would where it asks for it."""
    correction = load_correction(name, table)
    if not correction.prepares:
        return correction
    if correction.shadow_every:
        # The shadow of an exact run is the run itself.
        batch = replace(batch, shadow_logp_T=batch.logp_T, shadow_old_logp_T=batch.old_logp_T)
    return correction.prepare(batch, *bounds)


def test_the_folder_holds_the_corrections():
    expected = {"none", "tis", "icepop", "mis", "reject", "acr", "calibrated", "adaptive"}
    assert expected <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_config_is_frozen_and_keyword_only(name):
    module = importlib.import_module(f"samebit.rl.corrections.{name}")
    assert module.Config.__dataclass_params__.frozen
    assert all(f.kw_only for f in fields(module.Config))
    assert issubclass(module.Correction, Correction)


@pytest.mark.parametrize("algorithm", list_algorithms())
@pytest.mark.parametrize(("name", "table"), VARIANTS)
def test_unified_recipe_makes_it_an_exact_no_op(name, table, algorithm):
    """Rollout and old log-probs are the same bits: loss and gradient bits equal those of none."""
    chosen = load_algorithm(algorithm, {})
    batch = random_batch(LENGTHS, 4, gap=0.3)
    batch = fresh(batch, rollout_logp_T=batch.old_logp_T.clone())
    bare = fresh(batch)
    correction = prepared(name, table, batch, chosen.clip_bounds)
    assert bool((correction.weights(batch.filled()).weight_T == 1.0).all())
    loss, metrics = chosen.loss(batch, normaliser_of(batch), correction)
    plain, _ = chosen.loss(bare, normaliser_of(batch), load_correction("none"))
    loss.backward()
    plain.backward()
    assert torch.equal(loss.detach().view(torch.int32), plain.detach().view(torch.int32))
    for first, second in zip(gradients(batch), gradients(bare), strict=True):
        assert torch.equal(first, second)
    assert metrics.compute()["rl/bounds_differ_share"] == 0.0


@pytest.mark.parametrize(("name", "table"), VARIANTS)
def test_a_gap_is_seen_unless_the_correction_ignores_rollout(name, table):
    batch = random_batch(LENGTHS, 4, rollout_gap=2.0)
    correction = prepared(name, table, batch)
    weight_T = correction.weights(batch.filled()).weight_T[batch.mask_T]
    assert bool((weight_T != 1.0).any()) == correction.corrects_rollout
    assert not weight_T.requires_grad and bool((weight_T >= 0).all())


@pytest.mark.parametrize("filler", [float("nan"), 1e6])
@pytest.mark.parametrize(("name", "table"), VARIANTS)
def test_masked_slots_change_no_bit(name, table, filler):
    algorithm = load_algorithm("grpo", {})
    batch = random_batch(LENGTHS, 5)
    spoiled = {
        key: torch.where(batch.mask_T, value, torch.full_like(value, filler)).detach().clone()
        for key, value in batch.tensors_T().items()
        if key not in ("mask_T", "sequence_T")
    }
    dirty = replace(batch, **spoiled)
    results = []
    for each in (batch, dirty):
        correction = prepared(name, table, each)
        loss, metrics = algorithm.loss(each, normaliser_of(each), correction)
        results.append((loss.detach(), metrics.compute()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(("name", "table"), VARIANTS)
def test_weights_do_not_depend_on_the_split(name, table):
    batch = random_batch([4, 1, 6, 2], 6)
    correction = prepared(name, table, batch)
    whole_T = correction.weights(batch.filled()).weight_T
    for sequences in ([0, 2], [1], [3]):
        part = take(batch, sequences)
        keep_T = torch.isin(batch.sequence_T, torch.tensor(sequences))
        assert torch.equal(correction.weights(part.filled()).weight_T, whole_T[keep_T])


@pytest.mark.parametrize(("name", "table"), VARIANTS)
def test_missing_log_probs_have_weight_one_and_are_counted(name, table):
    """A14: the engine returned NaN for one token."""
    batch = random_batch([1, 1, 1], 0, masked=0.0)
    rollout_T = torch.where(torch.arange(3) == 1, torch.nan, batch.old_logp_T)
    batch = replace(batch, rollout_logp_T=rollout_T)
    correction = prepared(name, table, batch)
    weights = correction.weights(batch.filled())
    assert bool((weights.weight_T == 1.0).all())
    assert weights.metrics.compute()["rl/correction_missing_count"] == 1.0
    loss, _ = load_algorithm("grpo", {}).loss(batch, normaliser_of(batch), correction)
    assert bool(torch.isfinite(loss))


@pytest.mark.parametrize(("name", "table"), VARIANTS)
def test_everything_masked_is_finite(name, table):
    batch = random_batch(LENGTHS, 2)
    batch = replace(batch, mask_T=torch.zeros_like(batch.mask_T))
    correction = prepared(name, table, batch)
    loss, metrics = load_algorithm("grpo", {}).loss(batch, normaliser_of(batch), correction)
    assert float(loss.detach()) == 0.0
    assert all(abs(v) < float("inf") for v in metrics.compute().values())


@pytest.mark.parametrize(("name", "table"), VARIANTS)
def test_absurd_gaps_stay_finite_and_nan_stays_visible(name, table):
    batch = random_batch([1, 1, 1], 0, masked=0.0)
    rollout_T = batch.old_logp_T + torch.tensor([100.0, -100.0, 0.0])
    batch = replace(batch, rollout_logp_T=rollout_T)
    correction = prepared(name, table, batch)
    algorithm = load_algorithm("grpo", {})
    loss, _ = algorithm.loss(batch, normaliser_of(batch), correction)
    assert bool(torch.isfinite(loss))
    broken_T = torch.where(torch.arange(3) == 2, torch.nan, batch.old_logp_T)
    broken = replace(batch, old_logp_T=broken_T)
    loss, _ = algorithm.loss(broken, normaliser_of(broken), correction)
    assert bool(torch.isnan(loss))
