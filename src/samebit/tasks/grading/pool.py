"""A pool of grading processes: hard limits per item, replacement of what had to be killed.

Workers are fresh interpreters, never forks, so the pool works from any thread and under any test
runner, whatever the calling process holds.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

CHUNK = 16
START_SECONDS = 120.0
MAX_FAILED_STARTS = 3

_BOOT = "import sys; sys.path[:] = {path!r}; from samebit.tasks.grading.worker import main; main()"


@dataclass(frozen=True)
class Outcome:
    """What became of one item.

    score: the grader returned `value` (None: it abstained). timeout, memory: the item ran into its
    limit, its own fault. crash: the grader failed; there is no verdict, and `detail` says why.
    """

    kind: Literal["score", "timeout", "memory", "crash"]
    value: float | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one item. Processor time decides; wall-clock time catches what only waits."""

    cpu_seconds: float = 1.0
    wall_seconds: float = 20.0
    memory_mebibytes: int = 1024

    def __post_init__(self) -> None:
        for key in ("cpu_seconds", "wall_seconds", "memory_mebibytes"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} = {getattr(self, key)}: expected more than 0.")


class _Worker:
    """One process and what it was given: `pending` holds the indices not yet answered."""

    def __init__(self, module: str, setup: Any, limits: Limits) -> None:
        self.pending: deque[int] = deque()
        self.ready = False
        self.leaving = False
        self.deadline = time.monotonic() + START_SECONDS
        self.buffer = b""
        self.errors = tempfile.TemporaryFile()
        path = [entry or os.getcwd() for entry in sys.path]
        # One thread each: the pool is the parallelism. A fixed hash seed: the same verdict again.
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(path=path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **threads, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )
        self.send(
            {
                "module": module,
                "setup": setup,
                "cpu_seconds": limits.cpu_seconds,
                "memory_bytes": limits.memory_mebibytes << 20,
            }
        )

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, request: Any) -> None:
        data = pickle.dumps(request)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(struct.pack("<Q", len(data)) + data)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # It has died: the end of its output says so, and that is handled in one place.

    def receive(self) -> list[Any] | None:
        """Return the complete lines that have come, None once the process has closed its end."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> int:
        """Reap, by force where it still runs; return the exit status, negative for a signal."""
        if self.process.poll() is None:
            self.process.kill()
        status = self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass  # Unsent bytes to a dead process.
        return status

    def wait_briefly(self) -> None:
        try:
            self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            pass  # `end` kills it.

    def error_text(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-2000:].decode(errors="replace").strip()


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
        worker.errors.close()
    workers.clear()


class Pool:
    """Grades items with `module.grade(item)` after `module.setup(setup)` in each worker."""

    def __init__(
        self, module: str, setup: Any = None, *, workers: int = 2, limits: Limits | None = None
    ) -> None:
        if workers < 1:
            raise ValueError(f"grading workers = {workers}: expected 1 or more.")
        self.limits = limits or Limits()
        self._module, self._setup, self._count = module, setup, workers
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._failed_starts = 0
        self._retried: set[int] = set()
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def process_ids(self) -> list[int]:
        """Return the ids of the workers now alive."""
        return [w.process.pid for w in self._workers if w.process.poll() is None]

    def close(self) -> None:
        """End the workers; the next `grade` starts new ones."""
        with self._lock:
            _end_all(self._workers)

    def grade(self, items: Sequence[Any]) -> list[Outcome]:
        """Grade every item; the result does not depend on the other items or on their order.

        Raises RuntimeError where workers cannot even start.
        """
        if not items:
            return []
        with self._lock:
            try:
                return self._grade(items)
            except BaseException:
                # Interrupted half-way: answers still under way would be taken for later items'.
                _end_all(self._workers)
                raise

    def _grade(self, items: Sequence[Any]) -> list[Outcome]:
        todo = deque(range(len(items)))
        done: dict[int, Outcome] = {}
        self._retried.clear()
        for worker in [w for w in self._workers if w.process.poll() is not None]:
            # Died while idle (killed from outside): no item is to blame.
            self._bury(worker, todo, done, timed_out=False)
        while len(done) < len(items):
            self._replace_dead()
            for worker in self._workers:
                if worker.ready and not worker.pending and todo:
                    # Small chunks near the end keep all workers busy.
                    size = max(1, min(CHUNK, len(todo) // self._count))
                    worker.pending.extend(todo.popleft() for _ in range(size))
                    worker.send([items[index] for index in worker.pending])
                    worker.deadline = time.monotonic() + self.limits.wall_seconds
            self._wait(todo, done)
        self._replace_dead()
        return [done[index] for index in range(len(items))]

    def _replace_dead(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._module, self._setup, self.limits))

    def _wait(self, todo: deque[int], done: dict[int, Outcome]) -> None:
        busy = [w for w in self._workers if w.pending or not w.ready]
        remaining = min(w.deadline for w in busy) - time.monotonic()
        readable, _, _ = select.select(busy, [], [], max(0.0, remaining))
        for worker in readable:
            lines = worker.receive()
            if lines is None:
                self._bury(worker, todo, done, timed_out=False)
                continue
            for line in lines:
                if line == "ready":
                    worker.ready = True
                    self._failed_starts = 0
                    continue
                done[worker.pending.popleft()] = Outcome(*line)
                worker.leaving = line[0] == "memory"
                worker.deadline = time.monotonic() + self.limits.wall_seconds
        now = time.monotonic()
        for worker in busy:
            if worker not in readable and worker in self._workers and worker.deadline <= now:
                self._bury(worker, todo, done, timed_out=True)

    def _bury(
        self, worker: _Worker, todo: deque[int], done: dict[int, Outcome], *, timed_out: bool
    ) -> None:
        self._workers.remove(worker)
        if not timed_out:
            # It has closed its end, so it is on its way out: its own status is what counts.
            worker.wait_briefly()
        status = worker.end()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._failed_starts = 0
                raise RuntimeError(
                    f"grading workers do not start (status {status}): {worker.error_text()}"
                )
        worker.errors.close()
        if worker.pending and not worker.leaving:
            index = worker.pending.popleft()
            if timed_out or status == -signal.SIGPROF:
                done[index] = Outcome("timeout", detail="time limit")
            elif index in self._retried:
                done[index] = Outcome("crash", detail=f"the worker ended with status {status}")
            else:
                # Once more, at the head of the next chunk: a kill from outside is not its fault.
                self._retried.add(index)
                worker.pending.appendleft(index)
        # The rest of its chunk has not been looked at yet.
        todo.extendleft(reversed(worker.pending))
