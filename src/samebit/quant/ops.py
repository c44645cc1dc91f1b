"""Which backend computes: chosen once by device, named in the log, never fallen back from."""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from typing import Any

import torch

from samebit import reference
from samebit.kernels import TRITON

Ops = Any
"""A module with the operator set of `samebit.reference`."""

HOPPER = (9, 0)
"""The compute capability the kernels are proved on. Others keep other bits inside a tensor-core product."""


def missing_for_cuda(device: torch.device) -> str | None:
    """What keeps the Hopper kernels from running on a CUDA device; None when nothing does."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (a CPU build of torch, or no driver)"
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        return f"there is no such device: torch sees {count}"
    capability = torch.cuda.get_device_capability(index)
    if capability != HOPPER:
        name = torch.cuda.get_device_name(index)
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels are written "
            "and proved for 9.0 (H100, H200)"
        )
    way = "install samebit with the extra gpu, pip install '.[gpu]': torch 2.11 and its triton"
    if importlib.util.find_spec("triton") is None:
        return f"the package triton is not installed ({way})"
    version = metadata.version("triton")
    if not version.startswith(TRITON):
        return f"triton {version} is installed, the kernels are written and proved for {TRITON}x ({way})"
    return None


def get_ops(device: torch.device, option: str = "--run.device") -> Ops:
    """The operator set for a device; ValueError, with the way out by `option`, where none exists."""
    if device.type == "cpu":
        return reference
    if device.type != "cuda":
        raise ValueError(f"device {device} has no operator set; use {option} cpu or cuda")
    missing = missing_for_cuda(device)
    if missing is not None:
        raise ValueError(f"device {device} cannot be used: {missing}. Use {option} cpu")
    # late: triton must not be needed on a CPU
    return importlib.import_module("samebit.kernels.ops")
