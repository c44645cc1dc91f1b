"""Forward and backward of a few decoder blocks at a real shape on one CUDA device; JSON and a kernel table.

    python -m bench.block --out block.json --table table.txt --arms fp8 fp8-kv bf16

Random weights, Qwen3-8B's block, 16,384 tokens in sequences of 4,096. No head, no optimiser: what is
timed is what every further layer adds to a micro-batch, gradients accumulating in FP32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import cast

import torch
from torch.profiler import ProfilerActivity, profile

from samebit.layers.block import Recompute
from samebit.layout import PackedLayout, Segment
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder
from samebit.models.load import plan_for
from samebit.quant.plan import load_recipe

QWEN3_8B = {
    "family": "qwen3", "hidden": 4096, "intermediate": 12288, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "vocab_size": 1024, "tokenizer_size": 1024, "rope_theta": 1e6,
    "rms_eps": 1e-6, "tied": True, "max_position": 8192, "qk_norm": True,
}  # fmt: skip


def build(recipe: str, layers: int) -> Decoder:
    """A random model on the device."""
    config = ModelConfig(layers=layers, **QWEN3_8B)
    model = Decoder(config, plan_for(load_recipe(recipe), config), "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    model.refresh()
    return model


def timed(run, repeats: int) -> tuple[float, float]:
    """(median milliseconds on the device, median milliseconds until the host is free)."""
    device, host = [], []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        start.record()
        run()
        end.record()
        host.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def measure(recipe: str, recompute: str, layers: int, layout: PackedLayout, table: str) -> dict:
    """One row."""
    model = build(recipe, layers)
    model.recompute = cast(Recompute, recompute)
    ids = torch.randint(0, 1000, (layout.num_tokens,), device="cuda")
    dy = torch.randn(layout.num_tokens, 4096, device="cuda").bfloat16()

    def forward() -> None:
        with torch.no_grad():
            model(ids, layout, "train")

    def both() -> None:
        model(ids, layout, "train").backward(dy)

    for _ in range(3):
        both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    device, host = timed(both, 9)
    alone, _ = timed(forward, 9)
    refresh, _ = timed(model.refresh, 5)
    if table:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            both()
            torch.cuda.synchronize()
        text = found.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=60
        )
        with open(table, "a", encoding="utf-8") as file:
            file.write(f"{recipe} recompute {recompute}\n{text}\n\n")
    return {
        "recipe": recipe, "recompute": recompute, "layers": layers, "tokens": layout.num_tokens,
        "forward_backward_ms": device, "host_ms": host, "forward_ms": alone, "refresh_ms": refresh,
        "activations_gib": peak / 2**30, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    """Measure the arms named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--table", default="")
    parser.add_argument("--arms", nargs="+", default=["fp8", "fp8-kv", "bf16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    arguments = parser.parse_args()
    n = arguments.length
    layout = PackedLayout(tuple(Segment(i * n, n) for i in range(arguments.sequences)), "cuda")
    rows = []
    for arm in arguments.arms:
        recipe, _, recompute = arm.partition("/")
        try:
            row = measure(recipe, recompute or "none", arguments.layers, layout, arguments.table)
        except Exception as error:  # the other arms still run
            row = {"recipe": recipe, "recompute": recompute, "error": f"{error!r:.300}"}
        rows.append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
