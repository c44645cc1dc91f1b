"""The head against the bare cuBLAS BF16 matmuls of its shape, and sampling against the weight read.

Two passes: log-prob forward, then backward (recomputes the logits: four products). One pass: the
sampler's log-sum-exp is given, so the backward's tiles also yield the log-probs (three products).
Prints a table and writes JSON: python bench/head.py --out DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from pointwise import copy_rate, graph_microseconds, normal

from samebit.kernels.head import HeadParts, head_log_prob, inverse_temperature
from samebit.kernels.head_backward import HeadGradient, head_log_prob_backward
from samebit.kernels.head_tile import HeadTile, head_tile
from samebit.kernels.sample import sample

V, VOCAB = 151936, 151669


def milliseconds(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def bare_products(hidden: torch.Tensor, weight: torch.Tensor) -> list[tuple[str, float, int]]:
    """(name, milliseconds, products) of the three cuBLAS BF16 matmuls."""
    logits = torch.empty((hidden.shape[0], V), dtype=torch.bfloat16, device="cuda")
    forward = milliseconds(lambda: torch.mm(hidden, weight.t(), out=logits))
    backward = milliseconds(lambda: (logits @ weight, logits.t() @ hidden), 3)
    return [
        ("cuBLAS logits", forward, 1),
        ("cuBLAS dhidden + dweight, BF16 out", backward, 2),
        ("cuBLAS, all three", forward + backward, 3),
    ]


def training_rows(T: int, K: int, tiles: list[HeadTile]) -> list[dict[str, object]]:
    hidden, weight = normal(T, K), normal(V, K) * 0.02
    target = torch.randint(0, VOCAB, (T,), device="cuda")
    inverse = inverse_temperature(1.0, T, "cuda")
    rows: list[dict[str, object]] = []

    def row(name: str, time: float, products: int) -> None:
        rate = products * 2 * T * V * K / (time * 1e-3) / 1e12
        print(f"{name:44s} T={T} K={K} {time:8.2f} ms {rate:7.1f} TFLOP/s")
        rows.append({"operator": name, "T": T, "K": K, "V": V, "milliseconds": time,
                     "tflops_of_products": rate})  # fmt: skip

    for name, time, products in bare_products(hidden, weight):
        row(name, time, products)
    for tile in tiles:
        name = f"forward {tile.tokens} {'swap' if tile.swap else 'normal'} {tile.num_warps}w"
        try:
            time = milliseconds(
                lambda tile=tile: head_log_prob(
                    hidden, weight, target, inverse, VOCAB, entropy=True, tile=tile)
            )  # fmt: skip
        except triton.runtime.errors.OutOfResources as error:
            print(name, error)
            continue
        row(f"{name} {tile.num_stages}s k{tile.block_k} g{tile.token_group}", time, 1)
    forward = milliseconds(
        lambda: head_log_prob(hidden, weight, target, inverse, VOCAB, entropy=True)
    )
    row("head forward", forward, 1)
    _, lse, entropy = head_log_prob(hidden, weight, target, inverse, VOCAB, entropy=True)
    dlogp = torch.randn(T, device="cuda")
    dweight = torch.zeros((V, K), device="cuda")
    parts = HeadParts.empty(V, T, True, hidden.device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def run(gradient: HeadGradient, parts: HeadParts | None) -> float:
        return milliseconds(
            lambda: head_log_prob_backward(
                hidden, weight, target, inverse, lse, gradient, VOCAB, dweight_VK=dweight,
                parts=parts, parts_entropy=True), 3,
        )  # fmt: skip

    time = run(HeadGradient(dlogp), None)
    extra = torch.cuda.max_memory_allocated() - before
    row("head backward (two passes)", time, 3)
    row("head forward + backward (two passes)", forward + time, 4)
    row("head one pass", run(HeadGradient(dlogp), parts), 3)
    row("head one pass, entropy gradient", run(HeadGradient(dlogp, entropy, dlogp), parts), 3)
    share = (extra + 3 * parts.top.nbytes) / (T * V * 4)
    print(f"extra memory {100 * share:.2f} % of the FP32 logits (dhidden FP32 included)")
    rows.append({"operator": "extra memory", "T": T, "K": K, "V": V, "share_of_logits": share})
    return rows


def sampling_rows(K: int, rate: float) -> list[dict[str, object]]:
    weight = normal(V, K) * 0.02
    rows: list[dict[str, object]] = []
    for T in (1, 16, 64, 128, 256, 512):
        hidden, keys = normal(T, K), torch.zeros(T, 2, dtype=torch.int32, device="cuda")
        inverse = inverse_temperature(1.0, T, "cuda")
        ours = graph_microseconds(
            [lambda h=hidden, i=inverse, k=keys: sample(h, weight, i, k, VOCAB)], 5
        )
        bare = graph_microseconds([lambda h=hidden: h @ weight.t()], 5)
        floor = weight.nbytes / rate * 1e6
        print(f"sample T={T:4d} K={K} {ours:8.1f} us, cuBLAS logits alone {bare:8.1f} us, "
              f"weight read at copy rate {floor:6.1f} us")  # fmt: skip
        rows.append({"operator": "sample", "T": T, "K": K, "V": V, "microseconds": ours,
                     "cublas_logits_microseconds": bare, "floor_microseconds": floor})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiles", action="store_true", help="also time other forward tiles")
    options = parser.parse_args()
    tiles = []
    if options.tiles:
        tiles = [
            HeadTile(128, False, 4, 3), HeadTile(128, False, 4, 3, 64, 32),
            HeadTile(128, False, 4, 3, 64, 64), HeadTile(256, False, 8, 3, 64, 8),
            HeadTile(256, False, 8, 4), HeadTile(256, False, 8, 3, 64, 32),
        ]  # fmt: skip
    rows = training_rows(8192, 4096, tiles)
    rows += sampling_rows(4096, copy_rate())
    if options.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "triton": triton.__version__, "tile": str(head_tile(8192))}  # fmt: skip
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": about, "rows": rows}, indent=1)
        (options.out / "head.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
