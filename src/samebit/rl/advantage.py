"""From rewards to advantages: reading rewards, group baselines, whitening, GAE. FP64 inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebit.rl import metrics
from samebit.rl.api import Advantages, Outcomes
from samebit.rl.metrics import Metrics

STD_FLOOR = 1e-6
"""Added to standard deviations before dividing (verl's value)."""


def read_reward(reward: Any, where: str) -> float | None:
    """One reward as a float; None is no verdict. Bool, int, numpy and 0-d tensor are numbers.

    ValueError for text, NaN, infinities and anything else, naming `where` it came from.
    """
    if reward is None:
        return None
    if isinstance(reward, (Tensor, np.ndarray)) and reward.ndim == 0:
        reward = reward.item()
    if not isinstance(reward, (bool, np.bool_, Real)):
        raise ValueError(
            f"reward of {where} is {reward!r} ({type(reward).__name__}); return a number, "
            "or None for no verdict"
        )
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(
            f"reward of {where} is {value}; return a finite number, or None for no verdict"
        )
    return value


def outcomes(
    rewards: Sequence[Any],
    groups: Sequence[int],
    lengths: Sequence[int],
    max_length: int,
    value_T: Tensor | None = None,
    ref_log_ratio_T: Tensor | None = None,
) -> Outcomes:
    """`Outcomes` from plain lists; a reward may be None (no verdict). Errors as `read_reward`.

    Everything is brought to the CPU: advantages are small, sequential and the same on any machine.
    """
    if not len(rewards) == len(groups) == len(lengths):
        raise ValueError(
            f"{len(rewards)} rewards, {len(groups)} group ids and {len(lengths)} lengths; "
            "there must be one of each per sequence"
        )
    read = [read_reward(r, f"sequence {i}") for i, r in enumerate(rewards)]
    return Outcomes(
        reward_B=torch.tensor([0.0 if r is None else r for r in read], dtype=torch.float32),
        verdict_B=torch.tensor([r is not None for r in read], dtype=torch.bool),
        group_B=torch.tensor(list(groups), dtype=torch.int64),
        lengths_B=torch.tensor(list(lengths), dtype=torch.int64),
        max_length=max_length,
        value_T=None if value_T is None else value_T.detach().cpu(),
        ref_log_ratio_T=None if ref_log_ratio_T is None else ref_log_ratio_T.detach().cpu(),
    )


def group_advantages(known: Outcomes, scale_by_std: bool, leave_one_out: bool = False) -> Tensor:
    """Reward minus the mean of its group, FP64 [B]; sequences without a verdict take no part.

    scale_by_std: divided by the group's sample standard deviation + STD_FLOOR (GRPO).
    leave_one_out: the mean of the *other* samples instead (RLOO).
    A group of equal rewards, or with a single verdict, gives exactly 0: FP rounding of a mean must
    not become an advantage once it is divided by an equally small deviation.
    """
    reward_B, result_B = known.reward_B.double(), torch.zeros_like(known.reward_B.double())
    for group in torch.unique(known.group_B).tolist():
        member_B = (known.group_B == group) & known.verdict_B
        rewards = reward_B[member_B]
        if rewards.numel() < 2 or bool(rewards.max() == rewards.min()):
            continue
        centred = rewards - rewards.mean()
        if scale_by_std:
            centred = centred / (rewards.std() + STD_FLOOR)
        if leave_one_out:
            centred = centred * (rewards.numel() / (rewards.numel() - 1))
        result_B[member_B] = centred
    return result_B


def whiten(values_T: Tensor, where_T: Tensor) -> Tensor:
    """(x - mean) / (std + floor) over `where_T`, sample std, FP64 [T]; 0 elsewhere.

    Equal values, and fewer than two, give exactly 0.
    """
    values_T = values_T.double()
    result_T, kept = torch.zeros_like(values_T), values_T[where_T]
    if kept.numel() < 2 or bool(kept.max() == kept.min()):
        return result_T
    result_T[where_T] = (kept - kept.mean()) / (kept.std() + STD_FLOOR)
    return result_T


def per_token(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Each sequence's value at each of its tokens, [B] -> [sum of lengths]."""
    return torch.repeat_interleave(values_B, lengths_B)


def sequence_advantages(known: Outcomes, advantage_B: Tensor) -> Advantages:
    """`Advantages` when every token of a sequence has the same one."""
    advantage_B = torch.where(known.verdict_B, advantage_B, torch.zeros_like(advantage_B))
    return Advantages(
        advantage_T=per_token(advantage_B.float(), known.lengths_B),
        include_B=known.verdict_B,
        metrics=outcome_metrics(known, advantage_B),
    )


def outcome_metrics(known: Outcomes, advantage_B: Tensor) -> Metrics:
    """Counts of what cannot teach: no verdict, groups of equal rewards."""
    ids = torch.unique(known.group_B).tolist()
    equal = 0
    for group in ids:
        rewards = known.reward_B[(known.group_B == group) & known.verdict_B]
        equal += int(rewards.numel() == 0 or bool(rewards.max() == rewards.min()))
    everyone_B = torch.ones_like(known.verdict_B)
    return Metrics(
        {
            "rl/no_verdict_count": metrics.total((~known.verdict_B).sum()),
            "rl/equal_group_share": metrics.Entry(
                "mean", torch.tensor([float(equal), float(len(ids))], dtype=torch.float64)
            ),
            "rl/advantage_abs_mean": metrics.mean(advantage_B.abs(), everyone_B),
        }
    )


def padded(values_T: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Packed [sum of lengths] -> (FP64 [B, longest] zero-padded, bool [B, longest] real slots)."""
    width = int(lengths_B.max()) if lengths_B.numel() else 0
    real_BL = torch.arange(width, device=lengths_B.device) < lengths_B[:, None]
    rows_BL = torch.zeros(real_BL.shape, dtype=torch.float64, device=values_T.device)
    rows_BL[real_BL] = values_T.double()
    return rows_BL, real_BL


def terminal_rewards(known: Outcomes, kl_coefficient: float) -> Tensor:
    """Per-token reward FP64 [sum of lengths]: the verdict on the last token, minus KL on each.

    The KL is k1, old over reference log-prob, at each token (PPO for language models, REINFORCE++).
    """
    reward_T = torch.zeros(int(known.lengths_B.sum()), dtype=torch.float64)
    last_B = torch.cumsum(known.lengths_B, 0) - 1
    scored_B = known.verdict_B & (known.lengths_B > 0)
    reward_T[last_B[scored_B]] = known.reward_B.double()[scored_B]
    if kl_coefficient > 0:
        assert known.ref_log_ratio_T is not None, "a KL in the reward needs ref_log_ratio_T"
        reward_T = reward_T - kl_coefficient * known.ref_log_ratio_T.double()
    return reward_T


def discounted_returns(reward_T: Tensor, lengths_B: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} within each sequence, packed FP64."""
    zero_T = torch.zeros_like(reward_T)
    return generalised_advantages(reward_T, zero_T, lengths_B, gamma, 1.0)


def generalised_advantages(
    reward_T: Tensor, value_T: Tensor, lengths_B: Tensor, gamma: float, lam: float
) -> Tensor:
    """GAE (arXiv 1506.02438 eq. 16): A_t = delta_t + gamma*lam*A_{t+1}, packed FP64.

    delta_t = r_t + gamma*V_{t+1} - V_t with V = 0 after the last token.
    """
    reward_BL, real_BL = padded(reward_T, lengths_B)
    value_BL, _ = padded(value_T, lengths_B)
    next_B = torch.zeros(reward_BL.shape[0], dtype=torch.float64)
    advantage_B, columns = next_B.clone(), []
    for t in range(reward_BL.shape[1] - 1, -1, -1):
        delta_B = reward_BL[:, t] + gamma * next_B - value_BL[:, t]
        # Padding sits on the right: it must not discount what comes from it.
        advantage_B = torch.where(real_BL[:, t], delta_B + gamma * lam * advantage_B, 0.0)
        next_B = torch.where(real_BL[:, t], value_BL[:, t], 0.0)
        columns.append(advantage_B)
    if not columns:
        return torch.zeros_like(reward_T)
    return torch.stack(columns[::-1], dim=1)[real_BL]


def token_advantages(
    known: Outcomes, advantage_T: Tensor, return_T: Tensor | None = None
) -> Advantages:
    """`Advantages` from FP64 per-token values (already 0 where there is no verdict)."""
    sums_B = torch.stack([part.sum() for part in advantage_T.split(known.lengths_B.tolist())])
    mean_B = sums_B / known.lengths_B.clamp(min=1)
    return Advantages(
        advantage_T=advantage_T.float(),
        include_B=known.verdict_B,
        return_T=None if return_T is None else return_T.float(),
        metrics=outcome_metrics(known, mean_B),
    )
