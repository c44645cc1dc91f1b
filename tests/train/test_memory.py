"""The memory plan against what the operators keep and what the tensors weigh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from samebit.config import Config, RLSection, RolloutConfig, TaskSection, TrainConfig
from samebit.layout import PackedLayout, Segment
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder
from samebit.models.load import plan_for
from samebit.quant.plan import load_recipe
from samebit.train.memory import LEVELS, activation_bytes, parameter_count, plan_memory
from samebit.train.optim import build_optimizer

TOKENS = 48
MODEL = ModelConfig(
    family="llama", hidden=256, intermediate=384, layers=1, heads=4, kv_heads=2, head_dim=64,
    vocab_size=300, tokenizer_size=280, rope_theta=1e4, rms_eps=1e-6, tied=True, max_position=128,
)  # fmt: skip
QWEN3 = replace(MODEL, family="qwen3", qk_norm=True, tied=False)


def settings(**train) -> Config:
    return Config(
        model="none",
        task=TaskSection(name="none"),
        rollout=RolloutConfig(max_tokens=8),
        rl=RLSection(group_size=2),
        train=TrainConfig(**train),
    )


def random_model(config: ModelConfig, recipe: str) -> Decoder:
    model = Decoder(config, plan_for(load_recipe(recipe), config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    model.refresh()
    return model


def kept_bytes(config: ModelConfig, recipe: str, level: str) -> int:
    """Bytes that a forward leaves for its backward; tensors once, what the model holds not at all.

    A view counts as itself: the reference's V is one of the projection, the kernels write a V.
    """
    model = random_model(config, recipe)
    model.recompute = level  # type: ignore[assignment]
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            found[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(torch.arange(TOKENS), PackedLayout((Segment(0, TOKENS),)), "train")
    total = sum(found.values())
    del out
    return total


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recipe", ["bf16", "bf16-fast", "fp8", "fp8-kv", "fp8-row", "int8"])
@pytest.mark.parametrize("config", [MODEL, QWEN3], ids=["llama", "qwen3"])
def test_a_block_keeps_what_the_plan_says(config, recipe, level):
    one, two = (kept_bytes(replace(config, layers=n), recipe, level) for n in (1, 2))
    planned = activation_bytes(config, plan_for(load_recipe(recipe), config), level)
    # the reference also keeps each norm's FP32 rstd
    assert (two - one) / TOKENS == planned + 2 * 4, (two - one) / TOKENS - planned


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "int8", "fp8-rollout"])
def test_weights_gradients_and_moments_are_exact(recipe):
    model = random_model(QWEN3, recipe)
    count = parameter_count(QWEN3, model.plan)
    assert count == sum(p.numel() for p in model.parameters())
    for states in ("fp32", "8bit", "host"):
        plan = plan_memory(QWEN3, model.plan, settings(optimizer_states=states))
        sizes = {p.name: p.size for p in plan.parts}
        assert sizes["FP32 masters"] == sizes["FP32 gradients"] == 4 * count
        held = {id(w): w for _, m in model.linears() for w in m.weights.values()}
        weights = [*held.values(), model.head_weight]
        tensors = [t for w in weights for t in (w.codes, w.scale) if t is not None]
        assert sizes[f"weights ({recipe})"] == sum(t.nbytes for t in tensors)
        optimizer = build_optimizer(
            dict(model.named_parameters()), TrainConfig(optimizer_states=states)
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
        planned = sum(p.size for p in plan.parts if p.name.startswith("moments ("))
        if states == "host":
            assert planned == 8 * count  # less than two slices
            planned = sizes["moments"]
        # parameters of fewer than 4096 values keep FP32 moments, and torch counts steps
        assert planned == pytest.approx(moments, rel=0.03)


def test_the_largest_lever_is_named():
    plan = plan_for(load_recipe("fp8"), QWEN3)
    few = plan_memory(QWEN3, plan, settings(micro_batch_tokens=64))
    assert few.largest_lever.lever == 'train.optimizer_states = "8bit"'
    assert 'train.optimizer_states = "8bit"' in few.advice("train")
    assert "rollout.max_batch" in few.advice("rollout")
    many = plan_memory(QWEN3, plan, settings(micro_batch_tokens=65536, optimizer_states="host"))
    assert many.largest_lever.lever == "train.micro_batch_tokens = 32768"
    saved = plan_memory(QWEN3, plan, settings(micro_batch_tokens=32768, optimizer_states="host"))
    kept = {p.name.split(",")[0]: p.size for p in saved.parts}
    assert many.total - saved.total >= many.largest_lever.saves > 0.9 * kept["kept for backward"]
    assert "more than the" in many.describe(1000) and "are left" in many.describe(1 << 40)


def test_auto_makes_as_little_again_as_fits():
    model = replace(QWEN3, layers=10)
    plan = plan_for(load_recipe("fp8"), model)
    config = settings(micro_batch_tokens=512)

    def planned(available: int | None, **train):
        return plan_memory(
            model, plan, settings(micro_batch_tokens=512, **train), frozenset(), available
        )

    totals = {level: planned(None, recompute=level).total for level in LEVELS}
    assert config.train.recompute == "auto"
    assert planned(None).recompute == planned(totals["none"]).recompute == ("none",) * 10
    for level in ("codes", "block"):
        assert planned(totals[level]).recompute == (level,) * 10
    # the last block keeps gate and up instead of making them again at the fullest moment
    assert planned(totals["mlp"]).recompute == ("mlp",) * 9 + ("codes",)
    codes, mlp = (activation_bytes(model, plan, level) for level in ("codes", "mlp"))
    step = 512 * (codes - mlp)
    mixed = planned(totals["codes"] - 3 * step)
    assert mixed.recompute == ("mlp",) * 3 + ("codes",) * 7
    assert mixed.total == totals["codes"] - 3 * step
    assert mixed.describe_recompute() == "mlp in 3 blocks, codes in 7 blocks"
    one_more = planned(totals["codes"] - 3 * step - 1)
    assert one_more.recompute == ("mlp",) * 4 + ("codes",) * 6
    lost = planned(totals["block"] - 1)
    assert lost.recompute == ("block",) * 10
    assert "more than the" in lost.describe(totals["block"] - 1)
    room = planned(None, recompute="codes").describe(totals["codes"] + 3 * mixed_row(model, plan))
    assert "packs of up to 515 tokens" in room


def test_what_a_rollout_has_room_for_is_said():
    from samebit.run_checks import describe_memory

    plan = plan_for(load_recipe("bf16"), QWEN3)
    config = settings(micro_batch_tokens=64)
    memory = plan_memory(QWEN3, plan, config)
    sizes = {p.name: p.size for p in memory.parts}
    standing = sizes["FP32 masters"] + sizes["weights (bf16)"] + sizes["moments (FP32)"]
    # keys and values of two heads of 64, BF16: 512 bytes a token; completions of 8
    text = describe_memory(config, memory, standing + 512 * 1000)
    assert "room for 850 tokens of keys and values: 64 completions of 8 tokens at once" in text
    assert "keys and values" not in describe_memory(config, memory, None)


def mixed_row(model: ModelConfig, plan) -> int:
    """Bytes of one more row of a pack, every block at `codes`."""
    two = [
        plan_memory(model, plan, settings(micro_batch_tokens=n, recompute="codes")).total
        for n in (512, 513)
    ]
    return two[1] - two[0]


def test_blocks_may_differ_in_what_they_make_again():
    config = replace(QWEN3, layers=3)
    model = random_model(config, "fp8")
    layout, grads = PackedLayout((Segment(0, TOKENS),)), []
    for model.recompute in ("none", ("block", "mlp", "none")):
        model(torch.arange(TOKENS), layout, "train").float().square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("level", "again"), [("none", 0), ("codes", 0), ("mlp", 4), ("block", 4)])
def test_temporaries_of_a_block_by_hand(level, again):
    """A token: 7 bytes by width of the MLP (4 more where gate and up are made again), 8 by the model's."""
    plan = plan_for(load_recipe("fp8"), MODEL)
    parts = plan_memory(MODEL, plan, settings(micro_batch_tokens=64, recompute=level)).parts
    sizes = {p.name: p.size for p in parts}
    assert sizes["temporaries of a block"] == 64 * ((7 + again) * 384 + 8 * 256)


