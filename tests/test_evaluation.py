"""avg@n and pass@k: numbers worked by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from samebit.evaluation import pass_at_k, summarise
from samebit.types import Group, Prompt, Sample


def graded(*rewards: tuple[float | None, ...]) -> list[Group]:
    nothing = np.zeros(1, np.float32), np.zeros(1, np.int32)
    return [
        Group(
            Prompt(str(i), (1,), ""),
            tuple(Sample(str(i), j, (1,), *nothing, "stop") for j in range(len(found))),
            found,
        )
        for i, found in enumerate(rewards)
    ]


@pytest.mark.parametrize(("samples", "passed"), [(1, 0), (1, 1), (5, 2), (8, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_the_subsets_that_hold_a_pass(samples: int, passed: int):
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(range(samples), k))
        share = sum(any(i < passed for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(passed, samples, k) == pytest.approx(share, abs=1e-12)


def test_means_are_over_prompts_and_ks_double_up_to_the_samples():
    found = summarise(graded((1.0, 0.0, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    assert found.mean == pytest.approx((2 / 3 + 0 + 1) / 3)
    spread = np.std([2 / 3, 0.0, 1.0], ddof=1) / math.sqrt(3)
    assert found.standard_error == pytest.approx(spread)
    assert list(found.pass_at) == [1, 2, 3]
    assert found.pass_at[1] == pytest.approx(found.mean)
    assert found.pass_at[2] == found.pass_at[3] == pytest.approx(2 / 3)
    assert found.verdicts == 9


def test_a_pass_is_a_reward_of_at_least_what_is_said_and_no_verdict_is_left_out():
    groups = graded((0.5, None, 0.2, None), (None, None, None, None), (0.6, 0.6, 0.6, 0.6))
    found = summarise(groups, 0.5)
    assert found.mean == pytest.approx((0.35 + 0.6) / 2) and found.verdicts == 6
    assert found.pass_at == {1: pytest.approx(0.75), 2: 1.0, 4: 1.0}
    assert summarise(groups).pass_at[1] == 0.0
    assert summarise(graded((None,))).verdicts == 0 and math.isnan(summarise([]).mean)
