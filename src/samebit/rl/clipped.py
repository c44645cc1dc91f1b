"""What the clipped algorithms share: their common settings and the assembly of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebit.rl import losses, metrics
from samebit.rl.api import Algorithm, Averaging, Bound, Correction, Need, Normaliser, TokenBatch
from samebit.rl.metrics import Entry, Metrics


@dataclass(frozen=True, kw_only=True)
class ClippedConfig:
    """Settings every algorithm has."""

    clip_low: float = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = 3.0
    """Largest loss per unit of negative advantage; none: no such bound."""
    averaging: Averaging = "token-mean"
    """How token losses become one number, by verl's names."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference model inside the loss; 0: no reference model is kept."""
    kl_estimator: losses.KLEstimator = "k3"
    """KL estimator; k1+ and k3+ take the gradient of k2, which is that of the true KL."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus (positive: more entropy)."""

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, 0.0, 1.0)
        check_range("clip_high", self.clip_high, 0.0, float("inf"))
        check_range("kl_coefficient", self.kl_coefficient, 0.0, float("inf"))
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip = {self.dual_clip}: must be above 1, or none (off)")
        if self.kl_coefficient > 0 and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator = 'k1' has zero expected gradient as a loss, so kl_coefficient = "
                f"{self.kl_coefficient} would do nothing; use 'k1+', 'k2', 'k3' or 'k3+'"
            )


def check_range(key: str, value: float, low: float, high: float) -> None:
    """ValueError unless low <= value <= high (NaN is refused)."""
    if not low <= value <= high:
        raise ValueError(f"{key} = {value}: must be between {low:g} and {high:g}")


class ClippedAlgorithm(Algorithm):
    """Surrogate * correction weight, + KL, - entropy bonus, averaged over the whole step."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.needs = frozenset(self._needs())

    def _needs(self) -> set[Need]:
        needs: set[Need] = set()
        if self.config.kl_coefficient > 0:
            needs.add("reference")
        if self.config.entropy_coefficient != 0:
            needs.add("entropy")
        return needs

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(1 - clip_low, 1 + clip_high)."""
        return 1.0 - self.config.clip_low, 1.0 + self.config.clip_high

    def ratio(self, batch: TokenBatch) -> Tensor:
        """The ratio that is clipped [T], with gradient."""
        return torch.exp(losses.log_ratio(batch.logp_T, batch.old_logp_T))

    def surrogate(
        self, batch: TokenBatch, ratio_T: Tensor, lower: Bound, upper: Bound
    ) -> losses.Surrogate:
        """Per-token policy loss."""
        return losses.clipped_surrogate(
            ratio_T, batch.advantage_T, lower, upper, self.config.dual_clip
        )

    def loss(
        self, batch: TokenBatch, normaliser: Normaliser, correction: Correction
    ) -> tuple[Tensor, Metrics]:
        """Sum over tokens of averaging weight * (correction weight * surrogate + KL - entropy)."""
        batch = batch.filled()
        averaging_T = losses.averaging_weights(batch, normaliser, self.config.averaging)
        nominal_lower, nominal_upper = self.clip_bounds
        lower, upper = correction.bounds(batch, nominal_lower, nominal_upper)
        ratio_T = self.ratio(batch)
        surrogate = self.surrogate(batch, ratio_T, lower, upper)
        weights = correction.weights(batch)
        policy = (weights.weight_T * surrogate.loss_T * averaging_T).sum()
        loss, result = policy, Metrics(weights.metrics)
        result["rl/policy_loss"] = metrics.total(policy)
        if self.config.kl_coefficient > 0:
            assert batch.ref_logp_T is not None, "kl_coefficient > 0 needs ref_logp_T"
            kl_T = losses.kl_penalty(batch.logp_T, batch.ref_logp_T, self.config.kl_estimator)
            loss = loss + self.config.kl_coefficient * (kl_T * averaging_T).sum()
            result["rl/reference_kl"] = metrics.mean(kl_T, batch.mask_T)
        if self.config.entropy_coefficient != 0:
            assert batch.entropy_T is not None, "entropy_coefficient needs entropy_T"
            loss = loss - self.config.entropy_coefficient * (batch.entropy_T * averaging_T).sum()
        loss = loss + self.extra_loss(batch, averaging_T, result)
        result["rl/loss"] = metrics.total(loss)
        with torch.no_grad():
            result.update(update_metrics(batch, ratio_T, surrogate))
            nominal = self.surrogate(batch, ratio_T, nominal_lower, nominal_upper)
            moved_T = nominal.loss_T != surrogate.loss_T
            result["rl/bounds_differ_share"] = metrics.share(moved_T, batch.mask_T)
        return loss, result

    def extra_loss(self, batch: TokenBatch, averaging_T: Tensor, result: Metrics) -> Tensor | float:
        """Anything beside the policy (PPO's value loss)."""
        return 0.0


def update_metrics(
    batch: TokenBatch, ratio_T: Tensor, surrogate: losses.Surrogate
) -> dict[str, Entry]:
    """Clipping by sign of the advantage, size of the update, entropy; see docs/metrics.md."""
    positive_T = batch.mask_T & (batch.advantage_T > 0)
    negative_T = batch.mask_T & (batch.advantage_T < 0)
    step_T = batch.old_logp_T - batch.logp_T
    result = {
        "rl/clip_share_positive": metrics.share(surrogate.clipped_T, positive_T),
        "rl/clip_share_negative": metrics.share(surrogate.clipped_T, negative_T),
        "rl/dual_clip_share": metrics.share(surrogate.dual_clipped_T, negative_T),
        "rl/ratio_mean": metrics.mean(ratio_T, batch.mask_T),
        "rl/ratio_max": metrics.maximum(ratio_T, batch.mask_T),
        "rl/update_k1": metrics.mean(step_T, batch.mask_T),
        "rl/logp_mean": metrics.mean(batch.logp_T, batch.mask_T),
        "rl/tokens": metrics.total(batch.mask_T.sum()),
    }
    if batch.entropy_T is not None:
        result["rl/entropy"] = metrics.mean(batch.entropy_T, batch.mask_T)
    return result
