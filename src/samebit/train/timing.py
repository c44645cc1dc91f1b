"""Seconds of the parts of an update. On CUDA they are taken between events, so that nothing waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PartTimer:
    """`with timer("forward"): ...`; parts with one name add up. `seconds` waits for the device once."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if self.on_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((part, start, end))
            return
        begun = time.perf_counter()
        yield
        self._host[part] = self._host.get(part, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """time/<part>_s of everything timed so far."""
        found = dict(self._host)
        for part, start, end in self._events:
            end.synchronize()
            found[part] = found.get(part, 0.0) + start.elapsed_time(end) / 1e3
        return {f"time/{part}_s": value for part, value in found.items()}
