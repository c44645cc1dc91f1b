"""`samebit check`: its bars hold here, and each can be missed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebit import check
from samebit.cli import main
from samebit.quant.plan import recipe_names
from samebit.trace import inject_fault


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_bar_is_met_and_the_json_says_so(capsys: Any):
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == []
    assert len(report["results"]) == check.number_of_checks()
    assert report["environment"]["backends"]["cpu"] == "available: reference"
    assert report["environment"]["torch"] == torch.__version__
    assert report["environment"]["recipes"]["fp8"] == "unified"
    assert report["environment"]["recipes"]["fp8-rollout"] == "mixed"


def test_a_broken_weight_misses_the_parity_bar(monkeypatch: pytest.MonkeyPatch):
    whole = check.tiny_model

    def broken(recipe: str, device: str) -> Any:
        model = whole(recipe, device=device)
        inject_fault(model, "scale", "layers.1.down")
        return model

    monkeypatch.setattr(check, "tiny_model", broken)
    passed, detail = check._parity("fp8")
    assert not passed and "prefill = training forward: " in detail


def test_a_cast_that_truncates_is_seen(monkeypatch: pytest.MonkeyPatch):
    real = torch.Tensor.to

    def truncating(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and args[0] is torch.float8_e4m3fn and x.dtype == torch.float32:
            x = (x.view(torch.int32) & ~0xFFFFF).view(torch.float32)
        return real(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", truncating)
    passed, detail = check._cast()
    assert not passed and ", 0 wrong" not in detail


def test_a_library_that_mixes_rows_is_seen(monkeypatch: pytest.MonkeyPatch):
    real = check.matmul_rows

    def mixing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return real(x, w) * (1 + 2.0**-7 * (x.shape[0] == 48))

    monkeypatch.setattr(check, "matmul_rows", mixing)
    passed, detail = check._matmul_rows()
    assert not passed and "48 rows" in detail


def test_exit_code_1_when_a_bar_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    missed = [check.Result("parity of fp8", False, "3 tokens differ", 0.1)]
    monkeypatch.setattr(check, "results", lambda device: iter(missed))
    assert main(["check"]) == 1
    text = capsys.readouterr().out
    assert "FAILED  parity of fp8: 3 tokens differ" in text
    assert main(["check", "--json"]) == 1


def test_the_tiny_model_and_the_recipes_checked_are_ones_that_the_kernels_take():
    assert check.TINY.head_dim in (64, 128)
    on_cuda = [name for name, _ in check._checks("cuda")]
    assert (
        "parity of fp8 on cuda" in on_cuda and "mismatch of fp8-rollout is seen on cuda" in on_cuda
    )
    assert not any("int4" in name for name in on_cuda)
    assert len(check._checks("cpu")) == 3 + len(recipe_names())


@pytest.mark.parametrize("version", ["3.5.1", "3.7.1", "3.60.0", None])
def test_a_compiler_that_the_kernels_are_not_proved_with_is_refused(
    version: str | None, monkeypatch: pytest.MonkeyPatch
):
    from samebit.quant import ops

    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda _: version and "here")
    monkeypatch.setattr(ops.metadata, "version", lambda _: version or "")
    with pytest.raises(ValueError, match=r"triton.*\.\[gpu\].*--run\.device cpu"):
        ops.get_ops(card)
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda _: "here")
    monkeypatch.setattr(ops.metadata, "version", lambda _: "3.6.0")
    assert ops.missing_for_cuda(card) is None


def test_the_compiler_that_is_asked_for_is_the_one_taken():
    """In the package's extra, the Makefile and the short launch alike."""
    from samebit.quant.ops import TRITON

    root = Path(__file__).parents[1]
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    minor = int(TRITON.split(".")[1])
    assert f"triton>=3.{minor},<3.{minor + 1}" in extra["optional-dependencies"]["gpu"]
    assert f"TRITON ?= {TRITON}" in (root / "Makefile").read_text()
    launch = pytest.importorskip("samebit.kernels.launch")
    assert launch.KNOWN == TRITON


@pytest.mark.parametrize(("known", "said"), [(True, ""), (False, "Triton's own way")])
def test_what_launches_go_by_is_said(known: bool, said: str, monkeypatch: pytest.MonkeyPatch):
    launch = pytest.importorskip("samebit.kernels.launch")
    from samebit import machine

    monkeypatch.setattr(launch, "is_known", lambda: known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "get_ops", lambda device: SimpleNamespace(NAME="hopper"))
    found = machine._backends()["cuda"]
    assert found.startswith("available: hopper") and said in found
    assert known == (found == "available: hopper")


def test_a_device_that_cannot_be_used_is_refused(capsys: Any):
    assert main(["check", "--device", "tpu"]) == 2
    assert "--device tpu: must be cpu or cuda" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["check", "--device", "cuda"]) == 2
        said = capsys.readouterr().err
        assert "cannot be used" in said and said.endswith("Use --device cpu\n")
