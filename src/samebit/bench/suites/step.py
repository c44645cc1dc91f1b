"""The training phase at the shapes of 8B models: our recipes and a plain torch step, side by side.

A row `micro/...` is one micro-batch (forward, GRPO loss on random advantages, backward) of every arm in
turn, at two depths: their difference is a layer, the rest is embedding, head and loss. `full_ms` is the
whole depth made of these, `phase_s` 256 sequences with one optimiser step and requantising. `layer_mib`
is what a layer adds to the peak of memory. Rows `whole/...` run all layers, rows `step/...` a whole
RL step of a small model. Two kinds measure nothing and are made of the others: `training/...` holds the
ratios of `micro/...` beside the arms' distance in roofline shares, `integrated/...` adds the decode grid
to the training phase. MODE `once`: no product is made twice in any arm (FP8 arms make their codes again,
BF16 arms keep all they read); else it is train.recompute.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from samebit.bench.api import Case, Target

GROUP = "step"
ABOUT = "training phase of 8B models by recipe, beside a plain torch BF16 step; whole steps"

ARMS = ("fp8", "fp8-kv", "bf16", "bf16-fast", "torch")
RECIPES = ARMS[:-1]
ONCE: Mapping[str, str] = {"fp8": "codes", "fp8-kv": "codes"}
"""train.recompute of an arm in MODE once; others: none."""
TOKENS = 16384
FEW, MANY = 2, 6
"""Depths whose difference is a layer."""
SEQUENCES = 256
"""Of a step."""
STEPS = (("qwen3-0.6b", SEQUENCES, 2048, 1), ("smollm2-135m", 64, 256, 5))
"""(model, sequences, tokens of each, runs whose median counts) of the steps that are run whole."""
ROUNDS = 3


def _whole_name(recipe: str, tokens: int, mode: str) -> str:
    return f"whole/qwen3-8b/2048/{tokens}/{recipe}/{mode}"


def _step_target(what: str, recipe: str, must: float, aim: float, lengths: str = "*") -> Target:
    return Target(f"whole step, {what}", "step", f"integrated/*/{lengths}/{recipe}", "over_bf16-fast",
                  must, aim, reduce="worst", near="roofline_points")  # fmt: skip


TARGETS = (
    Target("training phase, fp8 over bf16-fast", "step", "training/*/fp8", "over_bf16-fast", 1.25,
           1.45, reduce="worst", near="roofline_points"),
    Target("training phase, bf16-fast over a plain torch BF16 step", "step", "training/*/bf16-fast",
           "over_torch", 0.97, 1.1, reduce="worst", near="roofline_points"),
    _step_target("fp8-kv over bf16-fast", "fp8-kv", 1.3, 1.5),
    _step_target("fp8 over bf16-fast, 2,048 tokens", "fp8", 1.16, 1.3, "2048"),
    _step_target("same-bits bf16 over bf16-fast", "bf16", 0.9, 1.0),
    Target("peak memory of the training phase, fp8 against bf16-fast, every product once", "step",
           _whole_name("bf16-fast", 8192, "once"), "peak_gib", 0.85, 0.7, more=False,
           over=_whole_name("fp8", 8192, "once")),
    Target("peak memory, both with train.recompute = mlp, 16,384 tokens", "step",
           _whole_name("bf16-fast", 16384, "mlp"), "peak_gib", 0.85, 0.7, more=False,
           over=_whole_name("fp8", 16384, "mlp")),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """micro/MODEL/LENGTH/MODE, whole/MODEL/LENGTH/TOKENS/RECIPE/MODE, step/..., training/..., integrated/..."""
    from samebit.bench import integrate

    yield from _micro_cases("qwen3-8b")
    yield from _whole_cases(8192, "once")
    yield from _micro_cases("llama-3.1-8b")
    yield from _whole_cases(8192, "mlp")
    yield from _whole_cases(16384, "mlp")
    for (model, sequences, length, runs), recipe in itertools.product(STEPS, RECIPES):
        shape = (model, recipe, sequences, length)
        yield Case(
            f"step/{model}/{sequences}x{length}/{recipe}",
            measure=lambda a=shape, n=runs: real_step(*a, runs=n),
            warm=lambda a=shape: warm_step(*a),
        )
    for row in itertools.product(("qwen3-8b", "llama-3.1-8b"), (2048, 8192), RECIPES):
        yield Case(
            "training/{}/{}/{}".format(*row),
            derive=lambda held, a=row: integrate.training_of(held, *a),
        )
        yield Case(
            "integrated/{}/{}/{}".format(*row),
            derive=lambda held, a=row: integrate.step_of(held, *a),
        )


def _micro_cases(model: str) -> Iterator[Case]:
    for length, mode in itertools.product((2048, 8192), ("once", "mlp")):
        yield Case(
            f"micro/{model}/{length}/{mode}",
            measure=lambda m=model, n=length, r=mode: micro(m, n, r),
            warm=lambda m=model, n=length, r=mode: warm(m, n, r),
        )


def _whole_cases(tokens: int, mode: str) -> Iterator[Case]:
    for recipe in RECIPES:
        yield Case(
            _whole_name(recipe, tokens, mode),
            measure=lambda r=recipe, t=tokens, c=mode: whole("qwen3-8b", 2048, t, r, c),
            warm=lambda r=recipe, t=tokens, c=mode: whole("qwen3-8b", 2048, t, r, c, layers=1),
        )


def recompute_of(recipe: str, mode: str) -> str:
    """train.recompute of an arm."""
    return ONCE.get(recipe, "none") if mode == "once" else mode


def _arms(
    model: str, length: int, mode: str, names: tuple[str, ...], layers: int = MANY
) -> dict[str, Any]:
    from samebit.bench import training

    config = training.shape_of(model, layers)
    groups = training.random_groups(config, TOKENS // length, length)
    owner, arms = None, {}
    for name in names:
        if name == "torch":
            arms[name] = training.PlainArm(config, groups)
            continue
        decoder = training.random_decoder(config, name, owner)
        owner = owner or decoder
        settings = training.settings(TOKENS, length, recompute_of(name, mode))
        arms[name] = training.Arm(decoder, groups, settings)
    return arms


def warm(model: str, length: int, mode: str) -> None:
    """Compile what `micro` runs: one arm after the other through one layer."""
    for name in ARMS:
        _arms(model, length, mode, (name,), layers=1)[name].run(1)
        gc.collect()


def micro(model: str, length: int, mode: str, names: tuple[str, ...] = ARMS) -> dict[str, Any]:
    """The fields of one row."""
    import torch

    from samebit.bench import training

    arms = _arms(model, length, mode, names)
    out: dict[str, Any] = {"tokens": TOKENS, "length": length, "mode": mode}
    times: dict[tuple[str, int], list[float]] = {}
    peaks: dict[tuple[str, int], int] = {}
    for name, arm in list(arms.items()):
        try:
            for depth in (FEW, MANY):
                arm.run(depth)
        except Exception as error:
            # the other arms are still worth their time
            out[f"{name}_error"] = f"{type(error).__name__}: {error!s:.200}"
            del arms[name]
    for _ in range(ROUNDS):
        for depth in (FEW, MANY):
            for name, arm in arms.items():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call = training.timed(lambda a=arm, d=depth: a.run(d))
                times.setdefault((name, depth), []).append(call)
                peaks[name, depth] = torch.cuda.max_memory_allocated() - before
    layers = training.MODELS[model].layers
    for name in arms:
        few, many = (statistics.median(times[name, d]) for d in (FEW, MANY))
        layer = (many - few) / (MANY - FEW)
        rest = few - FEW * layer
        out |= {
            f"{name}_layer_ms": layer,
            f"{name}_rest_ms": rest,
            f"{name}_full_ms": rest + layers * layer,
            f"{name}_layer_mib": (peaks[name, MANY] - peaks[name, FEW]) / (MANY - FEW) / (1 << 20),
        }
    out |= _optimiser(arms, model)
    _phases(out, arms, model, length)
    torch.cuda.synchronize()
    return out


def _optimiser(arms: dict[str, Any], model: str) -> dict[str, Any]:
    """Milliseconds of an optimiser step (moments in a byte) and of requantising, scaled to all layers."""
    from samebit.bench import training
    from samebit.models.load import plan_for
    from samebit.train.memory import parameter_count

    out: dict[str, Any] = {}
    for name, arm in arms.items():
        if name == "torch":
            continue
        arm.model.layers = arm.layers
        whole = training.shape_of(model)
        held = parameter_count(arm.model.config, arm.model.plan)
        share = parameter_count(whole, plan_for(arm.model.plan.recipe, whole))
        if "optimizer_ms" not in out:
            step = arm.trainer.optimizer.step
            step()
            time = statistics.median(training.timed(step) for _ in range(3))
            out["optimizer_ms"] = time * share / held
        refresh = statistics.median(training.timed(arm.model.refresh) for _ in range(3))
        out[f"{name}_refresh_ms"] = refresh * share / held
    return out


def _phases(out: dict[str, Any], arms: dict[str, Any], model: str, length: int) -> None:
    """phase_s of 256 sequences, MFU, share of the data sheet's roofline, and the ratios between arms."""
    from samebit.bench import training
    from samebit.train.flops import PEAK_BF16, forward_flops

    rows = SEQUENCES * length
    pairs = SEQUENCES * length * (length + 1) // 2
    predicted = SEQUENCES * (length + 1 - training.PROMPT)
    flops = 3 * forward_flops(training.MODELS[model], rows, pairs, predicted)
    for name in arms:
        packs = rows / TOKENS
        refresh = out.get(f"{name}_refresh_ms", 0.0)
        phase = (packs * out[f"{name}_full_ms"] + out.get("optimizer_ms", 0.0) + refresh) / 1e3
        out[f"{name}_phase_s"] = phase
        out[f"{name}_mfu"] = flops / phase / PEAK_BF16["NVIDIA H200"]
        out[f"{name}_roofline"] = training.roofline_share(model, name, SEQUENCES, length, phase)
    for one, other in (
        ("fp8", "bf16-fast"),
        ("fp8-kv", "bf16-fast"),
        ("bf16", "bf16-fast"),
        ("bf16-fast", "torch"),
    ):
        if one in arms and other in arms:
            out[f"{one}_over_{other}"] = out[f"{other}_phase_s"] / out[f"{one}_phase_s"]


