"""How near to cuDNN and to the memory's read rate do the attention kernels run?

Medians of CUDA-graph replays. Forward and backward count 4 and 10 operations per visible (query,
key, channel); decode counts each key, value and scale once. Prints a table and writes JSON:
python bench/attention.py --out DIR [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from samebit.kernels.attention import attention_backward, attention_forward
from samebit.kernels.attention_layout import PackedLayout, PagedLayout

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = {"8B": (32, 8, 128), "Qwen3-0.6B": (16, 8, 128), "SmolLM2-135M": (9, 3, 64)}
SHARED = [(0, 512, 0, 0), *((512 + i * 480, 480, 0, 512) for i in range(16))]
PACKS = {
    "1 x 8192": [(0, 8192, 0, 0)],
    "1 x 32768": [(0, 32768, 0, 0)],
    "8 x 1024": [(i * 1024, 1024, 0, 0) for i in range(8)],
    "512 + 16 x 480 shared": SHARED,
}
DECODES = [(128, 4096), (256, 1024), (32, 2048), (4, 32768), (1, 8192)]


@dataclass(frozen=True)
class Row:
    """One measurement; rate in TFLOP/s or TB/s, share of the ceiling beside it."""

    operation: str
    model: str
    case: str
    microseconds: float
    rate: float
    unit: str
    share: float
    ceiling: str


@triton.jit
def read_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """XOR of SIZE x STEPS words: the cheapest use of a read."""
    base = tl.program_id(0).to(tl.int64) * SIZE * STEPS
    total = tl.zeros([SIZE], tl.int32)
    for step in tl.range(0, STEPS, num_stages=4):
        total ^= tl.load(x_ptr + base + step * SIZE + tl.arange(0, SIZE))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def microseconds(
    call: Callable[[], object], replays: int = 11, inner: int = 2, capture: bool = True
) -> float:
    """Median time of one call, from replays of a graph of `inner` calls."""
    call()
    torch.cuda.synchronize()
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                call()
        run = graph.replay
    else:
        run, inner = call, 1
    run()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / inner)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Measured read-only bandwidth (TB/s) and cuBLAS BF16 rate (TFLOP/s, 8192 cubed)."""
    x = torch.randint(0, 100, (1 << 29,), dtype=torch.int32, device="cuda")
    out = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
    grid = (x.numel() // (8192 * 16),)
    read = microseconds(lambda: read_kernel[grid](x, out, SIZE=8192, STEPS=16, num_warps=8))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    c = torch.empty_like(a)
    product = microseconds(lambda: torch.mm(a, b, out=c))
    return {"read TB/s": x.nbytes / read / 1e6, "cuBLAS BF16 TFLOP/s": 2 * 8192**3 / product / 1e6}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 codes, fp32 scale per row and head)."""
    scale = x.float().abs().amax(-1) / 448.0
    return (x.float() / scale[..., None]).clamp(-448, 448).to(E4M3), scale


def packed_calls(model: str, case: str) -> Iterator[tuple[str, Callable[[], object], float]]:
    """(operation, call, operations) of forward and backward over packed segments."""
    H, G, D = SHAPES[model]
    segments = PACKS[case]
    layout = PackedLayout.build(segments, "cuda")
    T = layout.num_tokens
    work = sum(4.0 * H * D * (n * p + n * (n + 1) / 2) for _, n, _, p in segments)
    q, k, v, dout = normal(T, H, D), normal(T, G, D), normal(T, G, D), normal(T, H, D)
    out, lse = attention_forward(q, k, v, layout, D**-0.5)
    yield "forward", lambda: attention_forward(q, k, v, layout, D**-0.5, out=out, lse=lse), work
    yield (
        "backward",
        lambda: attention_backward(q, k, v, out, lse, dout, layout, D**-0.5),
        2.5 * work,
    )
    if case == "1 x 8192":
        (q8, qs), (k8, ks), (v8, vs) = codes(q), codes(k), codes(v)
        yield (
            "forward FP8",
            lambda: attention_forward(
                q8, k8, v8, layout, D**-0.5, q_scale_TH=qs, k_scale=ks, v_scale=vs
            ),
            work,
        )
        yield from cudnn_calls(q, k, v, dout, work)


def cudnn_calls(q, k, v, dout, work: float) -> Iterator[tuple[str, Callable[[], object], float]]:
    """The same problem through cuDNN, keys and values repeated per query head beforehand."""
    group = q.shape[1] // k.shape[1]
    leaves = [
        x.transpose(0, 1)[None].contiguous().requires_grad_()
        for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    ]
    plain = [x.detach() for x in leaves]

    def forward(tensors):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*tensors, is_causal=True)

    yield "cuDNN forward", lambda: forward(plain), work
    out = forward(leaves)
    grad = dout.transpose(0, 1)[None].contiguous()
    # Autograd's backward runs on the stream of its forward, which a capture cannot follow.
    yield (
        "cuDNN backward, no graph",
        lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        2.5 * work,
    )


def decode_call(model: str, B: int, context: int, fp8: bool) -> tuple[Callable, float]:
    """(call, bytes) of one decode step over pages of 128 in random order."""
    H, G, D = SHAPES[model]
    pages = B * context // 128
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).reshape(B, -1)
    layout = PagedLayout(
        table, torch.full((B,), context, dtype=torch.int32, device="cuda"), None, 1, context
    )
    q = normal(B, H, D)
    k, v = normal(pages, 128, G, D), normal(pages, 128, G, D)
    scales: dict[str, torch.Tensor] = {}
    if fp8:
        q, q_scale = codes(q)
        k, v = k.to(E4M3), v.to(E4M3)
        k_scale, v_scale = (torch.rand(pages, G, 128, device="cuda") + 0.5 for _ in range(2))
        scales = {
            "q_scale_TH": q_scale,
            "k_scale": k_scale.transpose(1, 2),
            "v_scale": v_scale.transpose(1, 2),
        }
    out = torch.empty(B, H, D, device="cuda", dtype=BF16)
    lse = torch.empty(B, H, device="cuda")
    total = B * context * G * 2 * (D * k.element_size() + (4 if fp8 else 0))
    return lambda: attention_forward(q, k, v, layout, D**-0.5, out=out, lse=lse, **scales), float(
        total
    )


def measure(only: str) -> Iterator[Row]:
    """Every row whose description holds `only`."""
    top = ceilings()
    for model in SHAPES:
        for case in PACKS:
            for operation, call, work in packed_calls(model, case):
                if only in f"{operation} {model} {case}":
                    time = microseconds(call, capture="no graph" not in operation)
                    rate = work / time / 1e6
                    yield Row(
                        operation,
                        model,
                        case,
                        time,
                        rate,
                        "TFLOP/s",
                        rate / top["cuBLAS BF16 TFLOP/s"],
                        "cuBLAS BF16 TFLOP/s",
                    )
        for B, context in DECODES:
            for operation in ("decode BF16", "decode FP8"):
                case = f"{B} x {context}"
                if only in f"{operation} {model} {case}":
                    call, total = decode_call(model, B, context, operation.endswith("FP8"))
                    time = microseconds(call, inner=4)
                    rate = total / time / 1e6
                    yield Row(
                        operation,
                        model,
                        case,
                        time,
                        rate,
                        "TB/s",
                        rate / top["read TB/s"],
                        "read TB/s",
                    )
                    del call
    for name, value in top.items():
        yield Row("ceiling", "", name, 0.0, value, name.split()[-1], 1.0, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = []
    for row in measure(arguments.only):
        rows.append(row)
        print(
            f"{row.operation:15s} {row.model:13s} {row.case:22s} {row.microseconds:9.1f} us "
            f"{row.rate:8.2f} {row.unit:8s} {row.share:6.1%} of {row.ceiling}",
            flush=True,
        )
    record = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [asdict(row) for row in rows],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "attention.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
