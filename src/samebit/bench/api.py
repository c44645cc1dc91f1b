"""What a suite defines, and the run over its rows: time limit, records, progress.

A suite is one module of `samebit.bench.suites` with GROUP, ABOUT and `cases()`; listing cases imports
neither triton nor a kernel. Correctness is the tests' business: nothing here compares results.
"""

from __future__ import annotations

import fnmatch
import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Call = Callable[[], object]
Records = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Rows by suite and name, as they are in the folder of the records."""
NEAR = 0.05
"""How far apart, in shares of their rooflines, the two arms of a ratio may be."""
GROUPS = ("kernels", "rollout", "step")


@dataclass
class Prepared:
    """Operands of one row on the card, ready to be timed.

    calls: what is compared, by name, each as a rotation of calls over different operands so that no
    cache holds them. record: medians in microseconds by name -> the row's fields. eager: names that a
    CUDA graph cannot hold. inner: rotations a graph holds.
    """

    calls: dict[str, list[Call]]
    record: Callable[[dict[str, float]], dict[str, Any]]
    eager: tuple[str, ...] = ()
    inner: int = 2


@dataclass(frozen=True)
class Case:
    """One row. Either `prepare`, whose calls are interleaved, or `measure`, which does all of it, or
    `derive`, which makes it of other rows and needs no card.

    warm: launches every kernel that `measure` will, in little memory; run by processes that compile.
    """

    name: str
    prepare: Callable[[], Prepared] | None = None
    measure: Callable[[], dict[str, Any]] | None = None
    warm: Callable[[], object] | None = None
    derive: Callable[[Records], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Target:
    """A line of the target table: which rows, which of their fields, and how they become one number.

    rows: whole names or patterns, joined by |. more: larger is better. least: no single row may be worse
    (0: no such bound). reduce: `geomean` or `worst`. over: another row's name, whose field is divided by
    the row's own (both times: how many times faster). near: a field with the share of the roofline, which
    both rows have; without `over`, the field of a row that is a ratio already, with the difference of its
    arms' shares. Arms that are not
    `comparable` by it have no verdict.
    """

    what: str
    suite: str
    rows: str
    field: str
    must: float
    aim: float
    unit: str = "x"
    more: bool = True
    least: float = 0.0
    reduce: str = "geomean"
    over: str = ""
    near: str = ""


@dataclass
class Run:
    """What a run did: rows measured, those that failed with their errors, those without time."""

    measured: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def comparable(points: float) -> bool:
    """The one rule for a ratio of two arms: their shares of the roofline are within `NEAR`.

    points: share of the first less that of the second; NaN, where one is not known, is no.
    """
    return abs(points) <= NEAR


def suite_names() -> list[str]:
    """Every suite: the files of `samebit.bench.suites`."""
    package = importlib.import_module("samebit.bench.suites")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_")


def load_suite(name: str) -> ModuleType:
    """The suite called `name`."""
    return importlib.import_module(f"samebit.bench.suites.{name}")


def suites_of(name: str) -> dict[str, ModuleType]:
    """The suites that `samebit bench NAME` runs: a group's, or one; ValueError naming what there is."""
    suites = {n: load_suite(n) for n in suite_names()}
    chosen = {n: s for n, s in suites.items() if name in (n, s.GROUP)}
    if not chosen:
        raise ValueError(
            f"no bench {name!r}; groups: {', '.join(GROUPS)}; suites: {', '.join(suites)}"
        )
    return chosen


def file_name(name: str, suite: ModuleType) -> str:
    """Where a suite's records are, in the folder of the records."""
    return f"{name}.json" if name == suite.GROUP else f"{suite.GROUP}_{name}.json"


def select(suite: ModuleType, patterns: Sequence[str]) -> list[Case]:
    """The suite's cases whose name matches one of the patterns (all without any)."""
    cases = list(suite.cases())
    return [c for c in cases if not patterns or any(matches(c.name, p) for p in patterns)]


def aimed(suite: ModuleType, cases: Iterable[Case]) -> list[Case]:
    """The cases that a target of the suite is about."""
    targets = getattr(suite, "TARGETS", ())
    patterns = [p for t in targets for p in (*t.rows.split("|"), t.over) if p]
    return [c for c in cases if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]


def matches(name: str, pattern: str) -> bool:
    """Whether a row's name holds `pattern`, or matches it where it has wildcards."""
    wild = any(c in pattern for c in "*?[")
    return fnmatch.fnmatchcase(name, pattern) if wild else pattern in name


def run_cases(
    cases: Iterable[Case],
    measure: Callable[[Case], dict[str, Any]],
    seconds: float,
    finished: Callable[[Case, dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """Measure case by case until `seconds` have passed; a case that fails is named and stops no other."""
    run, end = Run(), clock() + seconds
    for case in cases:
        if clock() >= end and case.derive is None:
            run.left.append(case.name)
            continue
        try:
            record = measure(case)
        except Exception as error:
            # one line for one of many rows: the rest of the table is still worth its time
            run.failed[case.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        finished(case, record)
        run.measured.append(case.name)
    return run


def every_case(
    suites: dict[str, ModuleType], patterns: Sequence[str], only_aimed: bool = False
) -> Iterator[tuple[str, Case]]:
    """(suite, case) of all selected rows; ValueError when nothing matches."""
    found = []
    for name, suite in suites.items():
        cases = select(suite, patterns)
        found += [(name, case) for case in (aimed(suite, cases) if only_aimed else cases)]
    if not found:
        raise ValueError(
            f"--rows {','.join(patterns)}: no row of {', '.join(suites)} matches; --list shows them"
        )
    yield from found
