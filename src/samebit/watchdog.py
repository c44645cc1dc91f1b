"""Stops a run whose promise is broken: log-probs that differ in a unified recipe, or numbers that
are not finite for several steps. It names the place and leaves a bundle for `samebit replay`.

A mismatch is seen after the forward that is differentiated and before the optimiser moves a weight,
so the checkpoint saved then holds the very weights that drew the tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samebit.bundle import bundle_folder, write_bundle
from samebit.config import Config
from samebit.diagnosis import Diagnosis, diagnose_mismatch, first_nonfinite, token_faults
from samebit.errors import RunStopped
from samebit.models.decoder import Decoder
from samebit.train.rollout import Rollout
from samebit.train.score import Compared
from samebit.train.step import Trainer

log = logging.getLogger(__name__)


class Watchdog:
    """One a run. save: writes a checkpoint of the last finished step and returns its folder."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        save: Callable[[], Path],
        note: Callable[[str], None],
    ) -> None:
        self.config, self.trainer = config, trainer
        self.save, self.note = save, note
        self.step = 0
        """The step being run."""
        self.warned = False
        self._skipped_before = trainer.skipped
        self._in_a_row = 0
        self._rollout: Rollout | None = None
        trainer.before_update = self.before_update

    @property
    def model(self) -> Decoder:
        """The policy."""
        return self.trainer.model

    def before_update(self, rollout: Rollout) -> None:
        """Judge log-probs before the first update of a step. RunStopped unless only warning."""
        self._rollout = rollout
        self.judge(rollout, "mismatch")

    def judge(self, compared: Compared, what: str) -> None:
        """Leave a bundle where a bit differs in a unified recipe; RunStopped unless only warning, once."""
        if not self.model.plan.unified or self.warned:
            return
        found = compared.numbers()
        # a token without a sampler's log-prob is counted apart (mismatch/missing_tokens)
        if found.get("mismatch/tokens_differing", 0.0) <= found.get("mismatch/missing_tokens", 0.0):
            return
        logp = compared.trainer_logp().numpy()
        if not bool((logp == logp).all()):
            return  # NaN in the forward: not a mismatch but a broken number, see after_step
        transform = self.trainer.scorer.transform
        diagnosis = diagnose_mismatch(self.model, compared.groups, logp, transform, self.step)
        self._stop_or_warn(diagnosis, compared, f"{what} is not 0 in a unified recipe")

    def judge_waiting(self, compared: Compared) -> None:
        """`judge` of groups that wait. NaN is a mismatch of theirs: no update comes that it would spoil.

        Skipping updates (`after_step`) would not help, and others would move weights meanwhile.
        """
        if not self.model.plan.unified or self.warned or not compared.groups:
            return
        logp = compared.trainer_logp()
        if not bool(logp.isnan().any()):
            self.judge(compared, "mismatch of unfinished samples")
            return
        reason = "NaN in the trainer's log-probs of unfinished samples"
        self._stop_or_warn(self._waiting_nan(compared), compared, reason)

    def _stop_or_warn(self, diagnosis: Diagnosis, compared: Compared, reason: str) -> None:
        """What run.on_mismatch asks for, a bundle left either way."""
        bundle = self._leave_bundle(diagnosis, compared, {})
        if self.config.run.on_mismatch == "stop":
            raise self._stop(diagnosis, bundle, reason)
        self.warned = True
        log.warning("%s; bundle: %s", reason, bundle)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Count steps in a row with a number that is not finite; RunStopped at the limit."""
        skipped = self.trainer.skipped > self._skipped_before
        self._skipped_before = self.trainer.skipped
        loss = metrics.get("rl/loss", 0.0)
        bad = skipped or not math.isfinite(loss)
        self._in_a_row = self._in_a_row + 1 if bad else 0
        rollout, self._rollout = self._rollout, None
        limit = self.config.run.max_skipped_steps
        if bad:
            roles = self.trainer.nonfinite_roles
            log.warning(
                "step %d: loss %r, gradients not finite in %s; the update is skipped (%d in a row)",
                self.step,
                loss,
                ", ".join(roles) or "none",
                self._in_a_row,
            )
        if not (limit and self._in_a_row >= limit) or rollout is None:
            return
        diagnosis = self._nonfinite(rollout, loss)
        bundle = self._leave_bundle(diagnosis, rollout, {"metrics": _plain(metrics)})
        reason = f"loss or gradient was not finite for {self._in_a_row} steps in a row"
        raise self._stop(diagnosis, bundle, reason)

    def _nonfinite(self, rollout: Rollout, loss: float) -> Diagnosis:
        logp = rollout.trainer_logp()
        bad = int((~logp.isfinite()).sum())
        role, where = first_nonfinite(self.model, rollout.groups)
        roles = ", ".join(self.trainer.nonfinite_roles)
        if role:
            phase = "forward: an operator's output is not finite"
        elif not math.isfinite(loss):
            phase = "loss: the forward is finite, the loss is not"
        else:
            phase = "backward: forward and loss are finite, the gradient is not"
        found = role or f"gradients of {roles}"
        return Diagnosis("non-finite", self.step, phase, found, where, (), bad, len(logp))

    def _waiting_nan(self, compared: Compared) -> Diagnosis:
        logp = compared.trainer_logp()
        faults = token_faults(compared.groups, logp.numpy(), None)
        tokens = tuple(f for f in faults if math.isnan(f.trainer))
        role, where = first_nonfinite(self.model, compared.groups)
        if role:
            phase = "forward: an operator's output is not finite"
        else:
            phase = "forward: no operator of a block, each sample alone"
            role, where = "head or packing", "NaN in the head, or of the packed batch only"
        bad = int(logp.isnan().sum())
        return Diagnosis("non-finite", self.step, phase, role, where, tokens[:50], bad, len(logp))

    def _leave_bundle(
        self, diagnosis: Diagnosis, compared: Compared, more: Mapping[str, Any]
    ) -> Path:
        for line in diagnosis.lines():
            self.note(line)
        run = Path(self.config.run.out)
        about = {
            "diagnosis": diagnosis.to_dict(),
            "plan": self.model.plan.digest,
            "version": self.model.version,
            **more,
        }
        logp, device = compared.trainer_logp().numpy(), self.model.device
        checkpoint = self.save()
        if not compared.ranks.leads:
            return bundle_folder(run, self.step)
        return write_bundle(
            run, self.step, self.config, compared.groups, logp, checkpoint, device, about
        )

    def _stop(self, diagnosis: Diagnosis, bundle: Path, reason: str) -> RunStopped:
        text = (
            f"{reason} (step {self.step}, {diagnosis.role}; {diagnosis.where}). No weight was "
            f"moved. Run it again with: samebit replay {bundle}"
        )
        return RunStopped(text, str(bundle))


def _plain(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {
        key: value if math.isfinite(value) else repr(value)
        for key, value in metrics.items()
        if not key.startswith(("time/", "perf/"))
    }
