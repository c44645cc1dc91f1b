"""The process that grades: reads items, answers each at once, and may be killed at any moment.

Requests come pickled from the parent (which made them); answers go back as JSON lines, because
nothing that has touched a completion is ever unpickled. Each item runs under a timer of processor
time whose signal ends the process in any code, C loops included, and under a limit of memory.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

_REFUSED_EVENTS = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.",
    "ctypes.dlopen",
    "pty.spawn",
    "urllib.",
)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED_EVENTS):
        raise PermissionError(f"grading workers may not use {event}")
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else 0
        if writes or (isinstance(mode, str) and any(letter in mode for letter in "wax+")):
            raise PermissionError("grading workers may not write files")


def read_request(stream: BinaryIO) -> Any:
    """Read one length-prefixed pickle; None at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0]))


def _lock_down(memory_bytes: int) -> None:
    with open("/proc/self/statm") as status:
        used = int(status.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.addaudithook(_refuse)


def _grade_one(grade: Any, item: Any, cpu_seconds: float) -> tuple[str, float | None, str]:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        value = grade(item)
        return "score", None if value is None else float(value), ""
    except MemoryError:
        return "memory", None, "memory limit"
    except Exception as error:
        return "crash", None, f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Serve until the parent closes the pipe."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # What a library prints must not end up among the answers.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An ignored or blocked signal would be inherited, and with it the time limit would be gone.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    start = read_request(requests)
    if start is None:
        return
    module = importlib.import_module(start["module"])
    module.setup(start["setup"])
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    _lock_down(start["memory_bytes"])
    answers.write(b'"ready"\n')
    while (items := read_request(requests)) is not None:
        for item in items:
            outcome = _grade_one(module.grade, item, start["cpu_seconds"])
            answers.write(json.dumps(outcome).encode() + b"\n")
            if outcome[0] == "memory":
                # What the limit hit may be left half-done: a fresh process takes over.
                os._exit(0)
