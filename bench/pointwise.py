"""How near to the copy rate do the quantisers, norms, activations and the rotary kernel run?

Medians of CUDA-graph replays over rotating inputs; bytes are each input and output counted once.
Prints a table and writes one JSON record per row: python bench/pointwise.py --out DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from samebit.formats import E4M3, INT8
from samebit.kernels import activation, embed, norm, norm_backward, rope, rope_backward
from samebit.kernels.quantize_activation import quantize_activation
from samebit.kernels.quantize_gradient import quantize_gradient, token_group_table
from samebit.kernels.quantize_row import quantize_rows
from samebit.kernels.quantize_saved import requantize_tokens, rescale_tokens
from samebit.kernels.quantize_weight import quantize_weight, transpose_codes

BF16 = torch.bfloat16


def graph_microseconds(calls: list[Callable[[], object]], replays: int = 9) -> float:
    """Median time of one call, from replays of a graph that runs each of `calls` four times."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (4 * len(calls)))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read plus bytes written per second of a 2 GB device copy by a kernel."""
    a = torch.empty(1 << 30, dtype=BF16, device="cuda").normal_()
    b = torch.empty_like(a)
    # A kernel: inside a graph copy_ becomes a copy-engine node, which is slower.
    return 2 * a.nbytes / (graph_microseconds([lambda: torch.neg(a, out=b)]) * 1e-6)


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def quantiser_cases(T: int, K: int) -> dict[str, tuple[list[Callable[[], object]], int]]:
    """Name -> (calls over rotating inputs, bytes moved by one)."""
    sets = max(2, (400 << 20) // (2 * T * K))
    sets = min(sets, 8)
    xs = [normal(T, K) for _ in range(sets)]
    table = token_group_table([T], "cuda")
    coded = [quantize_activation(x) for x in xs]
    n, scales = T * K, T * K // 128 * 4
    return {
        "quantize_activation": ([lambda x=x: quantize_activation(x) for x in xs], 3 * n + scales),
        "quantize_gradient": (
            [lambda x=x: quantize_gradient(x, table) for x in xs], 4 * n + 2 * scales,
        ),
        "requantize_tokens": (
            [lambda c=c, s=s: requantize_tokens(c, s, table, K) for c, s in coded],
            2 * n + 2 * scales,
        ),
        "rescale_tokens": (
            [lambda c=c, s=s: rescale_tokens(c, s, table, K) for c, s in coded], 2 * n + scales,
        ),
        "quantize_rows int8": ([lambda x=x: quantize_rows(x, INT8) for x in xs], 3 * n),
        "quantize_rows e4m3": ([lambda x=x: quantize_rows(x, E4M3) for x in xs], 3 * n),
    }  # fmt: skip


def weight_cases(N: int, K: int) -> dict[str, tuple[list[Callable[[], object]], int]]:
    ws = [normal(N, K, dtype=torch.float32) for _ in range(2)]
    codes, scale = quantize_weight(ws[0])
    transposed = torch.empty((K, N), dtype=E4M3.dtype, device="cuda")
    n = N * K
    return {
        "quantize_weight": ([lambda w=w: quantize_weight(w, codes, scale) for w in ws], 5 * n),
        "quantize_weight +T": (
            [lambda w=w: quantize_weight(w, codes, scale, transposed) for w in ws], 6 * n,
        ),
        "transpose_codes": ([lambda: transpose_codes(codes, transposed)], 2 * n),
        "quantize_rows int8 fp32": ([lambda w=w: quantize_rows(w, INT8, codes.view(torch.int8))
                                     for w in ws], 5 * n),
    }  # fmt: skip


def norm_cases(T: int, K: int) -> dict[str, tuple[list[Callable[[], object]], int]]:
    sets = min(max(2, (400 << 20) // (4 * T * K)), 8)
    pairs = [(normal(T, K), normal(T, K)) for _ in range(sets)]
    weight, n = normal(K), T * K
    return {
        "rms_norm": ([lambda x=x: norm.rms_norm(x, weight, 1e-6) for x, _ in pairs], 4 * n),
        "add_rms_norm": (
            [lambda x=x, r=r: norm.add_rms_norm(x, r, weight, 1e-6) for x, r in pairs], 8 * n,
        ),
        "rms_norm+quantize": (
            [lambda x=x: norm.rms_norm_quantize(x, weight, 1e-6, E4M3) for x, _ in pairs], 3 * n,
        ),
        "add_rms_norm+quantize": (
            [lambda x=x, r=r: norm.rms_norm_quantize(x, weight, 1e-6, E4M3, residual_TK=r)
             for x, r in pairs], 7 * n,
        ),
        "add_rms_norm+int8": (
            [lambda x=x, r=r: norm.rms_norm_quantize(
                x, weight, 1e-6, INT8, residual_TK=r, per_row=True) for x, r in pairs], 7 * n,
        ),
        "rms_norm_backward": (
            [lambda x=x, r=r: norm_backward.rms_norm_backward(x, r, weight, 1e-6)
             for x, r in pairs], 6 * n,
        ),
    }  # fmt: skip


def activation_cases(T: int, F: int) -> dict[str, tuple[list[Callable[[], object]], int]]:
    fused = [normal(T, 2 * F) for _ in range(2 if T > 64 else 8)]
    pairs = [(x[:, :F], x[:, F:]) for x in fused]
    dy, n = normal(T, F), T * F
    return {
        "silu_mul": ([lambda g=g, u=u: activation.silu_mul(g, u) for g, u in pairs], 6 * n),
        "silu_mul+quantize": (
            [lambda g=g, u=u: activation.silu_mul_quantize(g, u, E4M3) for g, u in pairs], 5 * n,
        ),
        "silu_mul_backward": (
            [lambda g=g, u=u: activation.silu_mul_backward(dy, g, u) for g, u in pairs], 10 * n,
        ),
    }  # fmt: skip


def rope_cases(T: int, H: int, G: int, D: int) -> dict[str, tuple[list[Callable[[], object]], int]]:
    table = rope.rotary_table(T, D, 1e6, "cuda")
    positions = torch.arange(T, dtype=torch.int32, device="cuda")
    fused = [normal(T, (H + 2 * G) * D) for _ in range(4)]
    weights, n = (normal(D), normal(D)), T * (H + 2 * G) * D
    dy = normal(T, H, D)
    cases = {}
    for fp8 in (False, True):
        store = rope.KeyValueStore.packed(T, G, D, fp8, positions.device)
        cases["qk_norm+rope+store " + ("fp8" if fp8 else "bf16")] = (
            [lambda x=x, store=store: rope.qk_norm_rope_store(
                x, x[:, H * D:], x[:, (H + G) * D:], positions, table, store, num_heads=H,
                norm_weights=weights) for x in fused],
            (3 if fp8 else 4) * n,
        )  # fmt: skip
    cases["rope_backward +norm (q)"] = (
        [lambda x=x: rope_backward.rope_backward(
            dy, positions, table, x_TN=x, norm_weight=weights[0]) for x in fused],
        6 * T * H * D,
    )  # fmt: skip
    return cases


def embed_cases(T: int, K: int, V: int) -> dict[str, tuple[list[Callable[[], object]], int]]:
    weight, dweight = normal(V, K), torch.zeros((V, K), device="cuda")
    # A power law, as in text: some ids occur hundreds of times.
    ids = (torch.rand(T, device="cuda") ** 4 * V).long()
    dy = normal(T, K)
    return {
        "embed": ([lambda: embed.embed(ids, weight)], 4 * T * K),
        "embed_backward": (
            [lambda: embed.embed_backward(dy, ids, dweight)],
            2 * T * K + 8 * K * ids.unique().numel(),
        ),
    }


def all_cases(small: bool):
    """(shape, cases) for the 8B shapes, decoding, Qwen3-0.6B and SmolLM2-135M."""
    for T, K, F, heads in (
        (8192, 4096, 12288, (32, 8, 128)),
        (64, 4096, 12288, (32, 8, 128)),
        (8192, 1024, 3072, (16, 8, 128)),
        (8192, 576, 1536, (9, 3, 64)),
    ):
        shape = f"T={T} K={K} F={F}"
        yield shape, quantiser_cases(T, K)
        yield shape, norm_cases(T, K)
        yield shape, activation_cases(T, F)
        yield shape, rope_cases(T, *heads)
        if T > 64:
            yield f"N={2 * F} K={K}", weight_cases(2 * F, K)
        if T > 64 and K == 4096:
            yield f"T={T} K={K} V=151936", embed_cases(T, K, 151936)
        if small:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="the first shape only")
    options = parser.parse_args()
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
    records = []
    for shape, cases in all_cases(options.small):
        for name, (calls, size) in cases.items():
            time = graph_microseconds(calls)
            share = size / (time * 1e-6) / rate
            print(f"{name:28s} {shape:28s} {time:9.2f} us {100 * share:5.1f} % of copy")
            records.append(
                {"operator": name, "shape": shape, "microseconds": time, "bytes": size,
                 "share_of_copy_rate": share, "copy_bytes_per_second": rate}
            )  # fmt: skip
    if options.out:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": triton.__version__,
        }  # fmt: skip
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": about, "rows": records}, indent=1)
        (options.out / "pointwise.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
