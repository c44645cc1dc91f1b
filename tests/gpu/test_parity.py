"""Every operator keeps its bits over the lists of sizes: see parity_cases.py, which counts and records."""

import pytest
import torch

usable = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable, reason="needs a Hopper GPU")]
if usable:
    pytest.importorskip("triton")

from tests.gpu.parity_cases import cases  # noqa: E402


@pytest.mark.parametrize("name", list(cases()))
def test_case(name):
    result = cases()[name]()
    assert result["ok"], result
