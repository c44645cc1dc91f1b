"""SIGTERM and SIGINT as requests: the run leaves with a checkpoint, between two whole states.

| signal | what happens | exit code |
| --- | --- | --- |
| SIGTERM | rollout, grading or evaluation in progress is dropped, an update is finished; checkpoint | 143 |
| SIGINT | the step is finished; checkpoint | 130 |
| a second one of either | the process leaves at once; the last checkpoint, if any, stands | 143, 130 |
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from samebit.errors import RunLeft
from samebit.ranks import ALONE, Ranks

_SAID = {
    signal.SIGINT: "\nfinishing this step, then leaving with a checkpoint (again: leave now{loss})\n",
    signal.SIGTERM: "\nSIGTERM: leaving with a checkpoint\n",
}


def lost_steps(finished: int, saved: int) -> str:
    """What leaving at once loses, for people; "" for nothing. saved: the last checkpoint's step, 0: none."""
    if not (count := finished - saved):
        return ""
    steps = f"the {count} finished step{'s' if count > 1 else ''}"
    which = "since the last checkpoint" if saved else "(all there are: no checkpoint yet)"
    return f"{steps} {which} {'are' if count > 1 else 'is'} lost"


class Signals:
    """Handlers for the time of a `with` block (main thread only; elsewhere nothing is installed).

    loss: says what leaving at once loses, "" for nothing but the step in progress; called in a handler.
    """

    def __init__(self, loss: Callable[[], str] = lambda: "") -> None:
        self._loss = loss
        self._asked: int | None = None
        self._shields = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _SAID:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            kept = self._loss() or "the last checkpoint stands"
            raise RunLeft(f"left at once; {kept}", 128 + number, at_once=True)
        self._asked = number
        loss = self._loss()
        said = _SAID[signal.Signals(number)].format(loss=f"; {loss}" if loss else "")
        # no lock may be taken in a handler, so the console's own writer is not used
        os.write(2, said.encode())
        if number == signal.SIGTERM and not self._shields:
            raise RunLeft("left on SIGTERM", 128 + number)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """A block that a first SIGTERM does not interrupt; it leaves when the block has ended."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._asked == signal.SIGTERM and not self._shields:
            raise RunLeft("left on SIGTERM", 128 + signal.SIGTERM)

    def leave_if_asked(self, ranks: Ranks = ALONE) -> None:
        """Called between steps: raises RunLeft when a signal has come, to any process of the run."""
        asked = [number for number in ranks.gather(self._asked) if number is not None]
        if asked:
            raise RunLeft(f"left on {signal.Signals(asked[0]).name}", 128 + asked[0])

    def leave_together(self, ranks: Ranks) -> None:
        """Before an update, which needs all processes: RunLeft where a SIGTERM has come to any of them."""
        if ranks.size > 1 and signal.SIGTERM in ranks.gather(self._asked):
            raise RunLeft("left on SIGTERM", 128 + signal.SIGTERM)
