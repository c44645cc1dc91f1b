"""KV storage. On a CPU, rows; on a GPU, pages with their heads first, as the kernels fetch them.

Which row is whose is the layout's business. Both kinds are written by slot (page * page_size +
offset) and hand out each layer's keys and values in the form that the backend's attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samebit.formats import get_format
from samebit.operand import HeadCodes, Heads
from samebit.spec import BF16, Precision

PageCopy = tuple[int, int, int]
"""(source page, target page, leading rows that count)."""

PAGES_AT_ONCE = 16
"""Pages whose copy is in flight at a time: bounds what it needs besides."""


class KVStore:
    """Rows [num_rows, G, D] for keys and values of every layer: BF16, or codes with scales per head."""

    def __init__(
        self,
        layers: int,
        num_rows: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        precision: Precision = BF16,
    ):
        def rows() -> Heads:
            dtype = get_format(precision.format).dtype
            shape = (num_rows, kv_heads, head_dim)
            if precision.block is None:
                return torch.zeros(shape, dtype=dtype, device=device)
            codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
            return HeadCodes(codes, torch.ones(shape[:2], device=device))

        self.keys = [rows() for _ in range(layers)]
        self.values = [rows() for _ in range(layers)]

    def write(self, layer: int, slots: torch.Tensor, k: Heads, v: Heads) -> None:
        """Store K and V [T, G, D] of a layer at rows `slots` int64 [T]."""
        _put(self.keys[layer], (slots,), k)
        _put(self.values[layer], (slots,), v)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[Heads, Heads]:
        """Copies of K and V [T, G, D] at rows `slots` of a layer."""
        return _take(self.keys[layer], (slots,)), _take(self.values[layer], (slots,))

    def copy(self, pairs: Sequence[PageCopy], page_size: int) -> None:
        """Copy leading rows of pages in every layer, every source read before a target is written."""
        rows = [(s * page_size + i, t * page_size + i) for s, t, n in pairs for i in range(n)]
        if not rows:
            return
        data = self.keys[0]
        source, target = torch.tensor(rows, device=data.device).unbind(1)
        for held in (*self.keys, *self.values):
            _put(held, (target,), _take(held, (source,)))


class PageStore:
    """Pages [layers, 2, G, page_size, D], one after the other in `raw`, scales behind each page's codes.

    A page lies in one piece, so the store grows and shrinks at its end and no address moves.
    `keys[l]` and `values[l]` are views [pages, page_size, G, D] (codes: scales [pages, page_size, G]);
    pages past the memory behind `raw` must not be touched.
    """

    def __init__(
        self, layers: int, page_size: int, kv_heads: int, head_dim: int, precision: Precision,
        raw: torch.Tensor,
    ):  # fmt: skip
        self.page_size = page_size
        self.page_bytes = page_bytes(layers, page_size, kv_heads, head_dim, precision)
        self.num_pages = raw.numel() // self.page_bytes
        assert self.num_pages > 0 and raw.dtype == torch.uint8
        self._raw = raw[: self.num_pages * self.page_bytes]
        dtype = get_format(precision.format).dtype
        per_head = page_size * head_dim
        part = kv_heads * per_head

        def view(index: int) -> Heads:
            heads = self._view(dtype, (kv_heads, page_size, head_dim), index * part)
            if precision.block is None:
                return heads
            codes_bytes = 2 * layers * part * get_format(precision.format).bytes
            start = codes_bytes // 4 + index * kv_heads * page_size
            return HeadCodes(heads, self._view(torch.float32, (kv_heads, page_size), start))

        self.keys = [view(2 * i) for i in range(layers)]
        self.values = [view(2 * i + 1) for i in range(layers)]

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """[pages, page_size, G, ...] of a part at `offset` elements into each page, heads first."""
        data = self._raw.view(dtype)
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        page = self.page_bytes // data.element_size()
        view = data.as_strided((self.num_pages, *shape), (page, *reversed(strides)), offset)
        return view.transpose(1, 2)

    def write(self, layer: int, slots: torch.Tensor, k: Heads, v: Heads) -> None:
        """Store K and V [T, G, D] of a layer at `slots` int64 [T]."""
        where = self._place(slots)
        _put(self.keys[layer], where, k)
        _put(self.values[layer], where, v)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[Heads, Heads]:
        """Copies of K and V [T, G, D] at `slots` of a layer."""
        where = self._place(slots)
        return _take(self.keys[layer], where), _take(self.values[layer], where)

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // self.page_size, slots % self.page_size

    def copy(self, pairs: Sequence[PageCopy], page_size: int) -> None:
        """Copy whole pages (rows that do not count are never read), in order, PAGES_AT_ONCE a time."""
        assert page_size == self.page_size
        pages = self._raw.view(torch.int64).view(self.num_pages, -1)
        for start in range(0, len(pairs), PAGES_AT_ONCE):
            some = [(s, t) for s, t, n in pairs[start : start + PAGES_AT_ONCE] if n]
            if some:
                source, target = torch.tensor(some).to(pages.device).unbind(1)
                pages[target] = pages[source]


AnyStore = KVStore | PageStore


def _take(rows: Heads, where: tuple[torch.Tensor, ...]) -> Heads:
    return rows.take(where) if isinstance(rows, HeadCodes) else rows[where]


def _put(rows: Heads, where: tuple[torch.Tensor, ...], new: Heads) -> None:
    if isinstance(rows, HeadCodes):
        assert isinstance(new, HeadCodes), "an FP8 cache takes codes"
        rows.put(where, new)
    else:
        assert isinstance(new, torch.Tensor), "a BF16 cache takes BF16"
        rows[where] = new


def row_bytes(head_dim: int, precision: Precision) -> int:
    """Bytes of one head of one row of keys (or of values)."""
    scale = 0 if precision.block is None else 4
    return head_dim * get_format(precision.format).bytes + scale


def page_bytes(
    layers: int, page_size: int, kv_heads: int, head_dim: int, precision: Precision
) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * layers * kv_heads * page_size * row_bytes(head_dim, precision)


def page_size_for(device: torch.device) -> int:
    """Tokens a page. Small pages share more of a common prefix; the Hopper kernels fetch 128 keys at once.

    No bit depends on it: attention walks keys in blocks of absolute positions whatever page they lie on.
    """
    return 16 if device.type == "cpu" else 128
