"""Milliseconds of a decode step over (sequences, mean context), and of a refresh, beside the roofline.

Random weights, a cache filled with random keys and values, end ids ignored: medians of replays of the
engine's own CUDA graph (embedding, blocks, head, draw). The roofline adds, linear by linear, the larger of
bytes over the read rate and operations over the product rate, and the same for attention.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from samebit.bench.api import Case, Target

GROUP = "rollout"
ABOUT = "decode step and refresh by model, recipe, sequences and mean context"

RECIPES = ("bf16-fast", "bf16", "fp8", "fp8-kv", "int8")
POINTS = {
    "qwen3-8b": ((1, 1024), (32, 1200), (128, 384), (256, 384), (128, 1792), (256, 1792)),
    "qwen3-0.6b": ((1, 384), (64, 384), (256, 384), (1024, 384)),
    "smollm2-135m": ((1, 384), (64, 384), (256, 384), (1024, 384)),
}
"""(sequences, mean context): 128 + 512 tokens have the mean 384, 256 + 3,072 the mean 1,792."""

OUTSIDE_MS = {
    ("bf16", 128, 384): 8.28, ("bf16", 256, 384): 12.92,
    ("fp8", 128, 384): 6.79, ("fp8", 256, 384): 10.48, ("fp8", 256, 1792): 19.4,
}  # fmt: skip
"""vLLM 0.26 on an H200, Qwen3-8B shape, whole steps: BF16, and FP8 weights with FP8 KV (2026-11-29)."""

PAGE = 128
REPLAYS = 24


def _row(recipe: str, sequences: int, context: int) -> str:
    return f"decode/qwen3-8b/{recipe}/{sequences}x{context}"


def _against(
    recipe: str, other: str, sequences: int, context: int, must: float, aim: float
) -> Target:
    return Target(f"{recipe} over {other}, {sequences} x {context:,}", "rollout",
                  _row(recipe, sequences, context), "ms", must, aim,
                  over=_row(other, sequences, context), near="share_of_roofline")  # fmt: skip


TARGETS = (
    Target("bf16-fast over vLLM BF16, 128 and 256 x 384", "rollout",
           f"{_row('bf16-fast', 128, 384)}|{_row('bf16-fast', 256, 384)}", "over_vllm", 1.0, 1.3,
           reduce="worst"),
    Target("fp8-kv over vLLM FP8 + FP8 KV, 128 and 256 x 384, 256 x 1,792", "rollout",
           f"{_row('fp8-kv', 128, 384)}|{_row('fp8-kv', 256, 384)}|{_row('fp8-kv', 256, 1792)}",
           "over_vllm", 1.2, 1.6, reduce="worst"),
    _against("fp8-kv", "bf16-fast", 128, 384, 1.4, 1.7),
    _against("fp8-kv", "bf16-fast", 256, 1792, 1.5, 1.7),
    _against("fp8", "bf16-fast", 32, 1200, 1.3, 1.42),
    Target("share of the roofline, fp8-kv, 128 x 384", "rollout", _row("fp8-kv", 128, 384),
           "share_of_roofline", 0.55, 0.75, "%"),
    Target("share of the roofline, fp8-kv, 256 x 1,792", "rollout", _row("fp8-kv", 256, 1792),
           "share_of_roofline", 0.65, 0.88, "%"),
    _against("bf16", "bf16-fast", 128, 384, 0.9, 1.0),
    _against("bf16", "bf16-fast", 256, 1792, 0.9, 1.0),
    Target("refresh of all quantised weights, 8B", "rollout", "refresh/qwen3-8b/fp8-kv", "ms", 20, 10,
           "ms", more=False),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """refresh/model/recipe and decode/model/recipe/sequences x context; a model's rows follow another."""
    for model, points in POINTS.items():
        for recipe in RECIPES:
            yield Case(
                f"refresh/{model}/{recipe}", measure=lambda m=model, r=recipe: _refresh(m, r)
            )
            for sequences, context in points:
                yield Case(
                    f"decode/{model}/{recipe}/{sequences}x{context}",
                    measure=lambda a=(model, recipe, sequences, context): _decode(*a),
                    warm=lambda a=(model, recipe, sequences, context): _decode(*a, layers=1),
                )


def shape_of(name: str, layers: int = 0):
    """The `ModelConfig` of a published shape; layers: instead of its own number."""
    from samebit.models.config import ModelConfig

    common: dict[str, Any] = {"family": "qwen3", "kv_heads": 8, "head_dim": 128, "vocab_size": 151936,
              "tokenizer_size": 151669, "rope_theta": 1e6, "rms_eps": 1e-6, "max_position": 40960,
              "qk_norm": True}  # fmt: skip
    made: dict[str, dict[str, Any]] = {
        "qwen3-8b": {**common, "hidden": 4096, "intermediate": 12288, "layers": 36, "heads": 32,
                     "tied": False},
        "qwen3-0.6b": {**common, "hidden": 1024, "intermediate": 3072, "layers": 28, "heads": 16,
                       "tied": True},
        "smollm2-135m": {"family": "llama", "hidden": 576, "intermediate": 1536, "layers": 30,
                         "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab_size": 49152,
                         "tokenizer_size": 49152, "rope_theta": 1e5, "rms_eps": 1e-5, "tied": True,
                         "max_position": 8192},
    }  # fmt: skip
    fields = made[name]
    if layers:
        fields["layers"] = layers
    return ModelConfig(**fields)


