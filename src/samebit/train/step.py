"""The update of one rollout: scores, advantages, losses, optimiser steps, refresh, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from samebit.config import Config
from samebit.models.decoder import Decoder
from samebit.models.load import share_masters
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
    nonfinite_roles,
    set_learning_rates,
    trainable,
)
from samebit.train.pack import PackedBatch, pack_part
from samebit.train.quant_metrics import (
    Observed,
    UpdateProbe,
    activation_shares,
    observe_activations,
)
from samebit.train.score import Compared, Outputs, Scorer, Scores
from samebit.train.timing import PartTimer
from samebit.types import Group


class Rollout(Compared):
    """One step's groups with everything known about them before the first update."""

    def __init__(
        self,
        groups: Sequence[Group],
        scores: Scores,
        advantages: Advantages,
        device: torch.device | str = "cpu",
    ):
        super().__init__(groups, Metrics(advantages.metrics))
        self.scores = scores
        self.included: list[bool] = advantages.include_B.tolist()
        """Of each sequence, whether it has a verdict."""
        return_T = advantages.return_T
        self.advantages = replace(
            advantages,
            advantage_T=advantages.advantage_T.to(device),
            include_B=advantages.include_B.to(device),
            return_T=None if return_T is None else return_T.to(device),
        )
        """On the device: micro-batches cut their tokens out of them."""

    def mask(self, batch: PackedBatch) -> torch.Tensor:
        """Bool [C]: tokens of sequences with a verdict."""
        return self.advantages.include_B[batch.sequence]

    def normaliser(self, batches: list[PackedBatch], limit: int) -> Normaliser:
        """What the losses of these micro-batches together divide by, counted on the host."""
        samples = [s for g in self.groups for s in g.samples]
        members = range(
            batches[0].first_sequence, batches[-1].first_sequence + batches[-1].num_sequences
        )
        kept = [i for i in members if self.included[i]]
        return Normaliser(
            num_tokens=sum(len(samples[i].ids) for i in kept),
            num_sequences=len(kept),
            max_length=limit,
        )


