"""Recipes, the flow graph and the plan's digest."""

from dataclasses import replace

import pytest

from samebit.models.config import ModelConfig
from samebit.models.decoder import linear_shapes
from samebit.quant.flow import differing_edges, graph, is_unified
from samebit.quant.plan import load_recipe, recipe_names, resolve
from samebit.spec import FP8_ROW, GEMM_BF16, ROLES, Flow, Gemm

CONFIG = ModelConfig(
    family="llama",
    hidden=576,
    intermediate=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    tokenizer_size=49152,
    rope_theta=1e5,
    rms_eps=1e-5,
    tied=True,
    max_position=8192,
)


@pytest.mark.parametrize("name", recipe_names())
def test_unified_is_what_the_name_says(name):
    assert is_unified(load_recipe(name)) == (not name.endswith(("-rollout", "-fast")))


def test_a_library_gemm_is_unified_with_nothing_and_changes_no_other_plan_s_digest():
    fast, plain = load_recipe("bf16-fast"), load_recipe("bf16")
    assert fast.library and not plain.library
    assert {e.target for e in graph(fast.rollout) ^ graph(fast.train)} == {"head"}
    assert all(fast.train.gemm(role).library for role in ("qkv", "out", "gate_up", "down"))
    assert fast.train.head.library and not fast.rollout.head.library
    assert "library" not in str(plain.to_dict()) and "'library': True" in str(fast.to_dict())
    shapes = linear_shapes(CONFIG)
    assert resolve(fast, shapes).digest != resolve(plain, shapes).digest
    assert len(differing_edges(fast.train, plain.train)) == 10
    with pytest.raises(ValueError, match="only BF16 has a library product"):
        replace(load_recipe("fp8").train.qkv, library=True)


@pytest.mark.parametrize(
    ("name", "x_block"), [("fp8", "128x128"), ("fp8-kv", "128x128"), ("fp8-jet", "128x1")]
)
def test_jet_rl_s_flow_but_for_the_weight_gradient_s_x(name, x_block):
    recipe = load_recipe(name)
    for role in ("qkv", "out", "gate_up", "down"):
        assert str(recipe.train.gemm(role)) == "e4m3[1x128] x e4m3[128x128]"
        assert recipe.rollout.gemm(role) == recipe.train.gemm(role)
    assert recipe.train.gemm("head") == GEMM_BF16
    assert str(recipe.backward.input_grad) == "e4m3[1x128] x e4m3[128x128]"
    assert str(recipe.backward.weight_grad) == f"e4m3[128x1] x e4m3[{x_block}]"
    assert str(recipe.backward.saved) == "e4m3[1x128]"


def test_a_mixed_recipe_names_the_edges_that_differ():
    recipe = load_recipe("fp8-rollout")
    edges = differing_edges(recipe.rollout, recipe.train)
    where = {(a or b).target for a, b in edges}
    assert where == {"qkv", "out", "gate_up", "down"}
    assert all("e4m3" in a.precision and b.precision == "bf16" for a, b in edges)
    assert differing_edges(recipe.train, recipe.train) == []


def test_an_attention_constant_is_part_of_the_flow():
    flow = Flow()
    other = replace(flow, attention=replace(flow.attention, kv_block=64))
    assert not graph(other) <= graph(flow)


def test_the_digest_changes_with_anything_that_changes_a_number_and_with_nothing_else():
    shapes = linear_shapes(CONFIG)
    recipe = load_recipe("fp8")
    plan = resolve(recipe, shapes)
    assert plan.digest == resolve(recipe, shapes).digest
    assert plan.digest == resolve(replace(recipe, summary="other words"), shapes).digest
    promoted = replace(recipe, train=replace(recipe.train, qkv=GEMM_BF16))
    assert plan.digest != resolve(promoted, shapes).digest
    assert plan.digest != resolve(recipe, linear_shapes(replace(CONFIG, layers=29))).digest
    with pytest.raises(ValueError, match=plan.digest[:12]):
        resolve(promoted, shapes).require_same(plan.digest, "checkpoint X")


def test_smollm2_s_linears_are_named_and_fused_in_order():
    shapes = {s.path: s for s in linear_shapes(CONFIG)}
    assert shapes["layers.0.qkv"].parts == (("q", 576), ("k", 192), ("v", 192))
    assert shapes["layers.29.gate_up"].parts == (("gate", 1536), ("up", 1536))
    assert len(shapes) == 30 * 4 + 1 and {s.role for s in shapes.values()} == set(ROLES)


def test_what_no_operator_implements_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no GEMM multiplies e4m3\[1xall\] by bf16"):
        Gemm(FP8_ROW, GEMM_BF16.rhs, promote=512)
    with pytest.raises(ValueError, match="promote > 0"):
        Gemm(FP8_ROW, FP8_ROW)
    with pytest.raises(ValueError, match="quantises the head"):
        fp8 = load_recipe("fp8")
        flow = replace(fp8.train, head=fp8.train.qkv)
        resolve(replace(fp8, train=flow, rollout=flow), linear_shapes(CONFIG))
    with pytest.raises(ValueError, match=r"known recipes: .*fp8"):
        load_recipe("fp9")
