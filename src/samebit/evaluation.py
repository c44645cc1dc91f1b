"""avg@n and pass@k of graded samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samebit.types import Group


@dataclass(frozen=True)
class Summary:
    """Of the prompts with a verdict: mean reward (avg@n), its standard error over prompts, pass@k by k.

    pass_at: k = 1, 2, 4, ... and the number of samples itself, over the prompts with at least k verdicts.
    """

    mean: float
    standard_error: float
    pass_at: dict[int, float]
    verdicts: int


def pass_at_k(passed: int, samples: int, k: int) -> float:
    """Chance that one of k samples passes, unbiased from `samples` of which `passed` did.

    1 - C(samples - passed, k) / C(samples, k) (Chen et al., arXiv 2107.03374, equation 1).
    """
    assert 0 <= passed <= samples and 1 <= k <= samples
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def summarise(groups: Sequence[Group], pass_reward: float = 1.0) -> Summary:
    """Of graded groups; a sample passes with a reward of at least `pass_reward`.

    Samples without a verdict are left out, prompts without any too; NaN where nothing is left.
    """
    rewards = [[r for r in g.rewards if r is not None] for g in groups]
    rewards = [found for found in rewards if found]
    if not rewards:
        return Summary(math.nan, math.nan, {}, 0)
    means = [sum(found) / len(found) for found in rewards]
    mean = sum(means) / len(means)
    variance = sum((m - mean) ** 2 for m in means) / max(len(means) - 1, 1)
    largest = max(map(len, rewards))
    ks = sorted({1 << i for i in range(largest.bit_length()) if 1 << i <= largest} | {largest})
    pass_at = {}
    for k in ks:
        chances = [
            pass_at_k(sum(r >= pass_reward for r in found), len(found), k)
            for found in rewards
            if len(found) >= k
        ]
        pass_at[k] = sum(chances) / len(chances)
    return Summary(mean, math.sqrt(variance / len(means)), pass_at, sum(map(len, rewards)))
