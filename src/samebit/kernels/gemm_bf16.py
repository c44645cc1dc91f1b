"""BF16 GEMM whose bits do not depend on the batch: FP32 accumulation in K order, one rounding."""

from __future__ import annotations

import torch

from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_fast import Tile
from samebit.kernels._gemm_launch import check_operands, multiply, output


def bf16_gemm(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    n: int | None = None,
    bias_N: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> torch.Tensor:
    """[M, n] in `out_dtype` (bfloat16, rounded once, or float32, unrounded): x_MK times w_NK^T.

    x_MK: bf16 [M, K]; w_NK: bf16 [Np, K], Np >= n (default Np); any K. bias_N: bf16 [n], added in
    FP32. Operands whose rows are not 16-byte aligned take the plain kernel: same bits, slower.
    """
    check_operands(x_MK, w_NK, torch.bfloat16, multiple=1)
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
    M, stored = x_MK.shape[0], w_NK.shape[0]
    out_MN = output(out, M, n or stored, stored, out_dtype, x_MK.device)
    return multiply("bf16", plain.BF16, x_MK, w_NK, out_MN, bias_N=bias_N, tile=tile)
