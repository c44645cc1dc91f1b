"""Stopping at any moment and resuming gives the log of the run that was never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebit.cli import main
from samebit.errors import RunLeft
from samebit.log import Reporter
from samebit.loop import Run
from samebit.train import checkpoint
from tests import runs


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def unbroken(file: Path) -> Path:
    """The folder of a run of six steps that nothing interrupted."""
    out = file.parent / "unbroken"
    assert main(["train", str(file), "--out", str(out), "--steps", "6", "--quiet"]) == 0
    return out


def assert_same_log(out: Path, unbroken: Path) -> None:
    assert runs.metrics(out) == runs.metrics(unbroken)
    assert runs.samples(out) == runs.samples(unbroken)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stops=st.lists(st.integers(1, 5), min_size=1, max_size=2, unique=True),
    save_every=st.integers(1, 3),
)
def test_stop_and_resume_gives_the_same_log(
    file: Path, unbroken: Path, tmp_path_factory: Any, stops: list[int], save_every: int
):
    """Stops inside the run, after any step, with any spacing of checkpoints."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    args = [("train.steps", "6"), ("run.save_every", str(save_every))]
    resume = False
    for stop in sorted(stops):
        run = Run(runs.config(file, out, *args), resume, Reporter(quiet=True))
        finish, resume = run._finish_step, True

        def finish_then_die(run: Run = run, finish: Any = finish, stop: int = stop) -> None:
            finish()
            if run.progress.step == stop:
                raise ConnectionAbortedError

        run._finish_step = finish_then_die  # type: ignore[method-assign]
        with pytest.raises(ConnectionAbortedError):
            run.train()
        run.close()
    last = Run(runs.config(file, out, *args), True, Reporter(quiet=True))
    last.train()
    last.close()
    assert_same_log(out, unbroken)


def test_the_command_resumes_to_the_same_log(file: Path, unbroken: Path, tmp_path: Path):
    out = str(tmp_path / "out")
    args = ["train", str(file), "--out", out, "--quiet"]
    assert main([*args, "--steps", "2"]) == 0
    assert main([*args, "--steps", "6", "--resume"]) == 0
    # the shorter run evaluated its last step, as the longer one does every second
    assert_same_log(tmp_path / "out", unbroken)


def test_more_data_workers_or_another_batch_size_of_the_engine_change_no_sample(
    file: Path, unbroken: Path, tmp_path: Path
):
    out = tmp_path / "out"
    args = ["train", str(file), "--out", str(out), "--steps", "6", "--quiet"]
    assert main([*args, "--rollout.max-batch", "1", "--rollout.prefill-tokens", "3"]) == 0
    assert_same_log(out, unbroken)


# --- signals -------------------------------------------------------------------------------------


def signal_at(run: Run, place: str, step: int, *numbers: int) -> None:
    """Send signals to this process when the run comes to a place of a step."""
    owner: Any = {"generate": run.engine, "step": run.trainer, "reward": run.task}.get(place, run)
    real = getattr(owner, place)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if run.progress.step == step:
            setattr(owner, place, real)
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0)
        return real(*args, **kwargs)

    setattr(owner, place, interrupted)


