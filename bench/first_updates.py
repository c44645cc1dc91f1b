"""Why the log-probs of a mixed recipe part at the first update: which function follows the masters?

    python bench/first_updates.py --out docs/results/first_updates.json

SmolLM2-135M learns additions (recipes/h200_addition.toml) for a few steps under fp8-rollout, on the
CPU, about twelve minutes. After each update: how far weights have moved with their masters since the
start (as a projection: 1 is as far, 0 not at all), and how far the log-probs of sixteen answers of the
first step have moved, for the BF16 forward that is trained and the FP8 forward that samples. A
checkpoint's masters lie on the BF16 grid; the second run first moves each by a random part of its
rounding interval, so that every BF16 value starts as the same number.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samebit.bench.records import git_commit
from samebit.config_io import load
from samebit.loop import Run
from samebit.models.load import named_masters
from samebit.operand import QuantizedWeight
from samebit.reference.quantize import dequantize_weight
from samebit.reporter import Reporter
from samebit.trace import training_side

RECIPE_FILE = Path(__file__).parents[1] / "recipes" / "h200_addition.toml"
SIDES = {"bf16": "train", "fp8": "rollout"}
SHOWN = ("mismatch/logp_abs_mean", "mismatch/logp_abs_max", "rl/entropy", "reward/mean")


@torch.no_grad()
def off_the_grid(model: Any) -> float:
    """Move every master within the interval that rounds to its BF16 value; the share that moved."""
    generator = torch.Generator().manual_seed(1)
    moved = total = 0
    for master in named_masters(model).values():
        grid = master.bfloat16()
        assert torch.equal(grid.float(), master), "the masters are BF16 values at the start"
        step = torch.exp2(torch.floor(torch.log2(master.abs())) - 7)
        part = torch.rand(master.shape, generator=generator) - 0.5
        new = master + torch.where(master == 0, 0.0, part * step)
        master.copy_(torch.where(new.bfloat16() == grid, new, master))
        moved += int((master != grid.float()).sum())
        total += master.numel()
    model.refresh()
    return moved / total


def copy_of(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight that later refreshes leave alone."""
    scale = None if weight.scale is None else weight.scale.clone()
    return replace(weight, codes=weight.codes.clone(), scale=scale, _derived={})


class Watch:
    """The weights and the log-probs of some answers at the start, to measure later ones against."""

    def __init__(self, run: Run) -> None:
        self.model = run.model
        self.linears = dict(run.model.linears())
        self.masters = {path: m.master.detach().clone() for path, m in self.linears.items()}
        self.start = {
            (side, path): copy_of(m.weights[use])
            for side, use in SIDES.items()
            for path, m in self.linears.items()
        }
        self.answers: list[tuple[list[int], int]] = []
        self.logps: dict[str, torch.Tensor] = {}

    def keep(self, groups: Sequence[Any]) -> None:
        """The first answer of every prompt."""
        self.answers = [([*g.prompt.ids, *g.samples[0].ids], len(g.prompt.ids)) for g in groups]
        self.logps = {side: self._logps(use) for side, use in SIDES.items()}

    def _logps(self, use: str) -> torch.Tensor:
        sequences = [ids for ids, _ in self.answers]
        found = training_side(self.model, sequences, digests=False, side=use).logp_T
        parts = found.split([len(ids) for ids in sequences])
        return torch.cat([p[n - 1 : -1] for p, (_, n) in zip(parts, self.answers, strict=True)])

    @torch.no_grad()
    def after_update(self) -> dict[str, Any]:
        """What has moved since the start."""
        entry: dict[str, Any] = {}
        now = {side: self._logps(use) for side, use in SIDES.items()}
        for side, use in SIDES.items():
            along = length = moved = total = 0.0
            for path, module in self.linears.items():
                wanted = (module.master.detach() - self.masters[path]).double()
                before, after = self.start[side, path], module.weights[use]
                got = (dequantize_weight(after) - dequantize_weight(before)).double()
                along += float((wanted * got).sum())
                length += float(wanted.square().sum())
                moved += float((after.codes.float() != before.codes.float()).sum())
                total += got.numel()
            entry[side] = {
                "followed": along / length,
                "codes_moved_share": moved / total,
                "logp_moved_abs_mean": float((now[side] - self.logps[side]).abs().mean()),
            }
        entry["logp_apart_abs_mean"] = float((now["bf16"] - now["fp8"]).abs().mean())
        return entry


def measure(steps: int, grid: bool, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            ("recipe", "fp8-rollout"), ("run.device", "cpu"), ("run.out", f"{folder}/run"),
            ("run.threads", str(threads)), ("eval.every", "0"), ("steps", str(steps)),
        ]  # fmt: skip
        run = Run(load(RECIPE_FILE, options), False, Reporter(quiet=True))
        result: dict[str, Any] = {}
        if not grid:
            result["masters_moved_share"] = off_the_grid(run.model)
        watch, rows = Watch(run), []
        step_of = run.trainer.step

        def step(groups: Sequence[Any]) -> dict[str, float]:
            if not watch.answers:
                watch.keep(groups)
                result["logp_apart_abs_mean"] = float(
                    (watch.logps["bf16"] - watch.logps["fp8"]).abs().mean()
                )
            return step_of(groups)

        run.trainer.step = step  # type: ignore[method-assign]
        for number in range(1, steps + 1):
            metrics = run.one_step()
            row = {"step": number, "metrics": {key: metrics[key] for key in SHOWN}}
            rows.append(row | {"after_its_update": watch.after_update()})
            print(json.dumps(rows[-1]), flush=True)
        run.close()
    return result | {"steps": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    result = {
        "model": "SmolLM2-135M-Instruct", "recipe": "fp8-rollout", "task": RECIPE_FILE.name,
        "commit": git_commit(), "torch": str(torch.__version__), "threads": options.threads,
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "checkpoint": measure(options.steps, True, options.threads),
        "off_the_grid": measure(options.steps, False, options.threads),
    }  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
