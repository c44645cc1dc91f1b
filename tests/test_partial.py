"""Runs whose samples are drawn in parts: nothing differs, nothing is lost by stopping, and what is refused."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samebit import partial
from samebit.bundle import read_bundle
from samebit.cli import main
from samebit.errors import RunStopped
from samebit.log import Reporter
from samebit.loop import Run
from samebit.replay import replay
from samebit.report.data import exactness, read_run, worst_mismatch
from samebit.reporter import last_line, step_line
from samebit.types import Group, Prompt, Sample
from tests import runs

PARTS = {
    "rollout.max_tokens": "9", "rollout.partial_tokens": "4", "eval.every": "0", "train.steps": "7",
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("partial"))


def run_of(file: Path, out: Path, *more: tuple[str, str], resume: bool = False) -> Run:
    settings = (PARTS | dict(more)).items()
    return Run(runs.config(file, out, *settings), resume, Reporter(quiet=True))


def finish(run: Run) -> list[dict[str, Any]]:
    run.train()
    run.close()
    return runs.read_json_lines(run.folder / "metrics.jsonl")


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-kv", "int8"])
def test_every_token_is_compared_once_at_its_own_version(file: Path, tmp_path: Path, recipe: str):
    found = finish(run_of(file, tmp_path / "out", ("recipe", recipe)))
    drawn = sum(r["rollout/drawn_tokens"] for r in found)
    in_updates = sum(r.get("mismatch/tokens", 0.0) for r in found)
    waiting = sum(r.get("mismatch/held_tokens", 0.0) for r in found)
    # where a step updates nothing the version stays, and what waits is compared again
    again = sum(
        before["rollout/held_tokens"] for before, _ in pairwise(found) if "rl/loss" not in before
    )
    assert in_updates + waiting == drawn + again
    assert sum(r.get("mismatch/stale_tokens", 0.0) for r in found) > 0
    assert sum(r.get("mismatch/tokens_differing", 0.0) for r in found) == 0.0
    assert sum(r.get("mismatch/held_tokens_differing", 0.0) for r in found) == 0.0
    # nine tokens in parts of four: nothing is whole in the first two steps, then two groups a step
    assert [r["rollout/groups"] for r in found] == [0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert "rl/loss" not in found[0] and np.isfinite(found[2]["rl/loss"])


def test_older_tokens_have_the_sampler_s_log_prob_in_their_ratio(file: Path, tmp_path: Path):
    """Until a weight has moved every ratio is 1; from then on older tokens' are not."""
    updates = [r for r in finish(run_of(file, tmp_path / "out")) if "rl/loss" in r]
    moved = [r["train/grad_norm"] > 0.0 for r in updates]
    first = moved.index(True) + 1
    assert 0 < first < 4, "some updates see no moved weight, some do"
    for before in updates[:first]:
        assert before["rl/ratio_mean"] == 1.0
        assert before.get("mismatch/stale_logp_abs_max", 0.0) == 0.0
    for after in updates[first:]:
        assert after["rl/ratio_mean"] != 1.0 and after["mismatch/stale_logp_abs_max"] > 0.0


def test_at_frozen_weights_parts_are_the_whole(file: Path, tmp_path: Path):
    frozen = (("train.learning_rate", "0.0"),)
    finish(run_of(file, tmp_path / "parts", *frozen))
    finish(run_of(file, tmp_path / "whole", *frozen, ("rollout.partial_tokens", "0")))

    def completions(name: str) -> dict[int, str]:
        return {s["sample_id"]: s["completion"] for s in runs.samples(tmp_path / name)}

    parts, whole = completions("parts"), completions("whole")
    assert len(parts) == 20 and parts == {i: whole[i] for i in parts}


