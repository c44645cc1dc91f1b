"""Device time by kernel of the decode steps that `samebit bench rollout` measures, as text.

    python bench/decode_profile.py --out DIR [--model qwen3-8b] [--recipes bf16 fp8-kv] [--points 128x384]

One table a recipe and point: the sum over the replays of one measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from samebit.bench.decoding import HELD, REPLAYS, new_step, pages_of, step_times
from samebit.bench.suites.rollout import POINTS, RECIPES


@torch.no_grad()
def kernel_table(model: str, recipe: str, sequences: int, context: int) -> str:
    """The profiler's table of a step that was captured and run before."""
    weights = HELD.model(model, recipe)
    store = HELD.store(sequences * pages_of(context + REPLAYS) + 1)
    step = new_step(weights, store, sequences, context)
    step_times(step, context)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step_times(step, context)
    table = found.key_averages().table(
        sort_by="cuda_time_total", row_limit=30, max_name_column_width=60
    )
    return f"{REPLAYS} replays\n{table}\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", choices=POINTS)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8-kv"], choices=RECIPES)
    parser.add_argument("--points", nargs="+", default=["128x384", "256x384"])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for recipe in arguments.recipes:
        for point in arguments.points:
            sequences, context = (int(n) for n in point.split("x"))
            text = kernel_table(arguments.model, recipe, sequences, context)
            name = f"{arguments.model}_{recipe}_{point}.txt"
            (arguments.out / name).write_text(text, encoding="utf-8")
            print(f"{name}\n{text}", flush=True)


if __name__ == "__main__":
    main()
