"""`make demo`, again and again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_second_make_demo_resumes(tmp_path: Path):
    """What a resumed run does and says is in test_resume.py and cli/test_run.py."""
    samebit = tmp_path / "bin" / "samebit"
    samebit.parent.mkdir()
    samebit.write_text('#!/bin/sh\necho "$@"\n')
    samebit.chmod(0o755)
    stamp = tmp_path / ".installed"
    stamp.touch()
    command = ["make", "-s", "-f", str(MAKEFILE), "-o", str(stamp), "demo", f"VENV={tmp_path}"]

    def demo() -> str:
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return made.stdout.strip()

    (tmp_path / "pyproject.toml").touch()
    assert demo() == "train recipes/demo.toml"
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "metrics.jsonl").touch()
    assert demo() == "train recipes/demo.toml --resume"
