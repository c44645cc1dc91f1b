"""Seconds a step spends in each of its phases."""

from __future__ import annotations

import sys
import time


class Clock:
    """Seconds by phase, summed within a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}
        self._open: tuple[str, float] | None = None
        self._compiled_s = _compiled_s()

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
        """time/<phase>_s and time/step_s; on a GPU time/compile_s, which other phases hold."""
        out = {f"time/{phase}_s": seconds for phase, seconds in self.phases.items()}
        out["time/step_s"] = time.perf_counter() - self.started
        compiled = _compiled_s()
        if compiled is not None:
            out["time/compile_s"] = compiled - (self._compiled_s or 0.0)
        return out


def _compiled_s() -> float | None:
    """Seconds that kernels' first launches have taken; None where none are launched."""
    launch = sys.modules.get("samebit.kernels.launch")  # not to be imported for this
    return launch.first_launches_s() if launch is not None and launch.is_known() else None