def whole(
    model: str, length: int, tokens: int, recipe: str, mode: str, layers: int = 0
) -> dict[str, Any]:
    """All layers: seconds of a micro-batch and of the optimiser, and the peak of memory beside its plan."""
    import torch

    from samebit.bench import training
    from samebit.train.memory import GIB, plan_memory

    config = training.shape_of(model, layers)
    settings = training.settings(tokens, length, recompute_of(recipe, mode))
    torch.cuda.reset_peak_memory_stats()
    arm = training.Arm(
        training.random_decoder(config, recipe),
        training.random_groups(config, tokens // length, length),
        settings,
    )
    optimizer = arm.trainer.optimizer
    arm.run(config.layers)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    times = [training.timed(lambda: arm.run(config.layers)) for _ in range(3)]
    peak = torch.cuda.max_memory_allocated()
    return {
        "micro_ms": statistics.median(times),
        "optimizer_ms": training.timed(optimizer.step),
        "refresh_ms": training.timed(arm.model.refresh),
        "peak_gib": peak / GIB,
        "planned_gib": plan_memory(config, arm.model.plan, settings).total / GIB,
        "tokens": tokens,
        "recompute": settings.train.recompute,
    }


def warm_step(model: str, recipe: str, sequences: int, length: int) -> None:
    """Compile what `real_step` runs, over two layers and few tokens."""
    from samebit.bench.whole import RealStep

    RealStep(model, recipe, sequences, length, layers=2).run(answer=64)


def real_step(model: str, recipe: str, sequences: int, length: int, runs: int) -> dict[str, Any]:
    """One whole RL step (the median of `runs`) of real engine and trainer, random weights."""
    from samebit.bench.whole import RealStep

    step = RealStep(model, recipe, sequences, length)
    step.run(answer=64)
    found = sorted((step.run() for _ in range(runs)), key=lambda fields: fields["step_s"])
    return {**found[runs // 2], "runs": runs}
