"""Attention: one definition, three layouts, the same bits per (token, head).

Legend: T query rows, S key rows, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch

from samebit.formats import BLOCK
from samebit.kernels.attention_decode_launch import Result, fast_decode, launch_decode
from samebit.kernels.attention_gradient import attention_backward, head_rows
from samebit.kernels.attention_hopper import attention_hopper_kernel
from samebit.kernels.attention_layout import (
    KEY_BLOCK,
    PLAIN_STAGES,
    SPLIT_KEYS,
    TILE_TOKENS,
    Layout,
    PackedLayout,
    PagedLayout,
    on_card,
    rows_like,
)
from samebit.kernels.attention_pages import LOG2E, or_unused, page_rows, pages_fit, strides_of
from samebit.kernels.attention_prefill import attention_prefill_kernel
from samebit.kernels.attention_stream import attention_stream_kernel
from samebit.kernels.launch import cdiv, launch, processors
from samebit.kernels.quantize_common import empty_activation_scale

MAX_GROUP = 64


def attention_forward(
    q_THD: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scale: float,
    *,
    q_scale_TH: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention: (out bf16 [T, H, D], log-sum-exp fp32 [T, H], natural log).

    q_THD: bf16, contiguous. k, v: bf16 [S, G, D] with a PackedLayout, [pages, page size, G, D]
    with a PagedLayout, any strides with D contiguous. FP8: all three e4m3 codes, with fp32 scales
    per row and head: q_scale_TH [T, H], k_scale and v_scale shaped as k, v without D.
    Fastest cache: pages of 128, stored [pages, G, 128, D] and passed transposed, scales likewise.
    """
    _check(q_THD, k, v, layout, (q_scale_TH, k_scale, v_scale))
    if out is None:
        out = rows_like(q_THD, layout, torch.bfloat16)
    if lse is None:
        lse = rows_like(q_THD[..., 0], layout, torch.float32)
    scales = (q_scale_TH, k_scale, v_scale)
    if isinstance(layout, PagedLayout) and layout.query_starts is None:
        launch_decode(q_THD, k, v, scales, layout, scale, Result(out, None, lse))
    elif on_card(q_THD) and isinstance(layout, PackedLayout) and k_scale is None:
        _packed(q_THD, k, v, layout, scale, out, lse)
    elif on_card(q_THD) and (isinstance(layout, PackedLayout) or pages_fit(k, v)):
        _stream(q_THD, k, v, scales, layout, scale, out, lse)
    else:
        _prefill(q_THD, k, v, scales, layout, scale, out, lse)
    return out, lse


