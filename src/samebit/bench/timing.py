"""Time on the card: medians of CUDA-graph replays, the compared calls interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 9


def capture(calls: Sequence[Callable[[], object]], inner: int) -> Callable[[], None]:
    """A graph of `inner` rounds of the calls, warmed up; returns its replay."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def medians(
    calls: dict[str, list[Callable[[], object]]],
    inner: int = 2,
    eager: Sequence[str] = (),
    replays: int = REPLAYS,
) -> dict[str, float]:
    """Median microseconds of one call, by name; one replay of each name in turn, `replays` times."""
    runs: dict[str, tuple[Callable[[], object], int]] = {}
    for name, rotation in calls.items():
        if name in eager:
            rotation[0]()
            runs[name] = (rotation[0], 1)
        else:
            runs[name] = (capture(rotation, inner), inner * len(rotation))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays):
        for name, (run, count) in runs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3 / count)
    return {name: statistics.median(values) for name, values in times.items()}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal numbers on the card: real data draws more power than zeros."""
    return torch.randn(*shape, device="cuda").to(dtype)


def rotation(bytes_each: int, most: int = 16, least: int = 2) -> int:
    """How many copies of an operand defeat a 50 MB cache."""
    return max(least, min(most, 300_000_000 // max(bytes_each, 1) + 1))
