"""Several corrections as one: weights multiply, clip bounds are moved in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samebit.rl.api import Bound, Correction, TokenBatch, Weights
from samebit.rl.metrics import Metrics
from samebit.rl.ratios import weight_metrics


class Composed(Correction):
    """`a+b`. At most one part may weight by rho and one may move bounds (ValueError)."""

    def __init__(self, parts: tuple[Correction, ...]) -> None:
        super().__init__(tuple(part.config for part in parts))
        for flag, does in (("reweights", "weight by rho"), ("moves_bounds", "move clip bounds")):
            if sum(bool(getattr(part, flag)) for part in parts) > 1:
                raise ValueError(f"two of the composed corrections {does}; keep one of them")
        self.parts = parts
        self.needs = frozenset().union(*(part.needs for part in parts))
        self.corrects_rollout = any(part.corrects_rollout for part in parts)
        self.reweights = any(part.reweights for part in parts)
        self.moves_bounds = any(part.moves_bounds for part in parts)
        self.prepares = any(part.prepares for part in parts)
        self.shadow_every = max(part.shadow_every for part in parts)
        movers = [part for part in parts if part.moves_bounds]
        self.level = (movers or list(parts))[0].level
        self.cap = next((part.cap for part in parts if part.reweights), parts[0].cap)

    def prepare(self, batch: TokenBatch, lower: float, upper: float) -> Correction:
        """Each part prepared."""
        return Composed(tuple(part.prepare(batch, lower, upper) for part in self.parts))

    def bound_metrics(self, lower: float, upper: float) -> Metrics:
        """Those of every part."""
        merged = Metrics()
        for part in self.parts:
            merged = merged.merge(part.bound_metrics(lower, upper))
        return merged

    def state(self) -> dict[str, Any]:
        """Each part's state, by place."""
        return {str(i): part.state() for i, part in enumerate(self.parts)}

    def with_state(self, state: Mapping[str, Any]) -> Correction:
        """Each part with its state."""
        parts = tuple(p.with_state(state.get(str(i), {})) for i, p in enumerate(self.parts))
        return Composed(parts)

    def weights(self, batch: TokenBatch) -> Weights:
        """Product of the parts' weights; metrics of the product, and those only one part has."""
        results = [part.weights(batch) for part in self.parts]
        weight_T = results[0].weight_T
        for result in results[1:]:
            weight_T = weight_T * result.weight_T
        merged: dict = {}
        for result in results:
            merged.update({k: v for k, v in result.metrics.items() if k not in merged})
        capped = merged.get("rl/correction_capped_share")
        merged.update(weight_metrics(batch, weight_T))
        if capped is not None:
            merged["rl/correction_capped_share"] = capped
        return Weights(weight_T, merged)

    def bounds(self, batch: TokenBatch, lower: float, upper: float) -> tuple[Bound, Bound]:
        """The bounds of the one part that moves them."""
        for part in self.parts:
            if part.moves_bounds:
                return part.bounds(batch, lower, upper)
        return lower, upper
