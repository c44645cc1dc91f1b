"""The canary sings while both sides agree, and names the operator when they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samebit.canary import Canary
from samebit.cli import main
from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.errors import RunStopped
from samebit.log import Reporter
from samebit.loop import Run
from samebit.trace import inject_fault
from samebit.types import Sampling
from tests import runs
from tests.engine.common import tiny_model


def test_canary(tmp_path):
    model = tiny_model(tmp_path, "llama", "fp8")
    canary = Canary(model, Sampling(temperature=0.8, max_tokens=50), every=3)
    engine = Engine(model, RolloutConfig(), None, 0)
    canary.check(engine, 0)
    inject_fault(model, "scale", "layers.1.gate_up")
    canary.check(engine, 1)  # not due
    engine.refresh()
    with pytest.raises(RunStopped, match=r"canary after step 3: .*gate_up.* layer 1"):
        canary.check(engine, 3)


def test_no_canary_where_every_token_is_compared_or_none_can_be(tmp_path):
    model = tiny_model(tmp_path, "llama", "fp8")
    assert Canary.of(model, 20, Sampling()) is None


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("canary"), layers=2)


@pytest.fixture
def sung(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Finished steps when a canary sings; a run on this CPU has one, as on a GPU."""
    steps: list[int] = []
    real = Canary.sing

    def sing(self: Canary, engine: Any, step: int) -> Any:
        steps.append(step)
        return real(self, engine, step)

    def of(model: Any, every: int, sampling: Any) -> Canary | None:
        return Canary(model, sampling, every) if every else None

    monkeypatch.setattr(Canary, "sing", sing)
    monkeypatch.setattr(Canary, "of", of)
    return steps


def run_of(file: Path, out: Path, *more: tuple[str, str], resume: bool = False) -> Run:
    return Run(runs.config(file, out, *more), resume, Reporter(quiet=True))


def finish(run: Run) -> None:
    try:
        run.train()
    finally:
        run.close()


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ((), [0, 1, 2, 3, 4]),  # once each, evaluated or not: 4 is the last evaluation
        ((("eval.every", "0"),), [0, 1, 2, 3]),
        ((("run.canary", "2"),), [0, 2, 4]),
        ((("run.canary", "0"),), []),
    ],
)
def test_the_canary_sings_once_after_every_refresh(
    file: Path, tmp_path: Path, sung: list[int], more: tuple[Any, ...], steps: list[int]
):
    finish(run_of(file, tmp_path / "out", *more))
    assert sung == steps
    records = runs.read_json_lines(tmp_path / "out" / "metrics.jsonl")
    assert all(("time/canary_s" in r) == bool(steps) for r in records if r["step"])


def test_a_run_with_a_canary_is_the_run_without(file: Path, tmp_path: Path, sung: list[int]):
    for every in ("0", "1"):
        finish(run_of(file, tmp_path / every, ("run.canary", every)))
    assert runs.metrics(tmp_path / "0") == runs.metrics(tmp_path / "1")
    assert runs.samples(tmp_path / "0") == runs.samples(tmp_path / "1")


def test_a_resumed_run_hears_the_canary_of_the_weights_it_read(
    file: Path, tmp_path: Path, sung: list[int]
):
    finish(run_of(file, tmp_path / "out", ("train.steps", "2"), ("eval.every", "0")))
    finish(run_of(file, tmp_path / "out", ("eval.every", "0"), resume=True))
    assert sung == [0, 1, 2, 3]


def break_after(run: Run, step: int) -> None:
    """Break a weight of the engine's side in the refresh that ends `step`."""
    refresh = run.engine.refresh

    def broken() -> None:
        refresh()
        if run.progress.step == step - 1:
            inject_fault(run.model, "scale", "layers.1.gate_up")

    run.engine.refresh = broken  # type: ignore[method-assign]


def test_a_fault_after_a_refresh_is_found_before_a_token_is_drawn(
    file: Path, tmp_path: Path, sung: list[int]
):
    for every in ("0", "1"):  # in step 2 the canary comes before an evaluation, else a rollout
        run = run_of(file, tmp_path / every, ("eval.every", every))
        break_after(run, 2)
        with pytest.raises(RunStopped, match=r"canary after step 2: .*gate_up"):
            finish(run)
        last = runs.read_json_lines(tmp_path / every / "metrics.jsonl")[-1]
        assert last["step"] == 2 and "reward/eval_mean" not in last
        assert max(s["step"] for s in runs.samples(tmp_path / every)) == 2


def test_where_a_run_only_warns_the_canary_is_heard_once(
    file: Path, tmp_path: Path, sung: list[int], caplog: pytest.LogCaptureFixture
):
    run = run_of(file, tmp_path / "out", ("run.on_mismatch", "warn"), ("eval.every", "0"))
    break_after(run, 2)
    finish(run)
    assert sung == [0, 1, 2] and caplog.text.count("canary after step 2") == 1


def test_the_help_says_how_often(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--run.canary INT After the refresh of every so many steps (1: of every step)" in text
    assert "as run.on_mismatch says. 0 never. (1)" in text
