"""Milliseconds per decode step on one Hopper GPU over (sequences, mean context), beside the roofline.

    python bench/engine_grid.py [--models qwen3-8b] [--recipes bf16 fp8-kv] [--points 128x384] [--out FILE]

Random weights, a filled cache of random keys and values, end ids ignored: medians of replays of the
engine's own CUDA graph (embedding, blocks, head, draw). The roofline adds, per kernel, the larger of
bytes over the measured read rate and operations over the measured matrix rate. Rows accumulate in --out.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from samebit.engine.decode import (
    CONTEXT_BOUNDS,
    HEADER,
    DecodeState,
    EagerStep,
    GraphStep,
    smallest_at_least,
)
from samebit.engine.scheduler import SchedulerStats
from samebit.formats import get_format
from samebit.layers.kv import PageStore, page_bytes
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder, linear_shapes
from samebit.models.load import plan_for
from samebit.operand import HeadCodes
from samebit.quant.plan import load_recipe
from samebit.reference.sampling import Transform

PAGE = 128
REPLAYS = 24


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="qwen3", hidden=hidden, intermediate=intermediate, layers=layers, heads=heads,
        kv_heads=8, head_dim=128, vocab_size=151936, tokenizer_size=151669, rope_theta=1e6,
        rms_eps=1e-6, tied=tied, max_position=40960, qk_norm=True,
    )  # fmt: skip


MODELS = {
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "smollm2-135m": ModelConfig(
        family="llama", hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_dim=64,
        vocab_size=49152, tokenizer_size=49152, rope_theta=1e5, rms_eps=1e-5, tied=True,
        max_position=8192,
    ),
}  # fmt: skip

POINTS = {
    "qwen3-8b": ("128x384", "256x384", "128x1792", "256x1792", "32x1200", "1x1024"),
    "qwen3-0.6b": ("1x384", "64x384", "256x384", "1024x384"),
    "smollm2-135m": ("1x384", "64x384", "256x384", "1024x384"),
}
"""sequences x mean context; 128 + 512 tokens have the mean 384, 256 + 3,072 the mean 1,792."""

OUTSIDE_MS = {
    ("qwen3-8b", "bf16", 128, 384): 8.28,
    ("qwen3-8b", "bf16", 256, 384): 12.92,
    ("qwen3-8b", "fp8-kv", 128, 384): 6.79,
    ("qwen3-8b", "fp8-kv", 256, 384): 10.48,
    ("qwen3-8b", "fp8-kv", 256, 1792): 19.4,
}
"""vLLM 0.26 on an H200, whole steps: BF16, and FP8 weights with FP8 KV (measured 2026-11-29)."""


@dataclass(frozen=True)
class Rates:
    """What the card does: bytes/s read, FLOP/s of BF16 and of FP8 and INT8 products."""

    read: float
    bf16: float
    eight_bit: float


def seconds_of(work: Callable[[], Any], repeats: int = 7) -> float:
    """Median device seconds of one call."""
    work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_rates() -> Rates:
    """A read of 8 GB, and library products of 8,192 cubed on random data."""
    big = [torch.randn(1 << 16, 1 << 15, device="cuda")]
    read = big[0].numel() * 4 / seconds_of(lambda: big[0].amax(1))
    big.clear()
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    bf16 = 2 * n**3 / seconds_of(lambda: a @ b)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    eight = (
        2 * n**3 / seconds_of(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16))
    )
    return Rates(read, bf16, eight)


def roofline_s(
    config: ModelConfig, model: Decoder, sequences: int, context: int, rates: Rates
) -> float:
    """Seconds of one step, kernel by kernel: every weight and every key and value read once."""
    total = 0.0
    for shape in linear_shapes(config):
        rows = sum(n for _, n in shape.parts)
        spec = model.plan.recipe.rollout.gemm(shape.role) if shape.role != "head" else None
        fmt = get_format("bf16" if spec is None else spec.rhs.format)
        rate = rates.bf16 if fmt.name == "bf16" else rates.eight_bit
        weights = rows * shape.in_features
        operations = 2 * sequences * weights / rate
        total += max(weights * fmt.bytes / rates.read, operations)
    attention = model.plan.recipe.rollout.attention
    key_bytes = get_format(attention.kv.format).bytes * config.head_dim
    key_bytes += 0 if attention.kv.block is None else 4
    keys = 2 * config.layers * config.kv_heads * sequences * context
    operations = 4 * config.layers * config.heads * config.head_dim * sequences * context
    return total + max(keys * key_bytes / rates.read, operations / rates.bf16)


@torch.no_grad()
def random_model(name: str, recipe: str, layers: int = 0) -> Decoder:
    """Random weights of a shape on the GPU; layers: instead of the shape's own number."""
    config = MODELS[name]
    if layers:
        config = ModelConfig(**(vars(config) | {"layers": layers}))
    model = Decoder(config, plan_for(load_recipe(recipe), config), torch.device("cuda"))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.refresh()
    return model


@torch.no_grad()
def filled_store(model: Decoder, pages: int) -> PageStore:
    """Pages of random keys and values."""
    c, precision = model.config, model.plan.recipe.rollout.attention.kv
    size = page_bytes(c.layers, PAGE, c.kv_heads, c.head_dim, precision) * pages
    raw = torch.empty(size, dtype=torch.uint8, device="cuda")
    store = PageStore(c.layers, PAGE, c.kv_heads, c.head_dim, precision, raw)
    for rows in (*store.keys, *store.values):
        if isinstance(rows, HeadCodes):
            codes = torch.randint(0, 256, rows.codes.shape, dtype=torch.uint8, device="cuda")
            rows.codes.view(torch.uint8).copy_(codes & 0xF7)  # no NaN code
            rows.scale.fill_(0.01)
        else:
            rows.normal_()
    return store


