"""The parity chain, bar exactly 0, after real optimiser steps; and what must break it does."""

from __future__ import annotations

import pytest
import torch

from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.layers.kv import KVStore
from samebit.layout import PackedLayout, PagedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.types import Sampling
from tests.engine.common import FAMILIES, prompts, tiny_model
from tests.parity.common import differing, optimiser_steps, sampled_logps, training_logps

UNIFIED = ("bf16", "fp8", "fp8-bf16-backward", "fp8-row", "int8")
MIXED = ("fp8-rollout", "int8-rollout", "fp8-row-rollout")
SAMPLING = Sampling(max_tokens=20, temperature=0.8)


def trained(folder, family: str, recipe: str) -> Decoder:
    model = tiny_model(folder, family, recipe)
    groups = Engine(model, RolloutConfig(), None, 1).generate(prompts((40, 33)), 2, SAMPLING)
    before = model.embedding.detach().clone()
    optimiser_steps(model, groups)
    assert not torch.equal(before, model.embedding), "the step moved nothing"
    return model


def rollout(model: Decoder, **config):
    return Engine(model, RolloutConfig(**config), None, 2).generate(prompts((70, 33)), 3, SAMPLING)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", UNIFIED)
def test_training_forward_gives_the_sampled_log_probs(tmp_path, family, recipe):
    model = trained(tmp_path, family, recipe)
    groups = rollout(model, max_batch=4, prefill_tokens=30, cache_tokens=176)
    assert differing(training_logps(model, groups, SAMPLING), sampled_logps(groups)) == 0
    assert_hidden_parity(model)


def paged_hidden(model: Decoder, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Hidden rows of one sequence computed in chunks that end at `cuts`, on scattered pages."""
    store = KVStore(
        model.config.layers, 40 * 16, model.config.kv_heads, model.config.head_dim, model.device
    )
    table = torch.tensor([[17, 3, 29, 5, 11, 2, 23, 7]])
    outs = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        rows = torch.zeros(end - start, dtype=torch.int64)
        layout = PagedLayout(table, rows, torch.arange(start, end), 16)
        outs.append(model(ids[start:end], layout, "rollout", store))
    return torch.cat(outs)


@torch.no_grad()
def assert_hidden_parity(model: Decoder) -> None:
    """Prefill = chunked prefill = decode = training forward = any batch, hidden bits."""
    ids = torch.randint(0, 250, (100,), generator=torch.Generator().manual_seed(4))
    alone = model(ids, PackedLayout((Segment(0, 100),)), "train")
    assert torch.equal(paged_hidden(model, ids, []), alone), "prefill"
    assert torch.equal(paged_hidden(model, ids, [1, 17, 63, 64, 90]), alone), "chunked prefill"
    assert torch.equal(paged_hidden(model, ids, list(range(58, 72))), alone), "decode"
    for others in (1, 5, 40):
        batch = torch.cat([ids.flip(0)[:others], ids, ids[:3]])
        segments = (Segment(0, others), Segment(others, 100), Segment(others + 100, 3))
        hidden = model(batch, PackedLayout(segments), "train")
        assert torch.equal(hidden[others : others + 100], alone), f"packed behind {others}"


@pytest.mark.parametrize("recipe", MIXED)
def test_mixed_recipes_are_clearly_not_zero(tmp_path, recipe):
    model = trained(tmp_path, "llama", recipe)
    groups = rollout(model)
    trained_logps, stored = training_logps(model, groups, SAMPLING), sampled_logps(groups)
    assert differing(trained_logps, stored) > 0.9 * stored.numel()
    assert (trained_logps - stored).abs().mean() > 1e-4


@pytest.mark.parametrize("change", [{"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}])
def test_training_applies_the_sampling_transform(tmp_path, change):
    """A12, A13: temperature and truncation are the same function on both sides."""
    model = tiny_model(tmp_path, "qwen3", "fp8")
    sampling = Sampling(max_tokens=10, **change)
    groups = Engine(model, RolloutConfig(), None, 2).generate(prompts((40, 33)), 3, sampling)
    assert differing(training_logps(model, groups, sampling), sampled_logps(groups)) == 0
    if "temperature" not in change:
        plain = training_logps(model, groups, Sampling())
        assert (plain - sampled_logps(groups)).abs().mean() > 1e-3


def test_two_threads(tmp_path):
    model = tiny_model(tmp_path, "llama", "fp8")
    one = sampled_logps(rollout(model))
    torch.set_num_threads(2)
    try:
        groups = rollout(model)
        assert differing(sampled_logps(groups), one) == 0
        assert differing(training_logps(model, groups, SAMPLING), one) == 0
    finally:
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def drawn_model(tmp_path_factory):
    model = tiny_model(tmp_path_factory.mktemp("control"), "llama", "fp8")
    return model, rollout(model)


def test_control_flipped_code(drawn_model):
    model, groups = drawn_model
    codes = model.layers[1].down.weights["train"].codes.view(torch.uint8)
    codes[100, 200] ^= 0x40
    _forget_derived(model)
    caught = differing(training_logps(model, groups, SAMPLING), sampled_logps(groups))
    codes[100, 200] ^= 0x40
    _forget_derived(model)
    assert caught > 0
    assert differing(training_logps(model, groups, SAMPLING), sampled_logps(groups)) == 0


def test_control_changed_scale(drawn_model):
    model, groups = drawn_model
    scale = model.layers[0].qkv.weights["train"].scale
    held = scale[1, 1].clone()
    scale[1, 1] = held * 1.01
    _forget_derived(model)
    caught = differing(training_logps(model, groups, SAMPLING), sampled_logps(groups))
    scale[1, 1] = held
    _forget_derived(model)
    assert caught > 0
    assert differing(training_logps(model, groups, SAMPLING), sampled_logps(groups)) == 0


def _forget_derived(model: Decoder) -> None:
    for _, linear in model.linears():
        for weight in linear.weights.values():
            weight._derived.clear()


def test_control_stale_page(drawn_model):
    """A prefix page whose rows are another prompt's is noticed in every sample that reads it."""
    model, _ = drawn_model
    engine = Engine(model, RolloutConfig(), None, 2)
    engine.generate(prompts((70, 33)), 3, SAMPLING)
    page = engine.prefix.match(prompts((70,))[0].ids)[1]
    for values in engine.pool.store.values:
        values[page * 16 : page * 16 + 16] = values[page * 16 : page * 16 + 16].flip(0)
    stale = engine.generate(prompts((70, 33)), 3, SAMPLING)
    assert differing(training_logps(model, stale, SAMPLING), sampled_logps(stale)) > 0


def test_control_wrong_position(drawn_model):
    model, groups = drawn_model
    cos, sin = model.cos.clone(), model.sin.clone()
    model.cos[40:], model.sin[40:] = cos[39:-1], sin[39:-1]
    caught = differing(training_logps(model, groups, SAMPLING), sampled_logps(groups))
    model.cos.copy_(cos)
    model.sin.copy_(sin)
    assert caught > 0
