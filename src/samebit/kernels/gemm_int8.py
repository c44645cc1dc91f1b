"""INT8 GEMM, exact in int32, with one scale per token and one per output channel (QuRL's INT8)."""

from __future__ import annotations

import torch

from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_fast import Tile
from samebit.kernels._gemm_launch import check_operands, check_shape, multiply, output

MAX_K = 2**31 // (127 * 127)
"""Beyond this K the exact int32 sum could overflow."""


def int8_gemm(
    x_MK: torch.Tensor,
    x_scale_M: torch.Tensor,
    w_NK: torch.Tensor,
    w_scale_N: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    n: int | None = None,
    bias_N: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """bf16 [M, n]: exact int32 over all of K, then fl(fl(acc) * fl(sx * sw)) + bias, rounded once.

    x_MK: int8 codes [M, K], w_NK: int8 codes [Np, K], K and Np multiples of 128, codes in
    [-127, 127]. x_scale_M: float32 [M]; w_scale_N: float32 [Np].
    """
    check_operands(x_MK, w_NK, torch.int8)
    M, K = x_MK.shape
    stored = w_NK.shape[0]
    if K > MAX_K:
        raise ValueError(f"K = {K} could overflow int32; the largest is {MAX_K}")
    check_shape("x_scale_M", x_scale_M, M)
    check_shape("w_scale_N", w_scale_N, stored)
    out_MN = output(out, M, n or stored, stored, torch.bfloat16, x_MK.device)
    return multiply(
        "int8", plain.INT8, x_MK, w_NK, out_MN, x_scale=x_scale_M, w_scale=w_scale_N,
        bias_N=bias_N, tile=tile,
    )  # fmt: skip
