"""How torch's threads wait is set before torch is there to read it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samebit.cli import SPINS, share_cores


@pytest.mark.parametrize(
    ("own", "spins"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_sleep_early_unless_the_user_says_how_they_wait(monkeypatch, own, spins):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "0")  # so that both are given back
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    share_cores()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_nothing_imports_torch_before():
    code = "import samebit.cli.dispatch, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
