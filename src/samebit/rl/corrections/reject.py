"""Rejection by a KL estimate of the gap between old and rollout policy: weight 1 or 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samebit.rl import api
from samebit.rl.api import TokenBatch, Weights
from samebit.rl.clipped import check_range
from samebit.rl.losses import mask_counts, sequence_maxima, sequence_sums
from samebit.rl.ratios import log_rho, weight_metrics

THRESHOLDS = {
    "k1": math.log(2.0),
    "k2": 0.5 * math.log(2.0) ** 2,
    "k3": 1.0 - math.log(2.0),
}
"""Each estimator at a ratio of 2, the usual cap."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of rejection."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = |log rho|, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho."""
    over: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"] = "token"
    """Reject single tokens, or whole sequences by the sum, mean or maximum over their tokens."""
    threshold: float | None = None
    """Largest estimate kept, in nats; none: the estimator's value at a ratio of 2."""

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_range("threshold", self.threshold, 0.0, float("inf"))


class Correction(api.Correction):
    """Rejected tokens still count in the averages, so nothing else is scaled up."""

    needs = frozenset({"proximal"})
    corrects_rollout = True

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.level = "token" if self.config.over == "token" else "sequence"

    def weights(self, batch: TokenBatch) -> Weights:
        """1 where the estimate is at most the threshold, else 0."""
        gap_T = log_rho(batch)
        threshold = self.config.threshold
        threshold = THRESHOLDS[self.config.estimator] if threshold is None else threshold
        estimate_T = self._estimate(batch, gap_T)
        rejected_T = estimate_T > threshold
        weight_T = torch.where(rejected_T, torch.zeros_like(gap_T), torch.ones_like(gap_T))
        return Weights(weight_T, weight_metrics(batch, weight_T))

    def _estimate(self, batch: TokenBatch, gap_T: Tensor) -> Tensor:
        signed_T = {
            "k1": gap_T,
            "k2": 0.5 * gap_T.square(),
            "k3": torch.expm1(gap_T) - gap_T,
        }[self.config.estimator]
        if self.config.over == "token":
            return signed_T.abs()
        if self.config.over == "sequence-max":
            per_B = sequence_maxima(signed_T.abs(), batch.sequence_T, batch.num_sequences)
            return per_B[batch.sequence_T]
        per_B = sequence_sums(signed_T, batch.sequence_T, batch.num_sequences).abs()
        if self.config.over == "sequence-mean":
            per_B = per_B / mask_counts(batch).clamp(min=1)
        return per_B[batch.sequence_T]
