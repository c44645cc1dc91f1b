"""A broken promise stops the run before a weight moves, names the place, and can be run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from samebit.bundle import environment, read_bundle
from samebit.cli import main
from samebit.errors import RunStopped
from samebit.log import Reporter
from samebit.loop import Run, build_trainer
from samebit.replay import replay
from samebit.trace import inject_fault
from samebit.train import checkpoint
from tests import runs


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("watchdog"), layers=2)


def run_of(file: Path, out: Path, *overrides: tuple[str, str]) -> Run:
    return Run(runs.config(file, out, ("eval.every", "0"), *overrides), False, Reporter(quiet=True))


def masters(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])


def break_at(run: Run, step: int, fault: Callable[[], Any]) -> None:
    """Call `fault` before the rollout of `step`."""
    generate = run.engine.generate

    def broken(*args: Any, **kwargs: Any) -> Any:
        if run.progress.step == step - 1:
            fault()
        return generate(*args, **kwargs)

    run.engine.generate = broken  # type: ignore[method-assign]


def test_a_fault_in_a_weight_stops_the_run_and_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = run_of(file, tmp_path / "out")
    break_at(run, 2, lambda: inject_fault(run.model, "code", "layers.1.gate_up"))
    before: list[torch.Tensor] = []
    step = run.one_step
    run.one_step = lambda: (before.append(masters(run)), step())[1]  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match="gate_up") as stopped:
        run.train()
    run.close()
    assert torch.equal(masters(run), before[-1]), "no weight was moved"
    assert [r["step"] for r in runs.metrics(tmp_path / "out")] == ["1"]
    bundle = read_bundle(stopped.value.bundle)
    found = bundle.about["diagnosis"]
    assert found["step"] == 2 and found["kind"] == "mismatch" and found["role"] == "gate_up"
    assert found["phase"].startswith("forward") and "layer 1" in found["where"]
    assert 0 < found["tokens_at_fault"] <= found["tokens_compared"]
    first = found["tokens"][0]
    assert first["sampler"] != first["trainer"]
    assert bundle.checkpoint.name == "step_000001"
    assert checkpoint.problem_of(bundle.checkpoint) is None
    # the fault was in memory: on the checkpoint's weights the trainer repeats, the sampler does not
    planned: list[Any] = []
    monkeypatch.setattr("samebit.replay.available_memory", lambda *_: 1)  # a device with no room
    monkeypatch.setattr(
        "samebit.replay.build_trainer",
        lambda model, *rest: (planned.append(model.recompute), build_trainer(model, *rest))[1],
    )
    again = replay(bundle.folder)
    assert planned == [("block",) * len(run.model.layers)]
    assert again.repeats and again.differing == again.differing_recorded > 0
    assert any("engine" in line for line in again.lines)
    assert again.redrawn_equal is not None and again.redrawn_equal < again.tokens
    require_recorded_device(bundle.folder, monkeypatch)


def require_recorded_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's bundle is replayed on the CPU, another device's is refused where there is none."""
    from samebit import replay as module

    monkeypatch.setattr(module, "choose_device", lambda _: pytest.fail("the bundle says where"))
    assert replay(folder, redraw=False).environment_changes == ()
    file = folder / "bundle.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    assert about["environment"]["device"] == "cpu"
    about["environment"]["device"] = "NVIDIA H200"
    file.write_text(json.dumps(about), encoding="utf-8")
    monkeypatch.setattr(module, "missing_for_cuda", lambda _: "torch sees no CUDA device")
    with pytest.raises(
        ValueError, match="recorded on NVIDIA H200, and only such a device"
    ) as error:
        replay(folder)
    assert str(folder) in str(error.value) and "--run.device" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "recorded", "device"),
    [("cuda:1", "NVIDIA H200", "cuda:1"), ("auto", "NVIDIA H200", "cuda"), ("cuda", None, "cuda"),
     ("auto", "cpu", "cpu"), ("auto", None, "cpu")],
)  # fmt: skip
def test_replay_goes_to_the_device_that_recorded(
    asked: str, recorded: str | None, device: str, monkeypatch: pytest.MonkeyPatch
):
    from samebit import replay as module

    found: list[torch.device] = []
    monkeypatch.setattr(module, "missing_for_cuda", lambda where: found.append(where))
    monkeypatch.setattr(module, "choose_device", lambda _: torch.device("cpu"))
    environment = {} if recorded is None else {"device": recorded}
    bundle: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(device=asked)),
        about={"environment": environment},
    )
    assert module._recorded_device(bundle) == torch.device(device)
    assert found == ([torch.device(device)] if device != "cpu" else [])


