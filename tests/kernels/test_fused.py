"""The backend's composites against the chains of its own single operators: equal bit for bit."""

import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE, same_bits

from samebit import reference  # isort: skip
from samebit.kernels import _ops_linear, ops  # isort: skip
from samebit.kernels.dequantize import dequantize  # isort: skip
from samebit.layers.kv import KVStore  # isort: skip
from samebit.operand import HeadCodes, Operand, Rotation, allocate_weight  # isort: skip
from samebit.quant.plan import load_recipe  # isort: skip
from samebit.spec import FP8_BLOCK, FP8_HEAD, FP8_ROW, FP8_TOKEN_GROUP, FP16  # isort: skip
from samebit.spec import INT4_ROW, INT8_ROW, Attention  # isort: skip
from samebit.spec import BF16 as PLAIN  # isort: skip

PRECISIONS = (PLAIN, FP8_TOKEN_GROUP, FP8_ROW, INT8_ROW)
EPS = 1e-6
FP8_KV = Attention(q=FP8_HEAD, kv=FP8_HEAD, probabilities=FP16)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(BF16).to(DEVICE)


def same_operand(mine: Operand, theirs: Operand) -> bool:
    assert mine.precision == theirs.precision and mine.features == theirs.features
    if mine.scale is None or theirs.scale is None:
        return mine.scale is theirs.scale and same_bits(mine.codes, theirs.codes)
    return same_bits(mine.codes, theirs.codes) and same_bits(mine.scale, theirs.scale)


def same_heads(mine, theirs) -> bool:
    if isinstance(mine, HeadCodes):
        return same_bits(mine.codes, theirs.codes) and same_bits(mine.scale, theirs.scale)
    return same_bits(mine, theirs)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("width", [192, 384])
def test_norm_and_quantise_are_the_chain(precision, width):
    x, update, gain = normal(7, width), normal(7, width, seed=1), normal(width, seed=2)
    operand, _ = ops.rms_norm_quantize(x, gain, EPS, precision)
    chained = ops.quantize_activation(ops.rms_norm(x, gain, EPS)[0], precision)
    assert same_operand(operand, chained)
    total, operand, _ = ops.add_rms_norm_quantize(x, update, gain, EPS, precision)
    assert same_bits(total, ops.residual_add(x, update))
    chained = ops.quantize_activation(ops.rms_norm(total, gain, EPS)[0], precision)
    assert same_operand(operand, chained)
    again, y, _ = ops.add_rms_norm(x, update, gain, EPS)
    assert same_bits(again, total) and same_bits(y, ops.rms_norm(total, gain, EPS)[0])


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_silu_and_quantise_are_the_chain(precision):
    gate, up = normal(9, 2 * 320).chunk(2, dim=1)
    chained = ops.quantize_activation(ops.silu_mul(gate, up), precision)
    assert same_operand(ops.silu_mul_quantize(gate, up, precision), chained)


def test_formats_without_a_fused_kernel_are_refused_by_name():
    x, gain = normal(2, 128), normal(128)
    with pytest.raises(ValueError, match="int4"):
        ops.rms_norm_quantize(x, gain, EPS, INT4_ROW)
    with pytest.raises(ValueError, match="int4"):
        ops.silu_mul_quantize(x, x, INT4_ROW)


def rotation(dim: int, heads: int = 3, kv_heads: int = 2) -> Rotation:
    positions = torch.tensor([0, 4, 2, 39, 7], device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    angle = torch.rand(40, dim // 2, generator=generator).to(DEVICE)
    return Rotation(heads, kv_heads, dim, positions, angle.cos(), angle.sin(), EPS)


def gains_of(dim: int, normed: bool):
    return (normal(dim, seed=5), normal(dim, seed=6)) if normed else None


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("spec", [Attention(), FP8_KV], ids=["bf16", "fp8"])
def test_rotated_heads_are_the_chain(dim, normed, spec):
    rot, gains = rotation(dim), gains_of(dim, normed)
    qkv = normal(5, 7 * dim).split(rot.widths, dim=1)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv)
    if gains is not None:
        q, k = ops.rms_norm(q, gains[0], EPS)[0], ops.rms_norm(k, gains[1], EPS)[0]
    q, k = ops.rotary(q, *rot.rows), ops.rotary(k, *rot.rows)
    if spec.kv.block is not None:
        q, k, v = (ops.quantize_heads(x, FP8_HEAD) for x in (q, k, v))
    found = ops.qk_norm_rope(qkv, rot, gains, spec)
    assert all(same_heads(a, b) for a, b in zip(found, (q, k, v), strict=True))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("spec", [Attention(), FP8_KV], ids=["bf16", "fp8"])
def test_stored_rows_are_those_of_a_packed_batch(paged, spec):
    rot = rotation(64)
    qkv = normal(5, 7 * 64).split(rot.widths, dim=1)
    expected = ops.qk_norm_rope(qkv, rot, None, spec)
    cache = KVStore(2, 24, 2, 64, torch.device(DEVICE), spec.kv)
    slots = torch.tensor([3, 23, 8, -1, 0], device=DEVICE)
    flat = (cache.keys[1], cache.values[1])
    if paged:
        for held in (cache.keys, cache.values):
            x = held[1]
            held[1] = (
                HeadCodes(x.codes.view(3, 8, 2, 64), x.scale.view(3, 8, 2))
                if isinstance(x, HeadCodes)
                else x.view(3, 8, 2, 64)
            )
    q = ops.qk_norm_rope_store(qkv, rot, None, spec, cache, 1, slots)
    assert same_heads(q, expected[0])
    written, rows = slots[slots >= 0], torch.tensor([0, 1, 2, 4], device=DEVICE)
    for held, new in zip(flat, expected[1:], strict=True):
        if isinstance(held, HeadCodes):
            assert same_heads(held.take(written), new.take(rows))
            assert not held.codes.float()[9:23].any()
        else:
            assert same_bits(held[written], new[rows]) and not held[9:23].any()


@pytest.mark.parametrize("normed", [False, True])
def test_the_backward_of_rotated_heads_is_near_the_reference(normed):
    rot, gains = rotation(64), gains_of(64, normed)
    qkv = normal(5, 7 * 64).split(rot.widths, dim=1)
    grads = [normal(5, n, 64, seed=i) for i, n in enumerate((3, 2, 2))]
    mine, gain_grads = ops.qk_norm_rope_backward(*grads, qkv, rot, gains)
    theirs, expected = reference.qk_norm_rope_backward(*grads, qkv, rot, gains)
    torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-6)
    assert (gain_grads is None) == (expected is None) == (not normed)
    if expected is not None:
        for a, b in zip(gain_grads, expected, strict=True):
            # the reference rounds to BF16 between rotation and norm
            torch.testing.assert_close(a, b, rtol=2**-6, atol=0.06)
        into = tuple(torch.ones(64, device=DEVICE) for _ in range(2))
        _, added = ops.qk_norm_rope_backward(*grads, qkv, rot, gains, into)
        assert added[0] is into[0]
        torch.testing.assert_close(added[1], gain_grads[1] + 1)


