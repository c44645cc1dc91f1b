"""Forwards of a packed rollout: the policy's own, the reference's and the BF16 shadow's log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samebit.layers.functional import gather_rows
from samebit.models.decoder import Decoder
from samebit.ranks import ALONE, Ranks
from samebit.reference.sampling import Transform
from samebit.rl.metrics import Metrics
from samebit.train.pack import PackedBatch
from samebit.types import Group

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""(log-probs, entropies, values or None) of a pack's completion tokens, FP32 [C]."""


@dataclass
class Scores:
    """Per-token values of a rollout before any update, FP32 [all completion tokens] or None.

    old: the proximal log-probs; None when the first forward's own are meant (one update, mixed).
    shadow_old: the old policy's in BF16, on steps that calibrate.
    """

    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    shadow_old: torch.Tensor | None = None
    value: torch.Tensor | None = None


class Compared:
    """Everybody's groups, whose log-probs by the trainer are compared with the sampler's.

    Metrics are kept leaf by leaf, and added in the leaves' order: the same bits on any number of processes.
    """

    def __init__(
        self, groups: Sequence[Group], metrics: Metrics | None = None, ranks: Ranks = ALONE
    ):
        self.groups, self.ranks = groups, ranks
        self.observed: list[torch.Tensor] = []
        """Log-probs of this process's forwards that were compared with the sampler's, batch by batch."""
        self._leaves = [metrics or Metrics()]

    def trainer_logp(self) -> torch.Tensor:
        """FP32 [completion tokens] on the CPU, in rollout order, everybody's. All processes ask, or none."""
        return self.ranks.cat(self.observed, torch.device("cpu"))

    def merge(self, found: Metrics, leaf: int = 0) -> None:
        """Add the metrics of a micro-batch of this process's leaf `leaf`."""
        while len(self._leaves) <= leaf:
            self._leaves.append(Metrics())
        self._leaves[leaf] = self._leaves[leaf].merge(found)

    def numbers(self) -> dict[str, float]:
        """Everybody's metrics so far. All processes ask, or none."""
        mine = self._leaves if self.ranks.size == 1 else [m.on_host() for m in self._leaves]
        total = Metrics()
        for leaf in (leaf for leaves in self.ranks.gather(mine) for leaf in leaves):
            total = total.merge(leaf)
        return total.compute()


class Scorer:
    """Runs the training forward of the policy (and its critic), the reference and the shadow."""

    def __init__(
        self,
        model: Decoder,
        value: nn.Linear | None,
        reference: Decoder | None,
        shadow: Decoder | None,
        transform: Transform,
    ):
        self.model, self.value = model, value
        self.reference, self.shadow, self.transform = reference, shadow, transform

    def forward(
        self,
        model: Decoder,
        batch: PackedBatch,
        planned: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Outputs:
        """The training forward of `model`, differentiable; planned: see `Decoder.planned_log_prob`."""
        hidden = model(batch.ids, batch.layout, "train")
        rows = gather_rows(hidden, batch.predicting, model.ops)
        if planned is None:
            logp, entropy = model.log_prob(rows, batch.targets, self.transform)
        else:
            logp, entropy = model.planned_log_prob(rows, batch.targets, self.transform, planned)
        value = None
        if self.value is not None and model is self.model:
            value = self.value(rows.float())[:, 0]
        return logp, entropy, value

    @torch.no_grad()
    def score(self, model: Decoder, batches: Sequence[PackedBatch]) -> list[Outputs]:
        """`forward` of every batch without gradient."""
        return [self.forward(model, batch) for batch in batches]

    def log_probs(self, model: Decoder, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Log-probs of the tokens of each of `batches`, FP32, without gradient."""
        return [logp for logp, _, _ in self.score(model, batches)]

    def shadow_log_probs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """The present masters, which the shadow shares, run in BF16."""
        assert self.shadow is not None
        self.shadow.refresh()
        return self.log_probs(self.shadow, batches)
