"""RMSNorm forward and backward against FP64, and fused against unfused bits."""

import numpy as np
import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE, awkward, same_bits

from samebit.formats import E4M3, INT8  # isort: skip
from samebit.kernels.norm import add_rms_norm, rms_norm, rms_norm_quantize  # isort: skip
from samebit.kernels.norm_backward import rms_norm_backward  # isort: skip
from samebit.kernels.quantize_activation import quantize_activation  # isort: skip
from samebit.kernels.quantize_row import quantize_rows  # isort: skip

EPS = 1e-5


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(BF16).to(DEVICE)


def tree(x):
    """Adjacent pairs over the last axis; rows of 128 folded to 16 first, as in the kernel."""
    while x.shape[-1] > 2048:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


@pytest.mark.parametrize("K", [576, 200, 2112, 2500])
def test_forward_equals_the_written_out_tree(K):
    x, weight = normal(5, K), normal(K, seed=1)
    width = 128 * 2 ** (((K + 127) // 128) - 1).bit_length()
    squares = torch.nn.functional.pad(x.cpu().float() ** 2, (0, width - K))
    # numpy's FP32 sqrt is correctly rounded; torch's on a CPU is not.
    rstd = 1.0 / torch.from_numpy(np.sqrt((tree(squares) / K + EPS).numpy()))
    expected = ((x.cpu().float() * rstd) * weight.cpu().float()).to(BF16)
    assert same_bits(rms_norm(x, weight, EPS), expected)


@pytest.mark.parametrize("K", [576, 200])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_fused_equals_the_chain(K, per_row, add):
    x, residual, weight = awkward(13, K), normal(13, K, seed=2), normal(K, seed=1)
    y, total = add_rms_norm(x, residual, weight, EPS) if add else (rms_norm(x, weight, EPS), None)
    fused = rms_norm_quantize(
        x, weight, EPS, E4M3, residual_TK=residual if add else None, per_row=per_row,
        keep_output=True,
    )  # fmt: skip
    codes, scale = quantize_rows(y, E4M3) if per_row else quantize_activation(y)
    assert same_bits(fused.y, y) and same_bits(fused.codes, codes) and same_bits(fused.scale, scale)
    assert total is None or same_bits(fused.residual, total)


def test_fused_int8_equals_the_chain():
    x, weight = awkward(13, 576), normal(576, seed=1)
    fused = rms_norm_quantize(x, weight, EPS, INT8, per_row=True)
    codes, scale = quantize_rows(rms_norm(x, weight, EPS), INT8)
    assert fused.y is None and same_bits(fused.codes, codes) and same_bits(fused.scale, scale)


def test_residual_is_rounded_before_the_norm():
    x, residual, weight = normal(3, 256), normal(3, 256, seed=3), normal(256, seed=1)
    y, total = add_rms_norm(x, residual, weight, EPS)
    assert same_bits(total, (x.float() + residual.float()).to(BF16))
    assert same_bits(y, rms_norm(total, weight, EPS))


def test_a_row_does_not_depend_on_its_place():
    x, weight = normal(40, 576), normal(576, seed=1)
    whole = rms_norm(x, weight, EPS)
    wide = torch.empty((40, 640), dtype=BF16, device=DEVICE)
    wide[:, 64:] = x
    assert same_bits(rms_norm(x[17:18], weight, EPS), whole[17:18])
    assert same_bits(rms_norm(wide[:, 64:], weight, EPS), whole)


@pytest.mark.parametrize("T", [7] if DEVICE == "cpu" else [7, 600])
def test_backward(T):
    K = 200
    x, dy, dsum, weight = (normal(T, K), normal(T, K, seed=2), normal(T, K, seed=3), normal(K))
    dx, dweight = rms_norm_backward(dy, x, weight, EPS, dsum_TK=dsum)
    x64 = x.cpu().double().requires_grad_()
    w64 = weight.cpu().double().requires_grad_()
    y = x64 * (x64.square().mean(-1, keepdim=True) + EPS).rsqrt() * w64
    (y * dy.cpu().double()).sum().backward()
    torch.testing.assert_close(
        dx.cpu().double(), x64.grad + dsum.cpu().double(), rtol=2**-8, atol=1e-3
    )
    torch.testing.assert_close(dweight.cpu().double(), w64.grad, rtol=1e-4, atol=1e-4)
    again = torch.ones_like(dweight)
    rms_norm_backward(dy, x, weight, EPS, dsum_TK=dsum, dweight_K=again)
    assert same_bits(again, dweight + 1.0)
