"""Launches the attention backward."""

from __future__ import annotations

import torch

from samebit.kernels.attention_backward import (
    attention_delta_kernel,
    attention_dkdv_kernel,
    attention_dq_kernel,
    attention_reduce_kernel,
)
from samebit.kernels.attention_backward_hopper import (
    attention_dkdv_hopper_kernel,
    attention_dq_hopper_kernel,
)
from samebit.kernels.attention_layout import PLAIN_STAGES, PackedLayout, on_card, rows_like
from samebit.kernels.launch import Box, cdiv, launch, next_power_of_2, rows_box


def head_rows(x: torch.Tensor, count: int, view: tuple[int, int, int] | None = None) -> Box:
    """Bulk copies of `count` rows of one head of x [rows, heads, D].

    `view`: (rows, columns, row stride) where x is not laid out so.
    """
    D = x.shape[-1]
    return rows_box(x, count, D, view or (x.shape[0], x.shape[1] * D, x.stride(0)))


def attention_backward(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    dout_THD: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq bf16 [T, H, D], dk bf16 [S, G, D], dv bf16 [S, G, D]), the same bits on every run.

    All inputs bf16 and contiguous (with FP8 keys: the dequantised q, k, v), lse fp32 natural log,
    from whatever forward wrote out and lse. A prompt's dK and dV sum its own and its samples'.
    """
    for name, x in (("q", q_THD), ("k", k_SGD), ("v", v_SGD), ("dout", dout_THD)):
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous in the attention backward")
    T, H, D = q_THD.shape
    G = k_SGD.shape[1]
    dq, dk, dv = (rows_like(x, layout, x.dtype) for x in (q_THD, k_SGD, v_SGD))
    delta = torch.empty((H, T), dtype=torch.float32, device=q_THD.device)
    lse = torch.empty_like(delta)
    launch(attention_delta_kernel, (cdiv(T, 64), H),
        out_THD, dout_THD, lse_TH, lse, delta, T, scale, H=H, D=D, TOKENS=64, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    part_shape = (max(layout.num_partial_rows, 1), G, D)
    dk_part = torch.empty(part_shape, dtype=torch.float32, device=q_THD.device)
    dv_part = torch.empty_like(dk_part)
    outputs = (dk, dv, dk_part, dv_part, layout.segments, layout.backward_items, T, scale)
    key_grid = (layout.backward_items.shape[0] * G, cdiv(layout.max_length, 128))
    query_grid = (layout.segments.shape[0] * H, cdiv(layout.max_length, 128))
    heads = {"H": H, "G": G, "D": D, "enable_fp_fusion": False}
    if on_card(q_THD):
        q_rows, do_rows, k_rows, v_rows = (
            head_rows(x, 64) for x in (q_THD, dout_THD, k_SGD, v_SGD)
        )
        launch(attention_dkdv_hopper_kernel, key_grid,
            q_rows, do_rows, k_rows, v_rows, lse, delta, *outputs, **heads, STAGES=4,
            CONSUMER_REGS=240, PRODUCER_REGS=24, num_warps=4,
        )  # fmt: skip
        launch(attention_dq_hopper_kernel, query_grid,
            q_rows, do_rows, k_rows, v_rows, k_SGD, v_SGD, lse, delta, dq, layout.segments, T,
            scale, k_SGD.stride(0), **heads, KEYS=64, STAGES=4, CONSUMER_REGS=232, PRODUCER_REGS=40,
            num_warps=4,
        )  # fmt: skip
    else:
        inputs = (q_THD, k_SGD, v_SGD, dout_THD, lse, delta)
        launch(
            attention_dkdv_kernel,
            key_grid,
            *inputs,
            *outputs,
            **heads,
            KEYS=128,
            QUERIES=64,
            STAGES=PLAIN_STAGES,
            num_warps=8,
        )
        launch(attention_dq_kernel, query_grid,
            *inputs, dq, layout.segments, T, scale, **heads, QUERIES=128, KEYS=64, STAGES=PLAIN_STAGES,
            num_warps=8,
        )  # fmt: skip
    if layout.reduce_items.shape[0]:
        launch(attention_reduce_kernel, (layout.reduce_items.shape[0], layout.max_length),
            dk_part, dv_part, dk, dv, layout.segments, layout.reduce_items, GD=G * D,
            COLUMNS=next_power_of_2(G * D), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dq, dk, dv
