"""Host microseconds a decode step of the engine's loop costs, without a model: what runs beside the GPU.

    python bench/engine_host.py [--out bench/results/cpu/engine_host.json]

The step is replaced by one that draws a fixed token at once, so a turn is bookkeeping alone: pages,
metadata, reading, ending samples. A GPU's step must take longer than this for the host not to be waited for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from samebit.engine.cache import PagePool, PrefixCache
from samebit.engine.decode import DecodeState, EagerStep
from samebit.engine.pipeline import Pipeline
from samebit.engine.requests import SampleState
from samebit.engine.scheduler import Scheduler
from samebit.reference.sampling import Transform
from samebit.types import Prompt

PAGE, PROMPT, NEW = 128, 200, 400


class NoStep(EagerStep):
    """Draws id 5 with log-prob -1 in every row."""

    def __init__(self, state: DecodeState):
        self.state = state
        state.out[:, 0], state.out[:, 1] = 5, torch.tensor(-1.0).view(torch.int32)

    def run(self, bucket: int, bound: int, transform: Transform) -> None:
        """Nothing: the outputs are there."""


class NoModel:
    """A model whose forward and draw cost nothing."""

    config = SimpleNamespace(vocab_size=1000, max_position=4096)
    device, version = torch.device("cpu"), 1

    def __call__(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        """Hidden rows."""
        return torch.zeros(len(ids), 8)

    def draw(self, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Id 5, log-prob -1."""
        return torch.full((len(hidden),), 5), torch.full((len(hidden),), -1.0)


def measure(rows: int) -> dict[str, float]:
    """Microseconds of a turn while every row decodes, and of the turn that ends all samples."""
    states = [
        SampleState(Prompt(str(i), tuple(range(PROMPT)), ""), i, NEW, 0, frozenset())
        for i in range(rows)
    ]
    pool = PagePool(SimpleNamespace(copy=lambda *_: None), rows * 6, PAGE, 1)  # type: ignore[arg-type]
    scheduler = Scheduler(pool, PrefixCache(pool), rows, 8192)
    for state in states:
        scheduler.add(state)
    model: Any = NoModel()
    step = NoStep(DecodeState(rows, model.config.max_position, PAGE, model.device))
    pipeline = Pipeline(model, scheduler, step, Transform(), states)
    times: list[tuple[float, int]] = []
    while scheduler.waiting or scheduler.running:
        begun = time.perf_counter()
        _, ended = pipeline.turn()
        times.append((time.perf_counter() - begun, ended))
    assert all(len(s.ids) == NEW for s in states)
    steady = [t for t, ended in times[3:] if not ended]
    return {
        "sequences": rows,
        "us_per_step_median": round(statistics.median(steady) * 1e6, 1),
        "us_per_step_p99": round(sorted(steady)[int(len(steady) * 0.99)] * 1e6, 1),
        "us_of_the_step_that_ends_all": round(max(t for t, ended in times if ended) * 1e6, 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="bench/results/cpu/engine_host.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(rows) for rows in (1, 64, 256, 1024)]
    Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
