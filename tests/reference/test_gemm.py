"""Products: exact where the contract says exact, rows blind to each other everywhere."""

from fractions import Fraction

import pytest
import torch

from samebit.operand import QuantizedWeight, allocate_weight
from samebit.quant.plan import load_recipe
from samebit.reference.gemm import (
    gemm,
    input_grad,
    matmul_rows,
    matmul_rows_fp32,
    packed,
    weight_grad,
)
from samebit.reference.quantize import (
    dequantize,
    dequantize_weight,
    quantize_activation,
    refresh_weight,
)
from samebit.spec import GEMM_BF16, Gemm

CPU = torch.device("cpu")
SPECS = {name: load_recipe(name).train.qkv for name in ("bf16", "fp8", "fp8-row", "int8")}


def weight_for(spec: Gemm, rows: tuple[int, ...], features: int, seed: int = 0) -> QuantizedWeight:
    weight = allocate_weight(rows, features, spec.rhs, CPU)
    generator = torch.Generator().manual_seed(seed)
    refresh_weight(weight, torch.randn(sum(rows), features, generator=generator) * 0.1)
    return weight


def test_fp8_block_product_equals_rational_arithmetic():
    spec = SPECS["fp8"]
    weight = weight_for(spec, (3,), 300)
    operand = quantize_activation(torch.randn(2, 300).bfloat16(), spec.lhs)
    got = gemm(operand, weight, spec)
    for t in range(2):
        for n in range(3):
            acc = 0.0
            for b in range(3):
                columns = range(b * 128, (b + 1) * 128)
                dot = sum(
                    Fraction(float(operand.codes[t, k].float()))
                    * Fraction(float(weight.codes[n, k].float()))
                    for k in columns
                )
                scale = float(operand.scale[t, b] * weight.scale[0, b])
                dot32 = float(torch.tensor(float(dot), dtype=torch.float64).float())
                acc = float(torch.tensor(acc) + torch.tensor(dot32) * torch.tensor(scale))
            assert float(got[t, n]) == float(torch.tensor(acc).bfloat16())


def test_int8_product_is_exact_before_its_two_roundings():
    spec = SPECS["int8"]
    weight = weight_for(spec, (5, 4), 200)
    operand = quantize_activation(torch.randn(7, 200).bfloat16(), spec.lhs)
    rows = weight.logical_rows()
    dot = operand.codes.long() @ weight.codes[rows].long().t()
    want = (dot.float() * (operand.scale * weight.scale[rows].t())).bfloat16()
    assert torch.equal(gemm(operand, weight, spec), want)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("rows", "features"), [((576, 192, 192), 576), ((130,), 129), ((1,), 64)])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(name, rows, features):
    spec = SPECS[name]
    weight = weight_for(spec, rows, features)
    x = torch.randn(200, features).bfloat16()
    whole = gemm(quantize_activation(x, spec.lhs), weight, spec)
    for m, start in [(1, 0), (1, 199), (2, 7), (3, 100), (17, 64), (33, 31), (128, 72)]:
        part = x[start : start + m]
        got = gemm(quantize_activation(part, spec.lhs), weight, spec)
        assert torch.equal(got, whole[start : start + m]), (name, m, start)


@pytest.mark.parametrize("name", ["fp8", "fp8-row", "int8"])
def test_an_outlier_in_one_row_moves_no_other_row(name):
    spec = SPECS[name]
    weight = weight_for(spec, (64,), 256)
    x = torch.randn(4, 256).bfloat16()
    before = gemm(quantize_activation(x, spec.lhs), weight, spec)
    x[2, 3] = 1000.0
    after = gemm(quantize_activation(x, spec.lhs), weight, spec)
    for row in (0, 1, 3):
        assert torch.equal(before[row], after[row])


@pytest.mark.parametrize("name", SPECS)
def test_products_reach_the_recipe_s_signal_to_noise(name):
    recipe = load_recipe(name)
    spec = recipe.train.qkv
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(256, 512, generator=generator) * 0.02
    weight = allocate_weight((256,), 512, spec.rhs, CPU)
    refresh_weight(weight, master)
    x = torch.randn(64, 512, generator=generator).bfloat16()
    got = gemm(quantize_activation(x, spec.lhs), weight, spec).double()
    want = x.double() @ master.double().t()
    sqnr = 10 * torch.log10(want.square().sum() / (got - want).square().sum())
    assert float(sqnr) >= recipe.sqnr_floor_db


def test_bias_is_added_before_the_one_rounding():
    weight = weight_for(GEMM_BF16, (4,), 64)
    x = torch.randn(3, 64).bfloat16()
    bias = torch.randn(4).bfloat16()
    got = gemm(quantize_activation(x, GEMM_BF16.lhs), weight, GEMM_BF16, bias)
    exact = x.double() @ weight.codes.double().t() + bias.double()
    assert torch.equal(got, exact.float().bfloat16())


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8-jet", "fp8-bf16-backward", "fp8-row", "int8"])
@pytest.mark.parametrize("tokens", [1, 15, 17, 130])
def test_gradients_are_those_of_the_dequantised_operands(name, tokens):
    recipe = load_recipe(name)
    spec = recipe.train.qkv
    weight = weight_for(spec, (70, 60), 200)
    x, dy = torch.randn(tokens, 200).bfloat16(), torch.randn(tokens, 130).bfloat16()
    saved = quantize_activation(x, spec.lhs)
    groups = torch.tensor([[i, min(128, tokens - i)] for i in range(0, tokens, 128)])
    dx = input_grad(dy, weight, recipe.backward).double()
    dw = weight_grad(dy, saved, groups, recipe.backward).double()
    want_dx = dy.double() @ dequantize_weight(weight).double()
    want_dw = dy.double().t() @ dequantize(saved).double()
    # FP8 gradients carry one more rounding of each operand: about 2.6 % RMS apiece
    limit = 0.06 if recipe.backward.input_grad.lhs.block else 0.006
    assert float((dx - want_dx).norm() / want_dx.norm()) < limit
    assert float((dw - want_dw).norm() / want_dw.norm()) < limit


def test_padded_rows_reach_no_result():
    w = torch.randn(8, 64)
    x = torch.randn(5, 64)
    assert torch.equal(matmul_rows(x, w), matmul_rows(torch.cat([x, torch.randn(20, 64)]), w)[:5])


def test_products_to_fp32_are_unrounded_and_leave_the_library_s_setting_alone():
    x = torch.randn(19, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    w = torch.randn(130, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = torch.backends.mkldnn.matmul.fp32_precision
    got = matmul_rows_fp32(x.float(), packed(w.float()))
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    want = x.double() @ w.double().t()
    assert float((got - want).norm() / want.norm()) < 1e-6
    assert not torch.equal(got, got.bfloat16().float())
    with pytest.raises(RuntimeError):
        matmul_rows_fp32(x.float(), w[:, 1:].float())
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_weight_gives_a_row_the_same_bits_in_every_batch(dtype):
    x = torch.randn(530, 192, generator=torch.Generator().manual_seed(0)).bfloat16().to(dtype)
    w = packed(
        torch.randn(203, 192, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
    )
    product = matmul_rows if dtype == torch.bfloat16 else matmul_rows_fp32
    whole = product(x, w)
    for rows in (slice(0, 1), slice(3, 20), slice(100, 420), slice(511, 530)):
        assert torch.equal(product(x[rows], w), whole[rows])
