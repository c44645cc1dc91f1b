"""The on-policy loop: with collect.py, all that knows engine, trainer, algorithm and task.

prompts -> engine.generate -> task.reward -> algorithm.select (collect.py) -> trainer.step ->
engine.refresh. Prompts, samples and noise are functions of (seed, counters), so stopping and resuming
changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from samebit import partial
from samebit.canary import Canary
from samebit.clock import Clock
from samebit.collect import Collector
from samebit.config import Config
from samebit.engine.api import load_engine
from samebit.errors import RunLeft, RunStopped
from samebit.models.decoder import Decoder
from samebit.models.load import freeze, load_model, plan_for
from samebit.models.source import fingerprint
from samebit.models.source import resolve as resolve_model
from samebit.models.tokenizer import Tokenizer
from samebit.partial import Held, compare_held, held_metrics
from samebit.quant.plan import load_recipe
from samebit.ranks import ALONE, Ranks, join, world
from samebit.reporter import Reporter
from samebit.run_checks import (
    Checks,
    available_memory,
    choose_device,
    describe_memory,
    describe_processes,
    other_machine,
    out_of_memory,
    planned_memory,
    require_divisible,
    require_enough_steps,
    set_threads,
    with_leaves,
)
from samebit.run_folder import RunFolder, hold
from samebit.signals import Signals, lost_steps
from samebit.train import checkpoint
from samebit.train.checkpoint import Progress
from samebit.train.invariant import apply_invariant_scale
from samebit.train.profile import kernels_of, write_table
from samebit.train.roofline import known_seconds, step_rates
from samebit.train.step import Trainer
from samebit.types import Group, Prompt
from samebit.watchdog import Watchdog

log = logging.getLogger(__name__)

EVALUATION_SAMPLES = 1 << 40
"""First sample id of evaluations: their noise never meets training's, and repeats each time."""


