"""The specialised kernels compile for sm_90a without a GPU, on wgmma alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("attention_ptx.py")


@pytest.mark.slow
def test_forward_and_decode_compile_to_wide_wgmma_within_shared_memory():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, SCRIPT], text=True, capture_output=True, env=environment, check=True
    )
    forward, decode = json.loads(run.stdout.splitlines()[-1])
    assert forward["wgmma"] == ["m64n128k16"]
    assert decode["wgmma"] == ["m64n128k16", "m64n128k32"]
    assert forward["mma_sync"] == decode["mma_sync"] == 0
    assert forward["shared"] <= 227 * 1024
    # Two programs on a multiprocessor, 1 KiB each reserved.
    assert 2 * (decode["shared"] + 1024) <= 228 * 1024
