"""The graph engine on a Hopper GPU against the naive engine and the training forward, bit for bit.

Run as a script: prints a table and writes JSON. Without a GPU the engine launches ahead eagerly, which
checks the cases themselves. The bar is 0 differing tokens, no page leaked, and no graph made anew
after a refresh.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from samebit.config import RolloutConfig
from samebit.engine.memory import CHUNK_BYTES, Reservation
from samebit.engine.naive import Engine as Naive
from samebit.engine.native import Engine
from samebit.models.config import ModelConfig
from samebit.types import Sampling
from tests.gpu import engine_wide_cases
from tests.gpu.backend_cases import (
    DEVICE,
    MODELS,
    RECIPES,
    learn,
    mismatch,
    random_model,
    run_cases,
)
from tests.gpu.engine_wide_cases import differing, leaked, prompts_of

Engine.pipelined = True


def same_as_naive(config: ModelConfig, recipe: str) -> dict[str, object]:
    """Against the cacheless oracle, with preemption and chunks, at several temperatures."""
    model = random_model(config, recipe, DEVICE)
    prompts = prompts_of((1, 40, 150, 127), config.tokenizer_size)
    tight = RolloutConfig(max_batch=5, prefill_tokens=64, cache_tokens=128 * 4)
    engine, naive = Engine(model, tight, None, 3), Naive(model, RolloutConfig(), None, 3)
    counts, preemptions = [], 0
    for temperature, new in ((1.0, 12), (0.0, 6), (0.7, 6)):
        sampling = Sampling(max_tokens=new, temperature=temperature)
        found = engine.generate(prompts, 2, sampling, 11)
        counts.append(differing(found, naive.generate(prompts, 2, sampling, 11)))
        preemptions = engine.stats.preemptions
    lost = leaked(engine)
    engine.close()
    return {
        "differing": counts, "preemptions": preemptions, "leaked": lost,
        "ok": not any(counts) and not lost,
    }  # fmt: skip


def same_as_trainer(config: ModelConfig, recipe: str, new: int = 40) -> dict[str, object]:
    """Before and after an optimiser step, over many bucket sizes; two runs; graphs kept; no leak."""
    model = random_model(config, recipe, DEVICE)
    lengths = (1, 5, 127, 128, 129, 200, 64, 333, 17, 90)
    prompts = prompts_of(lengths, config.tokenizer_size)
    options = RolloutConfig(max_batch=37, prefill_tokens=96, cache_tokens=128 * 18)
    engine = Engine(model, options, None, 3)
    counts, captures = [], []
    for step in range(2):
        groups = engine.generate(prompts, 4, Sampling(max_tokens=new), 7)
        counts.append(mismatch(model, groups))
        captures.append(engine.stats.captures)
        if step == 0:
            again = differing(groups, engine.generate(prompts, 4, Sampling(max_tokens=new), 7))
            engine.release()
            learn(model, groups)
            engine.refresh()
    stats = engine.stats
    ends = Sampling(max_tokens=new, stop_ids=tuple(range(0, config.tokenizer_size, 9)))
    groups = engine.generate(prompts, 4, ends, 7)  # answers end at random: every bucket
    counts.append(mismatch(model, groups))
    lost = leaked(engine)
    engine.close()
    return {
        "differing": [c[0] for c in counts], "tokens": [c[1] for c in counts],
        "largest": max(c[2] for c in counts), "again": again, "leaked": lost,
        "captures": captures, "preemptions": stats.preemptions, "dropped": stats.dropped_tokens,
        "idle": round(engine.idle_share, 3),
        "ok": not any(c[0] for c in counts) and not again and not lost
        and captures[0] == captures[-1],
    }  # fmt: skip


def long_answers(config: ModelConfig, recipe: str, new: int) -> dict[str, object]:
    """Answers of `new` tokens against the training forward; a second engine gives the same."""
    model = random_model(replace(config, max_position=new + 1024), recipe, DEVICE)
    prompts = prompts_of((700, 30), config.tokenizer_size)
    counts, runs, seconds = [], [], []
    for pages in (0, 128 * (2 * (new + 700) // 128 + 3)):
        engine = Engine(model, RolloutConfig(max_batch=4, cache_tokens=pages), None, 3)
        begun = time.perf_counter()
        groups = engine.generate(prompts, 2, Sampling(max_tokens=new))
        seconds.append(round(time.perf_counter() - begun, 2))
        counts.append(mismatch(model, groups))
        runs.append(groups)
        lost = leaked(engine)
        preemptions = engine.stats.preemptions
        engine.close()
    again = differing(*runs)
    return {
        "differing": [c[0] for c in counts], "tokens": counts[0][1], "again": again,
        "preemptions": preemptions, "leaked": lost, "seconds": seconds,
        "ok": not any(c[0] for c in counts) and not again and not lost,
    }  # fmt: skip


def memory() -> dict[str, object]:
    """Memory goes and comes at one address, and is the driver's in between."""
    held = Reservation(1 << 30, DEVICE)
    free = torch.cuda.mem_get_info()[0]
    begun = time.perf_counter()
    held.resize(512 << 20)
    mapping = time.perf_counter() - begun
    taken = free - torch.cuda.mem_get_info()[0]
    held.tensor[(512 << 20) - 1] = 7
    value = int(held.tensor[(512 << 20) - 1])
    held.resize(0)
    given = torch.cuda.mem_get_info()[0] - free
    held.resize(100)
    held.tensor[:100] = 5
    again = int(held.tensor[:100].sum())
    held.close()
    found = {
        "taken_mb": taken >> 20, "given_mb": given >> 20, "value": value, "again": again,
        "seconds": round(mapping, 4),
    }  # fmt: skip
    whole = (512 << 20) - CHUNK_BYTES
    return found | {"ok": taken == whole and value == 7 and again == 500 and given > 0}


