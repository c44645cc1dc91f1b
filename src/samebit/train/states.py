"""What optimisers with moments of our own share: torch.optim.AdamW's groups, defaults and walk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamWStates(torch.optim.Optimizer):
    """AdamW whose subclass says how one parameter is updated and where its moments live."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        self._finish()

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """After the last parameter."""