def test_a_group_larger_than_the_budget_counts_whole():
    plan = plan_for(load_recipe("bf16"), MODEL)
    config = settings(micro_batch_tokens=10)
    config = replace(config, rollout=RolloutConfig(max_tokens=100))
    assert any(" 200 tokens" in p.name for p in plan_memory(MODEL, plan, config).parts)


@pytest.mark.parametrize("config", [MODEL, QWEN3], ids=["tied", "untied"])
def test_the_reference_is_planned_as_the_weights_it_keeps(config):
    from samebit.models.load import freeze

    plan = plan_for(load_recipe("fp8"), config)
    parts = plan_memory(config, plan, settings(), frozenset({"reference"})).parts
    planned = next(p.size for p in parts if p.name.startswith("reference"))
    model = random_model(config, "fp8")
    ids, layout = torch.arange(TOKENS), PackedLayout((Segment(0, TOKENS),))
    with torch.no_grad():
        before = model(ids, layout, "train")
        freeze(model)
        assert torch.equal(model(ids, layout, "train"), before)
    held = {id(w): w for _, m in model.linears() for w in m.weights.values()}
    tensors = {t.data_ptr(): t for t in model.parameters() if t.numel()}
    for w in (*held.values(), model.head_weight):
        tensors |= {t.data_ptr(): t for t in (w.codes, w.scale) if t is not None}
    assert sum(t.nbytes for t in tensors.values()) == pytest.approx(planned, rel=0.01)
    assert not any(p.requires_grad for p in model.parameters())
