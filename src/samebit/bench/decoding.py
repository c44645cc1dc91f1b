"""What the rollout rows run: models of random weights, filled caches, decode steps, prompts, rooflines."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from samebit.bench.ceilings import launch_us, product_rate, read_rate
from samebit.bench.compile_only import compile_only
from samebit.bench.shapes import MODELS
from samebit.engine import decode as engine
from samebit.engine.scheduler import SchedulerStats
from samebit.formats import get_format
from samebit.layers.kv import PageStore, page_bytes
from samebit.layout import PagedLayout
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder, linear_shapes
from samebit.models.load import plan_for
from samebit.operand import HeadCodes
from samebit.quant.plan import load_recipe
from samebit.reference.sampling import Transform

PAGE = 128
REPLAYS = 24
UNTIMED = 4
"""Replays before those that count: the clock rises and the cache fills."""

POSITIONS = 40960
"""At most; no row's context is longer."""


def shape_of(name: str) -> ModelConfig:
    """A published shape with as many positions as are allocated here."""
    return replace(MODELS[name], max_position=min(MODELS[name].max_position, POSITIONS))


def make_model(config: ModelConfig, recipe: str, device: str = "cuda") -> Decoder:
    """Weights of a plausible size, none of them read from anywhere."""
    with torch.no_grad():
        model = Decoder(config, plan_for(load_recipe(recipe), config), torch.device(device))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        model.refresh()
    return model


def make_store(model: Decoder, pages: int) -> PageStore:
    """Pages of random keys and values."""
    c, precision = model.config, model.plan.recipe.rollout.attention.kv
    size = page_bytes(c.layers, PAGE, c.kv_heads, c.head_dim, precision) * pages
    raw = torch.empty(size, dtype=torch.uint8, device=model.device)
    store = PageStore(c.layers, PAGE, c.kv_heads, c.head_dim, precision, raw)
    for rows in (*store.keys, *store.values):
        if isinstance(rows, HeadCodes):
            codes = torch.randint(0, 256, rows.codes.shape, dtype=torch.uint8, device=raw.device)
            rows.codes.view(torch.uint8).copy_(codes & 0xF7)  # no NaN code
            rows.scale.fill_(0.01)
        else:
            rows.normal_()
    return store


class Held:
    """The one model that is on the card, and its cache: two of the largest do not fit."""

    def __init__(self) -> None:
        self._name, self._model, self._store = ("", ""), None, None

    def model(self, name: str, recipe: str) -> Decoder:
        """The model of a shape under a recipe; another one goes first."""
        if self._model is None or self._name != (name, recipe):
            self.drop()
            self._model = make_model(shape_of(name), recipe)
            self._name = (name, recipe)
        return self._model

    def store(self, pages: int) -> PageStore:
        """At least `pages` pages for the model held."""
        assert self._model is not None
        if self._store is None or self._store.num_pages < pages:
            self._store = None
            _give_back()
            self._store = make_store(self._model, pages)
        return self._store

    def drop(self) -> None:
        """Nothing is held any more."""
        self._model = self._store = None
        _give_back()


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


HELD = Held()


def small_model(name: str, recipe: str, device: str = "cuda") -> Decoder:
    """One layer with one embedding: launches every kernel of the whole model, at a tenth of the memory."""
    return make_model(replace(shape_of(name), layers=1, tied=True), recipe, device)


@torch.no_grad()
def compile_step(
    name: str, recipe: str, sequences: int, context: int, device: str = "cuda"
) -> None:
    """Compile every kernel of a decode step and of a refresh."""
    with compile_only(os.getpid()):
        model = small_model(name, recipe, device)
        state = engine.DecodeState(sequences, model.config.max_position, PAGE, model.device)
        step = engine.EagerStep(model, make_store(model, 2), state)
        step.on_gpu = True
        step.run(sequences, bound_of(model, context), Transform())


