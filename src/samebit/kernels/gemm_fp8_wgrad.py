"""FP8 weight gradient: both operands quantised along tokens in groups of 128 (Jet-RL 4.2)."""

from __future__ import annotations

import torch

from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_fast import Tile
from samebit.kernels._gemm_launch import GROUP, check_operands, check_shape, multiply, output


def fp8_block_wgrad(
    dy_NT: torch.Tensor,
    dy_scale_NG: torch.Tensor,
    x_KT: torch.Tensor,
    x_scale_KG: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    accumulate: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """float32 [N, K]: acc = fma(dot128, fl(sdy * sx), acc) over token groups in order.

    dy_NT, x_KT: e4m3 codes [N, Tp] and [K, Tp], transposed, Tp a multiple of 128 (each token group
    padded with zero codes). dy_scale_NG: float32 [N, Tp / 128]; x_scale_KG: float32 [K, Tp / 128],
    or [ceil(K / 128), Tp / 128] for one scale per 128x128 block (faster: no product of scales per
    element). Any strides; the physical layout to write is [Tp / 128, P], P a multiple of 4
    (stride(0) == 1). accumulate: `out` (required) is read and the product added to it, one FP32
    rounding. Deterministic. tile: instead of the tuned one; it never changes the bits.
    """
    check_operands(dy_NT, x_KT, torch.float8_e4m3fn)
    N, T = dy_NT.shape
    K = x_KT.shape[0]
    check_shape("dy_scale_NG", dy_scale_NG, N, T // GROUP)
    blocks = -(-K // GROUP)
    per_block = x_scale_KG.shape[0] == blocks != K
    check_shape("x_scale_KG", x_scale_KG, blocks if per_block else K, T // GROUP)
    if accumulate and out is None:
        raise ValueError("accumulate=True needs out, the gradient to add to")
    out_NK = output(out, N, K, K, torch.float32, dy_NT.device)
    return multiply(
        "fp8_wgrad", plain.BLOCK, dy_NT, x_KT, out_NK, x_scale=dy_scale_NG, w_scale=x_scale_KG,
        w_scale_rows=GROUP if per_block else 1, promote=GROUP, add=accumulate, tile=tile,
    )  # fmt: skip