@pytest.mark.parametrize("stops", [(1,), (2, 3), (3, 5)])
def test_stopping_between_the_parts_loses_nothing(
    file: Path, tmp_path: Path, stops: tuple[int, ...]
):
    finish(run_of(file, tmp_path / "unbroken"))
    resume = False
    for stop in stops:
        run = run_of(file, tmp_path / "out", resume=resume)
        end, resume = run._finish_step, True

        def die(run: Run = run, end: Any = end, stop: int = stop) -> None:
            end()
            if run.progress.step == stop:
                raise ConnectionAbortedError

        run._finish_step = die  # type: ignore[method-assign]
        with pytest.raises(ConnectionAbortedError):
            run.train()
        assert run.held, "there is something to lose"
        run.close()
    finish(run_of(file, tmp_path / "out", resume=True))
    assert runs.metrics(tmp_path / "out") == runs.metrics(tmp_path / "unbroken")
    assert runs.samples(tmp_path / "out") == runs.samples(tmp_path / "unbroken")


def test_a_run_that_goes_on_without_parts_finishes_what_it_holds(file: Path, tmp_path: Path):
    finish(run_of(file, tmp_path / "out", ("train.steps", "2")))
    run = run_of(file, tmp_path / "out", ("rollout.partial_tokens", "0"), resume=True)
    assert len(run.held) == 4
    found = finish(run)
    assert [r.get("rollout/groups") for r in found[2:4]] == [6.0, None]
    assert run.held == ()


def change_waiting(run: Run, step: int, change: Callable[[np.ndarray], None]) -> None:
    """Call `change` on the log-probs of every sample that is left unfinished, from `step` on."""
    advance = run.engine.advance

    def changed(sample: Sample) -> Sample:
        if sample.finished:
            return sample
        logps = sample.logps.copy()
        change(logps)
        return dataclasses.replace(sample, logps=logps)

    def wrong(*args: Any, **kwargs: Any) -> list[Group]:
        groups = advance(*args, **kwargs)
        if run.progress.step + 1 < step:
            return groups
        return [
            dataclasses.replace(g, samples=tuple(changed(s) for s in g.samples)) for g in groups
        ]

    run.engine.advance = wrong  # type: ignore[method-assign]


def flip_last(logps: np.ndarray) -> None:
    logps.view(np.int32)[-1] ^= 1


def break_waiting(run: Run, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the trainer's forward over groups that wait, and in no other, from `step` on."""
    real = run.model.forward

    def broken(ids: Any, layout: Any, side: str, *rest: Any, **more: Any) -> Any:
        hidden = real(ids, layout, side, *rest, **more)
        waiting = side == "train" and not torch.is_grad_enabled()
        return hidden * float("nan") if waiting and run.progress.step + 1 >= step else hidden

    monkeypatch.setattr(run.model, "forward", broken)


@pytest.mark.parametrize("step", [1, 5])
def test_nan_in_what_waits_alone_stops_the_run_and_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
):
    run = run_of(file, tmp_path / "out")
    break_waiting(run, step, monkeypatch)
    said = rf"NaN in the trainer's log-probs of unfinished samples \(step {step}, norm; output of norm_"
    with pytest.raises(RunStopped, match=said) as stopped:
        run.train()
    run.close()
    assert run.progress.step == step - 1, "before the update"
    about = read_bundle(stopped.value.bundle).about["diagnosis"]
    assert about["kind"] == "non-finite" and about["phase"].startswith("forward: an operator")
    assert about["tokens_at_fault"] == about["tokens_compared"] > 0
    assert about["tokens"][0]["trainer"] == "nan" and np.isfinite(about["tokens"][0]["sampler"])
    monkeypatch.undo()
    found = replay(stopped.value.bundle)
    assert not found.repeats and found.differing == 0, "the fault was in memory"


def test_groups_that_wait_without_a_token_are_nothing_to_judge(file: Path, tmp_path: Path):
    run = run_of(file, tmp_path / "out")
    empty = Sample("p", 0, (), np.zeros(0, np.float32), np.zeros(0, np.int32), "partial")
    held = [partial.Held(0, Group(Prompt("p", (1, 2), ""), (empty,)))]
    run.watchdog.judge_waiting(partial.compare_held(run.trainer, held))
    run.close()


