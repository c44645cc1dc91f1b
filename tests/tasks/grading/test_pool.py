"""Grading processes: limits per item, replacement, threads, faults from outside."""

from __future__ import annotations

import os
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from samebit.tasks.grading.pool import Limits, Pool

GRADER = textwrap.dedent("""
    import ctypes, os, signal, socket, subprocess, time

    def setup(value):
        print("text at the start", flush=True)
        if value == "broken":
            raise OSError("cannot set up")

    def grade(item):
        kind, value = item
        if kind == "value":
            return value
        if kind == "spin":
            while True:
                pass
        if kind == "power":
            return 9 ** 9 ** 9
        if kind == "sleep":
            time.sleep(60)
        if kind == "memory":
            return len(bytearray(1 << 36))
        if kind == "raise":
            raise KeyError("a mistake of the grader")
        if kind == "exit":
            os._exit(3)
        if kind == "segfault":
            os.abort()
        if kind == "print":
            print("text among the answers", flush=True)
            return 1.0
        if kind == "attack":
            try:
                {"socket": lambda: socket.socket(), "system": lambda: os.system("true"),
                 "popen": lambda: subprocess.Popen(["true"]), "write": lambda: open(value[1], "w"),
                 "dlopen": lambda: ctypes.CDLL("libc.so.6")}[value[0]]()
            except (PermissionError, OSError):
                return 0.0
            return 1.0
""")

LIMITS = Limits(cpu_seconds=0.3, wall_seconds=1.5, memory_mebibytes=256)


@pytest.fixture
def make_pool(tmp_path, monkeypatch):
    (tmp_path / "pool_grader.py").write_text(GRADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = []

    def make(setup=None, workers=2, limits=LIMITS):
        pools.append(Pool("pool_grader", setup, workers=workers, limits=limits))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def values(pool, numbers):
    return [o.value for o in pool.grade([("value", number) for number in numbers])]


def test_each_kind_of_failure_costs_its_item_only(make_pool, tmp_path):
    pool = make_pool()
    bad = {
        "spin": "timeout",
        "power": "timeout",
        "sleep": "timeout",
        "memory": "memory",
        "raise": "crash",
        "exit": "crash",
        "segfault": "crash",
    }
    items = []
    for i, kind in enumerate(bad):
        items += [("value", float(10 * i + j)) for j in range(5)] + [(kind, None)]
    items.append(("value", None))
    outcomes = pool.grade(items)
    for item, outcome in zip(items, outcomes, strict=True):
        assert outcome.kind == bad.get(item[0], "score"), item
        assert outcome.value == item[1]
    assert "a mistake of the grader" in outcomes[5 + 4 * 6].detail
    assert len(pool.process_ids()) == 2
    assert values(pool, [1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("spin", Limits(cpu_seconds=0.2, wall_seconds=100.0)),
        ("power", Limits(cpu_seconds=0.2, wall_seconds=100.0)),
        ("sleep", Limits(cpu_seconds=100.0, wall_seconds=1.0)),
    ],
)
def test_processor_time_and_wall_clock_are_separate_limits(make_pool, kind, limits):
    pool = make_pool(workers=1, limits=limits)
    outcomes = pool.grade([("value", 1.0), (kind, None), ("value", 2.0)])
    assert [(o.kind, o.value) for o in outcomes] == [
        ("score", 1.0),
        ("timeout", None),
        ("score", 2.0),
    ]


def test_what_a_grader_prints_does_not_mix_with_its_answers(make_pool):
    assert [o.value for o in make_pool(workers=1).grade([("print", None)] * 3)] == [1.0] * 3


def test_a_worker_can_neither_connect_nor_start_nor_write(make_pool, tmp_path):
    target = str(tmp_path / "written")
    attacks = ["socket", "system", "popen", "write", "dlopen"]
    outcomes = make_pool(workers=1).grade([("attack", (name, target)) for name in attacks])
    assert [o.value for o in outcomes] == [0.0] * len(attacks)
    assert not os.path.exists(target)


def test_eight_threads_get_their_own_answers(make_pool):
    pool = make_pool()
    with ThreadPoolExecutor(8) as threads:
        results = list(
            threads.map(lambda k: values(pool, [float(k * 100 + i) for i in range(40)]), range(8))
        )
    assert results == [[float(k * 100 + i) for i in range(40)] for k in range(8)]


def test_workers_killed_from_outside_are_replaced_and_no_verdict_is_lost(make_pool):
    pool = make_pool()
    assert values(pool, [1.0, 2.0]) == [1.0, 2.0]
    before = pool.process_ids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert values(pool, [float(i) for i in range(50)]) == [float(i) for i in range(50)]
    assert not set(before) & set(pool.process_ids())


def test_workers_that_cannot_start_say_why(make_pool):
    with pytest.raises(RuntimeError, match="cannot set up"):
        make_pool(setup="broken", workers=1).grade([("value", 1.0)])


def test_close_ends_the_processes_and_a_later_call_starts_new_ones(make_pool):
    pool = make_pool(workers=1)
    values(pool, [1.0])
    (pid,) = pool.process_ids()
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert values(pool, [2.0]) == [2.0]


def test_empty_and_impossible_settings(make_pool):
    assert make_pool().grade([]) == []
    with pytest.raises(ValueError, match="grading workers = 0"):
        Pool("pool_grader", workers=0)
    with pytest.raises(ValueError, match="cpu_seconds = 0"):
        Limits(cpu_seconds=0)