def new_step(model: Decoder, store: PageStore, sequences: int, context: int) -> GraphStep:
    """The engine's graph step over `sequences` rows whose contexts begin at context - REPLAYS / 2."""
    state = DecodeState(sequences, model.config.max_position, PAGE, model.device)
    per_row = (store.num_pages - 1) // sequences
    order = torch.randperm(per_row * sequences).view(sequences, per_row).numpy() + 1
    state.table[:, HEADER : HEADER + per_row] = order
    state.table[:, 2] = range(sequences)
    step = GraphStep(EagerStep(model, store, state), SchedulerStats())
    step.check_addresses()
    return step


def step_times(step: GraphStep, context: int) -> list[float]:
    """Milliseconds of each replay."""
    state = step.eager.state
    bound = smallest_at_least((*CONTEXT_BOUNDS, 1 << 30), context + REPLAYS)
    bound = min(bound, step.eager.model.config.max_position)
    step.prepared(state.rows, bound, Transform())
    state.table[:, 0] = context - 1 - REPLAYS // 2
    state.upload(state.rows)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for event in events[:-1]:
        event.record()
        step.run(state.rows, bound, Transform())
    events[-1].record()
    torch.cuda.synchronize()
    logps = state.out[:, 1].view(torch.float32)
    assert bool(logps.isfinite().all()), "the step drew from NaN"
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def profile(step: GraphStep, context: int, path: Path) -> None:
    """Device time by kernel of one replay, as text."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step_times(step, context)
    table = found.key_averages().table(
        sort_by="cuda_time_total", row_limit=30, max_name_column_width=60
    )
    path.write_text(f"{REPLAYS} replays\n{table}\n", encoding="utf-8")


def refresh_ms(model: Decoder) -> float:
    """Milliseconds to requantise every weight from its master."""
    return seconds_of(model.refresh, 5) * 1e3


def measure(
    name: str, recipe: str, points: list[str], rates: Rates, note: Callable[[dict], None],
    layers: int, profiles: Path | None,
) -> None:  # fmt: skip
    """One row a point, and one for the refresh; the cache is shared by the points."""
    begun = time.perf_counter()
    model = random_model(name, recipe, layers)
    note({"what": "refresh", "model": name, "recipe": recipe, "ms": refresh_ms(model)})
    pairs = sorted(tuple(int(n) for n in point.split("x")) for point in points)
    pages = max(s * -(-(c + REPLAYS) // PAGE) for s, c in pairs) + 1
    store = filled_store(model, pages)
    made = time.perf_counter() - begun
    for sequences, context in pairs:
        begun = time.perf_counter()
        step = new_step(model, store, sequences, context)
        times = step_times(step, context)
        bound = roofline_s(model.config, model, sequences, context, rates) * 1e3
        ms = statistics.median(times)
        outside = OUTSIDE_MS.get(
            (name, "fp8-kv" if "fp8" in recipe else "bf16", sequences, context)
        )
        note(
            {
                "what": "decode", "model": name, "recipe": recipe, "sequences": sequences,
                "context": context, "ms": round(ms, 4), "least": round(min(times), 4),
                "most": round(max(times[2:]), 4), "tokens_per_s": round(sequences / ms * 1e3),
                "roofline_ms": round(bound, 4), "roofline_share": round(bound / ms, 4),
                "vllm_ms": outside, "seconds": round(time.perf_counter() - begun, 2),
                "model_seconds": round(made, 2),
            }
        )  # fmt: skip
        if profiles is not None:
            profile(step, context, profiles / f"{name}_{recipe}_{sequences}x{context}.txt")


def accumulate(path: Path, row: dict[str, Any]) -> None:
    """Put a row into the file in place of an older one of the same measurement."""
    keys = ("what", "model", "recipe", "sequences", "context", "layers")
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [r for r in rows if any(r.get(k) != row.get(k) for k in keys)]
    path.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"], choices=MODELS)
    parser.add_argument(
        "--recipes", nargs="+", default=["bf16", "fp8", "fp8-kv", "int8", "bf16-fast"]
    )
    parser.add_argument("--points", nargs="*", default=[])
    parser.add_argument(
        "--layers", type=int, default=0, help="fewer layers: to compile, not to quote"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", default="bench/results/h200/engine.json")
    parser.add_argument("--profile", help="folder for one table of kernels a row")
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="start no recipe after this long"
    )
    arguments = parser.parse_args()
    started, rates = time.perf_counter(), measure_rates()
    about = {
        "commit": arguments.commit, "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "rates": vars(rates), "layers": arguments.layers,
    }  # fmt: skip

    def note(row: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        accumulate(Path(arguments.out), row | about)

    for name in arguments.models:
        for recipe in arguments.recipes:
            if time.perf_counter() - started > arguments.seconds:
                return
            points = arguments.points or list(POINTS[name])
            profiles = Path(arguments.profile) if arguments.profile else None
            try:
                measure(name, recipe, points, rates, note, arguments.layers, profiles)
            except Exception as error:  # the other rows still count
                sys.stdout.write(f"{name} {recipe}: {error!r:.400}\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