def test_nan_of_the_packed_batch_alone_is_told_from_an_operator_s(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = run_of(file, tmp_path / "out")
    real = run.trainer.scorer.forward

    def broken(*args: Any) -> Any:
        logp, *rest = real(*args)
        return (logp if torch.is_grad_enabled() else logp * float("nan"), *rest)

    monkeypatch.setattr(run.trainer.scorer, "forward", broken)
    with pytest.raises(RunStopped, match="step 1, head or packing; NaN in the head, or of the"):
        run.train()
    run.close()


def test_nan_in_what_waits_is_said_once_where_a_run_only_warns(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = run_of(file, tmp_path / "out", ("run.on_mismatch", "warn"))
    break_waiting(run, 4, monkeypatch)
    found = finish(run)
    assert caplog.text.count("NaN in the trainer's log-probs of unfinished samples; bundle") == 1
    assert [p.name for p in (tmp_path / "out" / "repro").iterdir()] == ["step_000004"]
    assert all(r["train/skipped_steps"] == 0.0 for r in found[2:])


@pytest.mark.parametrize("step", [1, 5])
def test_a_differing_bit_in_what_is_held_stops_the_run_and_is_replayed(
    file: Path, tmp_path: Path, step: int
):
    run = run_of(file, tmp_path / "out")
    change_waiting(run, step, flip_last)
    said = rf"mismatch of unfinished samples is not 0 .*step {step}, engine state; all operators"
    with pytest.raises(RunStopped, match=said) as stopped:
        run.train()
    run.close()
    assert run.progress.step == step - 1, "before the update"
    found = replay(stopped.value.bundle)
    waiting = 4 if step == 1 else 8
    assert found.repeats and found.differing == found.differing_recorded == waiting
    assert (found.older > 0) == (step == 5)
    assert found.redrawn_equal == found.tokens - found.older - waiting


def test_a_differing_bit_in_what_is_held_is_said_where_a_run_only_warns(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
):
    run = run_of(file, tmp_path / "out", ("run.on_mismatch", "warn"))
    change_waiting(run, 4, flip_last)
    found = finish(run)
    differing = [r["mismatch/held_tokens_differing"] for r in found]
    assert differing == [0.0] * 3 + [8.0] * 3 + [7.0], "a sample has ended early"
    assert all(r["mismatch/held_missing_tokens"] == 0.0 for r in found)
    assert 0.0 < found[3]["mismatch/held_logp_abs_max"] < 1e-5
    assert all(r.get("mismatch/tokens_differing", 0.0) == 0.0 for r in found)
    assert caplog.text.count("mismatch of unfinished samples is not 0") == 1
    assert [p.name for p in (tmp_path / "out" / "repro").iterdir()] == ["step_000004"]
    assert replay(tmp_path / "out" / "repro" / "step_000004").differing == 8
    before, line = step_line(3, 7, found[2]), step_line(4, 7, found[3])
    assert "max|dlogp| 0 " in before and "differing" not in before
    assert "max|dlogp| 0 " not in line and "differing 8 " in line
    last = last_line(worst_mismatch(read_run(tmp_path / "out")))
    assert "unfinished tokens differing 8  (not the same bits)" in last
    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "xactly 0</b>" not in page and page.count("<b>up to ") == 2
    assert "largest, of unfinished samples" in page


def test_a_missing_log_prob_of_what_is_held_is_counted_and_no_mismatch(file: Path, tmp_path: Path):
    def forget(logps: np.ndarray) -> None:
        logps[-1] = np.nan

    run = run_of(file, tmp_path / "out")
    change_waiting(run, 4, forget)
    found = finish(run)
    assert [r["mismatch/held_missing_tokens"] for r in found] == [0.0] * 3 + [8.0] * 3 + [7.0]
    assert all(r["mismatch/held_logp_abs_max"] == 0.0 for r in found)
    assert all(np.isfinite(r["rl/loss"]) for r in found[2:])
    assert not (tmp_path / "out" / "repro").exists()
    assert "not the same bits" in last_line(worst_mismatch(read_run(tmp_path / "out")))


def test_a_run_with_nothing_but_held_tokens_says_what_it_compared(file: Path, tmp_path: Path):
    said = io.StringIO()
    settings = PARTS | {"train.steps": "1"}
    run = Run(runs.config(file, tmp_path / "out", *settings.items()), False, Reporter(said))
    (first,) = finish(run)
    assert "mismatch/tokens" not in first and first["mismatch/held_tokens"] > 0
    assert "max|dlogp| 0" in step_line(1, 1, first)
    assert f"waiting {first['rollout/held_groups']:.0f}" in said.getvalue()
    assert "2 unfinished groups were not trained on" in said.getvalue()
    last = last_line(worst_mismatch(read_run(tmp_path / "out")))
    assert last.startswith("mismatch: max |dlogp| 0  (exactly 0")
    found = exactness(read_run(tmp_path / "out"))
    assert found is not None and found.exact and found.steps == 1
    assert found.tokens == first["mismatch/held_tokens"]


def test_a_differing_bit_in_a_resumed_sample_is_named_and_replayed(file: Path, tmp_path: Path):
    """Its older tokens are no fault, and are not drawn again."""
    run = run_of(file, tmp_path / "out")
    advance = run.engine.advance

    def flipped(*args: Any, **kwargs: Any) -> list[Group]:
        groups = advance(*args, **kwargs)
        if run.progress.step == 4:
            whole = next(g for g in groups if all(s.finished for s in g.samples))
            whole.samples[0].logps.view(np.int32)[-1] ^= 1
        return groups

    run.engine.advance = flipped  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match="step 5, engine state; all operators agree") as stopped:
        run.train()
    run.close()
    found = replay(stopped.value.bundle)
    assert found.older > 0 and found.redrawn_equal == found.tokens - found.older - 1
    assert found.repeats and found.differing == found.differing_recorded == 1


def test_what_is_held_survives_saving_to_the_bit(file: Path, tmp_path: Path):
    run = run_of(file, tmp_path / "out", ("train.steps", "1"))
    finish(run)
    again = run_of(file, tmp_path / "out", resume=True)
    again.close()
    assert len(again.held) == len(run.held) == 2
    for a, b in zip(again.held, run.held, strict=True):
        assert a.index == b.index and a.group.prompt == b.group.prompt
        for s, t in zip(a.group.samples, b.group.samples, strict=True):
            assert (s.sample_id, s.ids, s.finish_reason) == (t.sample_id, t.ids, t.finish_reason)
            assert s.logps.tobytes() == t.logps.tobytes()
            assert s.versions.tobytes() == t.versions.tobytes() and s.prompt_id == t.prompt_id


def test_a_missing_log_prob_and_an_empty_sample_are_saved_too():
    nothing = Sample("p", 3, (), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
    odd = Sample("p", 4, (7,), np.array([np.nan], np.float32), np.array([2], np.int32), "stop")
    tensors = partial.tensors_of([partial.Held(0, Group(Prompt("p", (1,), ""), (nothing, odd)))])
    assert all(t.dtype == torch.uint8 for t in tensors.values())
    assert np.isnan(tensors["logps"].numpy().view(np.float32)).all()
    assert tensors["length"].numpy().view(np.int64).tolist() == [0, 1]
    assert partial.tensors_of([]) == {}


def test_another_prompt_in_the_place_of_a_held_one_is_refused(file: Path, tmp_path: Path):
    finish(run_of(file, tmp_path / "out", ("train.steps", "1")))
    said = r"unfinished samples of train prompt .* set the task's options"
    with pytest.raises(ValueError, match=said):
        run_of(file, tmp_path / "out", ("task.held_out_share", "0.6"), resume=True)


def test_another_prompt_of_as_many_tokens_is_refused_too(tmp_path: Path):
    file, share = runs.make(tmp_path), ("task.held_out_share", "0.0")
    run = run_of(file, tmp_path / "out", share, ("train.steps", "1"))
    finish(run)
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace("say ", "sag "))
    with pytest.raises(ValueError, match=r"unfinished samples of train prompt .* set the task's"):
        run_of(file, tmp_path / "out", share, resume=True)
    data.write_text(data.read_text().replace("sag ", "say "))
    again = run_of(file, tmp_path / "out", share, resume=True)
    again.close()
    assert [h.index for h in again.held] == [h.index for h in run.held]


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("temperature", "0.5", "4"),
        ("temperature", "0.5", "0"),
        ("top_k", "5", "0"),
        ("top_p", "0.9", "0"),
    ],
)
def test_what_was_drawn_under_another_transform_is_not_gone_on_with(
    file: Path, tmp_path: Path, key: str, value: str, parts: str
):
    finish(run_of(file, tmp_path / "out", ("train.steps", "3")))
    other = (f"rollout.{key}", value), ("rollout.partial_tokens", parts)
    with pytest.raises(
        ValueError, match=rf"drawn with rollout.{key} = .*, this run has {value}: set it back"
    ):
        run_of(file, tmp_path / "out", *other, resume=True)
    # the way out that the message names
    steps = ("train.steps", "4"), ("rollout.partial_tokens", "0")
    finish(run_of(file, tmp_path / "out", *steps, resume=True))
    found = finish(run_of(file, tmp_path / "out", *other, ("train.steps", "5"), resume=True))
    assert found[-1]["step"] == 5
    assert found[-1].get("mismatch/tokens_differing", 0.0) == 0.0


