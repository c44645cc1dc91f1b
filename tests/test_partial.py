"""Runs whose samples are drawn in parts: nothing differs, nothing is lost by stopping, and what is refused."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samebit import partial
from samebit.cli import main
from samebit.errors import RunStopped
from samebit.log import Reporter
from samebit.loop import Run
from samebit.replay import replay
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


def test_a_differing_bit_in_what_is_held_stops_the_run_before_the_update(
    file: Path, tmp_path: Path
):
    run = run_of(file, tmp_path / "out")
    advance = run.engine.advance

    def flipped(*args: Any, **kwargs: Any) -> list[Group]:
        groups = advance(*args, **kwargs)
        sample = groups[-1].samples[0]
        logps = sample.logps.copy()
        logps.view(np.int32)[-1] ^= 1
        wrong = dataclasses.replace(sample, logps=logps)
        rest = groups[-1].samples[1:]
        return [*groups[:-1], dataclasses.replace(groups[-1], samples=(wrong, *rest))]

    run.engine.advance = flipped  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match="unfinished samples of step 1: engine and trainer differ"):
        run.train()
    run.close()


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
    with pytest.raises(
        ValueError, match=r"unfinished samples of train prompt .* set the task's options"
    ):
        run_of(file, tmp_path / "out", ("task.held_out_share", "0.6"), resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--rollout.partial-tokens 4 --rollout.top-k 5", "the set that older weights kept"),
        ("--rollout.partial-tokens 4 --rl.algorithm dapo", "samples again until its step is full"),
        ("--rollout.partial-tokens -1", "rollout.partial_tokens = -1"),
    ],
)
def test_what_does_not_go_with_parts_is_refused(
    file: Path, tmp_path: Path, capsys: Any, settings: str, message: str
):
    assert main(["train", str(file), "--out", str(tmp_path / "out"), *settings.split()]) == 2
    assert message in capsys.readouterr().err
