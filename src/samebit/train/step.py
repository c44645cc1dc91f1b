"""The update of one rollout: scores, advantages, losses, optimiser steps, refresh, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from samebit.config import Config
from samebit.models.decoder import Decoder
from samebit.models.load import share_masters
from samebit.ranks import ALONE, Ranks
from samebit.reference.sampling import Transform
from samebit.rl.advantage import outcomes
from samebit.rl.api import Advantages, Algorithm, Correction, Normaliser, TokenBatch
from samebit.rl.mismatch import measure
from samebit.train.leaves import GradientTree, leaves_of
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
from samebit.train.rollout import Rollout, Share
from samebit.train.score import Outputs, Scorer, Scores
from samebit.train.timing import PartTimer
from samebit.types import Group


class Trainer:
    """Owns the optimiser and everything an update needs. One per device, beside the engine.

    reference: the frozen first policy (KL). shadow: a decoder of the same shape under the BF16 plan
    (calibrated clipping); it is made to share the policy's masters. None where nothing needs them.
    ranks: the run's processes, each with a trainer that is given the same groups.
    """

    def __init__(
        self,
        model: Decoder,
        config: Config,
        algorithm: Algorithm,
        correction: Correction,
        reference: Decoder | None = None,
        shadow: Decoder | None = None,
        ranks: Ranks = ALONE,
    ):
        self.model, self.config, self.ranks = model, config, ranks
        self.leaves = leaves_of(config.train.gradient_leaves, ranks.size)
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
            share = whole if len(part) == len(groups) else self._pack(groups, part)
            self._prepare_correction(rollout, share, last=index == len(parts) - 1)
            numbers |= self._update(rollout, share, observe=index == 0)
        if self.correction.moves_bounds and self.ranks.leads:
            rollout.merge(self.correction.bound_metrics(*self.algorithm.clip_bounds))
        self.steps += 1
        self.updates += self.updates_per_step - len(parts)  # fewer groups than mini-batches
        numbers["train/skipped_steps"] = float(self.skipped)
        self.require_same_weights()
        return rollout.numbers() | numbers | probe.measure() | timer.seconds()

    def require_same_weights(self) -> None:
        """RuntimeError where the processes' masters differ: their bits as whole numbers, added up exactly."""
        if self.ranks.size > 1:
            masters = [p.detach().view(torch.int32) for p in self.parameters().values()]
            sums = torch.stack([bits.sum(dtype=torch.int64) for bits in masters])
            self.ranks.require_same(
                "the sum of each weight's bits", sums.tolist(), "a device may be faulty"
            )

    def pass_over(self) -> None:
        """A step without a group to train on: only the schedule goes on."""
        self.updates += self.updates_per_step

    def _pack(self, groups: Sequence[Group], part: range) -> Share:
        """This process's micro-batches, with everything on the device, so that no forward waits for a copy."""
        budget, device = self.config.train.micro_batch_tokens, self.model.device
        share = Share.pack(groups, part, budget, device, self.leaves, self.ranks)
        for batch in share.batches:
            self.model.ops.prepare_packed(batch.layout)
        return share

    def _mini_batches(self, groups: int) -> list[range]:
        parts = self.config.rl.mini_batches
        edges = [round(i * groups / parts) for i in range(parts + 1)]
        return [range(a, b) for a, b in pairwise(edges) if b > a]

    def _prepare(self, groups: Sequence[Group], share: Share) -> Rollout:
        """Scores before the first update, and the advantages: everybody's."""
        scores = self._scores(share)
        outputs: list[list[Outputs]] = []
        if self._scores_first:
            outputs = [self.scorer.score(self.model, leaf) for leaf in share.leaves]
            each = [output for leaf in outputs for output in leaf]
            scored = self._everybodys([logp for logp, _, _ in each])
            scores.old = scored if scores.old is None else _without_gaps(scores.old, scored)
            if self.value is not None:
                scores.value = self._everybodys([v for _, _, v in each if v is not None])
        advantages = self._advantages(groups, scores)
        rollout = Rollout(groups, scores, advantages, self.model.device, self.ranks)
        if self.updates_per_step > 1:
            for leaf, (found, batches) in enumerate(zip(outputs, share.leaves, strict=True)):
                for (logp, _, _), batch in zip(found, batches, strict=True):
                    self._compare(rollout, logp, batch, leaf)
        return rollout

    def _everybodys(self, mine: Sequence[torch.Tensor]) -> torch.Tensor:
        """FP32 of all completion tokens of an update, from each process's own."""
        return self.ranks.cat(mine, self.model.device)

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

    def _scores(self, share: Share) -> Scores:
        scores, batches = Scores(), share.batches
        if self._old_is_rollout:
            scores.old = self._everybodys([b.rollout_logp for b in batches])
        if self.scorer.reference is not None:
            found = self.scorer.log_probs(self.scorer.reference, batches)
            scores.reference = self._everybodys(found)
        every = self.correction.shadow_every
        if self.scorer.shadow is not None and every and self.steps % every == 0:
            scores.shadow_old = self._everybodys(self.scorer.shadow_log_probs(batches))
        return scores

    def _compare(self, rollout: Rollout, logp: torch.Tensor, batch: PackedBatch, leaf: int) -> None:
        """Measure the mismatch of a micro-batch."""
        everything = torch.ones_like(batch.targets, dtype=torch.bool)
        stale = batch.version != self.model.version
        logp, cap = logp.detach(), self.correction.cap
        rollout.merge(measure(logp, batch.rollout_logp, everything, stale, cap), leaf)
        rollout.observed.append(logp)

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

    def _prepare_correction(self, rollout: Rollout, share: Share, last: bool) -> None:
        """Give the correction all tokens of the coming update, with shadows where it calibrates."""
        if not self.correction.prepares:
            return
        calibrates = last and rollout.scores.shadow_old is not None
        whole = self._pack_whole(rollout, share)
        if calibrates:
            logp = self._everybodys(self.scorer.log_probs(self.model, share.batches))
            shadow = self._everybodys(self.scorer.shadow_log_probs(share.batches))
        else:
            assert rollout.scores.old is not None
            logp, shadow = rollout.scores.old[whole.tokens], None
        batch = self._token_batch(rollout, whole, (logp, torch.zeros_like(logp), None), shadow)
        self.correction = self.correction.prepare(batch, *self.algorithm.clip_bounds)

    def _pack_whole(self, rollout: Rollout, share: Share) -> PackedBatch:
        """The token side of everybody's packs as one (its rows are not to be fed)."""
        batches = share.batches
        if self.ranks.size > 1:
            budget = self.config.train.micro_batch_tokens
            batches = pack_part(rollout.groups, share.part, budget, self.model.device)
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

    def _update(self, rollout: Rollout, share: Share, observe: bool) -> dict[str, float]:
        """One optimiser step; merges metrics into the rollout's, returns the plain numbers."""
        normaliser = rollout.normaliser(share.part, self.config.rollout.max_tokens)
        observed: Observed = {}
        remove = observe_activations(self.model, observed) if observe else _nothing
        tree = GradientTree(list(self.parameters().values()))
        for leaf, batches in enumerate(share.leaves):
            for batch in batches:
                self.micro_batch(rollout, batch, normaliser, leaf)
                remove()  # the first is enough
            tree.end_leaf(last=leaf == len(share.leaves) - 1)
        remove()
        if observe and self.before_update is not None:
            self._look_before(rollout, self.before_update)
        if self.ranks.size > 1:
            with self._timer("exchange"):
                tree.add_others(self.ranks)
        with self._timer("optimizer"):
            numbers = self._optimise()
        return numbers | activation_shares(observed)

    def micro_batch(
        self, rollout: Rollout, batch: PackedBatch, normaliser: Normaliser, leaf: int = 0
    ) -> None:
        """Forward, loss and backward of one pack; gradients add up, metrics go to the rollout's."""
        with self._timer("forward"):
            planned = self._planned(rollout, batch, normaliser)
            outputs = self.scorer.forward(self.model, batch, planned)
            if self.updates_per_step == 1:
                self._compare(rollout, outputs[0], batch, leaf)
            tokens = self._token_batch(rollout, batch, outputs)
            loss, found = self.algorithm.loss(tokens, normaliser, self.correction)
            rollout.merge(found, leaf)
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


def _nothing() -> None:
    pass


def _without_gaps(old: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`old` with the trainer's own log-prob where the sampler gave none (NaN): ratio 1 there."""
    return torch.where(old.isnan(), own, old)