@pytest.mark.parametrize(
    ("place", "at", "saved"),
    [
        ("generate", 3, 3),  # inside the rollout of step 4: it is dropped
        ("reward", 3, 3),
        ("step", 3, 4),  # inside the update of step 4: it is finished
        ("evaluate", 2, 2),  # step 2 is done, its evaluation is not
        ("evaluate", 0, 0),  # before anything
        ("save", 2, 2),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_anywhere_leaves_a_checkpoint_and_the_same_log_after_resuming(
    file: Path, unbroken: Path, tmp_path: Path, place: str, at: int, saved: int, number: int
):
    out = tmp_path / "out"
    settings = [("train.steps", "6"), ("run.save_every", "0" if place != "save" else "1")]
    run = Run(runs.config(file, out, *settings), False, Reporter(quiet=True))
    signal_at(run, place, at, number)
    before = signal.getsignal(number)
    with pytest.raises(RunLeft) as left:
        run.train()
    run.close()
    assert signal.getsignal(number) is before
    assert left.value.exit_code == 128 + number
    if number == signal.SIGINT and place in ("generate", "reward", "step"):
        saved = 4  # the step is finished first
    found = checkpoint.newest(out / "checkpoints")
    assert (found.name if found else None) == (f"step_{saved:06d}" if saved else None)
    again = Run(runs.config(file, out, *settings), True, Reporter(quiet=True))
    again.train()
    again.close()
    assert_same_log(out, unbroken)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_at_once(file: Path, tmp_path: Path, number: int):
    out = tmp_path / "out"
    run = Run(runs.config(file, out, ("train.steps", "6")), False, Reporter(quiet=True))
    signal_at(run, "step", 2, number, number)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else RunLeft):
        run.train()
    run.close()
    assert runs.metrics(out)[-1]["step"] == "2"


@pytest.mark.parametrize(
    ("save_every", "lost"),
    [
        ("0", "; the 3 finished steps (all there are: no checkpoint yet) are lost"),
        ("2", "; the 1 finished step since the last checkpoint is lost"),
        ("1", ""),
    ],
)
def test_the_first_ctrl_c_says_what_a_second_one_loses(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], save_every: str, lost: str
):
    settings = [("train.steps", "6"), ("run.save_every", save_every)]
    run = Run(runs.config(file, tmp_path / "out", *settings), False, Reporter(quiet=True))
    signal_at(run, "step", 3, signal.SIGINT)
    with pytest.raises(RunLeft):
        run.train()
    run.close()
    assert f"(again: leave now{lost})" in capfd.readouterr().err
    assert run.unsaved() == ""  # it left with a checkpoint


# --- one process a folder, and kill -9 -----------------------------------------------------------

TRAIN = "import sys; from samebit.cli import main; sys.exit(main({args!r}))"


def command(file: Path, out: Path, *more: str) -> str:
    args = ["train", str(file), "--out", str(out), "--steps", "6", "--quiet", *more]
    return TRAIN.format(args=args)


def test_a_second_process_on_a_live_run_is_refused_and_a_dead_one_blocks_nobody(
    file: Path, tmp_path: Path, capsys: Any
):
    out = tmp_path / "out"
    code = command(file, out).replace("--steps', '6'", "--steps', '100000'")
    holder = runs.start(code)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists():
            assert time.monotonic() < deadline and holder.poll() is None
            time.sleep(0.05)
        for more in ([], ["--resume"]):
            assert main(["train", str(file), "--out", str(out), *more]) == 2
            error = capsys.readouterr().err
            assert "in use by a live run" in error and str(holder.pid) in error
    finally:
        holder.kill()
        holder.communicate()
    assert main(["train", str(file), "--out", str(out), "--steps", "1", "--resume", "--quiet"]) == 0


