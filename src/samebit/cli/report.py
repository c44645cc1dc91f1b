"""`samebit report`: run folders to one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samebit.cli.arguments import Option, help_text, parse, require_place
from samebit.report import write_report
from samebit.report.data import read_runs

USAGE = "samebit report RUN [RUN...] [--out FILE]"
ABOUT = "One self-contained HTML page: curves, precision plan, completions; several runs overlaid."
OPTIONS = (
    Option(
        "out", "FILE", "the page (default: RUN/report.html; of several runs ./report.html, here)"
    ),
)


def run(args: Sequence[str]) -> int:
    """Write the page and print its path."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    if not found.positionals:
        raise ValueError(f"RUN is missing; usage: {USAGE}")
    require_place("out", found.text("out"))
    runs = read_runs(found.positionals)
    default = Path("report.html") if len(runs) > 1 else runs[0].folder / "report.html"
    print(write_report(runs, found.text("out") or default))
    return 0
