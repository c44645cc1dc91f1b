"""FP8 GEMM with block scales: activations 1x128, weights 128x128 (Jet-RL section 4.2).

Serves the forward (X against W) and the input gradient (dY against W^T codes). Weights are stored
padded with zeros to multiples of 128 in both directions, activations along K.
"""

from __future__ import annotations

import torch

from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_fast import Tile
from samebit.kernels._gemm_launch import GROUP, check_operands, check_shape, multiply, output


def fp8_block_gemm(
    x_MK: torch.Tensor,
    x_scale_MG: torch.Tensor,
    w_NK: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    n: int | None = None,
    bias_N: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """bf16 [M, n]: acc = fma(dot128, fl(sx * sw), acc), K blocks in order, + bias, rounded once.

    x_MK: e4m3 codes [M, K], K a multiple of 128. x_scale_MG: float32 [M, K / 128], any strides; the
    physical layout to write is [K / 128, P], P >= M a multiple of 4 (so stride(0) == 1): it comes by
    TMA; any other gives the same bits more slowly.
    w_NK: e4m3 codes [Np, K], Np a multiple of 128. w_scale: float32 [Np / 128, K / 128].
    n: real outputs (default Np); bias_N: bf16 [n], added in FP32. A row's bits depend on nothing
    but the row and the weights. tile: instead of the tuned one, for tests and tuning; it never
    changes the bits. Raises ValueError on shapes, dtypes or strides that do not fit.
    """
    check_operands(x_MK, w_NK, torch.float8_e4m3fn)
    M, K = x_MK.shape
    stored = w_NK.shape[0]
    if stored % GROUP:
        raise ValueError(f"weights have {stored} rows; store them padded to a multiple of {GROUP}")
    check_shape("x_scale_MG", x_scale_MG, M, K // GROUP)
    check_shape("w_scale", w_scale, stored // GROUP, K // GROUP)
    out_MN = output(out, M, n or stored, stored, torch.bfloat16, x_MK.device)
    return multiply(
        "fp8_block", plain.BLOCK, x_MK, w_NK, out_MN, x_scale=x_scale_MG, w_scale=w_scale,
        w_scale_rows=GROUP, promote=GROUP, bias_N=bias_N, tile=tile,
    )  # fmt: skip
