"""`samebit check`: its bars hold here, and each can be missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    assert len(report["results"]) == check.number_of_checks() == 3 + len(recipe_names())
    assert report["environment"]["backends"]["cpu"] == "available: reference"
    assert report["environment"]["torch"] == torch.__version__
    assert report["environment"]["recipes"]["fp8"] == "unified"
    assert report["environment"]["recipes"]["fp8-rollout"] == "mixed"


def test_a_broken_weight_misses_the_parity_bar(monkeypatch: pytest.MonkeyPatch):
    whole = check.tiny_model

    def broken(recipe: str) -> Any:
        model = whole(recipe)
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
    real = check.linear

    def mixing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return real(x, w) * (1 + 2.0**-7 * (x.shape[0] == 48))

    monkeypatch.setattr(check, "linear", mixing)
    passed, detail = check._matmul_rows()
    assert not passed and "48 rows" in detail


def test_exit_code_1_when_a_bar_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    missed = [check.Result("parity of fp8", False, "3 tokens differ", 0.1)]
    monkeypatch.setattr(check, "results", lambda: iter(missed))
    assert main(["check"]) == 1
    text = capsys.readouterr().out
    assert "FAILED  parity of fp8: 3 tokens differ" in text
    assert main(["check", "--json"]) == 1
