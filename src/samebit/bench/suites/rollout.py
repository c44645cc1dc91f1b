"""Milliseconds of a decode step over (sequences, mean context), of prompts, of a refresh, of whole rollouts.

Random weights, a cache filled with random keys and values, end ids ignored: medians of replays of the
engine's own CUDA graph (embedding, blocks, head, draw). The roofline adds, linear by linear, the larger of
bytes over the read rate and operations over the product rate, and the same for attention; `bound` names the
largest of what the step is made of, launches included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from samebit.bench.api import Case, Target

GROUP = "rollout"
ABOUT = "decode step, prompts, refresh and whole rollouts by model and recipe"

RECIPES = ("bf16-fast", "bf16", "fp8", "fp8-kv", "int8")
POINTS = {
    "qwen3-8b": (
        (1, 1024), (8, 1024), (32, 1200), (128, 384), (256, 384), (128, 1792), (256, 1792),
        (1024, 384), (64, 4160), (128, 4160),
    ),
    "llama-3.1-8b": ((128, 384), (256, 384), (256, 1792), (64, 4160), (128, 4160)),
    "qwen3-0.6b": ((1, 384), (8, 384), (64, 384), (256, 384), (1024, 384)),
    "smollm2-135m": ((1, 384), (8, 384), (64, 384), (256, 384), (1024, 384)),
}  # fmt: skip
"""(sequences, mean context): 128 + 512 tokens have the mean 384, 256 + 3,072 the mean 1,792, 128 + 8,064
the mean 4,160 (the cache holds 64 such in BF16, 128 in FP8)."""

PROMPTS = ((1, 10), (1, 100), (1, 1000), (1, 8000), (8, 1000), (64, 100))
"""(prompts, tokens of each) computed in one forward."""

OUTSIDE_MS = {
    ("bf16", 128, 384): 8.28, ("bf16", 256, 384): 12.92,
    ("fp8", 128, 384): 6.79, ("fp8", 256, 384): 10.48, ("fp8", 256, 1792): 19.4,
}  # fmt: skip
"""vLLM 0.26 on an H200, Qwen3-8B shape, whole steps: BF16, and FP8 weights with FP8 KV (2026-11-29).
Every 8-bit recipe is compared with the second."""

WHOLE = ("bf16-fast", "bf16", "fp8-kv")
"""Recipes whose whole rollouts are measured."""


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
    """refresh/, decode/, prefill/ and answers/model/recipe/...; a model's rows follow another."""
    for model, points in POINTS.items():
        for recipe in RECIPES:
            yield Case(
                f"refresh/{model}/{recipe}",
                measure=lambda m=model, r=recipe: _late().refresh_row(m, r),
            )
            for sequences, context in points:
                yield _decode(model, recipe, sequences, context)
            for prompts, tokens in PROMPTS:
                yield _prefill(model, recipe, prompts, tokens)
            if not model.endswith("8b") and recipe in WHOLE:
                yield from _answers(model, recipe)


def _late() -> Any:
    from samebit.bench import decoding  # triton and the kernels

    return decoding


def _decode(model: str, recipe: str, sequences: int, context: int) -> Case:
    arguments = (model, recipe, sequences, context)

    def measure() -> dict[str, Any]:
        fields = _late().decode_row(*arguments)
        outside = OUTSIDE_MS.get(("bf16" if "bf16" in recipe else "fp8", sequences, context))
        if model == "qwen3-8b" and outside is not None:
            fields |= {"vllm_ms": outside, "over_vllm": outside / fields["ms"]}
        return fields

    return Case(
        f"decode/{model}/{recipe}/{sequences}x{context}",
        measure=measure,
        warm=lambda: _late().compile_step(*arguments),
    )


def _prefill(model: str, recipe: str, prompts: int, tokens: int) -> Case:
    arguments = (model, recipe, prompts, tokens)
    return Case(
        f"prefill/{model}/{recipe}/{prompts}x{tokens}",
        measure=lambda: _late().prefill_row(*arguments),
        warm=lambda: _late().compile_prompts(*arguments),
    )


def _answers(model: str, recipe: str) -> Iterator[Case]:
    def measure(kind: str) -> Callable[[], dict[str, Any]]:
        def found() -> dict[str, Any]:
            from samebit.bench.answers import answers_row

            return answers_row(model, recipe, kind)

        return found

    def warm() -> None:
        _late().compile_prompts(model, recipe, 80, 100)
        for sequences in (256, 64, 8):
            _late().compile_step(model, recipe, sequences, 384)

    for kind in ("at-once", "never", "spread", "parts", "queue"):
        yield Case(f"answers/{model}/{recipe}/{kind}", measure=measure(kind), warm=warm)
