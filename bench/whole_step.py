"""The whole RL step of 256 sequences, integrated from measured parts: decode grid and training phase.

    python -m bench.whole_step bench/results/h200/rollout.json bench/results/h200/step.json OUT.json

Nothing is measured here. Decode: milliseconds of a decode step at 256 sequences, a straight line in the mean
context through two measured contexts or more, or the one measured context where it is the step's own mean.
Prompts are priced as a third of their training time (a forward). Training: phase_s of the nearest measured
length, by tokens. What is missing is left out, and each row says what it was made of.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

SEQUENCES = 256
STEPS = ((128, 512), (128, 1920), (128, 8064))
"""(prompt, completion) tokens."""
RECIPES = ("bf16-fast", "bf16", "fp8", "fp8-kv")


def _rows(path: str) -> dict[str, dict[str, Any]]:
    return {r["row"]: r for r in json.loads(Path(path).read_text(encoding="utf-8"))["rows"]}


def decode_ms(grid: dict[str, Any], model: str, recipe: str, context: float) -> float | None:
    """Of one step at 256 sequences and a mean context, from what was measured; None where nothing fits."""
    prefix = f"decode/{model}/{recipe}/{SEQUENCES}x"
    points = {int(n[len(prefix) :]): r["ms"] for n, r in grid.items() if n.startswith(prefix)}
    if context in points:
        return points[int(context)]
    if len(points) < 2:
        return None
    slope, base = statistics.linear_regression(list(points), list(points.values()))
    return base + slope * context


def training_s(
    parts: dict[str, Any], model: str, recipe: str, length: int
) -> tuple[float, str] | None:
    """(seconds of 256 sequences of `length` tokens, the row it comes from)."""
    held = {
        abs(r["length"] - length): n
        for n, r in parts.items()
        if n.startswith(f"micro/{model}/") and f"{recipe}_phase_s" in r and r["recompute"] == "none"
    }
    if not held:
        return None
    name = held[min(held)]
    return parts[name][f"{recipe}_phase_s"] * length / parts[name]["length"], name


def integrate(grid: dict[str, Any], parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Every step and recipe that has both parts; ratios over bf16-fast, or over bf16 where that is missing."""
    rows: list[dict[str, Any]] = []
    for model in ("qwen3-8b", "llama-3.1-8b"):
        for prompt, answer in STEPS:
            found: dict[str, dict[str, Any]] = {}
            for recipe in RECIPES:
                step = decode_ms(grid, model, recipe, prompt + answer / 2)
                training = training_s(parts, model, recipe, prompt + answer)
                if step is None or training is None:
                    continue
                prefill = training[0] * prompt / (prompt + answer) / 3
                rollout = answer * step / 1e3 + prefill
                found[recipe] = {
                    "row": f"whole step/{model}/{SEQUENCES}x({prompt}+{answer})/{recipe}",
                    "rollout_s": rollout,
                    "training_s": training[0],
                    "step_s": rollout + training[0],
                    "integrated from": f"decode at {SEQUENCES} sequences; {training[1]}",
                }
            for recipe, row in found.items():
                for base in ("bf16-fast", "bf16"):
                    if base in found and base != recipe:
                        row[f"over_{base}"] = found[base]["step_s"] / row["step_s"]
            rows += found.values()
    return rows


def main() -> None:
    """See the module."""
    grid, parts, out = sys.argv[1:]
    rows = integrate(_rows(grid), _rows(parts))
    rows = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in r.items()} for r in rows
    ]
    text = ",\n".join(" " + json.dumps(r) for r in rows)
    Path(out).write_text('{"rows": [\n' + text + "\n]}\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
