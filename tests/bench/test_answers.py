"""Whole rollouts: what a step counts for, on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebit.bench import answers
from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from tests.gpu.backend_cases import MODELS, random_model

PLACES = 6


@pytest.fixture(scope="module")
def model():
    shape = replace(
        MODELS["llama"], hidden=64, layers=1, heads=1, kv_heads=1, head_dim=64, intermediate=96
    )
    return random_model(shape, "fp8", torch.device("cpu"))


@pytest.fixture
def engine(model, monkeypatch):
    monkeypatch.setattr(answers, "PROMPT_TOKENS", 5)
    monkeypatch.setattr(answers, "NEVER_TOKENS", 12)
    monkeypatch.setattr(answers, "MEAN_TOKENS", 8)
    monkeypatch.setattr(answers, "PART_TOKENS", 6)
    monkeypatch.setattr(answers, "made", lambda _: 3)
    return Engine(model, RolloutConfig(max_batch=PLACES), None, 0)


@pytest.mark.parametrize("kind", answers.STEPS)
def test_a_row_counts_the_tokens_of_its_steps(engine, kind):
    found = answers.measured(engine, kind, PLACES)
    uncounted, wanted = answers.STEPS[kind]
    assert found["steps_run"] == uncounted + wanted
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(found["tokens_a_step"])
    if kind == "at-once":
        assert found["tokens_a_step"] == PLACES and found["longest"] == 1
    elif kind == "never":
        assert found["tokens_a_step"] == 12 * PLACES and found["longest"] == 12
    else:
        assert PLACES < found["tokens_a_step"] < 12 * 8 * PLACES
    assert (found["cut"] > 0) == (kind == "parts")


def test_parts_count_what_each_step_drew(engine, monkeypatch):
    """Not what the samples that go on had already."""
    drawn = []
    advance = engine.advance

    def noted(groups, *args, **options):
        before = answers.drawn(groups)
        out = advance(groups, *args, **options)
        drawn.append(answers.drawn(out) - before)
        return out

    monkeypatch.setattr(engine, "advance", noted)
    found = answers.measured(engine, "parts", PLACES)
    assert found["tokens_a_step"] == sum(drawn[-4:]) / 4


def test_kinds_of_launches_and_graphs_are_what_is_made(monkeypatch):
    launch = pytest.importorskip("samebit.kernels.launch")
    engine: Any = SimpleNamespace(stats=SimpleNamespace(captures=3))
    monkeypatch.setattr(launch, "is_known", lambda: True)
    monkeypatch.setattr(launch, "kinds_seen", lambda: 40)
    assert answers.made(engine) == 43
    monkeypatch.setattr(launch, "is_known", lambda: False)
    with pytest.raises(RuntimeError, match=r"with triton 3\.6\.x only"):
        answers.made(engine)


def test_a_step_that_made_something_does_not_count(engine, monkeypatch):
    counts = iter([0, 0, 1, 1, 1, 1, 2, 2, 2])
    monkeypatch.setattr(answers, "made", lambda _: next(counts))
    # step 0 never counts and is asked once; steps 1 and 3 made something
    assert answers.measured(engine, "at-once", PLACES)["steps_run"] == 5


def test_a_row_whose_every_step_makes_something_is_refused(engine, monkeypatch):
    numbers = iter(range(1000))
    monkeypatch.setattr(answers, "made", lambda _: next(numbers))
    with pytest.raises(RuntimeError, match="still being made in step 9"):
        answers.measured(engine, "at-once", PLACES)
