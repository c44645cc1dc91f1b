"""What every file in samebit/rl that defines an algorithm must fulfil; new files inherit it."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.rl.api import Algorithm, Normaliser
from samebit.rl.metrics import Metrics
from samebit.rl.registry import list_algorithms, load_algorithm, load_correction
from tests.rl import oracle
from tests.rl.cases import (
    MAX_LENGTH,
    fresh,
    gradients,
    known,
    normaliser_of,
    random_batch,
    take,
)

NAMES = list_algorithms()
LENGTHS = [5, 1, 4, 3]
AVERAGINGS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
FULL = {"kl_coefficient": 0.05, "entropy_coefficient": 0.01, "kl_estimator": "k3"}


def test_the_folder_holds_the_algorithms_of_the_readme():
    expected = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"}
    assert expected <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_config_is_frozen_keyword_only_and_documented(name):
    module = importlib.import_module(f"samebit.rl.{name}")
    assert is_dataclass(module.Config) and issubclass(module.Algorithm, Algorithm)
    assert module.Config.__dataclass_params__.frozen
    assert all(f.kw_only for f in fields(module.Config))
    documented = set()
    for cls in module.Config.__mro__[:-1]:
        body = ast.parse(inspect.getsource(cls)).body[0].body
        for field, after in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                documented.add(field.target.id)
    assert {f.name for f in fields(module.Config)} <= documented


@pytest.mark.parametrize("averaging", AVERAGINGS)
@pytest.mark.parametrize("name", NAMES)
def test_value_equals_the_plain_python_oracle(name, averaging):
    algorithm = load_algorithm(name, FULL | {"averaging": averaging})
    config = algorithm.config
    for seed in range(4):
        batch = random_batch(LENGTHS, seed, dtype=torch.float64)
        loss, metrics = algorithm.loss(batch, normaliser_of(batch), load_correction("none"))
        rows = oracle.tokens_of(batch)
        values = oracle.policy_values(name, rows, config, [1 + config.clip_high] * len(rows))
        policy = oracle.average(rows, values, averaging, MAX_LENGTH)
        assert metrics.compute()["rl/policy_loss"] == pytest.approx(policy, abs=1e-10)
        for i, row in enumerate(rows):
            values[i] += 0.05 * oracle.kl_value(row, "k3") - 0.01 * row["entropy"]
            if name == "ppo":
                values[i] += oracle.value_loss(row, 0.5)
        expected = oracle.average(rows, values, averaging, MAX_LENGTH)
        assert loss.item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("correction", ["none", "acr"])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_derivative_of_the_value(name, correction):
    algorithm = load_algorithm(name, FULL)
    if not algorithm.exact_gradient:
        pytest.skip("stops a gradient on purpose; its gradient has a test of its own")
    batch = random_batch(LENGTHS, 3, dtype=torch.float64)
    chosen, normaliser = load_correction(correction), normaliser_of(batch)

    def value(logp_T, entropy_T, value_T):
        part = replace(batch, logp_T=logp_T, entropy_T=entropy_T, value_T=value_T)
        return algorithm.loss(part, normaliser, chosen)[0]

    assert torch.autograd.gradcheck(value, (batch.logp_T, batch.entropy_T, batch.value_T))


@pytest.mark.parametrize("filler", [float("nan"), 1e6, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_masked_slots_change_no_bit(name, filler):
    algorithm, correction = load_algorithm(name, FULL), load_correction("acr")
    batch = random_batch(LENGTHS, 5)
    assert not bool(batch.mask_T.all())
    spoiled = {
        key: torch.where(batch.mask_T, value, torch.full_like(value, filler)).detach().clone()
        for key, value in batch.tensors_T().items()
        if key not in ("mask_T", "sequence_T")
    }
    for key in ("logp_T", "entropy_T", "value_T"):
        spoiled[key].requires_grad_()
    clean, dirty = fresh(batch), replace(batch, **spoiled)
    loss, metrics = algorithm.loss(clean, normaliser_of(batch), correction)
    other, other_metrics = algorithm.loss(dirty, normaliser_of(batch), correction)
    loss.backward()
    other.backward()
    assert torch.equal(loss, other) and bool(torch.isfinite(loss))
    for first, second in zip(gradients(clean), gradients(dirty), strict=True):
        assert torch.equal(first, second)
    assert metrics.compute() == other_metrics.compute()


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    seed=st.integers(0, 50),
    averaging=st.sampled_from(AVERAGINGS),
)
@pytest.mark.parametrize("name", NAMES)
def test_any_split_sums_to_the_same_gradient(name, cuts, seed, averaging):
    algorithm = load_algorithm(name, FULL | {"averaging": averaging})
    correction = load_correction("tis", {"level": "sequence"})
    lengths = [4, 1, 6, 2, 3, 5]
    batch = random_batch(lengths, seed)
    whole, split = fresh(batch), fresh(batch)
    loss, metrics = algorithm.loss(whole, normaliser_of(batch), correction)
    loss.backward()
    parts = [take(split, [i for i, c in enumerate(cuts) if c == part]) for part in range(3)]
    counts = [Normaliser.of(p.mask_T, p.sequence_T, MAX_LENGTH) for p in parts]
    normaliser = counts[0] + counts[1] + counts[2]
    assert normaliser == normaliser_of(batch)
    merged, total = Metrics(), 0.0
    for part in parts:
        part_loss, part_metrics = algorithm.loss(part, normaliser, correction)
        part_loss.backward()
        total, merged = total + part_loss.item(), merged.merge(part_metrics)
    assert total == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for first, second in zip(gradients(whole), gradients(split), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)
    whole_metrics = metrics.compute()
    assert merged.compute() == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("averaging", AVERAGINGS)
@pytest.mark.parametrize("name", NAMES)
def test_ratio_one_gives_the_policy_gradient(name, averaging):
    algorithm = load_algorithm(name, {"averaging": averaging})
    batch = random_batch(LENGTHS, 1, gap=0.0)
    advantage_T = batch.advantage_T
    if algorithm.ratio_level == "sequence":
        advantage_T = torch.tensor([0.7, -1.3, 0.4, 2.0])[batch.sequence_T]
    batch = fresh(batch, old_logp_T=batch.logp_T.detach().clone(), advantage_T=advantage_T)
    loss, metrics = algorithm.loss(batch, normaliser_of(batch), load_correction("none"))
    loss.backward()
    rows = oracle.tokens_of(batch)
    weight_T = torch.zeros(len(advantage_T))
    for i, row in enumerate(rows):
        one_hot = [float(j == i) for j in range(len(rows))]
        weight_T[row["index"]] = oracle.average(rows, one_hot, averaging, MAX_LENGTH)
    if algorithm.ratio_level == "sequence":
        # The sequence ratio spreads the sequence's summed weight evenly over its tokens.
        for s in range(batch.num_sequences):
            mine_T = (batch.sequence_T == s) & batch.mask_T
            weight_T[mine_T] = weight_T[mine_T].mean() if bool(mine_T.any()) else 0.0
    torch.testing.assert_close(batch.logp_T.grad, -advantage_T * weight_T, rtol=1e-5, atol=1e-8)
    numbers = metrics.compute()
    assert numbers["rl/ratio_max"] == 1.0 and numbers.get("rl/clip_share_negative", 0.0) == 0.0


@pytest.mark.parametrize("lengths", [LENGTHS, []])
@pytest.mark.parametrize("name", NAMES)
def test_everything_masked_gives_zero_and_finite_metrics(name, lengths):
    algorithm = load_algorithm(name, FULL)
    batch = random_batch(lengths, 2)
    batch = fresh(batch, mask_T=torch.zeros_like(batch.mask_T))
    loss, metrics = algorithm.loss(batch, normaliser_of(batch), load_correction("acr"))
    loss.backward()
    assert loss.item() == 0.0
    assert all(bool((g == 0).all()) for g in gradients(batch))
    assert all(abs(v) < float("inf") for v in metrics.compute().values())


@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_stay_finite_and_nan_stays_visible(name):
    """A06: +100 with advantage 0, +1, -1, and -800 with both signs."""
    algorithm = load_algorithm(name, {"averaging": "token-mean"})
    gap_T = torch.tensor([100.0, 100.0, 100.0, -800.0, -800.0])
    advantage_T = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0])
    base = random_batch([1] * 5, 0, masked=0.0)
    old_T = torch.full((5,), -101.0)
    batch = fresh(
        base,
        logp_T=(old_T + gap_T).requires_grad_(),
        old_logp_T=old_T,
        rollout_logp_T=old_T,
        advantage_T=advantage_T,
    )
    loss, metrics = algorithm.loss(batch, normaliser_of(batch), load_correction("acr"))
    loss.backward()
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(batch.logp_T.grad).all())
    assert float(batch.logp_T.grad[0]) == 0.0
    assert all(abs(v) < float("inf") for v in metrics.compute().values())
    broken_T = torch.where(torch.arange(5) == 3, torch.nan, batch.logp_T.detach())
    loss, metrics = algorithm.loss(
        fresh(batch, logp_T=broken_T.requires_grad_()), normaliser_of(batch), load_correction("acr")
    )
    assert bool(torch.isnan(loss)) and metrics.compute()["rl/loss"] != 0.0


@pytest.mark.parametrize("name", NAMES)
def test_advantages_do_not_change_when_all_rewards_shift(name):
    algorithm = load_algorithm(name, {})
    if not algorithm.shift_invariant:
        pytest.skip("not declared")
    rewards, groups = [1.0, 0.0, 0.25, 0.5, 0.75, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1, 1, 1, 1]
    first = algorithm.advantages(known(rewards, groups)).advantage_T
    second = algorithm.advantages(known([r + 8.0 for r in rewards], groups)).advantage_T
    assert float(first.abs().max()) > 0.1
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.35, 0.7, 0.9])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 16])
@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_zero(name, size, reward):
    """A09; PPO's baseline is the critic, so its values are made equal too."""
    algorithm = load_algorithm(name, {"overlong_penalty": 0.0} if name == "dapo" else {})
    outcomes = known([reward] * size, [0] * size, [3] * size)
    if "critic" in algorithm.needs:
        outcomes = replace(outcomes, value_T=torch.full_like(outcomes.value_T, 0.3))
    result = algorithm.advantages(outcomes)
    assert bool((result.advantage_T == 0.0).all())
    assert result.metrics.compute()["rl/equal_group_share"] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_no_verdict_has_advantage_zero_and_moves_nobody(name):
    """A18: the others get what they would get if the sample did not exist."""
    algorithm = load_algorithm(name, {})
    full = known([1, None, 0, 1, None], [0, 0, 0, 0, 1], [2, 3, 2, 4, 1])
    kept_T = torch.repeat_interleave(full.verdict_B, full.lengths_B)
    without = known([1, 0, 1], [0, 0, 0], [2, 2, 4])
    without = replace(
        without, value_T=full.value_T[kept_T], ref_log_ratio_T=full.ref_log_ratio_T[kept_T]
    )
    result, reduced = algorithm.advantages(full), algorithm.advantages(without)
    assert bool((result.advantage_T[~kept_T] == 0.0).all())
    assert torch.equal(result.advantage_T[kept_T], reduced.advantage_T)
    assert result.include_B.tolist() == [True, False, True, True, False]
    assert result.metrics.compute()["rl/no_verdict_count"] == 2.0


@pytest.mark.parametrize("name", NAMES)
def test_sequence_of_no_tokens_is_harmless(name):
    algorithm = load_algorithm(name, {})
    result = algorithm.advantages(known([1, 0, 0.5], [0, 0, 0], [2, 0, 3]))
    assert result.advantage_T.shape == (5,) and bool(torch.isfinite(result.advantage_T).all())


@pytest.mark.parametrize("name", NAMES)
def test_needs_follow_the_settings(name):
    bare = load_algorithm(name, {}).needs
    assert ("critic" in bare) == (name == "ppo") and "reference" not in bare
    assert {"reference", "entropy"} <= load_algorithm(name, FULL).needs
