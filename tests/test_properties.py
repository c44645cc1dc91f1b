"""What holds everywhere, tried on random cases (the fifth, resuming, is in test_resume.py)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebit.models.load import load_model, named_masters
from samebit.quant.plan import load_recipe
from samebit.rl.registry import list_algorithms
from samebit.train.step import Trainer
from samebit.types import Group, Prompt
from tests.tiny import tiny_folder
from tests.train.groups import config_for, draw, rollout, trainer_for

UNIFIED = ("bf16", "fp8", "fp8-bf16-backward", "fp8-row", "int8")
FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 64, "intermediate": 96, "layers": 1, "heads": 2, "kv_heads": 1}
    return tiny_folder(tmp_path_factory.mktemp("properties"), "qwen3", **sizes)


@pytest.fixture(scope="module")
def groups_of(folder: Path) -> dict[str, list[Group]]:
    """A rollout of the model's own by recipe."""
    return {name: rollout(load_model(folder, load_recipe(name))) for name in UNIFIED}


def build(folder: Path, recipe: str, algorithm: str = "grpo", **config: Any) -> Trainer:
    model = load_model(folder, load_recipe(recipe))
    model.version = 1
    return trainer_for(model, config_for(**config), "none", algorithm)


def gradient(trainer: Trainer, groups: list[Group]) -> torch.Tensor:
    caught: list[torch.Tensor] = []

    def catch() -> dict[str, float]:
        caught.append(torch.cat([p.grad.flatten() for p in trainer.parameters().values()]))
        return {}

    trainer._optimise = catch  # type: ignore[method-assign]
    trainer.step(groups)
    return caught[0]


@FEW
@given(
    filler=st.floats(width=32) | st.sampled_from([math.nan, 1e6, -1e6, math.inf, -math.inf]),
    group=st.integers(0, 3),
    sample=st.integers(0, 2),
    algorithm=st.sampled_from(["grpo", "dapo", "gspo", "cispo", "reinforce_pp"]),
)
def test_what_is_masked_changes_no_bit(
    folder: Path,
    groups_of: dict[str, list[Group]],
    filler: float,
    group: int,
    sample: int,
    algorithm: str,
):
    def with_hole(value: float) -> torch.Tensor:
        groups = list(groups_of["fp8"])
        samples, rewards = list(groups[group].samples), list(groups[group].rewards)
        logps = np.full(len(samples[sample].ids), value, dtype=np.float32)
        samples[sample] = dataclasses.replace(samples[sample], logps=logps)
        rewards[sample] = None
        groups[group] = Group(groups[group].prompt, tuple(samples), tuple(rewards))
        return gradient(build(folder, "fp8", algorithm), groups)

    clean = with_hole(-1.0)
    assert bool(torch.isfinite(clean).all()) and float(clean.abs().max()) > 0
    assert torch.equal(with_hole(filler), clean)


@FEW
@given(
    order=st.permutations(range(4)),
    budget=st.integers(1, 300),
    recipe=st.sampled_from(UNIFIED),
)
def test_any_split_and_order_gives_the_same_gradient(
    folder: Path,
    groups_of: dict[str, list[Group]],
    order: list[int],
    budget: int,
    recipe: str,
):
    groups = groups_of[recipe]
    want = gradient(build(folder, recipe), groups)
    shuffled = [groups[i] for i in order]
    got = gradient(build(folder, recipe, micro_batch_tokens=budget), shuffled)
    assert float((got - want).norm() / want.norm()) < 1e-5


@FEW
@given(
    recipe=st.sampled_from(UNIFIED),
    algorithm=st.sampled_from(list_algorithms()),
    epochs=st.integers(1, 2),
    mini_batches=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([1, 100, 4096]),
)
def test_a_learning_rate_of_zero_gives_a_ratio_of_exactly_one(
    folder: Path,
    groups_of: dict[str, list[Group]],
    recipe: str,
    algorithm: str,
    epochs: int,
    mini_batches: int,
    budget: int,
):
    rl = {"epochs": epochs, "mini_batches": mini_batches}
    trainer = build(folder, recipe, algorithm, learning_rate=0.0, rl=rl, micro_batch_tokens=budget)
    found = trainer.step(groups_of[recipe])
    assert trainer.updates == epochs * mini_batches and trainer.skipped == 0
    assert found["rl/ratio_max"] == 1.0 and found["rl/ratio_mean"] == 1.0
    assert found["mismatch/tokens_differing"] == 0.0 and found["mismatch/tokens"] > 0


@FEW
@given(
    recipe=st.sampled_from([*UNIFIED, "fp8-rollout", "int8-rollout"]),
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
)
def test_refreshing_there_and_back_gives_the_first_bits(
    folder: Path, recipe: str, seed: int, size: float
):
    model = load_model(folder, load_recipe(recipe))
    masters = named_masters(model)
    first = {name: m.clone() for name, m in masters.items()}
    held, places = _derived(model)
    generator = torch.Generator().manual_seed(seed)
    for master in masters.values():
        master.copy_(torch.randn(master.shape, generator=generator) * size)
    model.refresh()
    other, _ = _derived(model)
    assert all(held[name] != other[name] for name in held), "everything was requantised"
    for name, master in masters.items():
        master.copy_(first[name])
    model.refresh()
    again, still = _derived(model)
    assert again == held and still == places


def _derived(model: Any) -> tuple[dict[str, bytes], dict[str, int]]:
    """Bytes and addresses of all that refresh makes."""
    held, places = {"head": model.head_weight.codes}, {}
    for path, module in model.linears():
        for side, weight in module.weights.items():
            held[f"{path}.{side}.codes"] = weight.codes
            if weight.scale is not None:
                held[f"{path}.{side}.scale"] = weight.scale
    places = {name: tensor.data_ptr() for name, tensor in held.items()}
    raw = {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in held.items()}
    return raw, places


@pytest.mark.parametrize("recipe", UNIFIED)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31])
def test_any_number_of_packed_rows_trains(folder: Path, recipe: str, rows: int):
    trainer = build(folder, recipe)
    prompt = [5 + i % 50 for i in range(rows)]
    samples = tuple(draw(trainer.model, prompt, i, 1) for i in range(3))
    group = Group(Prompt("p", tuple(prompt), "text"), samples, (0.0, 1.0, 5.0))
    found = trainer.step([group])
    assert found["mismatch/tokens"] == 3 and found["mismatch/tokens_differing"] == 0
    assert math.isfinite(found["train/grad_norm"])


def test_updates_far_below_a_bf16_step_add_up_in_the_master_and_reach_the_engine(folder: Path):
    """1,000 steps of 1e-6 at 0.02, where BF16 has steps of 1.2e-4: it would not move at all."""
    trainer = build(folder, "bf16", learning_rate=1e-6, beta1=0.0, beta2=0.0, max_grad_norm=0.0)
    head = trainer.model.embedding
    trainer.optimizer.param_groups[:] = [
        g for g in trainer.optimizer.param_groups if any(p is head for p in g["params"])
    ]
    with torch.no_grad():
        head.fill_(0.02)
    trainer.model.refresh()
    before = trainer.model.head_weight.codes.clone()
    for _ in range(1000):
        head.grad = torch.ones_like(head)
        trainer.optimizer.param_groups[0]["lr"] = 1e-6
        trainer.optimizer.step()
    trainer.model.refresh()
    assert float((head.detach() - 0.019).abs().max()) < 1e-6
    moved = (trainer.model.head_weight.codes != before)[: head.shape[0], : head.shape[1]]
    assert bool(moved.all())
