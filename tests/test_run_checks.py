"""What a run is planned into, and that the run is built by its plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samebit import run_checks
from samebit.log import Reporter
from samebit.loop import Run
from samebit.run_checks import Checks, available_memory, foresee, planned_memory
from tests import runs

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("checks"), layers=2)


def test_memory_is_what_the_run_was_given_or_a_share_of_what_is_free(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2000, 9000))
    config = runs.config(file, tmp_path)
    assert available_memory(config, CUDA) == 1900
    given = runs.config(file, tmp_path, ("train.memory_gib", "1.5"))
    assert available_memory(given, CUDA) == 3 << 29
    assert available_memory(given, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([("rl.kl_coefficient", "0.1")], "reference model (no masters)"),
        (
            [("recipe", "fp8-rollout"), ("rl.correction", "calibrated"), ("rl.epochs", "2")],
            "BF16 shadow (no masters)",
        ),
    ],
)
def test_models_that_algorithm_and_correction_need_are_planned(
    file: Path, tmp_path: Path, overrides: list[tuple[str, str]], part: str
):
    def names(*options: tuple[str, str]) -> set[str]:
        config = runs.config(file, tmp_path, *options)
        checks = Checks(config)
        checks.task.close()
        return {p.name for p in planned_memory(config, checks, Path(config.model)).parts if p.size}

    assert part in names(*overrides) and part not in names()


def test_a_run_recomputes_what_its_plan_says(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def recompute_of(name: str, level: str) -> object:
        config = runs.config(file, tmp_path / name, ("train.recompute", level))
        run = Run(config, False, Reporter(quiet=True))
        run.close()
        return run.model.recompute

    assert recompute_of("mlp", "mlp") == "mlp"
    assert recompute_of("enough", "auto") == ("none", "none")
    # a device with no room at all
    monkeypatch.setattr("samebit.loop.available_memory", lambda config, device: 1)
    assert recompute_of("none", "auto") == ("block", "block")


def test_a_dry_run_reads_the_model_s_shape_and_resolves_its_plan_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    called: list[str] = []
    for name in ("config_under", "plan_for"):
        real = getattr(run_checks, name)

        def counted(*args: object, name: str = name, real: object = real) -> object:
            called.append(name)
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(run_checks, name, counted)
    said = list(foresee(runs.config(file, tmp_path)))
    assert said[1].startswith("model: llama with") and "FP32 masters" in said[2]
    assert called == ["config_under", "plan_for"]
