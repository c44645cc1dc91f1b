"""The launchers refuse what does not fit, naming the value and the fix (no GPU, no launch)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from samebit.kernels.gemm_bf16 import bf16_gemm
from samebit.kernels.gemm_fp8_block import fp8_block_gemm
from samebit.kernels.gemm_fp8_row import fp8_row_gemm
from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad
from samebit.kernels.gemm_int8 import MAX_K, int8_gemm

E4M3 = torch.float8_e4m3fn


def codes(*shape, dtype=E4M3):
    return torch.zeros(shape, dtype=torch.float32).to(dtype)


def test_block_gemm_refuses_unpadded_operands():
    with pytest.raises(ValueError, match="K = 192 is not a multiple of 128"):
        fp8_block_gemm(codes(4, 192), torch.ones(4, 2), codes(128, 192), torch.ones(1, 2))
    with pytest.raises(ValueError, match="200 rows"):
        fp8_block_gemm(codes(4, 256), torch.ones(4, 2), codes(200, 256), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"x_scale_MG must be float32 \[4, 2\]"):
        fp8_block_gemm(codes(4, 256), torch.ones(2, 4), codes(128, 256), torch.ones(1, 2))
    with pytest.raises(ValueError, match="asked for 129 outputs"):
        fp8_block_gemm(codes(4, 256), torch.ones(4, 2), codes(128, 256), torch.ones(1, 2), n=129)


def test_operands_must_agree():
    with pytest.raises(ValueError, match="K differs: 256 against 128"):
        int8_gemm(
            codes(4, 256, dtype=torch.int8), torch.ones(4), codes(128, 128, dtype=torch.int8),
            torch.ones(128),
        )  # fmt: skip
    with pytest.raises(ValueError, match="second operand must be 2-D"):
        bf16_gemm(codes(4, 64, dtype=torch.bfloat16), codes(8, 64))
    with pytest.raises(ValueError, match="contiguous along K"):
        bf16_gemm(codes(64, 4, dtype=torch.bfloat16).T, codes(8, 64, dtype=torch.bfloat16))


def test_int8_refuses_a_sum_that_could_overflow():
    depth = (MAX_K // 128 + 1) * 128
    with pytest.raises(ValueError, match="could overflow"):
        int8_gemm(
            codes(1, depth, dtype=torch.int8), torch.ones(1), codes(1, depth, dtype=torch.int8),
            torch.ones(1),
        )  # fmt: skip


def test_row_gemm_promotes_whole_steps():
    with pytest.raises(ValueError, match="promote = 200"):
        fp8_row_gemm(codes(4, 256), torch.ones(4), codes(128, 256), torch.ones(128), promote=200)


def test_accumulating_gradient_needs_its_buffer():
    operands = codes(64, 128), torch.ones(64, 1), codes(32, 128), torch.ones(32, 1)
    with pytest.raises(ValueError, match="accumulate=True needs out"):
        fp8_block_wgrad(*operands, accumulate=True)
    with pytest.raises(ValueError, match="out must be"):
        fp8_block_wgrad(*operands, torch.zeros(64, 32).bfloat16())
