"""Argument checks and output allocation shared by the GEMM launchers."""

from __future__ import annotations

import torch

from samebit.formats import BLOCK
from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_fast import Tile, hopper_gemm, tma_ready
from samebit.kernels._gemm_tuning import tile_for

GROUP = BLOCK


def check_operands(
    a_MK: torch.Tensor, b_NK: torch.Tensor, dtype: torch.dtype, multiple: int = GROUP
) -> None:
    """Both operands are 2-D `dtype`, contiguous along K, and share K, a multiple of `multiple`."""
    for name, operand in (("first operand", a_MK), ("second operand", b_NK)):
        if operand.ndim != 2 or operand.dtype != dtype:
            raise ValueError(
                f"{name} must be 2-D {dtype}, got {operand.dtype} {tuple(operand.shape)}"
            )
        if operand.stride(1) != 1:
            raise ValueError(f"{name} must be contiguous along K, got strides {operand.stride()}")
    K = a_MK.shape[1]
    if b_NK.shape[1] != K:
        raise ValueError(f"K differs: {K} against {b_NK.shape[1]}; pad both with zeros alike")
    if K % multiple:
        raise ValueError(f"K = {K} is not a multiple of {multiple}; pad it with zero codes")


def output(
    out: torch.Tensor | None,
    rows: int,
    columns: int,
    stored: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """`out` if given (checked), else a new [rows, columns]; `columns` may not exceed `stored`."""
    if columns > stored:
        raise ValueError(f"asked for {columns} outputs, but only {stored} are stored")
    if out is None:
        return torch.empty((rows, columns), dtype=dtype, device=device)
    if out.shape != (rows, columns) or out.dtype != dtype or out.stride(1) != 1:
        raise ValueError(
            f"out must be {dtype} [{rows}, {columns}], contiguous along its columns; "
            f"got {out.dtype} {tuple(out.shape)} with strides {out.stride()}"
        )
    return out


def check_shape(name: str, tensor: torch.Tensor, *shape: int) -> None:
    """ValueError unless `tensor` is FP32 of exactly `shape`."""
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )


def multiply(
    operator: str,
    mode: int,
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    out_MN: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    w_scale_rows: int = 1,
    promote: int = 0,
    bias_N: torch.Tensor | None = None,
    add: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """out = x w^T by the tuned kernel, or by the plain one where the copy engine cannot address the
    operands and on tensors of another device than CUDA (Triton's interpreter). Same bits."""
    if bias_N is not None and bias_N.shape != (out_MN.shape[1],):
        raise ValueError(f"bias_N must be [{out_MN.shape[1]}], got {list(bias_N.shape)}")
    if x_MK.is_cuda and tma_ready(x_MK) and tma_ready(w_NK):
        if tile is None:
            M, N = out_MN.shape
            tile = tile_for(x_MK.device.index or 0, operator, M, N, x_MK.shape[1])
        return hopper_gemm(
            x_MK, w_NK, out_MN, mode, tile, x_scale=x_scale, w_scale=w_scale,
            w_scale_rows=w_scale_rows, promote=promote, bias_N=bias_N, add=add,
        )  # fmt: skip
    return plain.plain_gemm(
        x_MK, w_NK, out_MN, mode, a_scale=x_scale, b_scale=w_scale, col_group=w_scale_rows,
        promote=promote, bias_N=bias_N, add=add,
    )  # fmt: skip
