"""The trace: silent where both sides agree, and right about the place where they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from samebit import reference
from samebit.check import sequences, tiny_model
from samebit.cli import main
from samebit.diagnosis import ROLE_OF
from samebit.layers.kv import KVStore
from samebit.operand import HeadCodes, Operand
from samebit.trace import (
    differing_tokens,
    first_difference,
    inject_fault,
    rollout_side,
    training_side,
)

SEQUENCES = [ids[:18] for ids in sequences()[:3]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_unified_recipes_agree_in_every_operator(recipe: str):
    model = tiny_model(recipe)
    train, decode = training_side(model, SEQUENCES), rollout_side(model, SEQUENCES)
    assert first_difference(train, decode) is None
    assert differing_tokens(train.logp_T, decode.logp_T) == 0
    # 10 operators a block (qkv, its heads, ...), the codes of 4, the final norm and the log-prob
    assert len(train.rows) == 2 * (10 + 4) + 2
    assert all(len(rows) == sum(map(len, SEQUENCES)) for rows in train.rows.values())


@pytest.mark.parametrize(
    ("recipe", "kind", "path", "operator"),
    [
        ("fp8", "code", "layers.1.qkv", "qkv"),
        ("fp8", "scale", "layers.0.gate_up", "silu_mul"),
        ("fp8-row", "scale", "layers.1.down", "down"),
        ("int8", "code", "layers.0.out", "out"),
        ("bf16", "code", "layers.1.down", "down"),
    ],
)
def test_a_fault_in_a_weight_is_named(recipe: str, kind: str, path: str, operator: str):
    model = tiny_model(recipe)
    inject_fault(model, kind, path)
    found = first_difference(training_side(model, SEQUENCES), rollout_side(model, SEQUENCES))
    assert found is not None
    assert (found.operator, found.layer) == (operator, int(path.split(".")[1]))
    assert f"operator {operator} of layer {found.layer}" in found.describe()


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize(
    ("fused", "operator"),
    [
        ("rms_norm_quantize", "norm_attention"),
        ("add_rms_norm_quantize", "norm_mlp"),
        ("silu_mul_quantize", "silu_mul"),
    ],
)
def test_a_fault_of_a_fused_operator_is_named(recipe: str, fused: str, operator: str):
    """Its parts are right: only what it writes itself shows the fault."""

    class Faulty:
        def __getattr__(self, name: str):
            real = getattr(reference, name)
            return real if name != fused else lambda *a: self.spoiled(real(*a))

        def spoiled(self, found):
            if isinstance(found, tuple):
                return tuple(self.spoiled(x) if isinstance(x, Operand) else x for x in found)
            codes = found.codes.clone()
            codes.view(torch.uint8)[-1, 0] ^= 1
            return replace(found, codes=codes)

    model = tiny_model(recipe)
    train = training_side(model, SEQUENCES)
    model.ops = Faulty()
    found = first_difference(train, rollout_side(model, SEQUENCES))
    assert found is not None and found.layer == 0
    assert found.operator == operator + ("" if recipe == "bf16" else "_codes")
    assert found.operator in ROLE_OF


@pytest.mark.parametrize("recipe", ["fp8", "fp8-kv"])
@pytest.mark.parametrize("part", ["rotary_q", "rotary_k", "value"])
def test_a_fault_of_the_operator_that_rotates_and_stores_is_named(recipe: str, part: str):
    """What it writes into the cache is shown, not what the packed operator would have made."""

    class Faulty:
        def __getattr__(self, name: str):
            return self.store if name == "qk_norm_rope_store" else getattr(reference, name)

        def store(self, qkv, rotation, gains, spec, cache, layer, slots):
            q = reference.qk_norm_rope_store(qkv, rotation, gains, spec, cache, layer, slots)
            rows = {"rotary_q": q, "rotary_k": cache.keys[layer], "value": cache.values[layer]}
            held = rows[part]
            held = held.codes if isinstance(held, HeadCodes) else held
            row = -1 if part == "rotary_q" else slots[-1]
            held.view(torch.uint8)[row, 0, 0] ^= 1
            return q

    model = tiny_model(recipe)
    train = training_side(model, SEQUENCES)
    model.ops = Faulty()
    found = first_difference(train, rollout_side(model, SEQUENCES))
    assert found is not None and found.layer == 0
    assert found.operator == part + ("_codes" if recipe == "fp8-kv" else "")
    assert ROLE_OF[found.operator] == "qkv"


def test_a_mixed_recipe_is_compared_where_both_sides_have_the_operator():
    model = tiny_model("fp8-rollout")
    train, rollout = training_side(model, SEQUENCES), rollout_side(model, SEQUENCES)
    assert set(rollout.rows) - set(train.rows) >= {"layers.0.norm_attention_codes"}
    found = first_difference(train, rollout)
    assert found is not None and (found.operator, found.layer, found.position) == ("qkv", 0, 0)


def test_a_stale_cache_row_is_named_with_its_token():
    model = tiny_model("fp8")

    def overwrite(step: int, cache: KVStore) -> None:
        if step == 11:
            # every key of layer 1 written so far, moved by one page
            cache.keys[1].copy_(cache.keys[1].roll(16, 0))

    train = training_side(model, SEQUENCES)
    found = first_difference(train, rollout_side(model, SEQUENCES, between=overwrite))
    assert found is not None
    assert (found.operator, found.layer, found.position) == ("attention", 1, 12)


def test_a_token_difference_reaches_the_first_operator():
    model = tiny_model("bf16")
    other = [list(ids) for ids in SEQUENCES]
    other[2][5] = (other[2][5] + 1) % 190
    found = first_difference(training_side(model, SEQUENCES), training_side(model, other))
    assert found is not None
    assert (found.operator, found.layer) == ("norm_attention", 0)
    assert (found.sequence, found.position, found.tokens_differing) == (2, 5, 1)


def test_differing_tokens_counts_bits_not_values():
    a = torch.tensor([0.0, 1.0, float("nan")])
    assert differing_tokens(a, a.clone()) == 0
    assert differing_tokens(a, torch.tensor([-0.0, 1.0, float("nan")])) == 1


def test_command(capsys: Any):
    args = ["trace", "--recipe", "fp8", "--tokens", "6", "--sequences", "2"]
    assert main(args) == 0
    assert "all digests agree" in capsys.readouterr().out
    assert main([*args, "--inject", "code:layers.0.qkv", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first_difference"]["operator"] == "qkv" and found["logp_abs_max"] > 0
    assert found["operators"][0]["train"] == found["operators"][0]["rollout"]
    for bad in ("code:layers.9.qkv", "banana:layers.0.qkv", "code"):
        assert main([*args, "--inject", bad]) == 2
    assert main(["trace", "--tokens", "1"]) == 2
    assert main(["trace", "--text", "hello"]) == 2