_HELD: dict[tuple[str, str, int], Any] = {}


def random_model(name: str, recipe: str, layers: int = 0):
    """Random weights on the card, and pages of random keys and values for the largest point.

    The last one is kept; it goes before the next is made, for two of them do not fit.
    """
    import torch

    key = (name, recipe, layers)
    if key not in _HELD:
        _HELD.clear()
        gc.collect()
        torch.cuda.empty_cache()
        _HELD[key] = _new_random_model(*key)
    return _HELD[key]


def _new_random_model(name: str, recipe: str, layers: int):
    import torch

    from samebit.models.decoder import Decoder
    from samebit.models.load import plan_for
    from samebit.quant.plan import load_recipe

    config = shape_of(name, layers)
    with torch.no_grad():
        model = Decoder(config, plan_for(load_recipe(recipe), config), torch.device("cuda"))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        model.refresh()
        pages = max(s * -(-(c + REPLAYS) // PAGE) for s, c in POINTS[name]) + 1
        return model, _filled_store(model, pages)


def _filled_store(model: Any, pages: int):
    import torch

    from samebit.layers.kv import PageStore, page_bytes
    from samebit.operand import HeadCodes

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


def _refresh(name: str, recipe: str) -> dict[str, Any]:
    import torch

    from samebit.bench.timing import medians

    model, _ = random_model(name, recipe)
    with torch.no_grad():
        times = medians({"refresh": [model.refresh]}, eager=("refresh",), replays=5)
    return {"ms": times["refresh"] / 1e3}


def _decode(
    name: str, recipe: str, sequences: int, context: int, layers: int = 0
) -> dict[str, Any]:
    import torch

    model, store = random_model(name, recipe, layers)
    with torch.no_grad():
        times = step_times(new_step(model, store, sequences), context)
    ms = statistics.median(times)
    bound = _roofline_ms(model, sequences, context)
    fields = {"ms": ms, "least_ms": min(times), "tokens_per_s": sequences / ms * 1e3,
              "roofline_ms": bound, "share_of_roofline": bound / ms}  # fmt: skip
    outside = OUTSIDE_MS.get(("fp8" if "fp8" in recipe else "bf16", sequences, context))
    if name == "qwen3-8b" and outside is not None:
        fields |= {"vllm_ms": outside, "over_vllm": outside / ms}
    return fields


def new_step(model: Any, store: Any, sequences: int):
    """The engine's graph step over `sequences` rows whose pages are filled."""
    import torch

    from samebit.engine import decode as engine
    from samebit.engine.scheduler import SchedulerStats

    state = engine.DecodeState(sequences, model.config.max_position, PAGE, model.device)
    each = (store.num_pages - 1) // sequences
    header = engine.HEADER
    order = torch.randperm(each * sequences).view(sequences, each).numpy() + 1
    width = min(each, state.table.shape[1] - header)
    state.table[:, header : header + width] = order[:, :width]
    state.table[:, 2] = range(sequences)
    step = engine.GraphStep(engine.EagerStep(model, store, state), SchedulerStats())
    step.check_addresses()
    return step


def step_times(step: Any, context: int) -> list[float]:
    """Milliseconds of each replay of the engine's graph, contexts growing through the mean."""
    import torch

    from samebit.engine import decode as engine
    from samebit.reference.sampling import Transform

    state = step.eager.state
    bound = engine.smallest_at_least((*engine.CONTEXT_BOUNDS, 1 << 30), context + REPLAYS)
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


def _roofline_ms(model: Any, sequences: int, context: int) -> float:
    """Every weight, key and value read once, every product at the library's best rate."""
    from samebit.bench.ceilings import product_rate, read_rate
    from samebit.formats import get_format
    from samebit.models.decoder import linear_shapes

    config, flow, total = model.config, model.plan.recipe.rollout, 0.0
    for shape in linear_shapes(config):
        kind = "bf16" if shape.role == "head" else flow.gemm(shape.role).rhs.format
        fmt = get_format(kind)
        weights = sum(rows for _, rows in shape.parts) * shape.in_features
        rate = product_rate("bf16" if fmt.name == "bf16" else "fp8")
        total += max(weights * fmt.bytes / read_rate(), 2.0 * sequences * weights / rate)
    kv = flow.attention.kv
    width = get_format(kv.format).bytes * config.head_dim + (0 if kv.block is None else 4)
    keys = 2 * config.layers * config.kv_heads * sequences * context
    operations = 4.0 * config.layers * config.heads * config.head_dim * sequences * context
    return 1e3 * (total + max(keys * width / read_rate(), operations / product_rate("bf16")))
