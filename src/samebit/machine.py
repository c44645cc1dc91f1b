"""What this machine is: versions, processor, devices, and which backends and recipes there are."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from samebit.quant.flow import is_unified
from samebit.quant.ops import get_ops
from samebit.quant.plan import load_recipe, recipe_names

_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd")


def environment() -> dict[str, Any]:
    """Versions, processor, devices and which backends exist (and why not)."""
    flags, model = _cpu()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": model,
        "cpu_flags": [f for f in flags if f in _FLAGS],
        "triton": _version("triton"),
        "gpus": _gpus(),
        "backends": _backends(),
        "recipes": {name: kind(name) for name in recipe_names()},
    }


def _cpu() -> tuple[list[str], str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return [], platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", "")).split()
    return flags, fields.get("model name", platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def _backends() -> dict[str, str]:
    """Backend by device: `available` or the reason why not."""
    found = {"cpu": f"available: {get_ops(torch.device('cpu')).NAME}"}
    if not torch.cuda.is_available():
        found["cuda"] = "unavailable: torch finds no CUDA device"
        return found
    try:
        found["cuda"] = f"available: {get_ops(torch.device('cuda')).NAME}{_slow_launches()}"
    except (ValueError, ImportError) as error:
        found["cuda"] = f"unavailable: {error}"
    return found


def _slow_launches() -> str:
    from samebit.kernels.launch import is_known  # late: triton

    if is_known():
        return ""
    return " (each launch by Triton's own way, which is slower: this build's launcher is not known)"


def kind(name: str) -> str:
    """`unified`, `mixed`, or `library` (the platform's own GEMMs, no promise) of a recipe."""
    recipe = load_recipe(name)
    if recipe.library:
        return "library"
    return "unified" if is_unified(recipe) else "mixed"


def devices() -> list[str]:
    """The device types with an operator set here, CPU first."""
    return [name for name, state in _backends().items() if state.startswith("available")]
