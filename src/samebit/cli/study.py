"""`samebit study`: arms x seeds from one TOML file to one table and one page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from samebit.cli.arguments import Arguments, Option, expect, help_text, parse

if TYPE_CHECKING:
    from samebit.study.plan import Study

USAGE = "samebit study FILE [--out DIR] [--jobs N]"
ABOUT = (
    "Runs every arm of FILE under every seed, then writes study.json, study.md and study.html into\n"
    "OUT. Started again, it leaves finished runs alone and resumes the others; a run that fails is\n"
    "recorded and stops no other. docs/qurl.md describes the file."
)
OPTIONS = (
    Option("out", "DIR", "folder of the study (default: out of [study])"),
    Option("jobs", "N", "runs at the same time (default: jobs of [study])"),
    Option("only", "ARM:SEED", "this one run, in this process, without table and page"),
    Option("dry-run", "", "check everything, list the runs and stop"),
    Option("table", "", "write table and page of what there is, and run nothing"),
)


def run(args: Sequence[str]) -> int:
    """Run the study; 1 when a run failed."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    (path,) = expect(found, ["FILE"], USAGE)
    from samebit.cli.validate import validate
    from samebit.config_origin import Origin
    from samebit.study.plan import load_study, require_unchanged

    study = load_study(path, found.text("out"))
    if found.flag("only"):
        return _one(study, found.text("only"))
    for job in study.jobs[: len(study.arms)]:
        for warning in validate(job.config, Origin(f"{path}: arm {job.arm!r}")):
            _note(f"arm {job.arm}: {warning}")
    require_unchanged(study.jobs)
    if found.flag("dry-run"):
        for job in study.jobs:
            print(f"{job.label}  {job.folder}")
        return 0
    if not found.flag("table"):
        _run_all(study, path, found)
    return _conclude(study)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _one(study: Study, label: str) -> int:
    from samebit.reporter import Reporter
    from samebit.study.runs import find_job, run_job

    reporter = Reporter()
    try:
        run_job(study, find_job(study, label), reporter)
    finally:
        reporter.close()
    return 0


def _run_all(study: Study, path: str, found: Arguments) -> None:
    from samebit.study.runs import prepare_model, run_study

    prepare_model(study, _note)
    run_study(study, path, found.number("jobs", study.header.jobs), _note)


def _conclude(study: Study) -> int:
    from samebit.study.page import write_results
    from samebit.study.runs import read_result

    for written in write_results(study, study.out):
        print(written)
    print((study.out / "study.md").read_text(encoding="utf-8"))
    results = [read_result(job) for job in study.jobs]
    return 1 if any(r is not None and r["status"] == "failed" for r in results) else 0
