"""Compile what some code would launch, and launch nothing.

A row's first launch waits a second or two for each kernel, one after another. Here its launches are
only noted; then they are compiled in an order of the process's own, so that processes which need the
same kernels make different ones first and find the others in the compiler's cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction


class _Noted(Executor):
    """Keeps what it is given until `run`."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future of fn(*args, **kwargs)."""
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, order: int) -> None:
        """Everything noted, shuffled by `order`; an error is the future's."""
        random.Random(order).shuffle(self._jobs)
        for future, job in self._jobs:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
        self._jobs.clear()


@contextmanager
def compile_only(order: int) -> Iterator[None]:
    """Within: Triton kernels are noted instead of launched (results are undefined); then compiled.

    order: seeds the order in which they are. Other device work runs as ever.
    """
    noted, run = _Noted(), JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = note
    try:
        with AsyncCompileMode(noted, ignore_errors=True):
            try:
                yield
            finally:
                noted.run(order)
    finally:
        JITFunction.run = run
