"""`samebit bench`: measure kernels, rollout or a training step on this machine's GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from samebit.bench.targets import LEGEND
from samebit.cli.arguments import Arguments, Option, expect, help_text, parse

USAGE = "samebit bench kernels|rollout|step|SUITE [--rows PATTERN] [--seconds N] [--out DIR]"
ABOUT = (
    "Measures row by row on a Hopper GPU, beside the library and the roofline, and keeps one JSON\n"
    "record a row in DIR: a row measured again replaces its record, so short commands add up. Prints\n"
    "the target table at the end. Correctness is the tests' business, not this command's.\n\n"
    f"Its columns:\n{LEGEND}"
)
OPTIONS = (
    Option("rows", "PATTERN[,PATTERN]", "only rows whose name holds or matches a pattern"),
    Option("targets", "", "only rows that a line of the target table is about"),
    Option("seconds", "N", "start no row after this long (default: 300)"),
    Option("out", "DIR", "folder of the records (default: bench/results/h200)"),
    Option("workers", "N", "processes that compile in advance (default: 8; 0: none)"),
    Option("commit", "ID", "what to record where the source is in no repository"),
    Option("list", "", "print the rows and stop"),
    Option("table", "", "print the target table of the records there are, and measure nothing"),
)


def run(args: Sequence[str]) -> int:
    """Measure; 1 when a row failed."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    (name,) = expect(found, ["kernels|rollout|step|SUITE"], USAGE)
    from samebit.bench import api

    suites = api.suites_of(name)
    patterns = [p for p in found.text("rows").split(",") if p]
    out = Path(found.text("out", "bench/results/h200"))
    if found.flag("list"):
        for suite, case in api.every_case(suites, patterns, found.flag("targets")):
            print(f"{suite:12s} {case.name}")
        return 0
    if found.flag("table"):
        _require_records(suites, out)
        _print_table(suites, out)
        return 0
    cases = list(api.every_case(suites, patterns, found.flag("targets")))
    if any(case.derive is None for _, case in cases):
        _require_gpu(name)
    return _measure(found, suites, cases, out)


def _require_gpu(name: str) -> None:
    import torch

    from samebit.quant.ops import missing_for_cuda

    missing = missing_for_cuda(torch.device("cuda"))
    if missing is not None:
        raise ValueError(
            f"samebit bench {name} measures a Hopper GPU, and here {missing}. --table prints the "
            "records there are; CPU rollout speed is bench/rollout.py's"
        )


def _require_records(suites: dict[str, ModuleType], out: Path) -> None:
    """ValueError naming the folder where it holds none of the suites' records."""
    from samebit.bench import api

    names = [api.file_name(name, suite) for name, suite in suites.items()]
    if not any((out / name).exists() for name in names):
        raise ValueError(
            f"{out.absolute()} holds none of {', '.join(names)}: run in a checkout of the repository, "
            "or name a folder of records with --out"
        )


def _measure(
    found: Arguments, suites: dict[str, ModuleType], cases: list[tuple[str, Any]], out: Path
) -> int:
    from samebit.bench import api, records, runner

    seconds = found.number("seconds", 300)
    workers = found.number("workers", 8, least=0)
    runner.compile_in_advance(list(suites), [case.name for _, case in cases], workers, seconds / 2)
    derived = all(case.derive for _, case in cases)
    about = {} if derived else records.provenance(found.text("commit"))
    file_of = {case.name: out / api.file_name(suite, suites[suite]) for suite, case in cases}

    took: dict[str, float] = {}

    def measure(case: Any) -> dict[str, Any]:
        begun = time.monotonic()
        fields = runner.measure(case) if case.derive is None else case.derive(_records(out))
        took[case.name] = time.monotonic() - begun
        return fields

    def keep(case: Any, fields: dict[str, Any]) -> None:
        record = {"row": case.name, **records.rounded(fields), **({} if case.derive else about)}
        records.add(file_of[case.name], record)
        shown = f"{_short(records.rounded(fields))}  ({took[case.name]:.1f} s)"
        print(f"{case.name:44s} {shown}", flush=True)

    done = api.run_cases((case for _, case in cases), measure, seconds, keep)
    for row, error in done.failed.items():
        print(f"FAILED {row}: {error}")
    if done.left:
        print(f"no time for {len(done.left)} rows, the next of them {done.left[0]}: run again")
    print()
    _print_table(suites, out)
    return 1 if done.failed else 0


def _records(out: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows by suite and name, for rows that are made of others."""
    from samebit.bench import api, records

    files = {name: out / api.file_name(name, api.load_suite(name)) for name in api.suite_names()}
    return {name: records.read(path) for name, path in files.items()}


def _short(fields: dict[str, Any]) -> str:
    shown = [f"{k} {v:g}" for k, v in fields.items() if isinstance(v, float)]
    if "bound" in fields:
        shown.insert(0, f"bound by {fields['bound']}")
    return "  ".join(shown[:10])


def _print_table(suites: dict[str, ModuleType], out: Path) -> None:
    from samebit.bench import api, records, targets

    lines = []
    for name, suite in suites.items():
        held = records.read(out / api.file_name(name, suite))
        known = [case.name for case in suite.cases()]
        lines += [targets.evaluate(t, held, known) for t in getattr(suite, "TARGETS", ())]
    if lines:
        print(f"records: {out.absolute()}")
        print(targets.table(lines))
    else:
        print("no targets are stated for this suite; the records say what was measured")
