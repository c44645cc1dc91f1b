"""Runs one row, and compiles many in advance."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

from samebit.bench import api


def measure(case: api.Case) -> dict[str, Any]:
    """The fields of one row: medians of interleaved replays, or what the case measures itself."""
    import torch

    from samebit.bench.timing import medians

    try:
        if case.measure is not None:
            return case.measure()
        assert case.prepare is not None
        prepared = case.prepare()
        times = medians(prepared.calls, prepared.inner, prepared.eager)
        fields = prepared.record(times)
        return {**{f"{name}_us": value for name, value in times.items()}, **fields}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def compile_in_advance(
    suites: Sequence[str], rows: Sequence[str], workers: int, seconds: float
) -> None:
    """Fill the compiler's cache from several processes: a kernel takes seconds, and there are many."""
    workers = min(workers, len(rows))
    if workers < 2:
        return
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_launch_once, args=(suites, rows[i::workers]), daemon=True)
        for i in range(workers)
    ]
    end = time.monotonic() + seconds
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
        process.join()


def _launch_once(suites: Sequence[str], rows: Sequence[str]) -> None:
    import torch

    for case in (c for name in suites for c in api.load_suite(name).cases()):
        if case.name not in rows:
            continue
        try:
            if case.prepare is not None:
                for rotation in case.prepare().calls.values():
                    rotation[0]()
            elif case.warm is not None:
                case.warm()
            torch.cuda.synchronize()
        except Exception:
            # the row fails again, and is named, where it is measured
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
