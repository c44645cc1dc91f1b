"""What the card reaches at its best on random data: the rooflines' denominators, measured each run."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from samebit.bench.timing import medians, normal

SIZE = 8192
"""Side of the square product that stands for the tensor cores' best."""


@triton.jit
def _read_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """XOR of SIZE x STEPS words: the cheapest use of a read."""
    base = tl.program_id(0).to(tl.int64) * SIZE * STEPS
    total = tl.zeros([SIZE], tl.int32)
    for step in tl.range(0, STEPS, num_stages=4):
        total ^= tl.load(x_ptr + base + step * SIZE + tl.arange(0, SIZE))
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(total, 0))


def _median(call) -> float:
    return medians({"it": [call]}, replays=5)["it"] * 1e-6


@functools.cache
def read_rate() -> float:
    """Bytes per second of a kernel that only reads 2 GiB."""
    x = torch.randint(0, 100, (1 << 29,), dtype=torch.int32, device="cuda")
    out = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
    grid = (x.numel() // (SIZE * 16),)
    return x.nbytes / _median(lambda: _read_kernel[grid](x, out, SIZE=SIZE, STEPS=16, num_warps=8))


@functools.cache
def copy_rate() -> float:
    """Bytes read plus bytes written per second of a kernel that copies 2 GiB."""
    a = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a)
    # a kernel: inside a graph copy_ becomes a copy-engine node, which is slower
    return 2 * a.nbytes / _median(lambda: torch.neg(a, out=b))


@functools.cache
def product_rate(kind: str) -> float:
    """Operations per second of the library's best product of two 8192-square matrices: bf16, fp8 or
    int8. The tensor cores multiply INT8 at the rate of FP8; the library's INT8 product is slower."""
    a, b = normal(SIZE, SIZE), normal(SIZE, SIZE)
    if kind == "bf16":
        out = torch.empty_like(a)
        seconds = _median(lambda: torch.mm(a, b.t(), out=out))
    elif kind == "fp8":
        x, w = (t.to(torch.float8_e4m3fn) for t in (a, b))
        one = torch.ones((), device="cuda")
        seconds = _median(
            lambda: torch._scaled_mm(
                x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
    else:
        return product_rate("fp8")
    return 2 * SIZE**3 / seconds


def roofline_us(operations: float, kind: str, moved: float) -> float:
    """Least microseconds: operations at the product rate of `kind`, or bytes at the copy rate."""
    return 1e6 * max(operations / product_rate(kind), moved / copy_rate())


@functools.cache
def launch_us() -> float:
    """Microseconds that one more kernel adds to a graph of kernels that wait for one another."""
    x = torch.ones(1, device="cuda")
    return medians({"it": [lambda: torch.neg(x, out=x)]}, inner=400, replays=5)["it"]
