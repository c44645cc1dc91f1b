"""Corrections against hand-worked numbers and the plain-Python oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from samebit.rl.corrections import adaptive, calibrated
from samebit.rl.registry import load_algorithm, load_correction
from tests.rl import oracle
from tests.rl.cases import MAX_LENGTH, fresh, normaliser_of, random_batch

LN2 = math.log(2.0)


def with_rho(rho: list[float], lengths: list[int], ratio: list[float] | None = None):
    """A batch with the given rho (and policy/old ratio) per token, nothing masked."""
    batch = random_batch(lengths, 0, masked=0.0)
    old_T = torch.full((sum(lengths),), -1.0)
    ratio_T = torch.tensor(ratio or [1.0] * sum(lengths))
    return fresh(
        batch,
        old_logp_T=old_T,
        rollout_logp_T=old_T - torch.tensor(rho).log(),
        logp_T=(old_T + ratio_T.log()).requires_grad_(),
    )


def weights(name: str, table: dict, batch) -> list[float]:
    """Weights as a list."""
    return load_correction(name, table).weights(batch.filled()).weight_T.tolist()


@pytest.mark.parametrize(
    ("name", "table", "expected"),
    [
        ("none", {}, [1, 1, 1, 1]),
        ("tis", {}, [0.5, 1.5, 2.0, 0.25]),
        ("tis", {"cap": 3.0}, [0.5, 1.5, 3.0, 0.25]),
        ("tis", {"level": "sequence"}, [0.75, 0.75, 1.0, 1.0]),
        ("tis", {"level": "geometric"}, [0.75**0.5, 0.75**0.5, 1.0, 1.0]),
        ("acr", {}, [0.5, 1.5, 2.0, 0.25]),
        ("icepop", {}, [0.5, 1.5, 0.0, 0.0]),
        ("icepop", {"reweight": False}, [1.0, 1.0, 0.0, 0.0]),
        ("mis", {"upper": 1.0, "lower": 0.8}, [0.0, 0.0, 1.0, 1.0]),
        ("mis", {"level": "geometric"}, [0.0, 0.0, 1.0, 1.0]),
        ("mis", {"level": "geometric", "lower": 0.8}, [0.75**0.5, 0.75**0.5, 1.0, 1.0]),
        ("mis", {"level": "geometric", "lower": 0.8, "reweight": False}, [1, 1, 1, 1]),
        ("reject", {"estimator": "k1", "threshold": 0.7}, [1, 1, 0, 0]),
        ("reject", {"estimator": "k1", "over": "sequence-sum", "threshold": 0.1}, [0, 0, 1, 1]),
        ("reject", {"estimator": "k2", "over": "sequence-max", "threshold": 0.25}, [1, 1, 0, 0]),
    ],
)
def test_hand_worked_weights(name, table, expected):
    """rho = (0.5, 1.5 | 4, 0.25): products 0.75 and 1, log rho sums -0.288 and 0."""
    batch = with_rho([0.5, 1.5, 4.0, 0.25], [2, 2])
    assert weights(name, table, batch) == pytest.approx(expected, rel=1e-6)


def test_reject_by_k3_at_and_above_a_ratio_of_two():
    """k3(2) = 1 - ln 2 = 0.3069; k3(0.5) = 0.1931; k3(2.1) = 0.3581; k3(0.3) = 0.5040."""
    batch = with_rho([1.99, 0.5, 2.1, 0.3], [4])
    assert weights("reject", {}, batch) == [1.0, 1.0, 0.0, 0.0]
    mean_k3 = (2.0 - 1 - LN2 + 0.0) / 2
    batch = with_rho([2.0, 1.0], [2])
    below, above = mean_k3 * 0.999, mean_k3 * 1.001
    table = {"over": "sequence-mean", "threshold": below}
    assert weights("reject", table, batch) == [0.0, 0.0]
    assert weights("reject", table | {"threshold": above}, batch) == [1.0, 1.0]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "ppo"])
def test_acr_loss_equals_the_oracle(algorithm, level):
    """QuRL eq. 9: min(rho, C) * min(R*A, clip(R, 1 - eps, (1 + eps) / r) * A)."""
    chosen = load_algorithm(algorithm, {})
    correction = load_correction("acr", {"level": level, "cap": 1.5})
    for seed in range(5):
        batch = random_batch([5, 1, 4, 3], seed, dtype=torch.float64)
        _, metrics = chosen.loss(batch, normaliser_of(batch), correction)
        rows = oracle.tokens_of(batch)
        rhos = oracle.ratios_rho(rows, level)
        uppers = [(1 + chosen.config.clip_high) / min(1.0, 1.5 / rho) for rho in rhos]
        values = oracle.policy_values(algorithm, rows, chosen.config, uppers)
        values = [min(rho, 1.5) * v for rho, v in zip(rhos, values, strict=True)]
        expected = oracle.average(rows, values, chosen.config.averaging, MAX_LENGTH)
        assert metrics.compute()["rl/policy_loss"] == pytest.approx(expected, abs=1e-10)


def test_acr_differs_from_tis_only_on_truncated_positive_tokens():
    """Token 0: rho 4, R 1.5, A 1: TIS 2 * 1.2 without gradient, ACR 2 * 1.5 with it."""
    rho, ratio = [4.0, 4.0, 4.0, 1.5, 4.0], [1.5, 1.5, 1.1, 1.5, 3.0]
    advantage_T = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])
    batch = replace(with_rho(rho, [5], ratio), advantage_T=advantage_T)
    algorithm = load_algorithm("grpo", {"averaging": "seq-mean-token-sum"})
    results = {}
    for name in ("tis", "acr"):
        part = fresh(batch)
        loss, metrics = algorithm.loss(part, normaliser_of(part), load_correction(name))
        loss.backward()
        results[name] = (float(loss.detach()), part.logp_T.grad.tolist(), metrics.compute())
    tis = -2 * 1.2 + 2 * 1.5 - 2 * 1.1 - 1.5 * 1.2 - 2 * 1.2
    acr = -2 * 1.5 + 2 * 1.5 - 2 * 1.1 - 1.5 * 1.2 - 2 * 2.4
    assert results["tis"][0] == pytest.approx(tis, rel=1e-6)
    assert results["acr"][0] == pytest.approx(acr, rel=1e-6)
    assert results["tis"][1] == pytest.approx([0.0, 3.0, -2.2, 0.0, 0.0], rel=1e-6)
    assert results["acr"][1] == pytest.approx([-3.0, 3.0, -2.2, 0.0, 0.0], rel=1e-6)
    assert results["tis"][2]["rl/bounds_differ_share"] == 0.0
    assert results["acr"][2]["rl/bounds_differ_share"] == pytest.approx(2 / 5)
    assert results["acr"][2]["rl/acr_widened_share"] == pytest.approx(3 / 5)
    assert results["acr"][2]["rl/correction_capped_share"] == pytest.approx(4 / 5)


def test_adaptive_mixes_between_nothing_and_tis():
    """Mean |log rho| = (ln 2 + 0) / 2 = 0.3466; with limit 0.6931 the mix is one half."""
    batch = replace(with_rho([2.0, 1.0], [2]), advantage_T=torch.tensor([0.0, 1.0]))
    table = {"log_ratio_limit": LN2, "lost_sample_limit": 10.0}
    correction = load_correction("adaptive", table).prepare(batch, 0.8, 1.2)
    weight_T = correction.weights(batch.filled()).weight_T
    assert weight_T.tolist() == pytest.approx([1.5, 1.0], rel=1e-6)
    # ESS = 3^2 / (2 * 5) = 0.9, so 1 - ESS = 0.1: full correction at the default limit.
    full = load_correction("adaptive", {}).prepare(batch, 0.8, 1.2)
    assert full.weights(batch.filled()).weight_T.tolist() == pytest.approx([2.0, 1.0], rel=1e-6)


def test_adaptive_sees_variance_where_large_advantages_meet_large_ratios():
    """sum rho^2 A^2 / sum A^2 = (1.21 * 4 + 1) / 5 = 1.168; limit 0.336 gives a mix of 1/2."""
    batch = replace(with_rho([1.1, 1.0], [2]), advantage_T=torch.tensor([2.0, 1.0]))
    table = {"log_ratio_limit": 99.0, "lost_sample_limit": 99.0, "variance_limit": 0.336}
    correction = load_correction("adaptive", table).prepare(batch, 0.8, 1.2)
    assert correction.mix == pytest.approx(0.5, rel=1e-5)


def test_adaptive_leaves_tokens_without_a_gap_alone():
    """(1 - mix) + mix is not 1 for every mix in FP32; 1 + mix * 0 is."""
    batch = with_rho([1.0, 3.0], [2])
    for step in range(1, 100):
        weight_T = adaptive.Correction(None, step / 100).weights(batch.filled()).weight_T
        assert float(weight_T[0]) == 1.0 and float(weight_T[1]) > 1.0


def doubles(*values: float) -> torch.Tensor:
    """FP64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def test_calibration_matches_the_shadow_share_and_update_ratio():
    """Shadow clips 1 of 4 negative tokens, the run 3 of 4: the lower bound falls to 0.6.

    Kept negative mass: run 0.6 + 0.7 + 0.9 = 2.2, shadow 0.9 + 1.0 + 1.1 = 3.0; shadow gain
    1.1 + 1.2 = 2.3; target 2.3 * 2.2 / 3.0 = 1.687; of 0.9, 1.0 (sums 0.9, 1.9) the first fits, and
    a bound below 1 is raised to 1.
    """
    advantage = doubles(-1, -1, -1, -1, 1, 1)
    ratio = doubles(0.5, 0.6, 0.7, 0.9, 0.9, 1.0)
    shadow = doubles(0.7, 0.9, 1.0, 1.1, 1.1, 1.2)
    lower, upper = calibrated.calibrate(ratio, shadow, advantage, 0.8, 1.2)
    assert lower == 0.6 and int((ratio[:4] < lower).sum()) == 1
    assert upper == 1.0
    wide = doubles(0.5, 0.6, 0.7, 0.9, 0.4, 1.25)
    assert calibrated.calibrate(wide, shadow, advantage, 0.8, 1.2) == (0.6, 1.25)


