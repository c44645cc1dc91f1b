"""The plain kernel in Triton's interpreter against exact products worked in FP64 (no GPU)."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import DEVICE

SCRIPT = """
import torch
from samebit.kernels.gemm_fp8_block import fp8_block_gemm
from samebit.kernels.gemm_fp8_row import fp8_row_gemm
from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad
from samebit.kernels.gemm_int8 import int8_gemm

torch.manual_seed(0)
torch.set_num_threads(1)
E4M3 = torch.float8_e4m3fn

# Hand-worked: every code is 1, so a block's dot is 128 exactly.
ones = torch.ones(2, 256).to(E4M3)
weights = torch.ones(128, 256).to(E4M3)
scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
out = fp8_block_gemm(ones, scales, weights, torch.tensor([[1.0, 3.0]]), n=3)
assert out.tolist() == [[832.0] * 3, [224.0] * 3], out  # 128*(.5+6), 128*(1+.75)
bias = torch.tensor([1.0, -1.0, 0.0]).bfloat16()
biased = fp8_block_gemm(ones, scales, weights, torch.tensor([[1.0, 3.0]]), n=3, bias_N=bias)
assert biased.tolist()[1] == [225.0, 223.0, 224.0], biased
row = fp8_row_gemm(ones, torch.tensor([2.0, 0.5]), weights, torch.full((128,), 0.25), n=2)
assert row.tolist() == [[128.0] * 2, [32.0] * 2], row
codes = torch.full((2, 256), 100, dtype=torch.int8)
exact = int8_gemm(codes, torch.ones(2), codes.repeat(64, 1), torch.full((128,), 2.0**-10), n=2)
assert exact.tolist() == [[2496.0] * 2] * 2, exact  # 2.56e6 / 1024 = 2500, bf16 2496
"""

GRADIENT = """
import torch
from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad

torch.manual_seed(0)
E4M3 = torch.float8_e4m3fn
dy, x = torch.randn(70, 256).to(E4M3), torch.randn(130, 256).to(E4M3)
sdy, sx = torch.rand(70, 2), torch.rand(130, 2)
D = dy.double() * sdy.double().repeat_interleave(128, 1)
exact = D @ (x.double() * sx.double().repeat_interleave(128, 1)).T
got = fp8_block_wgrad(dy, sdy, x, sx)
assert got.dtype == torch.float32 and (got - exact).abs().max() < 1e-4 * exact.abs().max()
total = torch.ones(70, 130)
fp8_block_wgrad(dy, sdy, x, sx, total, accumulate=True)
assert torch.equal(total, got + 1)
blocks = torch.rand(2, 2)
rows = blocks.repeat_interleave(128, 0)[:130]
assert torch.equal(fp8_block_wgrad(dy, sdy, x, blocks), fp8_block_wgrad(dy, sdy, x, rows))
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu holds these on a card")
@pytest.mark.parametrize("script", [SCRIPT, GRADIENT], ids=["forward", "gradient"])
def test_plain_kernel_in_the_interpreter(script):
    exec(script, {})