@pytest.mark.parametrize("precision", [FP8_TOKEN_GROUP, FP8_ROW, INT8_ROW], ids=str)
def test_dequantised_activations_are_the_reference_ones(precision):
    operand = reference.quantize_activation(normal(5, 200), precision)
    block = (1, 128 if precision is FP8_TOKEN_GROUP else 0)
    mine = dequantize(operand.codes, operand.scale, 200, block)
    assert same_bits(mine, reference.quantize.dequantize(operand).to(BF16))


@pytest.mark.parametrize("precision", [FP8_BLOCK, FP8_ROW, INT8_ROW], ids=str)
@pytest.mark.parametrize("rows", [(140, 60), (128, 60)])
def test_dequantised_weights_are_the_reference_ones(precision, rows):
    weight = allocate_weight(rows, 192, precision, torch.device(DEVICE))
    reference.refresh_weight(weight, torch.randn(sum(rows), 192, device=DEVICE))
    mine = _ops_linear._dequantised(weight)
    assert same_bits(mine, reference.quantize.dequantize_weight(weight).to(BF16))


@pytest.mark.parametrize("rows", [(140, 60), (128, 60)])
def test_one_reading_of_dy_gives_both_gradients(rows):
    backward, n = load_recipe("fp8").backward, sum(rows)
    weight = allocate_weight(rows, 192, FP8_BLOCK, torch.device(DEVICE))
    ops.refresh_weight(weight, torch.randn(n, 192, device=DEVICE) * 0.02)
    saved = ops.quantize_activation(normal(150, 192, seed=1), FP8_TOKEN_GROUP)
    groups = torch.tensor([[0, 128], [128, 22]], dtype=torch.int32, device=DEVICE)
    dy = normal(150, n, seed=2)
    dx, dw = ops.linear_backward(dy, saved, weight, groups, backward)
    assert same_bits(dx, ops.input_grad(dy, weight, backward))
    assert same_bits(dw, ops.weight_grad(dy, saved, groups, backward))
    into = torch.ones_like(dw)
    _, added = ops.linear_backward(dy, saved, weight, groups, backward, into)
    assert added is into and same_bits(into, dw + 1)
    expected = reference.linear_backward(dy, saved, weight, groups, backward)
    for a, b in zip((dx.float(), dw), (expected[0].float(), expected[1]), strict=True):
        assert float((a - b).norm() / b.norm()) < 0.01


@pytest.mark.parametrize("width", [192, 256])
@pytest.mark.parametrize("recipe", ["fp8", "fp8-jet"])
def test_the_backward_through_silu_and_linear_is_the_chain(width, recipe):
    backward = load_recipe(recipe).backward
    weight = allocate_weight((width, width), 192, FP8_BLOCK, torch.device(DEVICE))
    ops.refresh_weight(weight, torch.randn(2 * width, 192, device=DEVICE) * 0.02)
    saved = ops.quantize_activation(normal(150, 192, seed=1), FP8_TOKEN_GROUP)
    gate, up = normal(150, 2 * width, seed=2).chunk(2, dim=1)
    groups = torch.tensor([[0, 128], [128, 22]], dtype=torch.int32, device=DEVICE)
    dy = normal(150, width, seed=3)
    both = ops.silu_mul_backward(dy, gate, up)
    expected = ops.linear_backward(both, saved, weight, groups, backward)
    both = ops.silu_mul_gradient(dy, gate, up, groups, backward)
    got = ops.linear_backward(both, saved, weight, groups, backward)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    plain = ops.silu_mul_gradient(dy, gate, up, groups, load_recipe("bf16").backward)
    assert same_bits(plain, ops.silu_mul_backward(dy, gate, up))


def test_silu_backward_fills_one_buffer():
    gate, up = normal(9, 2 * 320).chunk(2, dim=1)
    dy = normal(9, 320, seed=4)
    mine, theirs = (o.silu_mul_backward(dy, gate, up) for o in (ops, reference))
    assert mine.shape == (9, 640)
    torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-6)