class Trainer:
    """Owns the optimiser and everything an update needs. One per device, beside the engine.

    reference: the frozen first policy (KL). shadow: a decoder of the same shape under the BF16 plan
    (calibrated clipping); it is made to share the policy's masters. None where nothing needs them.
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
        self.needs = algorithm.needs | correction.needs
        if config.train.recompute != "auto":  # else whoever planned the memory has set it
            model.recompute = config.train.recompute
        self.value: nn.Linear | None = None
        if "critic" in self.needs:
            self.value = value = nn.Linear(model.config.hidden, 1, device=model.device)
            for parameter in value.parameters():
                nn.init.zeros_(parameter)
        r = config.rollout
        transform = Transform(r.temperature, r.top_k, r.top_p)
        if shadow is not None:
            share_masters(shadow, model)
        self.scorer = Scorer(model, self.value, reference, shadow, transform)
        self.optimizer = build_optimizer(self.parameters(), config.train)
        self.steps = 0
        """Rollouts trained on so far."""
        self.updates = 0
        """Where the learning rate's schedule is: `updates_per_step` a step, however few were made."""
        self.skipped = 0
        """Optimiser steps skipped because a gradient was not finite."""
        self.nonfinite_roles: tuple[str, ...] = ()
        """Roles of the parameters whose gradients were not finite in the last skipped update."""
        self.before_update: Callable[[Rollout], None] | None = None
        """Called once a step, when log-probs are known and no weight has moved; may raise."""
        self._correction_before = correction
        self._timer = PartTimer(model.device)
        """Of the step being run."""

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
        """Update on one rollout and refresh the weights; the step's metrics.

        Mismatch is measured at the weights the tokens were drawn under, on the forward that is
        differentiated (on the scoring forward for tokens whose turn comes after an update).
        """
        self._correction_before = self.correction
        timer = self._timer = PartTimer(self.model.device)
        with timer("score"):
            whole = self._pack(groups, range(len(groups)))
            rollout = self._prepare(groups, whole)
            probe = UpdateProbe(self.model)
        parts = self._mini_batches(len(groups)) * self.config.rl.epochs
        numbers: dict[str, float] = {}
        for index, part in enumerate(parts):
            batches = whole if len(part) == len(groups) else self._pack(groups, part)
            self._prepare_correction(rollout, batches, last=index == len(parts) - 1)
            numbers |= self._update(rollout, batches, observe=index == 0)
        if self.correction.moves_bounds:
            rollout.merge(self.correction.bound_metrics(*self.algorithm.clip_bounds))
        self.steps += 1
        self.updates += self.updates_per_step - len(parts)  # fewer groups than mini-batches
        numbers["train/skipped_steps"] = float(self.skipped)
        return rollout.metrics.compute() | numbers | probe.measure() | timer.seconds()

    def pass_over(self) -> None:
        """A step without a group to train on: only the schedule goes on."""
        self.updates += self.updates_per_step

    def _pack(self, groups: Sequence[Group], part: range) -> list[PackedBatch]:
        """Micro-batches with everything on the device, so that no forward waits for a copy."""
        budget = self.config.train.micro_batch_tokens
        batches = pack_part(groups, part, budget, self.model.device)
        for batch in batches:
            self.model.ops.prepare_packed(batch.layout)
        return batches

    def _mini_batches(self, groups: int) -> list[range]:
        parts = self.config.rl.mini_batches
        edges = [round(i * groups / parts) for i in range(parts + 1)]
        return [range(a, b) for a, b in pairwise(edges) if b > a]

    def _prepare(self, groups: Sequence[Group], batches: list[PackedBatch]) -> Rollout:
        """Scores before the first update, and the advantages."""
        scores, measured = self._scores(batches), Metrics()
        observed: list[torch.Tensor] = []
        if self._scores_first:
            outputs = self.scorer.score(self.model, batches)
            if self.updates_per_step > 1:
                for (logp, _, _), batch in zip(outputs, batches, strict=True):
                    measured = measured.merge(self._mismatch(logp, batch))
                    observed.append(logp.detach())
            scored = torch.cat([logp for logp, _, _ in outputs])
            scores.old = scored if scores.old is None else _without_gaps(scores.old, scored)
            if self.value is not None:
                scores.value = torch.cat([v for _, _, v in outputs if v is not None])
        rollout = Rollout(groups, scores, self._advantages(groups, scores), self.model.device)
        rollout.merge(measured)
        rollout.observed = observed
        return rollout

    @property
    def _old_is_rollout(self) -> bool:
        """Whether the sampler's log-probs are the old ones: same function, or asked for (naive)."""
        return self.model.plan.unified or "proximal" not in self.needs

    @property
    def _scores_first(self) -> bool:
        """Whether something needs the policy's own forward before the first update."""
        needs_old = not self._old_is_rollout and (
            self.correction.prepares or self.scorer.reference is not None
        )
        return self.updates_per_step > 1 or self.value is not None or needs_old

    def _scores(self, batches: list[PackedBatch]) -> Scores:
        scores = Scores()
        if self._old_is_rollout:
            scores.old = torch.cat([b.rollout_logp for b in batches])
        if self.scorer.reference is not None:
            scores.reference = self.scorer.log_probs(self.scorer.reference, batches)
        every = self.correction.shadow_every
        if self.scorer.shadow is not None and every and self.steps % every == 0:
            scores.shadow_old = self.scorer.shadow_log_probs(batches)
        return scores

    def _mismatch(self, logp: torch.Tensor, batch: PackedBatch) -> Metrics:
        everything = torch.ones_like(batch.targets, dtype=torch.bool)
        stale = batch.version != self.model.version
        return measure(logp.detach(), batch.rollout_logp, everything, stale, self.correction.cap)

    def _advantages(self, groups: Sequence[Group], scores: Scores) -> Advantages:
        rewards = [r for g in groups for r in g.rewards]
        group_ids = [i for i, g in enumerate(groups) for _ in g.samples]
        lengths = [len(s.ids) for g in groups for s in g.samples]
        ratio = None
        if scores.reference is not None and scores.old is not None:
            ratio = (scores.old - scores.reference).cpu()
        value = None if scores.value is None else scores.value.cpu()
        limit = self.config.rollout.max_tokens
        return self.algorithm.advantages(outcomes(rewards, group_ids, lengths, limit, value, ratio))

    def _prepare_correction(self, rollout: Rollout, batches: list[PackedBatch], last: bool) -> None:
        """Give the correction all tokens of the coming update, with shadows where it calibrates."""
        if not self.correction.prepares:
            return
        calibrates = last and rollout.scores.shadow_old is not None
        logp = shadow = None
        if calibrates:
            logp = self.scorer.log_probs(self.model, batches)
            shadow = self.scorer.shadow_log_probs(batches)
        tokens = slice(batches[0].first_token, batches[-1].tokens.stop)
        if logp is None:
            assert rollout.scores.old is not None
            logp = rollout.scores.old[tokens]
        whole = self._pack_whole(batches)
        batch = self._token_batch(rollout, whole, (logp, torch.zeros_like(logp), None), shadow)
        self.correction = self.correction.prepare(batch, *self.algorithm.clip_bounds)

    @staticmethod
    def _pack_whole(batches: list[PackedBatch]) -> PackedBatch:
        """The token side of several packs as one (its rows are not to be fed)."""
        first = batches[0]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(b, name) for b in batches])
            for name in ("targets", "rollout_logp", "version", "sequence", "group")
        }
        return PackedBatch(
            ids=first.ids,
            layout=first.layout,
            predicting=first.predicting,
            first_token=first.first_token,
            first_sequence=first.first_sequence,
            num_sequences=sum(b.num_sequences for b in batches),
            **joined,
        )

    def _token_batch(
        self,
        rollout: Rollout,
        batch: PackedBatch,
        outputs: Outputs,
        shadow: torch.Tensor | None = None,
    ) -> TokenBatch:
        logp, entropy, value = outputs
        scores, at = rollout.scores, batch.tokens

        def pick(whole: torch.Tensor | None) -> torch.Tensor | None:
            return None if whole is None else whole[at].to(logp.device)

        old, advantage = pick(scores.old), pick(rollout.advantages.advantage_T)
        assert advantage is not None
        return TokenBatch(
            logp_T=logp,
            old_logp_T=logp.detach() if old is None else _without_gaps(old, logp.detach()),
            rollout_logp_T=batch.rollout_logp,
            advantage_T=advantage,
            mask_T=rollout.mask(batch),
            sequence_T=batch.sequence - batch.first_sequence,
            num_sequences=batch.num_sequences,
            ref_logp_T=pick(scores.reference),
            shadow_logp_T=shadow,
            shadow_old_logp_T=None if shadow is None else pick(scores.shadow_old),
            entropy_T=entropy,
            value_T=value,
            old_value_T=pick(scores.value),
            return_T=pick(rollout.advantages.return_T),
        )

    def _update(
        self, rollout: Rollout, batches: list[PackedBatch], observe: bool
    ) -> dict[str, float]:
        """One optimiser step; merges metrics into the rollout's, returns the plain numbers."""
        normaliser = rollout.normaliser(batches, self.config.rollout.max_tokens)
        observed: Observed = {}
        for index, batch in enumerate(batches):
            remove = observe_activations(self.model, observed) if observe and not index else None
            self.micro_batch(rollout, batch, normaliser)
            if remove is not None:
                remove()
        if observe and self.before_update is not None:
            self._look_before(rollout, self.before_update)
        with self._timer("optimizer"):
            numbers = self._optimise()
        return numbers | activation_shares(observed)

    def micro_batch(self, rollout: Rollout, batch: PackedBatch, normaliser: Normaliser) -> None:
        """Forward, loss and backward of one pack; gradients add up, metrics go to the rollout's."""
        with self._timer("forward"):
            planned = self._planned(rollout, batch, normaliser)
            outputs = self.scorer.forward(self.model, batch, planned)
            if self.updates_per_step == 1:
                rollout.merge(self._mismatch(outputs[0], batch))
                rollout.observed.append(outputs[0].detach())
            tokens = self._token_batch(rollout, batch, outputs)
            loss, found = self.algorithm.loss(tokens, normaliser, self.correction)
            rollout.merge(found)
        with self._timer("backward"):
            loss.backward()

    def _planned(
        self, rollout: Rollout, batch: PackedBatch, normaliser: Normaliser
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(the sampler's log-probs, dloss/dlogp there), where the trainer's will be the same bits.

        None where they may differ (run.on_mismatch = "warn" trains on where they do), where entropy or a
        value carries gradient, or where the backend gains nothing by it.
        """
        model = self.model
        same = model.plan.unified and self.updates_per_step == 1 and self.value is None
        same = same and self.config.run.on_mismatch == "stop"
        if not (same and model.ops.PLANS_HEAD and batch.drawn_at == model.version):
            return None
        logp = batch.rollout_logp.clone().requires_grad_()
        entropy = torch.zeros_like(logp, requires_grad=True)
        tokens = self._token_batch(rollout, batch, (logp, entropy, None))
        loss, _ = self.algorithm.loss(tokens, normaliser, self.correction)
        dlogp, dentropy = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)
        if dlogp is None or dentropy is not None:
            return None
        return batch.rollout_logp, dlogp

    def _look_before(self, rollout: Rollout, look: Callable[[Rollout], None]) -> None:
        """Call `look` with everything as it was when the step began, so that it may save that."""
        current, self.correction = self.correction, self._correction_before
        look(rollout)
        self.correction = current

    def _optimise(self) -> dict[str, float]:
        """Clip and step, or skip where a gradient is not finite; then requantise and clear.

        A gradient of exactly zero (everything masked, or all groups equal) moves nothing: neither
        weights nor moments nor decay.
        """
        parameters = list(self.parameters().values())
        norm = finite_norm(parameters)
        total = self.config.train.steps * self.updates_per_step
        rate = learning_rate(self.config.train, self.updates, total)
        self.updates += 1
        if math.isfinite(norm):
            clip_gradients(parameters, norm, self.config.train.max_grad_norm)
            set_learning_rates(self.optimizer, rate, self.config.train)
            if norm > 0.0:
                self.optimizer.step()
        else:
            self.skipped += 1
            self.nonfinite_roles = nonfinite_roles(self.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        self.model.refresh()
        return {"train/grad_norm": norm, "train/learning_rate": rate}


def _without_gaps(old: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`old` with the trainer's own log-prob where the sampler gave none (NaN): ratio 1 there."""
    return torch.where(old.isnan(), own, old)