LIVES = """
import os, sys, traceback
from pathlib import Path
from samebit.engine.native import Engine
from samebit.log import MetricsLog, Reporter
from samebit.loop import train
from samebit.train import checkpoint
from samebit.train.step import Trainer
from tests import runs

def mark(owner, name):
    real = getattr(owner, name)
    def marked(*args, **kwargs):
        print("mark", flush=True)
        return real(*args, **kwargs)
    setattr(owner, name, marked)

for owner, names in (
    (Engine, ["generate"]), (Trainer, ["step"]), (MetricsLog, ["write"]),
    (checkpoint, ["save", "write_checkpoint", "write_json", "_drop"]),
):
    for name in names:
        mark(owner, name)
config = runs.config(Path({file!r}), Path({out!r}), ("train.steps", "6"))
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            train(config, True, Reporter(quiet=True))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print("life", child, flush=True)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""


def test_kill_9_at_random_moments_loses_at_most_the_steps_since_the_last_checkpoint(
    file: Path, unbroken: Path, tmp_path: Path
):
    """Each life is killed at a random place, in the middle of saves too, until one ends by itself."""
    out, chance = tmp_path / "out", random.Random(3)
    kills, last_step, status = 0, 0, -1
    lives = runs.start(LIVES.format(file=str(file), out=str(out)), stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while status != 0:
        more = kills < 3 or (kills < 20 and time.monotonic() < deadline)
        die_at = chance.randint(1, 14) if more else 10**9
        status = _one_life(lives, die_at, chance.uniform(0.0, 0.03))
        kills += status != 0
        found = checkpoint.newest(out / "checkpoints")
        step = int(found.name[5:]) if found else 0
        logged = len(runs.metrics(out)) - 1 if (out / "metrics.jsonl").exists() else 0
        # nothing that was saved is lost, and at most the step in progress was not saved yet
        assert step >= last_step and (status == 0 or logged <= step + 1)
        last_step = step
    lives.communicate()
    assert kills >= 3
    assert_same_log(out, unbroken)
    left = {p.name for p in (out / "checkpoints").iterdir()}
    # a kill between the last save and its clearing up leaves one whole checkpoint more
    assert left - {"step_000004"} == {"step_000005", "step_000006"}, "no litter of the killed"


def _one_life(lives: Any, die_at: int, delay: float) -> int:
    """Start a child, kill it a moment after its `die_at`-th mark; its exit status."""
    lives.stdin.write("\n")
    lives.stdin.flush()
    child = marks = 0
    while True:
        word, *rest = lives.stdout.readline().split() or ["gone"]
        assert word in ("mark", "life", "ended"), lives.communicate()[1]
        if word == "ended":
            status = int(rest[0])
            assert status in (0, signal.SIGKILL), f"{status}: {lives.communicate()[1]}"
            return status
        marks += word == "mark"
        child = int(rest[0]) if word == "life" else child
        if child and marks >= die_at:
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):  # it may just have ended
                os.kill(child, signal.SIGKILL)
            die_at = 10**9


# --- what a folder may have suffered -------------------------------------------------------------


def test_damage_to_the_newest_checkpoint_costs_its_steps_only(
    file: Path, unbroken: Path, tmp_path: Path, capsys: Any
):
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    weights = out / "checkpoints" / "step_000006" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 4
    weights.write_bytes(data)
    assert main(["train", str(file), "--out", str(out), "--steps", "6", "--resume", "--quiet"]) == 0
    assert_same_log(out, unbroken)
    assert "step_000006 is passed over" in capsys.readouterr().err
    assert checkpoint.problem_of(out / "checkpoints" / "step_000006") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--recipe", "bf16"], "precision plan"),
        (["--seed", "9"], "seed = 0"),
        (["--train.invariant-scale", "2"], "invariant_scale"),
        (["--steps", "5"], "train.steps = 5, but"),
    ],
)
def test_a_refused_resume_leaves_the_folder_as_it_was(
    file: Path, unbroken: Path, tmp_path: Path, change: list[str], said: str, capsys: Any
):
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    before = {n: (out / n).read_bytes() for n in ("config.toml", "plan.json", "metrics.jsonl")}
    args = ["train", str(file), "--out", str(out), "--quiet"]
    assert main([*args, *change, "--resume"]) == 2
    assert said in capsys.readouterr().err
    assert {name: (out / name).read_bytes() for name in before} == before
    assert main(args) == 2, "a used folder is refused without --resume"


def test_another_model_in_the_same_place_is_refused_on_resume(tmp_path: Path, capsys: Any):
    """Same path, same shape, other weights: the plan alone would not notice."""
    file = runs.make(tmp_path)
    out = tmp_path / "run"
    args = ["train", str(file), "--out", str(out), "--quiet"]
    assert main([*args, "--steps", "1"]) == 0
    shutil.rmtree(tmp_path / "model")
    runs.make(tmp_path, seed=1)
    assert main([*args, "--steps", "2", "--resume"]) == 2
    assert "model_fingerprint" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signalled_process_checkpoints_leaves_and_resumes_to_the_same_log(
    file: Path, unbroken: Path, tmp_path: Path, number: int, code: int
):
    out = tmp_path / "out"
    process = runs.start(command(file, out, "--run.save-every", "100"))
    deadline = time.monotonic() + 60
    while len(runs.metrics(out)) < 2 if (out / "metrics.jsonl").exists() else True:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (code, 0), "0: the run was over before the signal came"
    assert checkpoint.newest(out / "checkpoints") is not None
    assert main(["train", str(file), "--out", str(out), "--steps", "6", "--resume", "--quiet"]) == 0
    assert_same_log(out, unbroken)


def test_a_resumed_run_says_what_it_changes(
    file: Path, unbroken: Path, tmp_path: Path, capsys: Any
):
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    args = ["train", str(file), "--out", str(out), "--resume", "--steps", "7"]
    assert main([*args, "--train.learning-rate", "1e-4"]) == 0
    said = capsys.readouterr().err
    assert "another configuration" in said and "learning_rate = 0.0001" in said
    assert "steps = 7" in said and "resumed from" in said


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_resumed_with_other_threads_says_that_its_bits_may_be_others(
    file: Path, unbroken: Path, tmp_path: Path, capsys: Any, threads: int
):
    out, before = tmp_path / "out", torch.get_num_threads()
    shutil.copytree(unbroken, out)
    args = ["--out", str(out), "--resume", "--steps", "7", "--run.threads", str(threads)]
    try:
        assert main(["train", str(file), *args, "--run.device", "cpu"]) == 0
    finally:
        torch.set_num_threads(before)
    said = " ".join(capsys.readouterr().err.split())
    note = "resumed with 2 CPU threads after 1: threads are part of a CPU run's numerics, so what follows"
    assert said.count(note) == (threads == 2)
    assert said.count("(they are with --run.threads 1)") == (threads == 2)


FULL = """
import json, subprocess, sys
from pathlib import Path
sys.path.insert(0, {root!r})
disk, file = Path({disk!r}), Path({file!r})
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2000k", "none", str(disk)], check=True)
print("mounted", flush=True)
from samebit.cli import main
from samebit.train import checkpoint
args = ["train", str(file), "--out", str(disk / "out"), "--steps", "6", "--quiet"]
code = main(args)
found = checkpoint.newest(disk / "out" / "checkpoints")
left = sorted(p.name for p in (disk / "out" / "checkpoints").iterdir())
subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
again = main([*args, "--resume"])
from tests import runs
log = runs.metrics(disk / "out")
print(json.dumps([code, found and found.name, left, again, log]))
"""


def test_a_full_disk_stops_the_run_and_its_last_checkpoint_stands(
    file: Path, unbroken: Path, tmp_path: Path
):
    """A real file system of 2 MB: one checkpoint of 0.6 MB fits, a second with 1 MB to spare does not."""
    code = FULL.format(root=str(runs.ROOT), disk=str(tmp_path), file=str(file))
    process = runs.start(code, namespace=True)
    out, errors = process.communicate(timeout=120)
    if not out.startswith("mounted"):
        pytest.skip(f"mounting is not permitted here: {errors.strip().splitlines()[-1:]}")
    code, found, left, again, log = json.loads(out.splitlines()[-1])
    assert code == 2 and "not enough space" in errors
    assert found == "step_000001" and left == ["step_000001"]
    assert again == 0 and log == runs.metrics(unbroken)


def test_nothing_of_the_log_is_invalid_json(unbroken: Path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        for line in (unbroken / name).read_bytes().split(b"\n")[:-1]:
            json.loads(line, parse_constant=lambda text: pytest.fail(text))
