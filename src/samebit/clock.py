"""Seconds a step spends in each of its phases."""

from __future__ import annotations

import time


class Clock:
    """Seconds by phase, summed within a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}
        self._open: tuple[str, float] | None = None

    def __call__(self, phase: str) -> Clock:
        self._open = (phase, time.perf_counter())
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        assert self._open is not None
        phase, started = self._open
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    @property
    def open_phase(self) -> str:
        """The phase entered last."""
        return "rollout" if self._open is None else self._open[0]

    def metrics(self) -> dict[str, float]:
        """time/<phase>_s and time/step_s."""
        out = {f"time/{phase}_s": seconds for phase, seconds in self.phases.items()}
        out["time/step_s"] = time.perf_counter() - self.started
        return out
