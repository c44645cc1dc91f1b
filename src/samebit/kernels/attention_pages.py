"""How the attention launchers describe operands and a paged cache to their kernels."""

from __future__ import annotations

import torch

from samebit.kernels.attention_layout import KEY_BLOCK

LOG2E = 1.4426950408889634


def strides_of(k, v, k_scale, v_scale) -> list[int]:
    """(page, row, head) strides of k, v and their scales; 0 pages for packed rows."""
    out: list[int] = []
    for tensor, data in ((k, True), (v, True), (k_scale, False), (v_scale, False)):
        if tensor is None:
            out += [0, 0, 0]
            continue
        strides = tensor.stride()[:-1] if data else tensor.stride()
        out += list(strides) if len(strides) == 3 else [0, *strides]
    return out


def or_unused(scales: tuple, unused: torch.Tensor) -> tuple:
    """The scale tensors, or a pointer that the kernel never follows."""
    return tuple(unused if scale is None else scale for scale in scales)


def page_rows(cache: torch.Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """((rows, columns, row stride), (rows per page, rows per head, columns per head)) of a cache.

    None when pages and heads do not lie on one grid of rows.
    """
    pages, page, G, D = cache.shape
    page_stride, row, head, _ = cache.stride()
    head_rows, head_columns = (head // row, 0) if head % row == 0 else (0, head)
    columns = (G - 1) * head_columns + D
    if page_stride % row or (row * cache.element_size()) % 16 or row < columns:
        return None
    rows = (pages - 1) * (page_stride // row) + (G - 1) * head_rows + page
    return (rows, columns, row), (page_stride // row, head_rows, head_columns)


def pages_fit(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether bulk copies can fetch a key block from this cache."""
    return k.shape[1] % KEY_BLOCK == 0 and page_rows(k) is not None and page_rows(v) is not None
