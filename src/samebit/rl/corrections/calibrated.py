"""Calibrated clipping (arXiv 2609.22870): clip bounds that zero as much as a BF16 policy would.

Noise in the low-precision ratio pushes tokens with negative advantage below 1 - eps, where they
lose their gradient and go unpunished. A BF16 shadow pass tells how many *should* be clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebit.rl import api, metrics
from samebit.rl.api import Bound, TokenBatch, Weights
from samebit.rl.clipped import check_range
from samebit.rl.losses import log_ratio
from samebit.rl.ratios import weight_metrics


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of calibrated clipping."""

    every: int = 20
    """Steps between two shadow passes."""

    def __post_init__(self) -> None:
        check_range("every", self.every, 1, float("inf"))


class Correction(api.Correction):
    """Bounds of the last calibration; the algorithm's own before the first. Weight 1.

    Corrects the noise of the trained policy, not the sampler: compose with tis in a mixed recipe.
    """

    needs = frozenset({"shadow"})
    moves_bounds = True
    prepares = True

    def __init__(
        self, config: Config | None = None, calibrated: tuple[float, float] | None = None
    ) -> None:
        super().__init__(config or Config())
        self.shadow_every = self.config.every
        self.calibrated = calibrated

    def prepare(self, batch: TokenBatch, lower: float, upper: float) -> Correction:
        """A copy with new bounds where `batch` has shadow log-probs, else itself.

        Ratios must have had a chance to move: the shadow belongs to the last update of a rollout.
        """
        if batch.shadow_logp_T is None or batch.shadow_old_logp_T is None:
            return self
        with torch.no_grad():
            mask_T = batch.mask_T
            ratio = torch.exp(log_ratio(batch.logp_T, batch.old_logp_T))[mask_T].double()
            shadow_T = torch.exp(log_ratio(batch.shadow_logp_T, batch.shadow_old_logp_T))
            shadow = shadow_T[mask_T].double()
            advantage = batch.advantage_T[mask_T].double()
        return Correction(self.config, calibrate(ratio, shadow, advantage, lower, upper))

    def state(self) -> dict[str, Any]:
        """The calibrated bounds."""
        return {} if self.calibrated is None else {"calibrated": list(self.calibrated)}

    def with_state(self, state: Mapping[str, Any]) -> Correction:
        """A copy with bounds that `state` returned."""
        if "calibrated" not in state:
            return self
        lower, upper = state["calibrated"]
        return Correction(self.config, (lower, upper))

    def weights(self, batch: TokenBatch) -> Weights:
        """Ones."""
        weight_T = torch.ones_like(batch.logp_T)
        entries = weight_metrics(batch, weight_T)
        return Weights(weight_T, entries)

    def bounds(self, batch: TokenBatch, lower: float, upper: float) -> tuple[Bound, Bound]:
        """The calibrated bounds."""
        return (lower, upper) if self.calibrated is None else self.calibrated

    def bound_metrics(self, lower: float, upper: float) -> metrics.Metrics:
        """`rl/calibrated_lower` and `_upper`."""
        low, high = (lower, upper) if self.calibrated is None else self.calibrated
        one = torch.ones(1, dtype=torch.bool)
        return metrics.Metrics(
            {
                "rl/calibrated_lower": metrics.maximum(torch.tensor([low]), one),
                "rl/calibrated_upper": metrics.maximum(torch.tensor([high]), one),
            }
        )


def calibrate(
    ratio_N: Tensor, shadow_N: Tensor, advantage_N: Tensor, lower: float, upper: float
) -> tuple[float, float]:
    """(lower, upper) for `ratio_N`, from what (lower, upper) do to `shadow_N`. FP64, unmasked [N].

    Lower: as many tokens with A < 0 fall below it as shadow ratios fall below `lower`. Upper: the
    kept mass of R*A over tokens with A > 0, divided by that over A < 0, is the shadow's (nearest
    from below). Equal ratios give back the given bounds, bit for bit.
    """
    negative, positive = advantage_N < 0, advantage_N > 0
    new_lower = _lower_bound(ratio_N[negative], shadow_N[negative], lower)
    kept = _mass(ratio_N, advantage_N, negative & (ratio_N >= new_lower))
    shadow_kept = _mass(shadow_N, advantage_N, negative & (shadow_N >= lower))
    gained = _mass(shadow_N, advantage_N, positive & (shadow_N <= upper))
    if shadow_kept == 0 or not bool(positive.any()):
        return new_lower, upper
    target = gained * (kept / shadow_kept)
    if _mass(ratio_N, advantage_N, positive & (ratio_N <= upper)) == target:
        return new_lower, upper
    ordered, order = torch.sort(ratio_N[positive])
    running = torch.cumsum(ordered * advantage_N[positive][order], 0)
    count = int((running <= target).sum())
    # A bound below 1 would clip tokens that have not moved at all.
    return new_lower, max(float(ordered[count - 1]) if count else 1.0, 1.0)


def _lower_bound(ratio_N: Tensor, shadow_N: Tensor, lower: float) -> float:
    wanted = int((shadow_N < lower).sum())
    if wanted == int((ratio_N < lower).sum()):
        return lower
    ordered = torch.sort(ratio_N).values
    bound = float(ordered[min(wanted, ordered.numel() - 1)])
    return min(bound, 1.0)


def _mass(ratio_N: Tensor, advantage_N: Tensor, where_N: Tensor) -> float:
    return float((ratio_N * advantage_N.abs())[where_N].sum())
