"""Attention: one definition, three layouts, the same bits per (token, head).

Legend: T query rows, S key rows, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
import triton

from samebit.kernels.attention_decode import attention_decode_kernel, attention_fold_kernel
from samebit.kernels.attention_decode_hopper import attention_decode_hopper_kernel
from samebit.kernels.attention_gradient import attention_backward, rows_descriptor
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
from samebit.kernels.attention_prefill import attention_prefill_kernel
from samebit.kernels.attention_stream import attention_stream_kernel

LOG2E = 1.4426950408889634
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
        _decode(q_THD, k, v, scales, layout, scale, out, lse)
    elif on_card(q_THD) and isinstance(layout, PackedLayout) and k_scale is None:
        _packed(q_THD, k, v, layout, scale, out, lse)
    elif on_card(q_THD) and (isinstance(layout, PackedLayout) or _pages_fit(k, v)):
        _stream(q_THD, k, v, scales, layout, scale, out, lse)
    else:
        _prefill(q_THD, k, v, scales, layout, scale, out, lse)
    return out, lse


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


def _strides(k, v, k_scale, v_scale) -> list[int]:
    """(page, row, head) strides of k, v and their scales; 0 pages for packed rows."""
    out: list[int] = []
    for tensor, data in ((k, True), (v, True), (k_scale, False), (v_scale, False)):
        if tensor is None:
            out += [0, 0, 0]
            continue
        strides = tensor.stride()[:-1] if data else tensor.stride()
        out += list(strides) if len(strides) == 3 else [0, *strides]
    return out


def _pointers(scales: tuple, unused: torch.Tensor) -> tuple:
    """The scale tensors, or a pointer that the kernel never follows."""
    return tuple(unused if scale is None else scale for scale in scales)


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
    grid = (count * G, triton.cdiv(longest, tokens))
    attention_prefill_kernel[grid](
        q, k, v, *_pointers(scales, lse), out, lse, segments, table, context, starts, width,
        scale * LOG2E, *_strides(k, v, k_scale, v_scale), H=H, G=G, D=D, KB=KEY_BLOCK,
        SPLIT_BLOCKS=SPLIT_KEYS // KEY_BLOCK, PAGE=page, PAGED=paged, FP8=fp8,
        ONE_SPLIT=keys <= SPLIT_KEYS, ROWS=rows, STAGES=PLAIN_STAGES, num_warps=rows // 16,
        enable_fp_fusion=False,
    )  # fmt: skip


def _packed(q, k, v, layout: PackedLayout, scale: float, out, lse) -> None:
    """BF16 segments. On short segments this beats the streaming kernel, which knows them too."""
    H, D = q.shape[1:]
    G = k.shape[1]
    grid = (layout.segments.shape[0] * H, triton.cdiv(layout.max_length, TILE_TOKENS))
    attention_hopper_kernel[grid](
        rows_descriptor(q, 64), rows_descriptor(k, KEY_BLOCK), rows_descriptor(v, KEY_BLOCK), k, v,
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
        num_tiles = triton.cdiv(layout.max_query_length, TILE_TOKENS) * B * H
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
        programs = min(num_tiles, torch.cuda.get_device_properties(q.device).multi_processor_count)
        tables = (layout.forward_tiles,) * 4 + (0, 1)
    attention_stream_kernel[(programs,)](
        rows_descriptor(q, 64), rows_descriptor(k, KEY_BLOCK, k_view),
        rows_descriptor(v, KEY_BLOCK, v_view), k, v, *_pointers(scales, lse), out, lse, *tables,
        num_tiles, scale * LOG2E, *row_units, *_strides(k, v, *scales[1:]), H=H, G=G, D=D,
        KB=KEY_BLOCK, SPLIT_BLOCKS=SPLIT_KEYS // KEY_BLOCK, STAGES=2,
        PAGE=k.shape[1] if isinstance(layout, PagedLayout) else KEY_BLOCK,
        PAGED=isinstance(layout, PagedLayout), FP8=fp8, CONSUMER_REGS=224 if fp8 else 232,
        PRODUCER_REGS=56 if fp8 else 40, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def page_rows(cache: torch.Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """((rows, columns, row stride), (rows per page, rows per head, columns per head)) of a cache.

    None when pages and heads do not lie on one grid of rows.
    """
    pages, page, G, D = cache.shape
    page_stride, row, head, _ = cache.stride()
    head_rows, head_columns = (head // row, 0) if head % row == 0 else (0, head)
    if page_stride % row or (row * cache.element_size()) % 16 or (head_columns and row < G * D):
        return None
    rows = (pages - 1) * (page_stride // row) + (G - 1) * head_rows + page
    columns = D if head_rows else G * D
    return (rows, columns, row), (page_stride // row, head_rows, head_columns)


def _pages_fit(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether bulk copies can fetch a key block from this cache."""
    return k.shape[1] % KEY_BLOCK == 0 and page_rows(k) is not None and page_rows(v) is not None


