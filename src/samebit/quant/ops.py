"""Which backend computes: chosen once by device, named in the log, never fallen back from."""

from __future__ import annotations

from typing import Any

import torch

from samebit import reference

Ops = Any
"""A module with the operator set of `samebit.reference`."""


def get_ops(device: torch.device) -> Ops:
    """The operator set for a device; ValueError, with the way out, where none exists."""
    if device.type == "cpu":
        return reference
    raise ValueError(
        f"device {device} has no operator set yet: the Hopper kernels are not wired to the model. "
        "Use --run.device cpu"
    )