@torch.no_grad()
def compile_prompts(
    name: str, recipe: str, prompts: int, tokens: int, device: str = "cuda"
) -> None:
    """Compile every kernel of a forward of prompts."""
    with compile_only(os.getpid()):
        model = small_model(name, recipe, device)
        store = make_store(model, prompts * pages_of(tokens) + 1)
        model(*_prompt_batch(model, prompts, tokens), "rollout", store)


def pages_of(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


def bound_of(model: Decoder, context: int) -> int:
    """The context bound the engine takes for contexts around `context`."""
    bound = engine.smallest_at_least((*engine.CONTEXT_BOUNDS, 1 << 30), context + REPLAYS)
    return min(bound, model.config.max_position)


def new_step(model: Decoder, store: PageStore, sequences: int, context: int) -> engine.GraphStep:
    """The engine's graph step over `sequences` rows whose pages, in no order, are filled."""
    state = engine.DecodeState(sequences, model.config.max_position, PAGE, model.device)
    each = pages_of(context + REPLAYS)
    order = torch.randperm(store.num_pages - 1)[: each * sequences]
    pages = slice(engine.HEADER, engine.HEADER + each)
    state.table[:, pages] = (order + 1).view(sequences, each).numpy()
    state.table[:, 2] = range(sequences)
    step = engine.GraphStep(engine.EagerStep(model, store, state), SchedulerStats())
    step.check_addresses()
    return step


@torch.no_grad()
def step_times(step: engine.GraphStep, context: int) -> list[float]:
    """Milliseconds of each replay of the engine's graph, contexts growing through the mean."""
    state = step.eager.state
    bound = bound_of(step.eager.model, context)
    step.prepared(state.rows, bound, Transform())
    state.table[:, 0] = context - 1 - REPLAYS // 2 - UNTIMED
    state.upload(state.rows)
    for _ in range(UNTIMED):
        step.run(state.rows, bound, Transform())
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for event in events[:-1]:
        event.record()
        step.run(state.rows, bound, Transform())
    events[-1].record()
    torch.cuda.synchronize()
    logps = state.out[:, 1].view(torch.float32)
    assert bool(logps.isfinite().all()), "the step drew from NaN"
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


@torch.no_grad()
def launches_of(step: engine.GraphStep, context: int) -> int:
    """Nodes of the step's graph."""
    graph, state = torch.cuda.CUDAGraph(keep_graph=True), step.eager.state
    with torch.cuda.graph(graph):
        step.eager.run(state.rows, bound_of(step.eager.model, context), Transform())
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    code = driver.cuGraphGetNodes(raw, None, ctypes.byref(count))
    assert code == 0, f"cuGraphGetNodes failed with CUDA error {code}"
    return count.value


def decode_row(name: str, recipe: str, sequences: int, context: int) -> dict[str, Any]:
    """A decode step beside its roofline and what the roofline is made of."""
    model = HELD.model(name, recipe)
    store = HELD.store(sequences * pages_of(context + REPLAYS) + 1)
    step = new_step(model, store, sequences, context)
    times = step_times(step, context)
    ms = statistics.median(times)
    parts = roofline_parts(model, sequences, sequences, sequences * context, sequences * context)
    launches = launches_of(step, context)
    return {
        "ms": ms, "least_ms": min(times), "tokens_per_s": sequences / ms * 1e3,
        **shares(parts, ms, launches),
    }  # fmt: skip


def shares(parts: dict[str, float], ms: float, launches: int) -> dict[str, Any]:
    """The roofline's fields: its parts, the launches' own time, and which of them is the largest."""
    bound = parts["products_ms"] + parts["attention_ms"]
    out: dict[str, Any] = {"roofline_ms": bound, "share_of_roofline": bound / ms, **parts}
    if launches:
        out |= {"launch_ms": launches * launch_us() / 1e3, "launches": launches}
    names = {"products_ms": parts["products_are"], "attention_ms": "keys and values"}
    if launches:
        names["launch_ms"] = "launches"
    out["bound"] = names[max(names, key=lambda name: out[name])]
    return out


@torch.no_grad()
def refresh_row(name: str, recipe: str) -> dict[str, Any]:
    """A refresh of all weights."""
    from samebit.bench.timing import medians

    model = HELD.model(name, recipe)
    times = medians({"refresh": [model.refresh]}, eager=("refresh",), replays=7)
    weights = sum(sum(n for _, n in s.parts) * s.in_features for s in linear_shapes(model.config))
    # masters are read, codes written
    width = get_format(model.plan.recipe.rollout.gemm("qkv").rhs.format).bytes
    return {
        "ms": times["refresh"] / 1e3,
        "roofline_ms": 1e3 * weights * (4 + width) / read_rate(),
    }


def _prompt_batch(model: Decoder, prompts: int, tokens: int) -> tuple[torch.Tensor, PagedLayout]:
    each = pages_of(tokens)
    chunks = [(range(1 + i * each, 1 + (i + 1) * each), 0, tokens) for i in range(prompts)]
    layout = PagedLayout.of_chunks(chunks, PAGE, model.device)
    limit = model.config.tokenizer_size
    ids = torch.arange(prompts * tokens, device=model.device) * 7919 % limit
    return ids, layout


@torch.no_grad()
def prefill_row(name: str, recipe: str, prompts: int, tokens: int) -> dict[str, Any]:
    """A forward of whole prompts as the engine makes it: launched, not replayed. host_ms: launching it."""
    model = HELD.model(name, recipe)
    store = HELD.store(prompts * pages_of(tokens) + 1)
    times, host = [], []
    for _ in range(7):
        ids, layout = _prompt_batch(model, prompts, tokens)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        start.record()
        hidden = model(ids, layout, "rollout", store)
        stop.record()
        host.append((time.perf_counter() - begun) * 1e3)
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    assert bool(hidden[-1].isfinite().all()), "the forward gave NaN"
    ms, host_ms = statistics.median(times[2:]), statistics.median(host[2:])
    rows = prompts * tokens
    parts = roofline_parts(model, rows, 0, rows, prompts * tokens * (tokens + 1) // 2)
    out = {"ms": ms, "tokens_per_s": rows / ms * 1e3, "host_ms": host_ms, **shares(parts, ms, 0)}
    if host_ms > 0.9 * ms:
        out["bound"] = "launching from the host"
    return out


def roofline_parts(model: Decoder, rows: int, drawn: int, keys: int, pairs: int) -> dict[str, Any]:
    """Milliseconds of all linears and of attention at their least, kernel by kernel.

    rows: of every linear; drawn: of the head. keys: cached tokens read (or written) once in each
    layer; pairs: (query, key) pairs of one query head. A kernel takes the larger of its bytes at the
    read rate and its operations at the library's best rate. products_are: which of the two is more.
    """
    config, flow = model.config, model.plan.recipe.rollout
    total = reading = 0.0
    for shape in linear_shapes(config):
        head = shape.role == "head"
        fmt = get_format("bf16" if head else flow.gemm(shape.role).rhs.format)
        weights = sum(n for _, n in shape.parts) * shape.in_features
        number = drawn if head else rows
        if number:
            bytes_s = weights * fmt.bytes / read_rate()
            rate = product_rate("bf16" if fmt.name == "bf16" else "fp8")
            operations_s = 2.0 * number * weights / rate
            total += max(bytes_s, operations_s)
            reading += bytes_s if bytes_s >= operations_s else 0.0
    kv = flow.attention.kv
    width = get_format(kv.format).bytes * config.head_dim + (0 if kv.block is None else 4)
    moved = 2 * config.layers * config.kv_heads * keys * width / read_rate()
    operations = 4.0 * config.layers * config.heads * config.head_dim * pairs
    attention = max(moved, operations / product_rate("bf16"))
    return {
        "products_ms": 1e3 * total, "attention_ms": 1e3 * attention,
        "products_are": "weights" if reading >= total / 2 else "operations",
    }  # fmt: skip