def splits_per_program(programs: int, splits: int) -> int:
    """Splits that one decode program walks: more amortise its start, fewer fill the card.

    A scheduling choice only: every split's partial result and their fold are the same.
    """
    for count, enough in ((4, 1024), (2, 256)):
        if programs * triton.cdiv(splits, count) >= enough:
            return count
    return 1


def _decode(q, k, v, scales, layout: PagedLayout, scale: float, out, lse) -> None:
    _, k_scale, v_scale = scales
    B, H, D = q.shape
    G = k.shape[-2]
    fp8 = k_scale is not None
    splits = max(triton.cdiv(layout.max_context, SPLIT_KEYS), 1)
    shape = (B, H, splits) if splits > 1 else (1, 1, 1)
    part_m = torch.empty(shape, dtype=torch.float32, device=q.device)
    part_l = torch.empty_like(part_m)
    part_acc = torch.empty((*shape, D), dtype=torch.float32, device=q.device)
    constants = {
        "H": H,
        "D": D,
        "KB": KEY_BLOCK,
        "SPLIT_BLOCKS": SPLIT_KEYS // KEY_BLOCK,
        "FP8": fp8,
        "enable_fp_fusion": False,
    }
    pointers = (
        *_pointers(scales, lse), out, lse, part_acc, part_m, part_l, layout.block_table,
        layout.context_lens, layout.block_table.stride(0), scale * LOG2E,
    )  # fmt: skip
    strides = _strides(k, v, k_scale, v_scale)
    finished = 1
    if on_card(q) and _pages_fit(k, v) and H // G <= 32:
        k_rows, v_rows = page_rows(k), page_rows(v)
        assert k_rows is not None and v_rows is not None
        finished = splits_per_program(B * G, splits)
        attention_decode_hopper_kernel[(B * G, triton.cdiv(splits, finished))](
            rows_descriptor(k, KEY_BLOCK, k_rows[0]), rows_descriptor(v, KEY_BLOCK, v_rows[0]), q,
            *pointers, splits, *k_rows[1], *v_rows[1], *strides[6:], G=G, PAGE=k.shape[1],
            SPLITS=finished, SLOTS=_decode_slots(D, fp8), FEEDER_REGS=88 if fp8 else 24,
            maxnreg=128, num_warps=4, **constants,
        )  # fmt: skip
    else:
        attention_decode_kernel[(B * G, splits)](
            q, k, v, *pointers, *strides, G=G, PAGE=k.shape[1], ROWS=64, STAGES=PLAIN_STAGES, num_warps=4,
            **constants,
        )  # fmt: skip
    if splits > finished:
        attention_fold_kernel[(B, H)](
            part_acc, part_m, part_l, out, lse, layout.context_lens, splits, FINISHED=finished,
            num_warps=1, **constants,
        )  # fmt: skip


def _decode_slots(D: int, fp8: bool) -> int:
    """Ring slots that leave room for two programs on a multiprocessor."""
    if fp8:
        return 4 if D == 128 else 8
    return 3 if D == 128 else 6


__all__ = ["attention_backward", "attention_forward"]