def test_calibration_keeps_the_bounds_where_nothing_differs():
    ratio, advantage = doubles(0.5, 0.9, 1.3, 1.1), doubles(-1, -1, 1, 1)
    assert calibrated.calibrate(ratio, ratio.clone(), advantage, 0.8, 1.2) == (0.8, 1.2)
    empty = doubles()
    assert calibrated.calibrate(empty, empty, empty, 0.8, 1.2) == (0.8, 1.2)


def test_calibration_is_kept_until_the_next_shadow_pass():
    batch = random_batch([40, 40], 1, gap=0.4)
    correction = load_correction("calibrated", {"every": 5})
    assert correction.shadow_every == 5 and correction.bounds(batch, 0.8, 1.2) == (0.8, 1.2)
    first = correction.prepare(batch, 0.8, 1.2)
    lower, upper = first.bounds(batch, 0.8, 1.2)
    assert (lower, upper) != (0.8, 1.2) and lower <= 1.0 <= upper
    later = replace(batch, shadow_logp_T=None, shadow_old_logp_T=None)
    assert first.prepare(later, 0.8, 1.2).bounds(batch, 0.8, 1.2) == (lower, upper)
    assert first.bound_metrics(0.8, 1.2).compute()["rl/calibrated_lower"] == pytest.approx(lower)


def test_composition_multiplies_and_refuses_two_reweightings():
    batch = with_rho([0.5, 1.5, 4.0, 0.25], [2, 2])
    table = {"mis": {"reweight": False, "lower": 0.8}}
    assert weights("tis+mis", table, batch) == pytest.approx([0.0, 0.0, 2.0, 0.25])
    with pytest.raises(ValueError, match="weight by rho"):
        load_correction("tis+mis")
    with pytest.raises(ValueError, match="'acr' is not one of"):
        load_correction("tis+reject", {"acr": {}})
