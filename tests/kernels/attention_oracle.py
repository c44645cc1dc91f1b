"""A dense FP64 oracle for attention and small problems to try it on.

Import this module before any kernel: see interpreter.py.
"""

import torch

import tests.kernels.interpreter  # noqa: F401
from samebit.kernels.attention_layout import PackedLayout, PagedLayout

# (start, length, prefix start, prefix length): a prompt, three samples of it, one alone.
SEGMENTS = [(0, 37, 0, 0), (37, 50, 0, 37), (87, 1, 0, 37), (88, 130, 0, 37), (218, 70, 0, 0)]


def dense(q_THD, k_SGD, v_SGD, segments, scale):
    """(out [T, H, D], lse [T, H]) in FP64, differentiable, from packed tensors."""
    group = q_THD.shape[1] // k_SGD.shape[1]
    outs, lses = [], []
    for start, length, prefix_start, prefix_length in segments:
        rows = torch.cat(
            [
                torch.arange(prefix_start, prefix_start + prefix_length),
                torch.arange(start, start + length),
            ]
        ).to(q_THD.device)
        k = k_SGD[rows].double().repeat_interleave(group, 1)
        v = v_SGD[rows].double().repeat_interleave(group, 1)
        s = torch.einsum("thd,shd->hts", q_THD[start : start + length].double(), k) * scale
        position = prefix_length + torch.arange(length, device=s.device)
        keys = torch.arange(prefix_length + length, device=s.device)
        s = s.masked_fill(keys[None, None, :] > position[None, :, None], float("-inf"))
        outs.append(torch.einsum("hts,shd->thd", s.softmax(-1), v))
        lses.append(s.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(lses)


def quantise(x, dtype=torch.float8_e4m3fn):
    """(codes, fp32 scale per row and head) of x [..., D]."""
    scale = x.float().abs().amax(-1).clamp_min(2.0**-100) / 448.0
    return (x.float() / scale[..., None]).clamp(-448, 448).to(dtype), scale


def to_pages(k_SGD, segments, page, generator, spare=3, head_major=False):
    """(pages [P, page, G, D], block table [B, n]) holding every segment, prefix copied.

    Unused slots hold NaN (bf16, fp32) or NaN codes (e4m3): a kernel that reads them shows it.
    """
    G = k_SGD.shape[1]
    tail = k_SGD.shape[2:]
    counts = [-(-(length + prefix) // page) for _, length, _, prefix in segments]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=generator)
    shape = (total, G, page, *tail) if head_major else (total, page, G, *tail)
    pages = torch.full(shape, float("nan"), dtype=torch.float32).to(k_SGD.dtype)
    if head_major:
        pages = pages.transpose(1, 2)
    pages = pages.to(k_SGD.device)
    table = torch.zeros(len(segments), max(counts), dtype=torch.int32)
    used = 0
    for index, (start, length, prefix_start, prefix_length) in enumerate(segments):
        rows = [*range(prefix_start, prefix_start + prefix_length), *range(start, start + length)]
        for first in range(0, len(rows), page):
            number = int(order[used])
            used += 1
            part = rows[first : first + page]
            table[index, first // page] = number
            pages[number, : len(part)] = k_SGD[part]
    return pages, table.to(k_SGD.device)


def chunk(segments, table, first, last, device):
    """(layout, query rows) of tokens first..last-1 of every segment as a paged prefill chunk."""
    starts, context, rows = [0], [], []
    for start, length, _, prefix_length in segments:
        stop = min(last, length)
        count = max(stop - first, 0)
        rows += range(start + first, start + first + count)
        starts.append(starts[-1] + count)
        context.append(prefix_length + max(stop, 0) if count else prefix_length)
    layout = PagedLayout(
        block_table=table,
        context_lens=torch.tensor(context, dtype=torch.int32, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        max_query_length=last - first,
        max_context=max(context),
    )
    return layout, rows


def decode_step(segments, table, step, device):
    """(layout, query row per sequence) of token `step` of every segment; idle ones have 0 keys."""
    context = [p + step + 1 if step < n else 0 for _, n, _, p in segments]
    rows = [s + min(step, n - 1) for s, n, _, _ in segments]
    layout = PagedLayout(
        block_table=table,
        context_lens=torch.tensor(context, dtype=torch.int32, device=device),
        query_starts=None,
        max_query_length=1,
        max_context=max(p + n for _, n, _, p in segments),
    )
    return layout, rows


def packed(segments, device="cpu", **options):
    """The PackedLayout of `segments`."""
    return PackedLayout.build(segments, device, **options)