class Run:
    """Everything one run holds. Building it checks all that can be checked before any work."""

    def __init__(self, config: Config, resume: bool, report: Reporter, ranks: Ranks = ALONE):
        config = with_leaves(config, ranks.size)
        self.config, self.report, self.ranks = config, report, ranks
        checks = Checks(config)
        self.task, self.sampling = checks.task, checks.sampling
        self.files = RunFolder(config, resume, ranks, report)
        self.folder = self.files.path
        set_threads(config)
        with ranks.leader_first():  # others find what it fetched
            model_folder = resolve_model(config.model)
        self.fingerprint = fingerprint(model_folder)
        device = choose_device(config)
        available = available_memory(config, device)
        self.memory = planned_memory(config, checks, model_folder, available)
        for line in describe_processes(config, ranks.size):
            report.note(line)
        report.note(describe_memory(config, self.memory, available))
        with self._within_memory("load"):
            self.model = load_model(model_folder, checks.recipe, device)
            self.model.recompute = self.memory.recompute
            self.files.record_plan(self.model.plan)
            scale_at_start(self.model, config)
            self.tokenizer = Tokenizer(model_folder, self.model.config)
            self.task.bind(self.tokenizer)
            self.trainer = build_trainer(self.model, config, checks, model_folder, ranks)
        self.engine = load_engine(config.rollout.engine)(
            self.model, config.rollout, self.tokenizer, config.seed
        )
        self.collector = Collector(
            config, self.task, self.engine, checks.algorithm, self.sampling, report, ranks
        )
        self.canary = Canary.of(self.model, config.run.canary, self.sampling)
        self.clock = Clock()
        """Of the step being run."""
        self.progress = Progress()
        """The last finished step; weights and optimiser are those of its end outside an update."""
        self.pending: dict[str, float] = {}
        """Metrics of the last finished step while its evaluation is not done."""
        self.held: tuple[Held, ...] = ()
        """Groups that the last finished step began and did not finish."""
        self.saved_step = 0
        """Of the last checkpoint; 0 while there is none."""
        self.updating = False
        """Whether weights and optimiser may be between two steps: then no checkpoint is made of them."""
        self.signals = Signals(self.unsaved)
        if resume:
            self._resume()
        self._require_same_start()
        self.watchdog = Watchdog(config, self.trainer, self.save, report.note)
        if self.finished:
            done = self.progress.step
            report.note(f"nothing to do: all {done} steps are done (more with --steps)")
        else:
            self.files.record_config()
        self.files.open_log(self.progress.step, bool(self.pending))

    @property
    def about(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the run that resumes it."""
        return {
            "seed": self.config.seed,
            "model": self.config.model,
            "model_fingerprint": self.fingerprint,
            "invariant_scale": self.config.train.invariant_scale,
        }

    def _resume(self) -> None:
        found = checkpoint.newest(self.files.checkpoints)
        if found is None:
            self.report.note("no complete checkpoint to resume from: starting at step 0")
            return
        self.progress = checkpoint.restore(found, self.trainer, self.about)
        self.saved_step = self.progress.step
        self.pending = checkpoint.extra(found, "pending")
        about, transform = checkpoint.extra(found, "held"), self.trainer.scorer.transform
        self.held = partial.read_held(found, about, self.task, transform)
        require_enough_steps(self.config, self.progress.step)
        self.report.note(f"resumed from {found}")
        machine = checkpoint.extra(found, "machine")
        if not self.finished:
            for note in other_machine(machine, self.model.device, self.trainer.leaves):
                self.report.note(note)

    def _require_same_start(self) -> None:
        """RuntimeError where the run's processes do not begin from the same: a folder that is not shared."""
        trainer, plan = self.trainer, self.model.plan
        stands = (self.progress, plan.digest, self.fingerprint, trainer.steps, trainer.updates)
        rest = (sorted(self.pending), [h.index for h in self.held])
        self.ranks.require_same(
            "where the run stands", (stands, rest), "do all see the same run.out and model?"
        )
        trainer.require_same_weights()

    @property
    def finished(self) -> bool:
        """Whether no step or evaluation is left to do."""
        return self.progress.step == self.config.train.steps and not self.pending

    def train(self) -> None:
        """Run to config.train.steps, evaluating and saving on the way; RunLeft on a signal."""
        with self.signals:
            try:
                self._train()
            except RunLeft as left:
                if self.updating and not left.at_once:
                    lost = self.unsaved() or "nothing is lost but the step in progress"
                    self.report.note(f"{left}, in the middle of an update: no checkpoint; {lost}")
                elif (self.progress.step or self.pending) and not left.at_once:
                    with self.signals.shield():
                        self.report.note(f"{left}: {self.save()} holds step {self.progress.step}")
                raise

    def _train(self) -> None:
        config = self.config
        if self.progress.step == 0 and config.eval.every:
            with self._within_memory("evaluation"):
                first = self.evaluate()
            self.files.write(0, first)
            self.report.step(0, config.train.steps, first)
        if self.pending:
            self._finish_step()
        while self.progress.step < config.train.steps:
            self.signals.leave_if_asked(self.ranks)
            with self._within_memory():
                self.pending = self.one_step()
            self._finish_step()
        if self.held:
            self.report.note(f"{len(self.held)} unfinished groups were not trained on")

    @contextmanager
    def _within_memory(self, phase: str = "") -> Iterator[None]:
        """Turn running out of device memory into the name of the setting to change."""
        try:
            yield
        except RuntimeError as error:
            if (what := out_of_memory(error)) is None:
                raise
            phase = phase or self.clock.open_phase
            step = 0 if phase == "load" else self.progress.step + 1
            raise ValueError(
                f"the device ran out of memory in step {step}, phase {phase} ({what}): "
                f"{self.memory.advice(phase)}"
            ) from error

    def _finish_step(self) -> None:
        """Evaluate where due, write the step's metrics, save where due."""
        config, step, metrics = self.config, self.progress.step, self.pending
        last = step == config.train.steps
        try:
            self.watchdog.after_step(metrics)
            if config.eval.every and (last or step % config.eval.every == 0):
                with self._within_memory("evaluation"):
                    metrics = metrics | self.evaluate()
        except RunStopped:
            self.files.write(step, metrics)
            raise
        with self.signals.shield():
            self.files.write(step, metrics)
            self.pending = {}
            self.report.step(step, config.train.steps, metrics)
            if last or (config.run.save_every and step % config.run.save_every == 0):
                self.save()

    def save(self) -> Path:
        """Write a checkpoint of the last finished step."""
        saved = self.files.save(self.trainer, self.progress, self.about, self.pending, self.held)
        self.saved_step = self.progress.step
        return saved

    def unsaved(self) -> str:
        """Which finished steps no checkpoint holds, for people; "" for none."""
        return lost_steps(self.progress.step, self.saved_step)

    def one_step(self) -> dict[str, float]:
        """One rollout and the updates on it; advances `progress`."""
        clock = self.clock = Clock()
        self.watchdog.step = self.progress.step + 1
        if self.canary is not None:
            with clock("canary"):
                self._hear_canary()
        found = self.collector.collect(self.progress, self.held, clock)
        groups, metrics = found.groups, found.metrics
        self.files.samples(self.progress.step + 1, found.seen)
        if found.held and self.model.plan.unified:
            self._make_room()
            with clock("held"):
                compared = compare_held(self.trainer, found.held)
                metrics |= held_metrics(compared)
                self.watchdog.judge_waiting(compared)
        with self.signals.shield():
            self.signals.leave_together(self.ranks)
            self.updating = True
            if groups:
                self._make_room()
                with clock("train"), self._profiled(groups):
                    metrics |= self.trainer.step(groups)
                with clock("refresh"):
                    self.engine.refresh()
            else:
                self._pass_over()
            self.progress = dataclasses.replace(found.progress, step=found.progress.step + 1)
            self.pending, self.held = metrics, found.held
            self.updating = False
        metrics |= clock.metrics()
        tokens = metrics.get("rollout/drawn_tokens", metrics["rollout/tokens"])
        metrics["perf/rollout_tokens_per_s"] = tokens / max(1e-9, metrics["time/rollout_s"])
        metrics["perf/step_tokens_per_s"] = tokens / max(1e-9, metrics["time/step_s"])
        if self.model.device.type == "cuda":
            metrics["perf/decode_idle_share"] = self.engine.idle_share
        metrics["perf/decode_tail_share"] = self.engine.tail_share
        if groups:
            metrics |= step_rates(self.model, self.config, groups, metrics, self.ranks.size)
        return self.ranks.leaders(metrics)

    def _hear_canary(self) -> None:
        """Compare both sides on fixed prompts before these weights draw anything else, where it is due."""
        if self.canary is None:
            return
        found = ""
        try:
            self.canary.check(self.engine, self.progress.step)
        except RunStopped as stopped:
            found = str(stopped)
        for told in filter(None, self.ranks.gather(found)):
            if self.config.run.on_mismatch == "stop":
                raise RunStopped(told)
            log.warning("%s", told)
            self.canary = None

    def _pass_over(self) -> None:
        """A step that has nothing to train on."""
        self.trainer.pass_over()
        step = self.progress.step + 1
        if step == self.config.train.profile_step:
            self.report.note(
                f"train.profile_step = {step}: no kernels.txt, because step {step} has no group to train "
                "on; ask for a later step"
            )

    @contextmanager
    def _profiled(self, groups: list[Group]) -> Iterator[None]:
        """Time the kernels of the update of step train.profile_step."""
        if self.progress.step + 1 != self.config.train.profile_step:
            yield
            return
        with kernels_of(self.model.device) as kernels:
            yield
        least = known_seconds(self.model, groups, self.config.rl.epochs, self.ranks.size)
        if self.ranks.leads:
            self.report.note(write_table(self.folder, kernels, least))

    def _make_room(self) -> None:
        """Give the engine's cache back for the time of the update, on a device where it matters."""
        if self.model.device.type == "cuda":
            self.engine.release()
            torch.cuda.reset_peak_memory_stats()

    def evaluate(self) -> dict[str, float]:
        """Mean reward on held-out prompts; the same noise every time."""
        config, started = self.config, time.perf_counter()
        self._hear_canary()
        prompts = held_out(self.task, config.eval.prompts)
        if not prompts:
            return {}
        sampling = dataclasses.replace(
            self.sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0
        )
        groups = self.collector.draw(
            prompts, config.eval.samples, sampling, EVALUATION_SAMPLES, "evaluation"
        )
        rewards = [r for g in groups for r in g.rewards if r is not None]
        self.task.stats.metrics(reset=True)
        out = {"time/eval_s": time.perf_counter() - started}
        if rewards:
            out["reward/eval_mean"] = sum(rewards) / len(rewards)
        return out

    def close(self) -> None:
        """End workers and flush logs."""
        self.engine.close()
        self.task.close()
        self.files.close()


def held_out(task: Any, limit: int) -> list[Prompt]:
    """The first `limit` held-out prompts, or all there are."""
    return task.prompts("held_out", 0, min(limit, task.held_out_count))


def scale_at_start(model: Decoder, config: Config) -> None:
    """Apply train.invariant_scale to a freshly loaded model."""
    if config.train.invariant_scale != 1.0:
        apply_invariant_scale(model, config.train.invariant_scale)
        model.refresh()


def build_trainer(
    model: Decoder, config: Config, checks: Checks, folder: Path, ranks: Ranks = ALONE
) -> Trainer:
    """The trainer with whatever else its algorithm and correction need; folder: of the first policy."""
    needs = checks.algorithm.needs | checks.correction.needs
    reference = shadow = None
    if "reference" in needs:
        reference = freeze(load_model(folder, checks.recipe, model.device))
    if "shadow" in needs:
        shadow = Decoder(model.config, plan_for(load_recipe("bf16"), model.config), model.device)
    return Trainer(model, config, checks.algorithm, checks.correction, reference, shadow, ranks)


def train(config: Config, resume: bool, report: Reporter) -> None:
    """Run `config` from the start, or from its newest complete checkpoint.

    RunStopped where the watchdog ended it, RunLeft where a signal did.
    """
    require_divisible(config, world()[1])
    ranks = join(choose_device(config))
    try:
        with hold(config, ranks):
            run = Run(config, resume, report, ranks)
            try:
                run.train()
            finally:
                run.close()
    finally:
        ranks.close()
