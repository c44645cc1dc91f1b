"""The update of one rollout: scores, advantages, losses, optimiser steps, refresh, metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from samebit.config import Config
from samebit.layers.functional import gather_rows
from samebit.models.decoder import Decoder
from samebit.reference.sampling import Transform
from samebit.rl.advantage import outcomes
from samebit.rl.api import Advantages, Algorithm, Correction, Normaliser, TokenBatch
from samebit.rl.metrics import Metrics
from samebit.rl.mismatch import measure
from samebit.train.optim import (
    build_optimizer,
    clip_gradients,
    finite_norm,
    learning_rate,
    set_learning_rates,
    trainable,
)
from samebit.train.pack import PackedBatch, pack_part
from samebit.train.quant_metrics import UpdateProbe, observe_activations
from samebit.types import Group


@dataclass
class Scores:
    """Per-token values of a rollout before any update, FP32 [all completion tokens] or None."""

    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    shadow: torch.Tensor | None = None
    value: torch.Tensor | None = None


class Trainer:
    """Owns the optimiser and everything an update needs. One per device, beside the engine.

    `reference` is the frozen first policy (KL); `shadow` a decoder of the same shape under the BF16
    plan (calibrated clipping). Both are None where nothing needs them.
    """

    def __init__(
        self,
        model: Decoder,
        config: Config,
        algorithm: Algorithm,
        correction: Correction,
        reference: Decoder | None = None,
        shadow: Decoder | None = None,
    ):
        self.model, self.config = model, config
        self.algorithm, self.correction = algorithm, correction
        self.reference, self.shadow = reference, shadow
        self.transform = Transform(
            config.rollout.temperature, config.rollout.top_k, config.rollout.top_p
        )
        self.needs = algorithm.needs | correction.needs
        self.value: nn.Linear | None = None
        if "critic" in self.needs:
            self.value = nn.Linear(model.config.hidden, 1).to(model.device)
            nn.init.zeros_(self.value.weight)
        self.optimizer = build_optimizer(self.parameters(), config.train)
        self.updates = 0
        """Optimiser steps taken or skipped so far."""
        self.skipped = 0
        """Steps skipped because a gradient was not finite."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every trained parameter by name."""
        found = trainable(self.model)
        if self.value is not None:
            found |= {f"value.{n}": p for n, p in self.value.named_parameters()}
        return found

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps per rollout."""
        return self.config.rl.mini_batches * self.config.rl.epochs

    def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Update on one rollout and refresh the weights; the step's metrics."""
        batches = self._pack(groups, range(len(groups)))
        scores, measured = self._score(batches)
        advantages = self._advantages(groups, scores)
        probe = UpdateProbe(self.model)
        metrics = Metrics(advantages.metrics).merge(measured)
        numbers: dict[str, float] = {}
        for epoch in range(self.config.rl.epochs):
            for part in self._mini_batches(groups):
                first = epoch == 0 and not numbers
                numbers = self._update(groups, part, scores, advantages, metrics, first, numbers)
        result = metrics.compute() | numbers | probe.measure()
        result["train/skipped_steps"] = float(self.skipped)
        return result

    def _pack(self, groups: Sequence[Group], part: range) -> list[PackedBatch]:
        budget = self.config.train.micro_batch_tokens
        return pack_part(groups, part, budget, self.model.device)

    def _mini_batches(self, groups: Sequence[Group]) -> list[range]:
        count, parts = len(groups), self.config.rl.mini_batches
        edges = [round(i * count / parts) for i in range(parts + 1)]
        return [range(a, b) for a, b in pairwise(edges) if b > a]

    def _score(self, batches: list[PackedBatch]) -> tuple[Scores, Metrics]:
        """What must be known before the first update, without gradient, and its mismatch."""
        scores, metrics = Scores(), Metrics()
        unified = self.model.plan.unified
        if unified:
            scores.old = torch.cat([b.rollout_logp for b in batches])
        before_update = self.updates_per_step > 1
        if before_update or "critic" in self.needs or (self.reference and not unified):
            logps, values = [], []
            for batch in batches:
                logp, _, value = self._forward_no_grad(self.model, batch)
                logps.append(logp)
                values.append(value)
                if before_update:
                    metrics = metrics.merge(self._mismatch(logp, batch))
            if not unified:
                scores.old = torch.cat(logps)
            if self.value is not None:
                scores.value = torch.cat([v for v in values if v is not None])
        if self.reference is not None:
            scores.reference = self._logps(self.reference, batches)
        if self.shadow is not None and self._shadow_due():
            self._sync_shadow()
            scores.shadow = self._logps(self.shadow, batches)
        return scores, metrics

    def _shadow_due(self) -> bool:
        step = self.updates // max(1, self.updates_per_step)
        return self.correction.shadow_every > 0 and step % self.correction.shadow_every == 0

    def _sync_shadow(self) -> None:
        assert self.shadow is not None
        with torch.no_grad():
            for mine, its in zip(self.model.parameters(), self.shadow.parameters(), strict=True):
                its.copy_(mine)
        self.shadow.refresh()

    def _logps(self, model: Decoder, batches: list[PackedBatch]) -> torch.Tensor:
        return torch.cat([self._forward_no_grad(model, batch)[0] for batch in batches])

    @torch.no_grad()
    def _forward_no_grad(
        self, model: Decoder, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self._forward(model, batch)

    def _forward(
        self, model: Decoder, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(log-probs, entropies, values) of a pack's completion tokens, FP32 [C]."""
        hidden = model(batch.ids, batch.layout, "train")
        rows = gather_rows(hidden, batch.predicting, model.ops)
        logp, entropy = model.log_prob(rows, batch.targets, self.transform)
        value = None
        if self.value is not None and model is self.model:
            value = self.value(rows.float())[:, 0]
        return logp, entropy, value

    def _mismatch(self, logp: torch.Tensor, batch: PackedBatch) -> Metrics:
        everything = torch.ones_like(batch.targets, dtype=torch.bool)
        stale = batch.version != self.model.version
        return measure(logp.detach(), batch.rollout_logp, everything, stale)

    def _advantages(self, groups: Sequence[Group], scores: Scores) -> Advantages:
        rewards = [r for g in groups for r in g.rewards]
        group_ids = [i for i, g in enumerate(groups) for _ in g.samples]
        lengths = [len(s.ids) for g in groups for s in g.samples]
        ratio = None
        if scores.reference is not None and scores.old is not None:
            ratio = scores.old - scores.reference
        known = outcomes(
            rewards, group_ids, lengths, self.config.rollout.max_tokens, scores.value, ratio
        )
        return self.algorithm.advantages(known)

    def _token_batch(
        self,
        batch: PackedBatch,
        scores: Scores,
        advantages: Advantages,
        outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> TokenBatch:
        logp, entropy, value = outputs
        at = batch.tokens
        first = int(batch.sequence[0])

        def pick(whole: torch.Tensor | None) -> torch.Tensor | None:
            return None if whole is None else whole[at].to(logp.device)

        old = pick(scores.old)
        advantage = pick(advantages.advantage_T)
        assert advantage is not None
        return TokenBatch(
            logp_T=logp,
            old_logp_T=logp.detach() if old is None else old,
            rollout_logp_T=batch.rollout_logp,
            advantage_T=advantage,
            mask_T=self._mask(batch, advantages),
            sequence_T=batch.sequence - first,
            num_sequences=int(batch.sequence[-1]) - first + 1,
            ref_logp_T=pick(scores.reference),
            shadow_logp_T=pick(scores.shadow),
            shadow_old_logp_T=pick(scores.shadow),
            entropy_T=entropy,
            value_T=value,
            old_value_T=pick(scores.value),
            return_T=pick(advantages.return_T),
        )

    @staticmethod
    def _mask(batch: PackedBatch, advantages: Advantages) -> torch.Tensor:
        return advantages.include_B.to(batch.sequence.device)[batch.sequence]

    def _update(
        self,
        groups: Sequence[Group],
        part: range,
        scores: Scores,
        advantages: Advantages,
        metrics: Metrics,
        first: bool,
        numbers: dict[str, float],
    ) -> dict[str, float]:
        """One optimiser step on the groups of `part`; merges into `metrics`, returns numbers."""
        batches = self._pack(groups, part)
        normaliser = self._normaliser(batches, advantages)
        observed: dict[str, list[float]] = {}
        remove = observe_activations(self.model, observed) if first else None
        for batch in batches:
            outputs = self._forward(self.model, batch)
            if remove is not None:
                remove()
                remove = None
            if self.updates_per_step == 1:
                metrics.update(metrics.merge(self._mismatch(outputs[0], batch)))
            tokens = self._token_batch(batch, scores, advantages, outputs)
            correction = self.correction
            if correction.prepares and tokens.shadow_logp_T is not None:
                correction = correction.prepare(tokens, *self.algorithm.clip_bounds)
            loss, found = self.algorithm.loss(tokens, normaliser, correction)
            metrics.update(metrics.merge(found))
            loss.backward()
        numbers = dict(numbers) | self._optimise()
        for role, (saturated, flushed, count) in observed.items():
            numbers[f"quant/activation_saturated_share/{role}"] = saturated / count
            numbers[f"quant/activation_flushed_share/{role}"] = flushed / count
        return numbers

    def _normaliser(self, batches: list[PackedBatch], advantages: Advantages) -> Normaliser:
        limit = self.config.rollout.max_tokens
        parts = [Normaliser.of(self._mask(b, advantages), b.sequence, limit) for b in batches]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _optimise(self) -> dict[str, float]:
        """Clip and step, or skip where a gradient is not finite; then requantise and clear."""
        parameters = list(self.parameters().values())
        norm = finite_norm(parameters)
        total = self.config.train.steps * self.updates_per_step
        rate = learning_rate(self.config.train, self.updates, total)
        numbers = {"train/grad_norm": norm, "train/learning_rate": rate}
        self.updates += 1
        if math.isfinite(norm):
            clip_gradients(parameters, norm, self.config.train.max_grad_norm)
            set_learning_rates(self.optimizer, rate, self.config.train)
            if norm > 0.0:
                self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.model.refresh()
        return numbers
