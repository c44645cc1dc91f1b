"""Keeps Triton's interpreter out of every other test's process (see interpreter.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
STARTER = "test_interpreted.py"
NATIVE = ("test_compiled.py", "test_gemm_checks.py", "test_gemm_tables.py", "test_barriers.py")
"""Files that need no interpreter, or start it themselves. Any other file is interpreted."""


def _only_kernels(config: pytest.Config) -> bool:
    paths = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    return all(path == HERE or HERE in path.parents for path in paths)


def interpreted_files() -> list[str]:
    """The files whose tests run kernels in the interpreter where there is no card."""
    return sorted(p.name for p in HERE.glob("test_*.py") if p.name not in (*NATIVE, STARTER))


def pytest_configure(config: pytest.Config) -> None:
    """A run of kernel tests alone may be the interpreter's."""
    if _only_kernels(config) and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Interpreted files run here, or in processes that test_interpreted.py starts; never in both."""
    if collection_path.parent != HERE:
        return None
    here = _only_kernels(config) or torch.cuda.is_available()
    if collection_path.name == STARTER:
        return here or None
    named = any(Path(arg.split("::")[0]).name == collection_path.name for arg in config.args)
    return (collection_path.name in interpreted_files() and not here and not named) or None
