"""Rewards and advantages against hand-worked numbers and the plain-Python oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.rl import advantage
from samebit.rl.advantage import outcomes, read_reward
from samebit.rl.dapo import overlong_penalties
from samebit.rl.registry import load_algorithm
from samebit.types import Group, Prompt
from tests.rl import oracle


def per_sequence(name: str, rewards: list, groups: list[int], table: dict | None = None):
    """Advantages with one token per sequence."""
    algorithm = load_algorithm(name, table)
    result = algorithm.advantages(outcomes(rewards, groups, [1] * len(rewards), 8))
    return result.advantage_T.tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce_pp", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_one_of_four_is_right(name, expected):
    """A09: mean 0.25, sample std 0.5; RLOO: 1 - 0 and 0 - 1/3."""
    assert per_sequence(name, [1, 0, 0, 0], [0] * 4) == pytest.approx(expected, rel=1e-5)


def test_no_verdict_by_hand():
    """A18: mean of (1, 0, 1) = 2/3, sample std 0.5774."""
    expected = [0.57735, 0.0, -1.1547, 0.57735]
    assert per_sequence("grpo", [1, None, 0, 1], [0] * 4) == pytest.approx(expected, abs=1e-4)
    assert per_sequence("grpo", [None, None], [0, 0]) == [0.0, 0.0]
    assert per_sequence("grpo", [None, 1.0], [0, 0]) == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, 0.0, 0.1, 0.25, 0.5, 1.0, -2.0]), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    )
)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_baselines_equal_the_oracle(name, drawn):
    rewards, groups = [r for r, _ in drawn], [g for _, g in drawn]
    expected = oracle.group_advantages(rewards, groups, name)
    assert per_sequence(name, rewards, groups) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_sequence_gives_its_advantage_to_each_of_its_tokens():
    result = load_algorithm("dr_grpo").advantages(outcomes([1, 0], [3, 3], [2, 3], 8))
    assert result.advantage_T.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    "reward",
    [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1)],
)
def test_numbers_of_any_kind_are_rewards(reward):
    assert read_reward(reward, "x") == 1.0


@pytest.mark.parametrize(
    "reward",
    [float("nan"), float("inf"), -float("inf"), "1", [1.0], torch.ones(2), torch.tensor(torch.nan)],
)
def test_anything_else_is_an_error_that_names_the_sample(reward):
    with pytest.raises(ValueError, match="sequence 1"):
        outcomes([1.0, reward], [0, 0], [1, 1], 8)


def test_counts_must_agree():
    with pytest.raises(ValueError, match="2 rewards, 1 group ids and 2 lengths"):
        outcomes([1, 0], [0], [1, 1], 8)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_equals_its_double_sum(gamma, lam):
    lengths = [3, 1, 4]
    generator = torch.Generator().manual_seed(1)
    reward_T = torch.randn(8, generator=generator, dtype=torch.float64)
    value_T = torch.randn(8, generator=generator, dtype=torch.float64)
    result_T = advantage.generalised_advantages(
        reward_T, value_T, torch.tensor(lengths), gamma, lam
    )
    expected, start = [], 0
    for length in lengths:
        stop = start + length
        rewards, values = reward_T[start:stop].tolist(), value_T[start:stop].tolist()
        expected += oracle.gae(rewards, values, gamma, lam)
        start = stop
    assert result_T.tolist() == pytest.approx(expected, abs=1e-12)


def test_gae_by_hand():
    """r = (0, 0, 1), V = (0.5, 0.6, 0.7), gamma 1, lambda 0.5: deltas 0.1, 0.1, 0.3."""
    result_T = advantage.generalised_advantages(
        torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.6, 0.7]), torch.tensor([3]), 1.0, 0.5
    )
    assert result_T.tolist() == pytest.approx([0.225, 0.25, 0.3], abs=1e-7)


def test_ppo_returns_are_the_reward_and_advantages_are_white():
    known = outcomes([1.0, 0.0], [0, 1], [2, 2], 8, torch.tensor([0.5, 0.6, 0.2, 0.1]))
    result = load_algorithm("ppo").advantages(known)
    assert result.return_T.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=1e-6)
    assert float(result.advantage_T.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(result.advantage_T.std()) == pytest.approx(1.0, abs=1e-5)
    raw = torch.tensor([0.5, 0.4, -0.2, -0.1])
    torch.testing.assert_close(
        result.advantage_T, (raw - raw.mean()) / raw.std(), atol=1e-5, rtol=0
    )


def test_reinforce_pp_subtracts_kl_and_discounts():
    """Reward 1 on the last of 2 tokens, KL 0.1 and 0.2 at weight 1, gamma 0.5: 0.3 and 0.8."""
    gaps_T = torch.tensor([0.1, 0.2])
    known = outcomes([1.0], [0], [2], 8, None, gaps_T)
    algorithm = load_algorithm("reinforce_pp", {"gamma": 0.5, "reward_kl_coefficient": 1.0})
    reward_T = advantage.terminal_rewards(known, 1.0)
    assert reward_T.tolist() == pytest.approx([-0.1, 0.8])
    returns_T = advantage.discounted_returns(reward_T, known.lengths_B, 0.5)
    assert returns_T.tolist() == pytest.approx([0.3, 0.8])
    expected = [-(0.5**0.5), 0.5**0.5]
    assert algorithm.advantages(known).advantage_T.tolist() == pytest.approx(expected, abs=1e-4)
    assert "reference" in algorithm.needs


def test_reinforce_pp_with_group_baseline():
    """Group means 0.5 and 10: centred (0.5, -0.5, 0, 0), then std 0.408."""
    table = {"group_baseline": True}
    result = per_sequence("reinforce_pp", [1, 0, 10, 10], [0, 0, 1, 1], table)
    assert result == pytest.approx([1.22474, -1.22474, 0.0, 0.0], abs=1e-4)


def test_soft_overlong_penalty_by_hand():
    """Limit 20, buffer 4 (a fifth): free up to 16, half at 18, full at 20."""
    penalty_B = overlong_penalties(torch.tensor([1, 16, 17, 18, 20, 25]), 20, 0.2)
    assert penalty_B.tolist() == pytest.approx([0.0, 0.0, 0.25, 0.5, 1.0, 1.0])
    known = outcomes([1.0, 1.0], [0, 0], [1, 20], 20)
    first, *_, last = load_algorithm("dapo").advantages(known).advantage_T.tolist()
    assert (first, last) == pytest.approx((0.70711, -0.70711), abs=1e-4)


def groups_of(*rewards: tuple) -> list[Group]:
    """Groups with these rewards and no samples."""
    return [Group(Prompt(f"p{i}", (1,), ""), (), r) for i, r in enumerate(rewards)]


def test_dynamic_sampling_drops_equal_groups_and_counts_them():
    """A45: the loop knows what was dropped and how many rounds it may try."""
    groups = groups_of((1, 0), (0, 0), (1, 1), (None, None), (None, 1), (0.5, None, 0))
    algorithm = load_algorithm("dapo")
    selection = algorithm.select(groups)
    assert [g.prompt.id for g in selection.groups] == ["p0", "p5"]
    assert dict(selection.counts) == {"no verdict": 1, "equal rewards": 3}
    assert selection.describe() == "2 of 6 groups kept: 1 no verdict, 3 equal rewards"
    assert algorithm.max_sampling_rounds == 4
    nothing = algorithm.select(groups_of((0, 0), (0, 0)))
    assert nothing.describe() == "0 of 2 groups kept: 2 equal rewards"
    off = load_algorithm("dapo", {"dynamic_sampling": False})
    assert len(off.select(groups).groups) == 5 and off.max_sampling_rounds == 1


def test_other_algorithms_keep_equal_groups_but_not_groups_without_verdict():
    selection = load_algorithm("grpo").select(groups_of((0, 0), (None, None), (1, None)))
    assert [g.prompt.id for g in selection.groups] == ["p0", "p2"]
    assert dict(selection.counts) == {"no verdict": 1}
