"""QuRL on the trainer: who drew, who is proximal, what the loss is made of, what is requantised."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.config import Config, RLSection, RolloutConfig, TaskSection, TrainConfig
from samebit.engine.native import Engine
from samebit.layout import PackedLayout, Segment
from samebit.models.load import load_model, named_masters
from samebit.quant.plan import load_recipe
from samebit.reference.quantize import quantize_matrix
from samebit.reference.sampling import Transform
from samebit.rl.api import TokenBatch
from samebit.rl.registry import load_algorithm, load_correction
from samebit.train.invariant import apply_invariant_scale, fold_back
from samebit.train.step import Trainer
from samebit.types import Group, Prompt, Sampling
from tests.tiny import tiny_folder

CAP = 1.02
"""Close to 1, so that a handful of tokens of a mild quantiser already lie above it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("qurl"), "qwen2", intermediate=256)


def config(**rl: Any) -> Config:
    return Config(
        model="m",
        task=TaskSection(name="digits"),
        rollout=RolloutConfig(max_tokens=6, max_batch=8),
        rl=RLSection(group_size=2, prompts_per_step=2, **rl),
        train=TrainConfig(steps=4, learning_rate=3e-3),
    )


class Watch:
    """A trainer on a mixed recipe whose every loss and scoring pass is written down."""

    def __init__(self, folder: Path, settings: Config, recipe: str, correction: dict[str, Any]):
        self.model = load_model(folder, load_recipe(recipe))
        options = dict(correction)
        name = options.pop("name")
        self.trainer = Trainer(
            self.model, settings, load_algorithm("grpo"), load_correction(name, options)
        )
        self.batches: list[TokenBatch] = []
        self.losses: list[float] = []
        self.scored = 0
        self._watch_loss()
        self._watch_scores()
        self.engine = Engine(self.model, settings.rollout)

    def _watch_loss(self) -> None:
        inner = self.trainer.algorithm.loss

        def loss(batch: TokenBatch, *rest: Any) -> Any:
            self.batches.append(replace(batch, logp_T=batch.logp_T.detach().clone()))
            value, found = inner(batch, *rest)
            self.losses.append(float(value.detach()))
            return value, found

        self.trainer.algorithm.loss = loss  # type: ignore[method-assign]

    def _watch_scores(self) -> None:
        inner = self.trainer.scorer.score

        def score(model: Any, batches: Any) -> Any:
            self.scored += 1
            assert model is self.model
            return inner(model, batches)

        self.trainer.scorer.score = score  # type: ignore[method-assign]

    def roll(self) -> list[Group]:
        """Two prompts, two samples each, rewards 1 and 0."""
        prompts = [Prompt("a", tuple(range(5, 14)), "a"), Prompt("b", (40, 41, 42), "b")]
        groups = self.engine.generate(prompts, 2, Sampling(max_tokens=6))
        return [replace(g, rewards=(1.0, 0.0)) for g in groups]


def bf16_log_probs(folder: Path, groups: list[Group]) -> torch.Tensor:
    """Each sample alone through a BF16 model read from disk."""
    model = load_model(folder, load_recipe("bf16"))
    found = []
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor([*group.prompt.ids, *sample.ids])
            with torch.no_grad():
                layout = PackedLayout((Segment(0, len(ids) - 1),))
                hidden = model(ids[:-1], layout, "train")[len(group.prompt.ids) - 1 :]
                found.append(model.log_prob(hidden, torch.tensor(sample.ids), Transform())[0])
    return torch.cat(found)


def sampler_log_probs(groups: list[Group]) -> torch.Tensor:
    return torch.cat([torch.from_numpy(s.logps) for g in groups for s in g.samples])


@pytest.mark.parametrize("recipe", ["int8-rollout", "fp8-row-rollout"])
def test_behaviour_is_the_sampler_and_proximal_the_old_bf16_policy(folder: Path, recipe: str):
    watch = Watch(folder, config(epochs=2), recipe, {"name": "tis", "cap": CAP})
    groups = watch.roll()
    expected = bf16_log_probs(folder, groups)
    watch.trainer.step(groups)
    assert watch.scored == 1  # the extra forward, once a rollout
    first, second = watch.batches
    for batch in (first, second):
        assert torch.equal(batch.rollout_logp_T, sampler_log_probs(groups))
        assert torch.equal(batch.old_logp_T, expected)
    assert not torch.equal(first.rollout_logp_T, first.old_logp_T)
    assert torch.equal(first.logp_T, first.old_logp_T)
    assert not torch.equal(second.logp_T, second.old_logp_T)


def test_unified_recipe_takes_the_samplers_log_probs_as_old(folder: Path):
    watch = Watch(folder, config(), "int8", {"name": "none"})
    groups = watch.roll()
    metrics = watch.trainer.step(groups)
    assert watch.scored == 0 and metrics["mismatch/tokens_differing"] == 0
    assert torch.equal(watch.batches[0].old_logp_T, sampler_log_probs(groups))
    assert torch.equal(watch.batches[0].logp_T, sampler_log_probs(groups))


