"""Tuned tiles: one shipped table per device, read once. No tile changes a result's bits.

The table names its tiles and, per operator, lists [largest number of rows, tile] pairs for known
(outputs, K) shapes and a default list for all others; the last pair of a list has no limit.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

import torch

from samebit.kernels._gemm_fast import Tile

TABLES = {"NVIDIA H200": "tuning_h200.json"}
"""Device name to table file. A Hopper device that is not listed uses DEFAULT_TABLE."""

DEFAULT_TABLE = "tuning_h200.json"

HOPPER = (9, 0)
"""The compute capability the kernels are written for: `wgmma` and its accumulator."""


@functools.lru_cache
def load_table(file: str) -> dict:
    """The parsed table, its tiles as `Tile`."""
    text = resources.files("samebit.kernels").joinpath(file).read_text(encoding="utf-8")
    table = json.loads(text)
    table["tiles"] = {name: Tile(**fields) for name, fields in table["tiles"].items()}
    return table


@functools.lru_cache
def device_table(index: int) -> dict:
    """The table of CUDA device `index`; ValueError if its architecture is not Hopper."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability != HOPPER:
        raise ValueError(
            f"{properties.name} has compute capability {capability}; these kernels are built for "
            f"{HOPPER} (Hopper), whose bits another architecture does not reproduce"
        )
    return load_table(TABLES.get(properties.name, DEFAULT_TABLE))


def select(table: dict, operator: str, rows: int, outputs: int, depth: int) -> Tile:
    """The tile for a `rows` x `outputs` product over K = `depth`."""
    entry = table["operators"][operator]
    choices = entry["shapes"].get(f"{outputs}x{depth}", entry["default"])
    for limit, name in choices:
        if limit is None or rows <= limit:
            return table["tiles"][name]
    raise AssertionError(f"{operator} {outputs}x{depth}: the last choice has a limit")


@functools.lru_cache(maxsize=4096)
def tile_for(index: int, operator: str, rows: int, outputs: int, depth: int) -> Tile:
    """The tile of CUDA device `index` for this operator and shape."""
    return select(device_table(index), operator, rows, outputs, depth)
