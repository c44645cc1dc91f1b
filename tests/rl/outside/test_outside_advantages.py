"""Advantages and returns against verl, run in FP64 on the same rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", reason="verl is not installed; `make test-outside` runs these tests")

from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from samebit.rl.advantage import outcomes
from samebit.rl.api import Outcomes
from samebit.rl.registry import load_algorithm
from tests.rl.outside.cases import MAX_LENGTH, SEEDS, close

pytestmark = pytest.mark.outside

VERL_FLOOR = 1e-8
"""verl whitens by 1 / sqrt(variance + 1e-8), we by 1 / (deviation + 1e-6)."""


@dataclass(frozen=True)
class Rollout:
    """One rollout in both layouts; verl gets only the sequences that have a verdict."""

    known: Outcomes
    judged_T: Tensor

    @property
    def lengths_B(self) -> Tensor:
        """Lengths of the judged sequences."""
        return self.known.lengths_B[self.known.verdict_B]

    def real(self) -> Tensor:
        """Slots that hold a token, of the judged sequences."""
        return torch.arange(int(self.lengths_B.max())) < self.lengths_B[:, None]

    def mask(self) -> Tensor:
        """verl's response mask."""
        return self.real().double()

    def pad(self, values_T: Tensor) -> Tensor:
        """Packed values of all sequences -> FP64 [judged sequences, longest]."""
        rows_BL = torch.zeros(self.real().shape, dtype=torch.float64)
        rows_BL[self.real()] = values_T[self.judged_T].double()
        return rows_BL

    def scores(self) -> Tensor:
        """The reward in each judged sequence's last token."""
        rows_BL = torch.zeros(self.real().shape, dtype=torch.float64)
        rewards_B = self.known.reward_B[self.known.verdict_B].double()
        for row, (length, reward) in enumerate(zip(self.lengths_B, rewards_B, strict=True)):
            if length > 0:
                rows_BL[row, length - 1] = reward
        return rows_BL

    def outcome_scores(self) -> Tensor:
        """The reward where an outcome estimator sums it up: a sequence of length 0 has one too."""
        rows_BL = torch.zeros(self.real().shape, dtype=torch.float64)
        rows_BL[:, 0] = self.known.reward_B[self.known.verdict_B].double()
        return rows_BL

    def groups(self) -> np.ndarray:
        """Group ids of the judged sequences."""
        return self.known.group_B[self.known.verdict_B].numpy()

    def compare(self, advantage_T: Tensor, want_BL: Tensor) -> None:
        """Judged tokens equal verl's, the others are 0."""
        close(advantage_T[self.judged_T], want_BL[self.real()])
        assert not advantage_T[~self.judged_T].any()


def random_rollout(seed: int, min_group: int = 1) -> Rollout:
    """2 to 4 groups of 1 to 5, lengths 0 to 12, missing verdicts, binary or real rewards."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    sizes = draw(min_group, 6, draw(2, 5)[0])
    sizes[0] = max(sizes[0], 3)
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    count = len(groups)
    lengths = draw(0, 13, count)
    lengths[0], lengths[1], lengths[2] = 0, 1, 12
    rewards: list = (0.3 + 2 * torch.randn(count, generator=generator)).tolist()
    if seed % 2:
        rewards = [float(r > 0.3) for r in rewards]
    rewards[1:3] = [1.0, 0.0]
    seen = [groups.count(g) for g in groups]
    for i in range(3, count):
        if seen[i] > min_group + 1 and torch.rand((), generator=generator) < 0.2:
            rewards[i] = None
            seen = [n - 1 if groups[j] == groups[i] else n for j, n in enumerate(seen)]
    total = sum(lengths)
    values_T = torch.randn(total, generator=generator)
    gaps_T = 0.2 * torch.randn(total, generator=generator)
    known = outcomes(rewards, groups, lengths, MAX_LENGTH, values_T, gaps_T)
    return Rollout(known, torch.repeat_interleave(known.verdict_B, known.lengths_B))


def alone(rollout: Rollout) -> Tensor:
    """Judged sequences that are the only judged ones of their group."""
    groups = rollout.groups().tolist()
    return torch.tensor([groups.count(g) == 1 for g in groups])


def refloored(want_BL: Tensor, raw_BL: Tensor, real_BL: Tensor) -> Tensor:
    """verl's whitened values with our floor under the deviation."""
    deviation = raw_BL[real_BL].std()
    return want_BL * torch.sqrt(deviation.square() + VERL_FLOOR) / (deviation + 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ("grpo", "dr_grpo", "gspo", "cispo", "rloo"))
