"""What every file of quant/recipes is held to: name, kind, and its own floor and limit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from samebit.formats import FORMATS, get_format
from samebit.layout import PackedLayout, Segment
from samebit.models.load import load_model
from samebit.operand import allocate_weight
from samebit.quant.plan import load_recipe, recipe_names
from samebit.reference.gemm import gemm
from samebit.reference.quantize import quantize_activation, refresh_weight
from samebit.reference.sampling import Transform
from samebit.spec import INT4_ROW, Backward, Flow, Gemm
from tests.tiny import tiny_folder

SIDES = ("rollout", "train")
LINEARS = ("qkv", "out", "gate_up", "down")
IDS = torch.arange(64) * 37 % 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("recipes"), "llama", std=0.05)


@pytest.fixture(scope="module")
def true_log_probs(folder: Path) -> torch.Tensor:
    """The outside implementation, in FP32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(IDS[None]).logits[0, :-1]
    known = load_model(folder, load_recipe("bf16")).config.tokenizer_size
    return torch.log_softmax(logits[:, :known], -1).gather(1, IDS[1:, None])[:, 0]


def flow_of(name: str, side: str) -> Flow:
    return getattr(load_recipe(name), side)


def test_the_shipped_recipes():
    assert set(recipe_names()) >= {
        "bf16",
        "fp8",
        "fp8-row",
        "fp8-rollout",
        "fp8-row-rollout",
        "int8",
        "int8-rollout",
        "int4",
        "int4-rollout",
    }


@pytest.mark.parametrize("name", recipe_names())
def test_the_name_says_the_kind(folder: Path, name: str):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.summary
    unified = load_model(folder, recipe).plan.unified
    assert unified == (not name.endswith(("-rollout", "-fast")))
    if name.endswith("-rollout"):
        assert recipe.train == Flow() and recipe.backward == Backward()
        assert recipe.quantised and recipe.rollout.attention == Flow().attention


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", recipe_names())
def test_linears_keep_the_signal(name: str, side: str):
    """Signal over quantisation noise of one linear, 10 log10(|y|^2 / |y' - y|^2), Gaussian operands."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 576, generator=generator).bfloat16()
    w = torch.randn(192, 576, generator=generator) * 0.02
    exact = x.double() @ w.double().t()
    for role in LINEARS:
        spec = flow_of(name, side).gemm(role)  # type: ignore[arg-type]
        weight = allocate_weight((192,), 576, spec.rhs, torch.device("cpu"))
        refresh_weight(weight, w)
        y = gemm(quantize_activation(x, spec.lhs), weight, spec).double()
        ratio = 10 * math.log10(float(exact.pow(2).sum() / (y - exact).pow(2).sum()))
        assert ratio > load_recipe(name).sqnr_floor_db, (role, ratio)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", recipe_names())
def test_log_probs_stay_near_fp32(folder: Path, true_log_probs: torch.Tensor, name: str, side: str):
    model = load_model(folder, load_recipe(name))
    with torch.no_grad():
        hidden = model(IDS, PackedLayout((Segment(0, len(IDS)),)), side)
        logp = model.log_prob(hidden[:-1], IDS[1:], Transform())[0]
    gap = float((logp - true_log_probs).abs().mean())
    assert 0 < gap < load_recipe(name).logp_gap_limit


def test_int4_has_fifteen_levels_in_a_byte():
    int4 = get_format("int4")
    assert FORMATS["int4"] is int4 and int4.max == 7.0 and int4.bytes == 1
    x = torch.tensor([[7.0, -7.0, 0.4, 0.6, 2.5, -3.5, 0.0]]).bfloat16()
    operand = quantize_activation(x, INT4_ROW)
    assert operand.codes[0, :7].tolist() == [7, -7, 0, 1, 2, -4, 0]  # ties to even
    assert operand.scale is not None and operand.scale.tolist() == [[1.0]]


def test_int4_products_are_exact_integers():
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-7, 8, (20, 200), generator=generator).float()
    w = torch.randint(-7, 8, (24, 200), generator=generator).float()
    x[:, 0], w[:, 0] = 7, 7  # every scale is then exactly 1
    weight = allocate_weight((24,), 200, INT4_ROW, torch.device("cpu"))
    refresh_weight(weight, w)
    spec = Gemm(INT4_ROW, INT4_ROW)
    y = gemm(quantize_activation(x.bfloat16(), INT4_ROW), weight, spec)
    assert torch.equal(y, (x @ w.t()).bfloat16())


def test_nan_is_visible_in_integer_formats():
    x = torch.ones(2, 130).bfloat16()
    x[1, 3] = float("nan")
    operand = quantize_activation(x, INT4_ROW)
    assert operand.scale is not None
    assert operand.scale[0].isfinite().all() and operand.scale[1].isnan().all()