def test_steps_without_whole_groups_count_in_the_schedule(file: Path, tmp_path: Path):
    settings = (("train.schedule", "linear"), ("train.learning_rate", "8e-4"))
    found = finish(run_of(file, tmp_path / "out", *settings, ("train.steps", "8")))
    rates = [r["train/learning_rate"] for r in found if "rl/loss" in r]
    assert rates == pytest.approx([6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4])


def test_a_step_that_trains_on_nothing_says_that_it_cannot_be_timed(file: Path, tmp_path: Path):
    stream = io.StringIO()
    settings = PARTS | {"train.steps": "1", "train.profile_step": "1"}
    run = Run(runs.config(file, tmp_path / "out", *settings.items()), False, Reporter(stream))
    finish(run)
    assert "train.profile_step = 1: no kernels.txt, because step 1" in stream.getvalue()
    assert not (tmp_path / "out" / "kernels.txt").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "--rollout.partial-tokens 4 --rollout.top-k 5",
            "command line: --rollout.partial-tokens, --rollout.top-k: partial_tokens = 4 with "
            "top_p = 1.0, top_k = 5: the set that older weights kept",
        ),
        ("--rollout.partial-tokens 4 --rollout.top-p 0.9", "top_p = 0.9, top_k = 0: the set that"),
        (
            "--rollout.partial-tokens 4 --rl.algorithm dapo",
            "command line: --rollout.partial-tokens, --rl.algorithm: partial_tokens = 4 with "
            "algorithm 'dapo', which samples again until its step is full (max_sampling_rounds = 4); set "
            "rl.max_sampling_rounds = 1",
        ),
        ("--rollout.partial-tokens -1", "rollout.partial_tokens = -1"),
    ],
)
def test_what_does_not_go_with_parts_is_refused(
    file: Path, tmp_path: Path, capsys: Any, settings: str, message: str
):
    assert main(["train", str(file), "--out", str(tmp_path / "out"), *settings.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_advice_for_dapo_is_taken(file: Path, tmp_path: Path):
    settings = "--rollout.partial-tokens 4 --rl.algorithm dapo --rl.max-sampling-rounds 1"
    arguments = ["train", str(file), "--out", str(tmp_path / "out"), *settings.split()]
    assert main([*arguments, "--steps", "1", "--quiet"]) == 0