def test_group_advantages(seed, name):
    rollout = random_rollout(seed)
    scores_BL, mask_BL = rollout.outcome_scores(), rollout.mask()
    if name == "rloo":
        want_BL, _ = core_algos.compute_rloo_outcome_advantage(scores_BL, mask_BL, rollout.groups())
    else:
        want_BL, _ = core_algos.compute_grpo_outcome_advantage(
            scores_BL, mask_BL, rollout.groups(), norm_adv_by_std_in_grpo=name != "dr_grpo"
        )
    # A sample without company: verl keeps its reward as the advantage, we give 0.
    want_BL[alone(rollout)] = 0.0
    result = load_algorithm(name).advantages(rollout.known)
    rollout.compare(result.advantage_T, want_BL)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", (1.0, 0.9))
@pytest.mark.parametrize("kl", (0.0, 0.3))
def test_reinforce_pp(seed, gamma, kl):
    rollout = random_rollout(seed)
    reward_BL = core_algos.compute_rewards(
        rollout.scores(), rollout.pad(rollout.known.ref_log_ratio_T), 0.0, kl
    )
    want_BL, return_BL = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        reward_BL, rollout.mask(), config=AlgoConfig(gamma=gamma)
    )
    table = {"gamma": gamma, "reward_kl_coefficient": kl}
    result = load_algorithm("reinforce_pp", table).advantages(rollout.known)
    rollout.compare(result.advantage_T, refloored(want_BL, return_BL, rollout.real()))


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_pp_with_group_baseline(seed):
    rollout = random_rollout(seed, min_group=2)
    want_BL, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rollout.outcome_scores(), rollout.mask(), rollout.groups()
    )
    raw_BL, _ = core_algos.compute_grpo_outcome_advantage(
        rollout.outcome_scores(),
        rollout.mask(),
        rollout.groups(),
        norm_adv_by_std_in_grpo=False,
    )
    result = load_algorithm("reinforce_pp", {"group_baseline": True}).advantages(rollout.known)
    rollout.compare(result.advantage_T, refloored(want_BL, raw_BL, rollout.real()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), ((1.0, 1.0), (0.95, 0.9), (1.0, 0.0)))
@pytest.mark.parametrize("kl", (0.0, 0.3))
def test_generalised_advantages(seed, gamma, lam, kl):
    rollout = random_rollout(seed)
    reward_BL = core_algos.compute_rewards(
        rollout.scores(), rollout.pad(rollout.known.ref_log_ratio_T), 0.0, kl
    )
    value_BL = rollout.pad(rollout.known.value_T)
    want_BL, return_BL = core_algos.compute_gae_advantage_return(
        reward_BL, value_BL, rollout.mask(), gamma, lam
    )
    table = {"gamma": gamma, "lam": lam, "reward_kl_coefficient": kl}
    result = load_algorithm("ppo", table).advantages(rollout.known)
    want_BL = refloored(want_BL, return_BL - value_BL, rollout.real())
    rollout.compare(result.advantage_T, want_BL)
    rollout.compare(result.return_T, return_BL)


def test_equal_returns_are_exactly_zero_here_and_small_noise_in_verl():
    known = outcomes([0.7, 0.7, 0.7], [0, 0, 0], [2, 3, 4], MAX_LENGTH)
    rollout = Rollout(known, torch.ones(9, dtype=torch.bool))
    want_BL, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rollout.scores(), rollout.mask(), config=AlgoConfig(gamma=1.0)
    )
    result = load_algorithm("reinforce_pp").advantages(known)
    assert not result.advantage_T.any()
    assert 0 < want_BL.abs().max() < 1e-4


def test_the_whitening_floors_differ_by_less_than_a_part_in_ten_thousand_at_deviation_a_tenth():
    deviation = 0.1
    ratio = (deviation + 1e-6) / (deviation**2 + VERL_FLOOR) ** 0.5
    assert 1 < ratio < 1.0001
