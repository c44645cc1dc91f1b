"""Every test runs torch on one thread: tiny products gain nothing from two, and share the machine."""

import logging

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_reaches_pytest():
    """A command run in an earlier test set up logging of its own; caplog needs the records."""
    logging.getLogger("samebit").propagate = True
