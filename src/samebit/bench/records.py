"""Records: one a row, beside where and when it was measured; a new one replaces the row's old one."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import samebit


def provenance(commit: str = "") -> dict[str, Any]:
    """Commit, versions and card of a measurement made now."""
    import torch
    import triton

    return {
        "commit": commit or git_commit(),
        "samebit": samebit.__version__,
        "card": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def git_commit() -> str:
    """Commit of the source this package runs from, "" outside a checkout; + where files differ."""
    where = Path(__file__).parent
    command = ["git", "-C", str(where), "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Records by row; empty where there is no file. ValueError naming a file of another kind."""
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return {row["row"]: row for row in rows}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no bench records ({type(error).__name__}); move it, or use another --out"
        ) from error


def add(path: Path, record: dict[str, Any]) -> None:
    """Write `record` into `path` in place of the row's old one; rows in order of their names."""
    rows = {**read(path), record["row"]: record}
    lines = ",\n".join(" " + json.dumps(rows[name]) for name in sorted(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text('{"rows": [\n' + lines + "\n]}\n", encoding="utf-8")
    os.replace(part, path)


def rounded(fields: dict[str, Any]) -> dict[str, Any]:
    """Floats at five significant digits."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in fields.items()}
