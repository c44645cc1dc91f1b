"""The on-policy loop: the only file that knows engine, trainer, algorithm and task.

prompts -> engine.generate -> task.reward -> algorithm.select -> trainer.step -> engine.refresh. Prompts,
samples and noise are functions of (seed, counters), so stopping and resuming changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from samebit.config import Config
from samebit.config_dump import dump
from samebit.engine.api import load_engine
from samebit.log import MetricsLog
from samebit.models.load import load_model
from samebit.models.source import resolve as resolve_model
from samebit.models.tokenizer import Tokenizer
from samebit.quant.flow import is_unified
from samebit.quant.ops import missing_for_cuda
from samebit.quant.plan import load_recipe
from samebit.reporter import Reporter
from samebit.rl.checks import check_pair
from samebit.rl.registry import load_algorithm, load_correction
from samebit.tasks.api import load_task
from samebit.train import checkpoint
from samebit.train.checkpoint import Progress
from samebit.train.invariant import apply_invariant_scale
from samebit.train.step import Trainer
from samebit.types import Group, Prompt, Sampling

log = logging.getLogger(__name__)

EVALUATION_SAMPLES = 1 << 40
"""First sample id of evaluations: their noise never meets training's, and repeats each time."""


class Run:
    """Everything one run holds. Building it checks all that can be checked before any work."""

    def __init__(self, config: Config, resume: bool, report: Reporter):
        self.config, self.report = config, report
        self.folder = Path(config.run.out)
        checks = _Checks(config)
        self.task, self.sampling = checks.task, checks.sampling
        self._claim_folder(resume)
        set_threads(config)
        model_folder = resolve_model(config.model)
        self.model = load_model(model_folder, checks.recipe, choose_device(config))
        self._check_plan(resume)
        if config.train.invariant_scale != 1.0:
            apply_invariant_scale(self.model, config.train.invariant_scale)
            self.model.refresh()
        self.tokenizer = Tokenizer(model_folder, self.model.config)
        self.task.bind(self.tokenizer)
        self.trainer = self._build_trainer(checks, model_folder)
        self.engine = load_engine(config.rollout.engine)(
            self.model, config.rollout, self.tokenizer, config.seed
        )
        self.progress = Progress()
        if resume:
            self._resume()
        self.metrics_log = MetricsLog(self.folder, self.progress.step)

    def _claim_folder(self, resume: bool) -> None:
        used = (self.folder / "metrics.jsonl").exists()
        if used and not resume:
            raise ValueError(
                f"{self.folder} already holds a run: continue it with --resume, or choose another "
                "folder with --out"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(dump(self.config), encoding="utf-8")

    def _check_plan(self, resume: bool) -> None:
        plan, path = self.model.plan, self.folder / "plan.json"
        if resume and path.exists():
            plan.require_same(json.loads(path.read_text())["digest"], f"run {self.folder}")
        content = {"digest": plan.digest, "unified": plan.unified} | plan.to_dict()
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        self.report.note(plan.describe())

    def _build_trainer(self, checks: _Checks, folder: Path) -> Trainer:
        needs = checks.algorithm.needs | checks.correction.needs
        device = self.model.device
        reference = shadow = None
        if "reference" in needs:
            reference = load_model(folder, checks.recipe, device)
        if "shadow" in needs:
            shadow = load_model(folder, load_recipe("bf16"), device)
        return Trainer(
            self.model, self.config, checks.algorithm, checks.correction, reference, shadow
        )

    @property
    def about(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the run that resumes it."""
        return {
            "seed": self.config.seed,
            "model": self.config.model,
            "invariant_scale": self.config.train.invariant_scale,
        }

    def _resume(self) -> None:
        found = checkpoint.newest(self.folder / "checkpoints")
        if found is None:
            self.report.note("no complete checkpoint to resume from: starting at step 0")
            return
        self.progress = checkpoint.restore(found, self.trainer, self.about)
        self.report.note(f"resumed from {found}")

    def train(self) -> None:
        """Run to config.train.steps, evaluating and saving on the way."""
        config = self.config
        if self.progress.step == 0 and config.eval.every:
            self.metrics_log.write(0, self.evaluate())
        while self.progress.step < config.train.steps:
            metrics = self.one_step()
            step = self.progress.step
            last = step == config.train.steps
            if config.eval.every and (last or step % config.eval.every == 0):
                metrics |= self.evaluate()
            self.metrics_log.write(step, metrics)
            self.report.step(step, config.train.steps, metrics)
            if last or (config.run.save_every and step % config.run.save_every == 0):
                self.save()

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        keep = self.config.run.keep_checkpoints
        folder = self.folder / "checkpoints"
        return checkpoint.save(folder, self.trainer, self.progress, keep, self.about)

    def one_step(self) -> dict[str, float]:
        """One rollout and the updates on it; advances `progress`."""
        clock = _Clock()
        groups, metrics = self._collect(clock)
        if groups:
            with clock("train"):
                metrics |= self.trainer.step(groups)
            with clock("refresh"):
                self.engine.refresh()
        self.progress = dataclasses.replace(self.progress, step=self.progress.step + 1)
        metrics |= clock.metrics()
        tokens = metrics["rollout/tokens"]
        metrics["perf/rollout_tokens_per_s"] = tokens / max(1e-9, metrics["time/rollout_s"])
        metrics["perf/step_tokens_per_s"] = tokens / max(1e-9, metrics["time/step_s"])
        return metrics

    def _collect(self, clock: _Clock) -> tuple[list[Group], dict[str, float]]:
        """Sample until the algorithm's selection fills a step, at most its number of rounds."""
        config, wanted = self.config, self.config.rl.prompts_per_step
        kept: list[Group] = []
        seen: list[Group] = []
        for _ in range(self.trainer.algorithm.max_sampling_rounds):
            start = self.progress.next_prompt
            prompts = self.task.prompts("train", start, wanted)
            with clock("rollout"):
                groups = self.engine.generate(
                    prompts,
                    config.rl.group_size,
                    self.sampling,
                    self.progress.next_sample,
                    self.report.progress("rollout"),
                )
            self.progress = dataclasses.replace(
                self.progress,
                next_prompt=start + wanted,
                next_sample=self.progress.next_sample + wanted * config.rl.group_size,
            )
            with clock("reward"):
                groups = self.grade(groups)
            seen += groups
            selection = self.trainer.algorithm.select(groups)
            kept += selection.groups
            if len(kept) >= wanted:
                break
        else:
            if len(kept) < wanted:
                self.report.note(f"{selection.describe()}; training on {len(kept)} groups")
        self.metrics_log.samples(self.progress.step + 1, seen, config.run.save_samples)
        return kept[:wanted], rollout_metrics(seen) | self.task.stats.metrics(reset=True)

    def grade(self, groups: Sequence[Group]) -> list[Group]:
        """Rewards for every sample; None is no verdict."""
        prompts = [g.prompt for g in groups for _ in g.samples]
        texts = [s.text for g in groups for s in g.samples]
        rewards = iter(self.task.reward(prompts, texts))
        return [
            dataclasses.replace(g, rewards=tuple(next(rewards) for _ in g.samples)) for g in groups
        ]

    def evaluate(self) -> dict[str, float]:
        """Mean reward on held-out prompts; the same noise every time."""
        config, started = self.config, time.perf_counter()
        prompts = held_out(self.task, config.eval.prompts)
        if not prompts:
            return {}
        sampling = dataclasses.replace(
            self.sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0
        )
        groups = self.engine.generate(
            prompts,
            config.eval.samples,
            sampling,
            EVALUATION_SAMPLES,
            self.report.progress("evaluation"),
        )
        rewards = [r for g in self.grade(groups) for r in g.rewards if r is not None]
        self.task.stats.metrics(reset=True)
        out = {"time/eval_s": time.perf_counter() - started}
        if rewards:
            out["reward/eval_mean"] = sum(rewards) / len(rewards)
        return out

    def close(self) -> None:
        """End workers and flush logs."""
        self.engine.close()
        self.task.close()
        self.metrics_log.close()


class _Checks:
    """Everything that can be refused before the model is loaded."""

    def __init__(self, config: Config):
        self.recipe = load_recipe(config.recipe)
        self.algorithm = load_algorithm(config.rl.algorithm, config.rl.options)
        correction = dict(config.rl.correction)
        self.correction = load_correction(str(correction.pop("name", "none")), correction)
        r = config.rollout
        self.sampling = Sampling(
            temperature=r.temperature,
            top_p=r.top_p,
            top_k=r.top_k,
            max_tokens=r.max_tokens,
            stop=r.stop,
            stop_ids=r.stop_ids,
            seed=config.seed,
        )
        for warning in check_pair(
            self.algorithm,
            self.correction,
            is_unified(self.recipe),
            self.sampling,
            config.rl.group_size,
            config.rl.mini_batches * config.rl.epochs,
        ):
            log.warning("%s", warning)
        self.task = load_task(config.task.name, config.task.options)


class _Clock:
    """Seconds by phase, summed within a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}
        self._open: tuple[str, float] | None = None

    def __call__(self, phase: str) -> _Clock:
        self._open = (phase, time.perf_counter())
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        assert self._open is not None
        phase, started = self._open
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """time/<phase>_s and time/step_s."""
        out = {f"time/{phase}_s": seconds for phase, seconds in self.phases.items()}
        out["time/step_s"] = time.perf_counter() - self.started
        return out


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """reward/ and rollout/ numbers of a step's samples."""
    samples = [s for g in groups for s in g.samples]
    rewards = [r for g in groups for r in g.rewards if r is not None]
    lengths = [len(s.ids) for s in samples]
    out = {
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_share": sum(s.truncated for s in samples) / len(samples),
    }
    if rewards:
        out["reward/mean"] = sum(rewards) / len(rewards)
        out["reward/max"], out["reward/min"] = max(rewards), min(rewards)
    return out


def held_out(task: Any, limit: int) -> list[Prompt]:
    """The first `limit` held-out prompts, or all there are."""
    return task.prompts("held_out", 0, min(limit, task.held_out_count))


def choose_device(config: Config) -> torch.device:
    """run.device as a torch device; auto is the GPU where the kernels run, else the CPU."""
    if config.run.device != "auto":
        return torch.device(config.run.device)
    missing = missing_for_cuda(torch.device("cuda"))
    return torch.device("cuda" if missing is None else "cpu")


def set_threads(config: Config) -> None:
    """Apply run.threads (part of a CPU run's numerics)."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)


def train(config: Config, resume: bool, report: Reporter) -> None:
    """Run `config` from the start, or from its newest complete checkpoint."""
    run = Run(config, resume, report)
    try:
        run.train()
    finally:
        run.close()
