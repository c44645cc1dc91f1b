"""Every test runs torch on one thread: tiny products gain nothing from two, and share the machine."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)
