"""No correction: every token has weight 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from samebit.rl import api
from samebit.rl.api import TokenBatch, Weights
from samebit.rl.ratios import weight_metrics


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of no correction."""

    denominator: Literal["proximal", "rollout"] = "proximal"
    """Old log-probs in a mixed recipe: the trainer's own (QuRL eq. 1), or the sampler's (eq. 3)."""


class Correction(api.Correction):
    """Weight 1."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or Config())
        if self.config.denominator == "proximal":
            self.needs = frozenset({"proximal"})

    def weights(self, batch: TokenBatch) -> Weights:
        """Ones."""
        weight_T = torch.ones_like(batch.logp_T)
        return Weights(weight_T, weight_metrics(batch, weight_T))
