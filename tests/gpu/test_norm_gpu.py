"""Row bits on the card: whatever the number of rows, their place, and what is fused."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
from samebit.formats import E4M3, INT8
from samebit.kernels.activation import silu_mul, silu_mul_quantize
from samebit.kernels.norm import add_rms_norm, rms_norm, rms_norm_quantize
from samebit.kernels.norm_backward import rms_norm_backward
from samebit.kernels.quantize_activation import quantize_activation
from samebit.kernels.quantize_row import quantize_rows
from tests.kernels.pointwise_oracle import BF16, same_bits

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 15, 16, 17, 33, 64, 100, 128, 200, 256, 513, 1024, 4096)
WIDTHS = (576, 960, 2112, 4096, 12288)


def normal(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(BF16)


@pytest.mark.parametrize("K", WIDTHS)
def test_norm_chain(K):
    x, residual, weight = normal(4096, K), normal(4096, K, seed=1), normal(K, seed=2)
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    assert same_bits(y, rms_norm(total, weight, 1e-6))
    assert same_bits(total, (x.float() + residual.float()).to(BF16))
    codes = quantize_activation(y)
    row_codes = quantize_rows(y, INT8)
    for rows in ROWS:
        part = slice(4096 - rows, 4096)
        fused = rms_norm_quantize(x[part], weight, 1e-6, E4M3, residual_TK=residual[part])
        assert same_bits(fused.residual, total[part])
        assert same_bits(fused.codes, codes[0][part]) and same_bits(fused.scale, codes[1][part])
    fused = rms_norm_quantize(total, weight, 1e-6, INT8, per_row=True, keep_output=True)
    assert same_bits(fused.y, y)
    assert same_bits(fused.codes, row_codes[0]) and same_bits(fused.scale, row_codes[1])


@pytest.mark.parametrize("K", [576, 4096])
def test_norm_does_not_depend_on_alignment(K):
    x, weight = normal(64, K), normal(K, seed=2)
    wide = torch.zeros((64, K + 9), dtype=BF16, device="cuda")
    wide[:, 1 : K + 1] = x
    assert same_bits(rms_norm(wide[:, 1 : K + 1], weight, 1e-6), rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("F", [1536, 2112, 12288])
def test_silu_chain(F):
    gate, up = normal(1024, F), normal(1024, F, seed=1)
    y = silu_mul(gate, up)
    codes, scale = quantize_activation(y)
    for rows in (1, 17, 128, 1000):
        _, fused, fused_scale = silu_mul_quantize(gate[:rows], up[:rows], E4M3)
        assert same_bits(fused, codes[:rows]) and same_bits(fused_scale, scale[:rows])
        assert same_bits(silu_mul(gate[:rows], up[:rows]), y[:rows])


def test_backward_is_deterministic():
    x, dy, weight = normal(3000, 4096), normal(3000, 4096, seed=1), normal(4096, seed=2)
    first = rms_norm_backward(dy, x, weight, 1e-6)
    again = rms_norm_backward(dy, x, weight, 1e-6)
    assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])
