"""The loop where a step has nothing, or not all, of what it expects."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samebit.cli import main
from samebit.log import Reporter
from samebit.loop import Run
from samebit.samples import without_empty
from samebit.types import Group, Prompt, Sample
from tests import runs


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("loop"))


def run_of(file: Path, out: Path, *overrides: tuple[str, str]) -> Run:
    values = {"eval.every": "0", "train.weight_decay": "0.1", "train.steps": "2"}
    values |= dict(overrides)
    return Run(runs.config(file, out, *values.items()), False, Reporter(quiet=True))


def masters(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])


def records(run: Run) -> list[dict[str, Any]]:
    run.train()
    run.close()
    return runs.read_json_lines(run.folder / "metrics.jsonl")


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_steps_without_any_verdict_move_nothing_and_are_counted(
    file: Path, tmp_path: Path, algorithm: str
):
    run = run_of(file, tmp_path / "out", ("rl.algorithm", algorithm))
    run.task.reward = lambda prompts, texts: [None] * len(texts)  # type: ignore[method-assign]
    before = masters(run)
    found = records(run)
    assert torch.equal(masters(run), before), "decay included"
    assert len(found) == 2 and all(np.isfinite(v) for r in found for v in r.values())
    assert "reward/mean" not in found[0]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_dynamic_sampling_ends_when_every_group_is_equal(file: Path, tmp_path: Path, value: float):
    """All prompts too hard, or all solved: a bounded number of rounds, then a step that says so."""
    said: list[str] = []
    run = run_of(file, tmp_path / "out", ("rl.algorithm", "dapo"))
    run.report.note = said.append  # type: ignore[method-assign]
    run.task.reward = lambda prompts, texts: [value] * len(texts)  # type: ignore[method-assign]
    before = masters(run)
    rounds = run.trainer.algorithm.max_sampling_rounds
    found = records(run)
    assert torch.equal(masters(run), before)
    assert run.progress.next_prompt == 2 * 2 * rounds and len(found) == 2
    assert any("equal rewards" in line and "training on 0 groups" in line for line in said)


def test_what_the_engine_gave_up_is_dropped_or_without_verdict_and_counted(
    file: Path, tmp_path: Path
):
    """A deadline or an abort: one sample without a token, one cut short."""
    run = run_of(file, tmp_path / "out", ("train.steps", "1"), ("rl.group_size", "4"))
    generate, graded = run.engine.generate, []
    reward = run.task.reward

    def cut(sample: Sample, tokens: int) -> Sample:
        return dataclasses.replace(
            sample,
            ids=sample.ids[:tokens],
            logps=sample.logps[:tokens],
            versions=sample.versions[:tokens],
            finish_reason="abort",
        )

    def aborted(*args: Any, **kwargs: Any) -> list[Group]:
        first, *rest = generate(*args, **kwargs)
        samples = (cut(first.samples[0], 0), cut(first.samples[1], 2), *first.samples[2:])
        return [dataclasses.replace(first, samples=samples), *rest]

    run.engine.generate = aborted  # type: ignore[method-assign]
    run.task.reward = lambda p, t: graded.append(len(t)) or reward(p, t)  # type: ignore[method-assign]
    (found,) = records(run)
    assert graded == [6]
    assert found["rollout/aborted_count"] == 2.0 and found["rollout/empty_count"] == 1.0
    assert found["mismatch/tokens_differing"] == 0.0 and np.isfinite(found["rl/loss"])
    # the cut one is compared with the trainer (it was drawn), but is not learnt from
    assert found["mismatch/tokens"] == found["rollout/tokens"] == found["rl/tokens"] + 2


def test_an_engine_that_returns_nothing_at_all_is_a_step_without_training(
    file: Path, tmp_path: Path
):
    run = run_of(file, tmp_path / "out", ("train.steps", "1"))
    run.engine.abort()
    generate = run.engine.generate

    def nothing(*args: Any, **kwargs: Any) -> list[Group]:
        return generate(*args, **kwargs, deadline_s=0.0)

    run.engine.generate = nothing  # type: ignore[method-assign]
    before = masters(run)
    (found,) = records(run)
    assert found["rollout/empty_count"] == 4.0 and found["rollout/tokens"] == 0.0
    assert torch.equal(masters(run), before)


def test_empty_samples_leave_their_groups_with_their_rewards():
    def sample(name: int, tokens: int) -> Sample:
        ids = tuple(range(tokens))
        zeros = np.zeros(tokens, dtype=np.float32)
        return Sample("p", name, ids, zeros, zeros.astype(np.int32), "stop")

    prompt = Prompt("p", (1,), "t")
    groups = [
        Group(prompt, (sample(0, 0), sample(1, 2), sample(2, 1)), (None, 1.0, 0.0)),
        Group(prompt, (sample(3, 0),), (None,)),
    ]
    (left,) = without_empty(groups)
    assert [s.sample_id for s in left.samples] == [1, 2] and left.rewards == (1.0, 0.0)


def test_every_held_out_question_is_scored_once_whatever_the_batch(file: Path, tmp_path: Path):
    run = run_of(file, tmp_path / "out", ("eval.prompts", "100"), ("rollout.max_batch", "2"))
    asked: list[str] = []
    reward = run.task.reward
    run.task.reward = lambda p, t: asked.extend(q.id for q in p) or reward(p, t)  # type: ignore[method-assign]
    found = run.evaluate()
    run.close()
    assert len(asked) == len(set(asked)) == run.task.held_out_count > 2
    assert 0 <= found["reward/eval_mean"] <= 4


def test_fewer_rows_than_prompts_a_step_are_asked_again(file: Path, tmp_path: Path):
    run = run_of(file, tmp_path / "out", ("rl.prompts_per_step", "20"), ("train.steps", "1"))
    (found,) = records(run)
    assert len(runs.samples(tmp_path / "out")) == 40 and found["mismatch/tokens_differing"] == 0


def test_a_wrong_column_is_refused_before_the_model_is_looked_for(
    file: Path, tmp_path: Path, capsys: Any
):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "solution": "b"}\n')
    args = ["train", str(file), "--out", str(tmp_path / "out"), "--model", str(tmp_path / "none")]
    assert main([*args, "--task.files", f'["{data}"]', "--task.answer-column", "answer"]) == 2
    error = capsys.readouterr().err
    assert "answer" in error and "solution" in error and str(data) in error
    assert not (tmp_path / "out").exists()


def test_the_reward_before_training_is_shown(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", str(file), "--out", str(tmp_path / "out"), "--steps", "1"]) == 0
    first = runs.read_json_lines(tmp_path / "out" / "metrics.jsonl")[0]
    assert f"step 0/1  held-out {first['reward/eval_mean']:.3f}\n" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the device can be used")
def test_a_device_that_cannot_be_used_is_refused_with_the_way_out(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(["train", str(file), "--out", str(out), "--run.device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "device cuda cannot be used: torch sees no CUDA device" in said
    assert "Use --run.device cpu" in said


def test_a_reward_function_that_raises_is_its_writer_s_fault_and_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mine, out = tmp_path / "mine.py", tmp_path / "out"
    mine.write_text("def reward(completions, **_):\n    return 1 / 0\n")
    args = ["train", str(file), "--out", str(out), "--task.reward-function", f"{mine}:reward"]
    assert main([*args, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "raised ZeroDivisionError: division by zero" in said and said.count("\n") == 1
    assert f"({mine}, line 2, in reward; --debug shows the traceback)" in said
    assert runs.metrics(out) == []


def test_a_run_that_finished_no_step_starts_anew_and_any_other_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mine, out, new = tmp_path / "mine.py", tmp_path / "out", tmp_path / "new"
    # the first evaluation is graded, the first step is not
    mine.write_text(
        "calls = []\ndef reward(completions, **_):\n    calls.append(1)\n"
        "    if len(calls) > 1: raise RuntimeError('mine')\n    return [0.0] * len(completions)\n"
    )
    args = ["train", str(file), "--steps", "2", "--out"]
    option = ["--task.reward-function", f"{mine}:reward"]
    assert main([*args, str(out), *option]) == 2
    assert [r["step"] for r in runs.metrics(out)] == ["0"]
    assert "already holds" not in capsys.readouterr().err
    said = f"{out} holds a run without a finished step or a checkpoint: it starts anew"
    assert main([*args, str(out), "--dry-run"]) == 0
    assert said in capsys.readouterr().err
    (out / "checkpoints" / ".step_000001.partial").mkdir(parents=True)  # a killed run's
    assert main([*args, str(out)]) == 0
    assert said in capsys.readouterr().err
    assert main([*args, str(new), "--quiet"]) == 0
    assert runs.metrics(out) == runs.metrics(new) and runs.samples(out) == runs.samples(new)
    for gone in ("checkpoints", "metrics.jsonl"):  # the other alone is a run
        (new / gone).rename(tmp_path / gone)
        assert main([*args, str(new)]) == 2
        assert "already holds a run" in capsys.readouterr().err
        (tmp_path / gone).rename(new / gone)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "CUDA out of memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "CUDA",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error [CUDA]: out of memory"),
        (RuntimeError("shapes do not match"), None),
    ],
)
def test_what_running_out_of_memory_looks_like(error: RuntimeError, said: str | None):
    from samebit.run_checks import out_of_memory

    found = out_of_memory(error)
    assert found is None if said is None else (found or "").startswith(said)


@pytest.mark.parametrize(
    ("phase", "named"),
    [
        ("rollout", "rollout.max_batch or rollout.cache_tokens"),
        ("train", "the largest saving is train."),
    ],
)
def test_running_out_of_memory_names_the_phase_and_the_setting_to_change(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, named: str
):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More words")

    run = run_of(file, tmp_path / "oom", ("eval.every", "0"))
    owner, name = (run.engine, "generate") if phase == "rollout" else (run.trainer, "step")
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(ValueError, match=f"memory in step 1, phase {phase} .*{named}") as error:
        run.train()
    assert "More words" not in str(error.value)
    run.close()


def test_the_update_of_one_step_is_profiled_where_asked(file: Path, tmp_path: Path):
    said: list[str] = []
    run = run_of(file, tmp_path / "out", ("train.profile_step", "2"))
    run.report.note = said.append  # type: ignore[method-assign]
    records(run)
    assert sum("launches" in line for line in said) == 1
    assert "products" in (tmp_path / "out" / "kernels.txt").read_text()
