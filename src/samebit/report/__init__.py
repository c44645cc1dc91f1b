"""One self-contained HTML page of one or several runs: no script, font or image from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from samebit.report.data import RunData
from samebit.report.page import render


def write_report(runs: Sequence[RunData], target: str | Path) -> Path:
    """Render `runs` into `target` (the old file stays until the new one is whole); the path."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.partial")
    page = render(runs)
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