def stale_weights(config: ModelConfig) -> dict[str, object]:
    """A weight that lies elsewhere than at capture is noticed: graphs are made anew."""
    model = random_model(config, "fp8", DEVICE)
    engine = Engine(model, RolloutConfig(max_batch=4), None, 3)
    prompts = prompts_of((20, 30), config.tokenizer_size)
    sampling = Sampling(max_tokens=8)
    engine.generate(prompts, 2, sampling)
    before = engine.stats.captures
    weight = next(iter(model.linears()))[1].weights["rollout"]
    weight.codes = weight.codes.clone()
    weight.codes.view(torch.uint8)[0, :64] ^= 0x80
    engine.refresh()
    found = engine.generate(prompts, 2, sampling)
    fresh = Naive(model, RolloutConfig(), None, 3).generate(prompts, 2, sampling)
    engine.close()
    same = differing(found, fresh)
    return {"differing": same, "captures": (before, engine.stats.captures), "ok": not same}


def cases() -> dict[str, Callable[[], dict[str, object]]]:
    """Every case by name."""
    out: dict[str, Callable[[], dict[str, object]]] = {}
    if DEVICE.type == "cuda":
        out["memory"] = memory
        out["stale"] = lambda: stale_weights(MODELS["llama"])
    for model in ("llama", "qwen2", "qwen3"):
        for recipe in RECIPES:
            out[f"naive/{model}/{recipe}"] = lambda m=model, r=recipe: same_as_naive(MODELS[m], r)
            out[f"trainer/{model}/{recipe}"] = lambda m=model, r=recipe: same_as_trainer(
                MODELS[m], r
            )
    for recipe in RECIPES:
        out[f"trainer/smollm2/{recipe}"] = lambda r=recipe: same_as_trainer(
            MODELS["smollm2"], r, 16
        )
        out[f"long/qwen3/{recipe}"] = lambda r=recipe: long_answers(MODELS["qwen3"], r, 2048)
    for recipe in RECIPES:
        out[f"longest/llama/{recipe}"] = lambda r=recipe: long_answers(MODELS["llama"], r, 8192)
    return out | engine_wide_cases.cases()


def main() -> None:
    """Run the cases named, whole names or their beginnings up to a slash."""
    run_cases(
        __doc__,
        cases,
        lambda name, names: any(name == n or name.startswith(f"{n}/") for n in names),
        "seconds_all",
    )


if __name__ == "__main__":
    main()