def decoupled_loss(batch: TokenBatch, cap: float, acr: bool) -> float:
    """QuRL eq. 5 (or 9) token by token in plain Python; averaged per sequence, then over them."""
    sequences: dict[int, list[float]] = {}
    for t in range(len(batch.logp_T)):
        ratio = math.exp(float(batch.logp_T[t]) - float(batch.old_logp_T[t]))
        rho = math.exp(float(batch.old_logp_T[t]) - float(batch.rollout_logp_T[t]))
        advantage = float(batch.advantage_T[t])
        r = min(1.0, cap / rho) if acr else 1.0
        clipped = min(max(ratio, 0.8), 1.2 / r)
        gain = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            gain = max(gain, 3.0 * advantage)  # dual clip, on by default
        sequences.setdefault(int(batch.sequence_T[t]), []).append(-min(rho, cap) * gain)
    means = [sum(values) / len(values) for values in sequences.values()]
    return sum(means) / len(means)


@pytest.mark.parametrize("name", ["tis", "acr"])
def test_loss_is_the_decoupled_objective(folder: Path, name: str):
    watch = Watch(folder, config(epochs=3), "int4-rollout", {"name": name, "cap": CAP})
    groups = watch.roll()
    metrics = watch.trainer.step(groups)
    for batch, loss in zip(watch.batches, watch.losses, strict=True):
        expected = decoupled_loss(batch, CAP, name == "acr")
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-7)
    last = watch.batches[-1]
    rho = (last.old_logp_T - last.rollout_logp_T).exp()
    ratio = (last.logp_T - last.old_logp_T).exp()
    assert (rho > CAP).any() and (rho < 1).any()
    outside = (ratio > 1.2) & (last.advantage_T > 0)
    assert outside.any() and metrics["rl/clip_share_positive"] > 0
    widened = (outside & (rho > CAP)).any()
    assert widened  # or the two formulas would not be told apart
    other = decoupled_loss(last, CAP, name != "acr")
    assert watch.losses[-1] != pytest.approx(other, rel=1e-5)
    assert (metrics["rl/bounds_differ_share"] > 0) == (name == "acr")


def test_naive_arm_divides_by_the_sampler(folder: Path):
    settings = {"name": "none", "denominator": "rollout"}
    watch = Watch(folder, config(), "int8-rollout", settings)
    groups = watch.roll()
    watch.trainer.step(groups)
    assert torch.equal(watch.batches[0].old_logp_T, sampler_log_probs(groups))
    assert torch.equal(watch.batches[0].logp_T, bf16_log_probs(folder, groups))


@pytest.mark.parametrize("recipe", ["int8-rollout", "fp8-row-rollout"])
def test_every_update_requantises_from_the_masters(folder: Path, recipe: str):
    watch = Watch(folder, config(), recipe, {"name": "tis"})
    weight = watch.model.layers[0].down.weights["rollout"]  # type: ignore[union-attr]
    assert weight.precision.block == (1, 0) and weight.scale.shape == (256, 1)
    before, address = weight.codes.clone(), weight.codes.data_ptr()
    metrics = watch.trainer.step(watch.roll())
    master = named_masters(watch.model)["model.layers.0.mlp.down_proj.weight"]
    codes, scale = quantize_matrix(master, weight.precision)
    assert torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(weight.scale[:192], scale[:192])
    assert weight.codes.data_ptr() == address
    moved = float((before.view(torch.uint8) != codes.view(torch.uint8))[:192].float().mean())
    assert moved > 0.1
    watched = metrics["quant/codes_moved_share/down"]
    assert 0.1 < watched <= 1.0
    watch.engine.refresh()
    again = watch.roll()
    assert sampler_log_probs(again).isfinite().all()


def updated_masters(folder: Path, s: float, rates: dict[str, float]) -> dict[str, torch.Tensor]:
    """Masters after one Adam update on a fixed rollout, the scaling s undone."""
    train = TrainConfig(
        learning_rate=1e-3,
        role_learning_rates=rates,
        epsilon=1e-30,  # nothing beside the gradient's size
        max_grad_norm=0.0,
    )
    model = load_model(folder, load_recipe("bf16"))
    apply_invariant_scale(model, s)
    model.refresh()
    settings = replace(config(), train=train)
    trainer = Trainer(model, settings, load_algorithm("grpo"), load_correction("none"))
    prompts = [Prompt("a", tuple(range(5, 14)), "a"), Prompt("b", (40, 41, 42), "b")]
    groups = Engine(model, settings.rollout).generate(prompts, 2, Sampling(max_tokens=6))
    trainer.step([replace(g, rewards=(1.0, 0.0)) for g in groups])
    return fold_back(named_masters(model), model.config, s)


def test_update_aware_scaling_is_a_learning_rate_by_role_under_adam(tmp_path: Path):
    """At s = 2 every master but the last norm's (which the control's role includes) has the same bits."""
    folder = tiny_folder(tmp_path, "llama", intermediate=256)
    scaled = updated_masters(folder, 2.0, {})
    control = updated_masters(folder, 1.0, {"qkv": 2.0, "gate_up": 2.0, "norm": 0.5})
    plain = updated_masters(folder, 1.0, {})
    for name in scaled:
        if name != "model.norm.weight":
            assert torch.equal(scaled[name], control[name]), name
    moved = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(scaled[moved], plain[moved])


def test_cache_and_attention_stay_in_bf16(folder: Path):
    watch = Watch(folder, config(), "int8-rollout", {"name": "tis"})
    watch.roll()
    assert watch.engine.pool is not None
    store = watch.engine.pool.store
    assert all(x.dtype == torch.bfloat16 for x in (*store.keys, *store.values))
    attention = watch.model.plan.recipe.rollout.attention
    assert {attention.q.format, attention.kv.format} == {"bf16"}