def decodes_to_codes(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> bool:
    """Whether `attention_codes` takes these: decode by the fast kernel, a head as wide as a group of 128."""
    decode = isinstance(layout, PagedLayout) and layout.query_starts is None
    return decode and q_THD.shape[2] == BLOCK and fast_decode(q_THD, k, v)


def attention_codes(
    q_THD: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PagedLayout,
    scale: float,
    *,
    q_scale_TH: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 codes [T, H * 128], FP32 scales [T, H], group-major) of `attention_forward`'s BF16 output:
    the bytes that quantising it in groups of 1x128 gives. Only where `decodes_to_codes`."""
    scales = (q_scale_TH, k_scale, v_scale)
    _check(q_THD, k, v, layout, scales)
    T, H, D = q_THD.shape
    codes = torch.empty((T, H * D), dtype=torch.float8_e4m3fn, device=q_THD.device)
    out_scale = empty_activation_scale(T, H * D, q_THD.device)
    lse = torch.empty((T, H), dtype=torch.float32, device=q_THD.device)
    launch_decode(q_THD, k, v, scales, layout, scale, Result(codes, out_scale, lse))
    return codes, out_scale


def _check(q, k, v, layout: Layout, scales: tuple) -> None:
    """ValueError on shapes and dtypes that the kernels do not define."""
    H, D = q.shape[1:]
    G = k.shape[-2]
    if D not in (64, 128):
        raise ValueError(f"head size {D} is not supported; use 64 or 128")
    if H % G or H // G > MAX_GROUP:
        raise ValueError(f"{H} query heads over {G} key/value heads; the ratio must be whole")
    if k.shape != v.shape or k.shape[-1] != D or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must match, D contiguous")
    if not q.is_contiguous():
        raise ValueError("q_THD must be contiguous")
    if k.dim() != (4 if isinstance(layout, PagedLayout) else 3):
        raise ValueError(f"k has {k.dim()} dimensions, wrong for {type(layout).__name__}")
    fp8 = k.dtype == torch.float8_e4m3fn
    if len({q.dtype, k.dtype, v.dtype}) != 1:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must agree")
    if any((s is not None) != fp8 for s in scales):
        raise ValueError(f"{k.dtype} keys: pass q_scale_TH, k_scale and v_scale exactly with e4m3")
    if isinstance(layout, PackedLayout) and (k.stride(1) != D or v.stride(1) != D):
        raise ValueError("k_SGD and v_SGD must have their heads side by side (stride D)")
    if isinstance(layout, PagedLayout):
        page = k.shape[1]
        if page % KEY_BLOCK and KEY_BLOCK % page:
            raise ValueError(f"page size {page} must divide {KEY_BLOCK} or be a multiple of it")


def _prefill(q, k, v, scales, layout: Layout, scale: float, out, lse) -> None:
    _, k_scale, v_scale = scales
    H, D = q.shape[1:]
    G = k.shape[-2]
    fp8 = k_scale is not None
    paged = isinstance(layout, PagedLayout)
    rows = 128
    tokens = rows // (H // G)
    if isinstance(layout, PagedLayout):
        table, context, starts = layout.block_table, layout.context_lens, layout.query_starts
        assert starts is not None
        segments, width, page = table, table.stride(0), k.shape[1]
        count, longest, keys = table.shape[0], layout.max_query_length, layout.max_context
    else:
        segments = layout.segments
        table = context = starts = segments
        width, page = 0, KEY_BLOCK
        count, longest, keys = segments.shape[0], layout.max_length, layout.max_keys
    grid = (count * G, cdiv(longest, tokens))
    launch(attention_prefill_kernel, grid,
        q, k, v, *or_unused(scales, lse), out, lse, segments, table, context, starts, width,
        scale * LOG2E, *strides_of(k, v, k_scale, v_scale), H=H, G=G, D=D, KB=KEY_BLOCK,
        SPLIT_BLOCKS=SPLIT_KEYS // KEY_BLOCK, PAGE=page, PAGED=paged, FP8=fp8,
        ONE_SPLIT=keys <= SPLIT_KEYS, ROWS=rows, STAGES=PLAIN_STAGES, num_warps=rows // 16,
        enable_fp_fusion=False,
    )  # fmt: skip


def _packed(q, k, v, layout: PackedLayout, scale: float, out, lse) -> None:
    """BF16 segments. On short segments this beats the streaming kernel, which knows them too."""
    H, D = q.shape[1:]
    G = k.shape[1]
    grid = (layout.segments.shape[0] * H, cdiv(layout.max_length, TILE_TOKENS))
    launch(attention_hopper_kernel, grid,
        head_rows(q, 64), head_rows(k, KEY_BLOCK), head_rows(v, KEY_BLOCK), k, v,
        out, lse, layout.segments, scale * LOG2E, k.stride(0), v.stride(0), H=H, G=G, D=D,
        KB=KEY_BLOCK, SPLIT_BLOCKS=SPLIT_KEYS // KEY_BLOCK, STAGES=2, CONSUMER_REGS=232,
        PRODUCER_REGS=40, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _stream(q, k, v, scales, layout: Layout, scale: float, out, lse) -> None:
    """Paged chunks and FP8 segments. The paged form needs pages of whole key blocks."""
    H, D = q.shape[1:]
    G = k.shape[-2]
    fp8 = scales[0] is not None
    if isinstance(layout, PagedLayout):
        k_rows, v_rows = page_rows(k), page_rows(v)
        assert k_rows is not None and v_rows is not None and layout.query_starts is not None
        k_view, v_view, row_units = k_rows[0], v_rows[0], (*k_rows[1], *v_rows[1])
        B = layout.block_table.shape[0]
        num_tiles = cdiv(layout.max_query_length, TILE_TOKENS) * B * H
        programs = num_tiles
        tables = (
            layout.block_table,
            layout.block_table,
            layout.context_lens,
            layout.query_starts,
            layout.block_table.stride(0),
            B,
        )
    else:
        k_view = v_view = None
        row_units = (0, 0, D) * 2
        num_tiles = layout.forward_tiles.shape[0] * H
        programs = min(num_tiles, processors(q))
        tables = (layout.forward_tiles,) * 4 + (0, 1)
    launch(attention_stream_kernel, (programs,),
        head_rows(q, 64), head_rows(k, KEY_BLOCK, k_view),
        head_rows(v, KEY_BLOCK, v_view), k, v, *or_unused(scales, lse), out, lse, *tables,
        num_tiles, scale * LOG2E, *row_units, *strides_of(k, v, *scales[1:]), H=H, G=G, D=D,
        KB=KEY_BLOCK, SPLIT_BLOCKS=SPLIT_KEYS // KEY_BLOCK, STAGES=2,
        PAGE=k.shape[1] if isinstance(layout, PagedLayout) else KEY_BLOCK,
        PAGED=isinstance(layout, PagedLayout), FP8=fp8, CONSUMER_REGS=224 if fp8 else 232,
        PRODUCER_REGS=56 if fp8 else 40, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["attention_backward", "attention_codes", "attention_forward", "decodes_to_codes"]
