"""Mismatch metrics and the mergeable metrics they are made of, against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.rl import metrics
from samebit.rl.metrics import Metrics
from samebit.rl.mismatch import differing, measure

LN2 = math.log(2.0)


def masks(*values: int) -> torch.Tensor:
    """Bool mask."""
    return torch.tensor(values, dtype=torch.bool)


def test_by_hand():
    """rho = (1, 2, 1/2): |d| = (0, ln 2, ln 2); k3 = (0, 1 - ln 2, ln 2 - 1/2)."""
    trainer_T = torch.tensor([-1.0, -1.0 + LN2, -1.0 - LN2, 50.0])
    rollout_T = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    numbers = measure(trainer_T, rollout_T, masks(1, 1, 1, 0), cap=1.5).compute()
    expected = {
        "mismatch/logp_abs_max": LN2,
        "mismatch/logp_abs_mean": 2 * LN2 / 3,
        "mismatch/tokens_differing_share": 2 / 3,
        "mismatch/tokens_differing": 2,
        "mismatch/tokens": 3,
        "mismatch/missing_tokens": 0,
        "mismatch/k1": 0.0,
        "mismatch/k3": (1 - LN2 + LN2 - 0.5) / 3,
        "mismatch/exp_abs_mean": (1 + 2 + 2) / 3,
        "mismatch/ess": 3.5**2 / (3 * (1 + 4 + 0.25)),
        "mismatch/rho_max": 2.0,
        "mismatch/rho_over_cap_share": 1 / 3,
        "mismatch/stale_tokens": 0,
    }
    assert numbers == pytest.approx(expected, abs=1e-6)


def test_k1_is_of_the_sampler_against_the_trainer():
    """The sampler is surer than the trainer by 0.5 and 0.1: KL(sampler, trainer) > 0."""
    numbers = measure(torch.tensor([-1.5, -2.1]), torch.tensor([-1.0, -2.0]), masks(1, 1)).compute()
    assert numbers["mismatch/k1"] == pytest.approx(0.3, abs=1e-6)
    assert numbers["mismatch/rho_max"] == pytest.approx(math.exp(-0.1), rel=1e-6)


def test_same_bits_are_exactly_zero():
    logp_T = -torch.rand(100, generator=torch.Generator().manual_seed(0))
    numbers = measure(logp_T, logp_T.clone(), torch.ones(100, dtype=torch.bool)).compute()
    for key in ("logp_abs_max", "logp_abs_mean", "tokens_differing_share", "k1", "k3"):
        assert numbers[f"mismatch/{key}"] == 0.0
    assert numbers["mismatch/ess"] == numbers["mismatch/exp_abs_mean"] == 1.0


def test_the_last_bit_counts_and_so_do_nan_and_signed_zero():
    one = torch.tensor([1.0, float("nan"), 0.0, 2.0])
    other = torch.tensor([math.nextafter(1.0, 2.0), float("nan"), -0.0, 2.0])
    other[0] = torch.nextafter(one[0], torch.tensor(2.0))
    assert differing(one, other).tolist() == [True, True, True, False]


def test_stale_tokens_are_counted_apart():
    trainer_T, rollout_T = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.5, -3.0])
    numbers = measure(trainer_T, rollout_T, masks(1, 1, 1), masks(0, 1, 1)).compute()
    assert numbers["mismatch/logp_abs_max"] == 0.0 and numbers["mismatch/tokens"] == 1.0
    assert numbers["mismatch/stale_tokens"] == 2.0
    assert numbers["mismatch/stale_logp_abs_max"] == 2.0
    assert numbers["mismatch/stale_logp_abs_mean"] == 1.25


def test_missing_is_counted_and_poisons_nothing_while_a_broken_trainer_is_seen():
    trainer_T, rollout_T = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, float("nan")])
    numbers = measure(trainer_T, rollout_T, masks(1, 1)).compute()
    assert numbers["mismatch/missing_tokens"] == 1.0
    assert numbers["mismatch/tokens_differing_share"] == 0.5
    assert numbers["mismatch/logp_abs_max"] == numbers["mismatch/k3"] == 0.0
    broken = measure(torch.tensor([float("nan"), -2.0]), torch.tensor([-1.0, -2.0]), masks(1, 1))
    assert math.isnan(broken.compute()["mismatch/logp_abs_max"])
    assert math.isnan(broken.compute()["mismatch/k3"])


def test_absurd_gaps_are_huge_numbers_and_masked_slots_nothing():
    trainer_T, rollout_T = torch.tensor([-1.0, float("nan")]), torch.tensor([-900.0, 0.0])
    numbers = measure(trainer_T, rollout_T, masks(1, 0)).compute()
    assert all(math.isfinite(v) for v in numbers.values())
    assert numbers["mismatch/rho_max"] == pytest.approx(math.exp(300.0))
    empty = measure(trainer_T, rollout_T, masks(0, 0)).compute()
    assert empty["mismatch/tokens"] == 0.0 and "mismatch/logp_abs_max" not in empty


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    seed=st.integers(0, 20),
)
def test_merging_any_split_equals_the_whole(cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    trainer_T = torch.randn(12, generator=generator)
    rollout_T = trainer_T + 0.3 * torch.randn(12, generator=generator)
    mask_T = torch.rand(12, generator=generator) > 0.3
    whole = measure(trainer_T, rollout_T, mask_T)
    parts = []
    for part in range(4):
        keep_T = torch.tensor([c == part for c in cuts])
        parts.append(measure(trainer_T[keep_T], rollout_T[keep_T], mask_T[keep_T]))
    merged = Metrics()
    for part in parts:
        merged = merged.merge(part)
    assert merged.on_host().compute() == merged.compute()
    assert merged.compute() == pytest.approx(whole.compute(), rel=1e-9, abs=1e-12)


def test_entries_refuse_to_change_kind():
    first = Metrics({"x": metrics.total(1.0)})
    with pytest.raises(AssertionError, match="both sum and max"):
        first.merge({"x": metrics.maximum(torch.ones(1), masks(1))})
