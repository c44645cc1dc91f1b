"""FP8 GEMM with one scale per token and one per output channel (QuRL's FP8)."""

from __future__ import annotations

import torch

from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_fast import Tile
from samebit.kernels._gemm_launch import GROUP, check_operands, check_shape, multiply, output


def fp8_row_gemm(
    x_MK: torch.Tensor,
    x_scale_M: torch.Tensor,
    w_NK: torch.Tensor,
    w_scale_N: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    n: int | None = None,
    bias_N: torch.Tensor | None = None,
    promote: int = 512,
    tile: Tile | None = None,
) -> torch.Tensor:
    """bf16 [M, n]: acc = acc + dot(`promote` of K), in K order; then fl(acc * fl(sx * sw)) + bias.

    x_MK: e4m3 codes [M, K], w_NK: e4m3 codes [Np, K], K and Np multiples of 128. x_scale_M: float32
    [M]; w_scale_N: float32 [Np]. promote: a constant of the precision plan, a multiple of 128; the
    last span is shorter when K is not a multiple of it.
    """
    check_operands(x_MK, w_NK, torch.float8_e4m3fn)
    M, stored = x_MK.shape[0], w_NK.shape[0]
    if promote <= 0 or promote % GROUP:
        raise ValueError(f"promote = {promote} must be a positive multiple of {GROUP}")
    check_shape("x_scale_M", x_scale_M, M)
    check_shape("w_scale_N", w_scale_N, stored)
    out_MN = output(out, M, n or stored, stored, torch.bfloat16, x_MK.device)
    return multiply(
        "fp8_row", plain.ROW, x_MK, w_NK, out_MN, x_scale=x_scale_M, w_scale=w_scale_N,
        promote=promote, bias_N=bias_N, tile=tile,
    )  # fmt: skip