def test_a_bundle_names_the_card(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    assert environment(torch.device("cuda:1"))["device"] == "card 1"
    assert environment(torch.device("cpu"))["device"] == "cpu"


def test_a_fault_of_the_functions_themselves_is_named_again_by_replay(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from samebit import reference
    from samebit.reference import fused

    real = reference.silu_mul

    def drifting(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = real(gate, up)
        # another rounding in large batches only: what a library that picks kernels by shape does
        return out * 1.02 if len(out) > 16 else out

    for module in (reference, fused):
        monkeypatch.setattr(module, "silu_mul", drifting)
    run = run_of(file, tmp_path / "out")
    with pytest.raises(RunStopped, match="silu_mul of layer 0"):
        run.train()
    run.close()
    folder = tmp_path / "out" / "repro" / "step_000001"
    again = replay(folder)
    assert again.repeats and again.differing == again.differing_recorded > 0
    assert any("gate_up" in line for line in again.lines)
    assert again.redrawn_equal == again.tokens
    monkeypatch.undo()
    healed = replay(folder)
    assert not healed.repeats


def test_stale_engine_memory_is_told_from_a_broken_function(file: Path, tmp_path: Path):
    run = run_of(file, tmp_path / "out")
    generate = run.engine.generate

    def stale(*args: Any, **kwargs: Any) -> Any:
        groups = generate(*args, **kwargs)
        groups[0].samples[1].logps[2] = np.nextafter(groups[0].samples[1].logps[2], np.float32(0))
        return groups

    run.engine.generate = stale  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match="engine state"):
        run.train()
    run.close()
    found = read_bundle(tmp_path / "out" / "repro" / "step_000001").about["diagnosis"]
    assert found["tokens_at_fault"] == 1 and found["tokens"][0]["index"] == 2
    assert found["phase"].startswith("rollout")


def test_warn_says_so_once_and_goes_on_and_keeps_the_bundle_s_weights(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = run_of(file, tmp_path / "out", ("run.on-mismatch", "warn"))
    generate = run.engine.generate

    def wrong(*args: Any, **kwargs: Any) -> Any:
        groups = generate(*args, **kwargs)
        groups[0].samples[0].logps[0] -= 1e-3
        return groups

    run.engine.generate = wrong  # type: ignore[method-assign]
    run.train()
    run.close()
    assert caplog.text.count("mismatch is not 0") == 1
    assert [p.name for p in (tmp_path / "out" / "repro").iterdir()] == ["step_000001"]
    kept = sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
    assert kept == ["step_000000", "step_000003", "step_000004"]
    assert replay(tmp_path / "out" / "repro" / "step_000001").repeats


def test_a_token_without_a_sampler_s_log_prob_is_counted_and_no_mismatch(
    file: Path, tmp_path: Path
):
    run = run_of(file, tmp_path / "out", ("train.steps", "1"))
    generate = run.engine.generate

    def missing(*args: Any, **kwargs: Any) -> Any:
        groups = generate(*args, **kwargs)
        groups[0].samples[0].logps[0] = np.nan
        return groups

    run.engine.generate = missing  # type: ignore[method-assign]
    run.train()
    run.close()
    (record,) = runs.read_json_lines(tmp_path / "out" / "metrics.jsonl")
    assert record["mismatch/missing_tokens"] == 1.0 and record["mismatch/logp_abs_max"] == 0.0
    assert record["train/skipped_steps"] == 0.0 and np.isfinite(record["rl/loss"])
    assert record["rl/ratio_max"] == 1.0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_numbers_that_are_not_finite_stop_after_some_steps(
    file: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
):
    run = run_of(file, tmp_path / "out", ("run.max-skipped-steps", "2"), ("train.steps", "9"))
    before = masters(run)
    if where == "forward":
        real = run.model.forward

        def broken(ids: Any, layout: Any, side: str, *rest: Any, **more: Any) -> Any:
            hidden = real(ids, layout, side, *rest, **more)
            return hidden * float("nan") if side == "train" else hidden

        monkeypatch.setattr(run.model, "forward", broken)
    else:
        weight = run.model.layers[0].down.master  # type: ignore[union-attr]
        weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(RunStopped, match="2 steps in a row"):
        run.train()
    run.close()
    assert torch.equal(masters(run), before), "skipped updates move nothing"
    records = runs.read_json_lines(tmp_path / "out" / "metrics.jsonl")
    assert [r["train/skipped_steps"] for r in records] == [1.0, 2.0]
    found = read_bundle(tmp_path / "out" / "repro" / "step_000002").about["diagnosis"]
    assert found["kind"] == "non-finite" and found["phase"].startswith(where)
    assert ("down" in found["role"]) == (where == "backward")


def test_a_good_step_in_between_starts_the_count_again(file: Path, tmp_path: Path):
    run = run_of(file, tmp_path / "out", ("run.max-skipped-steps", "2"), ("train.steps", "5"))

    def poison(grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan") if run.progress.step % 2 == 0 else grad

    run.model.norm_final.register_hook(poison)
    run.train()
    run.close()
    skipped = [r["train/skipped_steps"] for r in runs.metrics(tmp_path / "out")]
    assert skipped == ["1.0", "1.0", "2.0", "2.0", "3.0"]


def test_the_command_and_its_refusals(file: Path, tmp_path: Path, capsys: Any):
    run = run_of(file, tmp_path / "out")
    break_at(run, 1, lambda: inject_fault(run.model, "scale", "layers.0.qkv"))
    with pytest.raises(RunStopped):
        run.train()
    run.close()
    bundle = tmp_path / "out" / "repro" / "step_000001"
    assert main(["replay", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["repeats"] and found["kind"] == "mismatch" and not found["environment_changes"]
    assert main(["replay", str(bundle), "--no-redraw"]) == 0
    assert "recorded bits" in capsys.readouterr().out
    assert main(["replay", str(tmp_path)]) == 2
    assert "no bundle.json" in capsys.readouterr().err
    (bundle / "groups.json").write_text("[]")
    assert main(["replay", str(bundle)]) == 2
    assert "damaged bundle" in capsys.readouterr().err
