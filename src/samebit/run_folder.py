"""What a run writes into its folder, and by whom: of several processes only the leader does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from samebit import partial
from samebit.bundle import pinned_checkpoints
from samebit.config import Config
from samebit.config_dump import dump
from samebit.lock import FolderLock
from samebit.log import MetricsLog, replace_file
from samebit.partial import Held
from samebit.quant.plan import Plan
from samebit.ranks import Ranks
from samebit.reporter import Reporter
from samebit.run_checks import require_same_plan, require_unused
from samebit.train import checkpoint
from samebit.train.checkpoint import Progress
from samebit.train.step import Trainer
from samebit.types import Group


def hold(config: Config, ranks: Ranks) -> AbstractContextManager[Any]:
    """The run's lock on its folder: the leader's."""
    return FolderLock(config.run.out) if ranks.leads else nullcontext()


class RunFolder:
    """The folder run.out. ValueError where it holds a run that is not to go on."""

    def __init__(self, config: Config, resume: bool, ranks: Ranks, report: Reporter) -> None:
        self.config, self.resume, self.ranks, self.report = config, resume, ranks, report
        self.path = Path(config.run.out)
        self.checkpoints = self.path / "checkpoints"
        self._log: MetricsLog | None = None
        if ranks.leads:
            if note := require_unused(self.path, resume):
                report.note(note)
            self.path.mkdir(parents=True, exist_ok=True)
            checkpoint.sweep(self.checkpoints)
        ranks.wait()

    def record_plan(self, plan: Plan) -> None:
        """Write plan.json; ValueError where the run was made under another."""
        if self.resume:
            require_same_plan(self.path, plan)
        content = {"digest": plan.digest, "unified": plan.unified} | plan.to_dict()
        if self.ranks.leads:
            replace_file(self.path / "plan.json", json.dumps(content, indent=1).encode())
        self.report.note(plan.describe())

    def record_config(self) -> None:
        """Write config.toml once nothing can be refused any more; say what a resumed run changes."""
        path, text = self.path / "config.toml", dump(self.config)
        if self.resume and path.exists():
            before = set(path.read_text(encoding="utf-8").splitlines())
            changed = [line for line in text.splitlines() if line and line not in before]
            if changed:
                self.report.note(f"resumed with another configuration: {'; '.join(changed)}")
        if self.ranks.leads:
            replace_file(path, text.encode())

    def open_log(self, step: int, pending: bool) -> None:
        """Go on with the logs after `step`; pending: its own line is still to come."""
        if self.ranks.leads:
            self._log = MetricsLog(self.path, step, pending)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """A step's metrics."""
        if self._log is not None:
            self._log.write(step, metrics)

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        """A few of a step's samples."""
        if self._log is not None:
            self._log.samples(step, groups, self.config.run.save_samples)

    def save(
        self,
        trainer: Trainer,
        progress: Progress,
        about: dict[str, Any],
        pending: dict[str, float],
        held: Sequence[Held],
    ) -> Path:
        """Write a checkpoint of the last finished step; its folder."""
        if not self.ranks.leads:
            return self.checkpoints / f"step_{progress.step:06d}"
        transform = trainer.scorer.transform
        machine = {"threads": torch.get_num_threads(), "gradient_leaves": trainer.leaves}
        return checkpoint.save(
            self.checkpoints,
            trainer,
            progress,
            self.config.run.keep_checkpoints,
            about
            | {"machine": machine}
            | ({"pending": pending} if pending else {})
            | ({"held": partial.about(held, transform)} if held else {}),
            pinned_checkpoints(self.path),
            {partial.FOLDER: partial.tensors_of(held)} if held else {},
        )

    def close(self) -> None:
        """Flush the logs."""
        if self._log is not None:
            self._log.close()
