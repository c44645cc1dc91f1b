"""`samebit train`: a TOML file and overrides to a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from samebit.cli.arguments import Option, expect, parse
from samebit.cli.keys import key_help
from samebit.cli.validate import check_model, check_place, model_of, validate
from samebit.config import Config
from samebit.config_io import load, origin_of
from samebit.reporter import Reporter, last_line

USAGE = "samebit train FILE [--recipe NAME] [--steps N] [--out DIR] [--resume] [--any.key VALUE]"
OPTIONS = (
    Option("resume", "", "continue the run in run.out from its last checkpoint"),
    Option(
        "dry-run",
        "",
        "check everything, print the configuration, device, model and memory, and stop",
    ),
    Option("quiet", "", "no progress and no line per step"),
)
SHORT_HELP = (
    ("--recipe NAME", "the same as recipe in the file"),
    ("--model NAME", "the same as model in the file"),
    ("--seed N", "the same as seed in the file"),
    ("--steps N", "short for --train.steps"),
    ("--out DIR", "short for --run.out"),
    (
        "torchrun",
        "several GPUs: torchrun --standalone --nproc-per-node N -m samebit train FILE ...",
    ),
)


def run(args: Sequence[str]) -> int:
    """Train; the run's folder says the rest."""
    found = parse(args, OPTIONS, overridable=True)
    if found.flag("help"):
        print(key_help(USAGE, OPTIONS, SHORT_HELP, found.positionals[:1]))
        return 0
    (path,) = expect(found, ["FILE"], USAGE)
    config = load(path, found.overrides)
    origin = origin_of(path, found.overrides)
    leads = _first_of_the_processes()
    validate(config, origin)  # the loop repeats its warnings
    check_model(config, origin)
    if leads:
        check_place(config, origin)
    with model_of(origin.of("model")):
        if found.flag("dry-run"):
            return _say_what_would_run(config, found.flag("resume")) if leads else 0
        from samebit.loop import train

        reporter = Reporter(quiet=found.flag("quiet") or not leads)
        try:
            train(config, found.flag("resume"), reporter)
        finally:
            reporter.close()
    if leads:
        _conclude(config.run.out)
    return 0


def _first_of_the_processes() -> bool:
    """Whether this is the process that speaks; of others only errors are shown."""
    from samebit.ranks import claim_gpu, world

    claim_gpu()
    rank, _, _ = world()
    if rank:
        logging.getLogger("samebit").setLevel(logging.ERROR)
    return rank == 0


def _say_what_would_run(config: Config, resume: bool) -> int:
    """The configuration on stdout, so that it can be kept; device, model and memory on stderr."""
    from samebit.config_dump import dump
    from samebit.run_checks import foresee

    print(dump(config), end="", flush=True)
    for line in foresee(config, resume):
        print(line, file=sys.stderr)
    return 0


def _conclude(folder: str) -> None:
    """Write report.html; the last line is the mismatch over all steps."""
    from samebit.report import write_report
    from samebit.report.data import read_run, worst_mismatch

    run = read_run(folder)
    page = write_report([run], f"{folder}/report.html")
    print(f"report: {page}")
    print(last_line(worst_mismatch(run)))
