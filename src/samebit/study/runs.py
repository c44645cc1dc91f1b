"""Run a study's jobs, each in a process of its own; what is finished is left alone.

A job ends with result.json in its folder (status `done`, or `failed` with the error). A failure of
any kind, a killed process included, is recorded and the other jobs go on.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from samebit.collect import grade
from samebit.config import RolloutConfig
from samebit.engine.api import load_engine
from samebit.log import Reporter, read_json_lines
from samebit.loop import Run, held_out
from samebit.models.decoder import Decoder
from samebit.models.load import named_masters, plan_for
from samebit.quant.plan import load_recipe
from samebit.run_checks import set_threads
from samebit.study.plan import Job, Study
from samebit.study.tiny import warm_up
from samebit.tasks.api import load_task

RESULT = "result.json"
FINAL_SAMPLES = 1 << 41
"""First sample id of the final judgement: other noise than training's and evaluations'."""


def read_result(job: Job) -> dict[str, Any] | None:
    """result.json of a job, or None before it has ended."""
    path = job.folder / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def is_finished(job: Job) -> bool:
    """Whether the job has run to its last step."""
    result = read_result(job)
    return result is not None and result["status"] == "done"


def _write_result(job: Job, result: dict[str, Any]) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    temporary = job.folder / f".{RESULT}.partial"
    temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    temporary.replace(job.folder / RESULT)


def prepare_model(study: Study, note: Callable[[str], None]) -> None:
    """Warm the tiny model up, where the study has one and it is not there yet."""
    if study.warmup is None:
        return
    config = study.jobs[0].config
    set_threads(config)
    task = load_task(config.task.name, config.task.options, config.seed)
    try:
        warm_up(study.model_folder, study.warmup, task, note)
    finally:
        task.close()


def run_job(study: Study, job: Job, reporter: Reporter) -> None:
    """Run one job in this process, from where it stands; result.json says how it ended."""
    started = time.perf_counter()
    try:
        resume = (job.folder / "metrics.jsonl").exists()
        run = Run(job.config, resume, reporter)
        try:
            run.train()
            finals = final_rewards(run, study)
        finally:
            run.close()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _write_result(job, {"status": "failed", "error": text, "trace": traceback.format_exc()})
        raise
    seconds = time.perf_counter() - started
    _write_result(job, {"status": "done", "seconds": seconds, **finals})


def final_rewards(run: Run, study: Study) -> dict[str, float]:
    """Held-out reward of the final weights: of the run's sampler, in BF16, and of the trained policy.

    final_reward is that of the training forward: the sampler's own in a unified recipe, BF16's in a
    mixed one (whose training forward is BF16).
    """
    model = run.model
    plain = Decoder(model.config, plan_for(load_recipe("bf16"), model.config), model.device)
    with torch.no_grad():
        ours = named_masters(model)
        for name, master in named_masters(plain).items():
            master.copy_(ours[name])
    plain.refresh()
    sampler, in_bf16 = _judge(run, study, model), _judge(run, study, plain)
    return {
        "final_reward": sampler if model.plan.unified else in_bf16,
        "final_reward_sampler": sampler,
        "final_reward_bf16": in_bf16,
    }


def _judge(run: Run, study: Study, model: Decoder) -> float:
    rollout: RolloutConfig = run.config.rollout
    engine = load_engine(rollout.engine)(model, rollout, run.tokenizer, run.config.seed)
    try:
        groups = engine.generate(
            held_out(run.task, study.header.final_prompts),
            study.header.final_samples,
            dataclasses.replace(run.sampling, temperature=run.config.eval.temperature),
            FINAL_SAMPLES,
        )
    finally:
        engine.close()
    rewards = [r for g in grade(run.task, groups) for r in g.rewards if r is not None]
    return sum(rewards) / len(rewards) if rewards else float("nan")


def run_study(
    study: Study,
    path: str | Path,
    jobs: int,
    note: Callable[[str], None],
    run_in_process: Callable[[Job], int] | None = None,
) -> None:
    """Run everything that is not finished, `jobs` at a time; returns when all have ended.

    run_in_process: runs a job and returns its exit code (the default starts `samebit study`).
    """
    waiting = [job for job in study.jobs if not is_finished(job)]
    total, lock = len(study.jobs), threading.Lock()
    if len(waiting) < total:
        note(f"{total - len(waiting)} of {total} runs are finished")
    launch = run_in_process or (lambda job: _launch(path, study, job))

    def work(job: Job) -> None:
        started = time.perf_counter()
        (job.folder / RESULT).unlink(missing_ok=True)
        code = launch(job)
        result = read_result(job)
        if result is None:
            result = {"status": "failed", "error": f"the process ended with exit code {code}"}
            _write_result(job, result)
        with lock:
            note(_line(study, job, result, time.perf_counter() - started))

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for done in [pool.submit(work, job) for job in waiting]:
            done.result()


def _launch(path: str | Path, study: Study, job: Job) -> int:
    command = [sys.executable, "-m", "samebit", "study", str(path), "--only", job.label]
    command += ["--out", study.header.out]
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / "log.txt", "ab") as log:
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode


def _line(study: Study, job: Job, result: dict[str, Any], seconds: float) -> str:
    ended = sum(read_result(j) is not None for j in study.jobs)
    said = (
        f"final reward {result['final_reward']:.3f}"
        if result["status"] == "done"
        else f"FAILED: {result['error']}"
    )
    return f"[{ended}/{len(study.jobs)}] {job.label}  {said}  ({seconds:.0f} s)"


def find_job(study: Study, label: str) -> Job:
    """The job called ARM:SEED; ValueError naming the labels there are."""
    for job in study.jobs:
        if job.label == label:
            return job
    known = ", ".join(job.label for job in study.jobs)
    raise ValueError(f"--only {label}: no such run; runs: {known}")


def records_of(jobs: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """metrics.jsonl of every job that has one, by label."""
    out = {}
    for job in jobs:
        path = job.folder / "metrics.jsonl"
        if path.is_file():
            out[job.label] = read_json_lines(path)
    return out
