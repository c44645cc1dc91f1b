"""SiLU(gate) * up: rounding, gradients, and fused against unfused bits."""

import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE, awkward, same_bits

from samebit.formats import E4M3, INT8  # isort: skip
from samebit.kernels.activation import silu_mul, silu_mul_backward, silu_mul_quantize  # isort: skip
from samebit.kernels.quantize_activation import quantize_activation  # isort: skip
from samebit.kernels.quantize_row import quantize_rows  # isort: skip


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator)).to(BF16).to(DEVICE)


def test_forward_is_the_rounded_product():
    fused = normal(37, 896)
    gate, up = fused[:, :320], fused[:, 512:832]
    exact = gate.cpu().double() * torch.sigmoid(gate.cpu().double()) * up.cpu().double()
    error = (silu_mul(gate, up).cpu().double() - exact).abs() / exact.abs()
    # Half a BF16 ulp, and the FP32 steps before it.
    assert error.max() < 2.0**-8 * 1.001


def test_by_hand():
    gate = torch.tensor([[0.0, -200.0, 200.0, float("nan")]], dtype=BF16, device=DEVICE)
    up = torch.tensor([[3.0, 1.0, 2.0, 1.0]], dtype=BF16, device=DEVICE)
    assert silu_mul(gate, up)[0, :3].tolist() == [0.0, 0.0, 400.0]
    assert silu_mul(gate, up)[0, 3].isnan()


@pytest.mark.parametrize("F", [128, 200])
def test_fused_equals_the_chain(F):
    gate, up = awkward(35, F), normal(35, F)
    y = silu_mul(gate, up)
    kept, codes, scale = silu_mul_quantize(gate, up, E4M3, keep_output=True)
    expected = quantize_activation(y)
    assert same_bits(kept, y) and same_bits(codes, expected[0]) and same_bits(scale, expected[1])
    dropped, codes, scale = silu_mul_quantize(gate, up, INT8, per_row=True)
    expected = quantize_rows(y, INT8)
    assert dropped is None and same_bits(codes, expected[0]) and same_bits(scale, expected[1])


def test_few_tokens_have_the_bits_of_many(monkeypatch):
    gate, up = awkward(11, 200), normal(11, 200)
    few = silu_mul_quantize(gate, up, E4M3, keep_output=True)
    monkeypatch.setattr("samebit.kernels.activation.FEW", 0)
    many = silu_mul_quantize(gate, up, E4M3, keep_output=True)
    assert all(same_bits(a, b) for a, b in zip(few, many, strict=True))


def test_backward():
    gate, up, dy = normal(33, 200), normal(33, 200, seed=1), normal(33, 200, seed=2)
    both = torch.zeros((33, 512), dtype=BF16, device=DEVICE)
    dgate, dup = silu_mul_backward(dy, gate, up, both[:, :200], both[:, 256:456])
    g, u = (x.cpu().double().requires_grad_() for x in (gate, up))
    (torch.nn.functional.silu(g) * u * dy.cpu().double()).sum().backward()
    torch.testing.assert_close(dgate.cpu().double(), g.grad, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(dup.cpu().double(), u.grad, rtol=2**-8, atol=1e-4)
    assert not both[:, 200:256].any() and not both[:, 456:].any()
