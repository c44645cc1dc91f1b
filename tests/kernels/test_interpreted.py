"""Runs the interpreted kernel tests of this folder, one process a file, in a run of the whole suite."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.kernels.conftest import HERE, interpreted_files

AT_ONCE = 2
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def run(name: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / name)]
    return subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def processes():
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run, name) for name in interpreted_files()}


@pytest.mark.parametrize("name", interpreted_files())
def test_in_the_interpreter(name: str, processes: dict[str, Future]):
    done = processes[name].result()
    assert done.returncode == 0 and " passed" in done.stdout, (
        done.stdout[-6000:] + done.stderr[-2000:]
    )


def test_nothing_leaks_into_this_process():
    assert os.environ.get("TRITON_INTERPRET") != "1"
