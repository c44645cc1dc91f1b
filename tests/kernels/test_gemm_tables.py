"""The shipped tile table: every entry resolves, fits the chip and obeys the bit rules."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from samebit.kernels._gemm_fast import Tile
from samebit.kernels._gemm_tuning import load_table, select

TABLE = load_table("tuning_h200.json")
OPERATORS = ("fp8_block", "fp8_wgrad", "fp8_row", "int8", "bf16")
SHARED_BYTES = 232_448
REGISTERS = 65_536


def shared_bytes(tile: Tile) -> int:
    strip = max(tile.rows, 64)
    slots = tile.stages * tile.hold
    scales = 4 * (strip + max(tile.columns, 32)) if tile.ring else 0
    staging = 0 if tile.swap else 2 * tile.rows * tile.columns
    return slots * (128 * (strip + tile.columns) + scales) + staging + 640


@pytest.mark.parametrize("name", TABLE["tiles"])
def test_tile_fits_and_keeps_wgmma(name):
    tile = TABLE["tiles"][name]
    assert tile.rows == 64 * tile.consumers or (tile.rows, tile.consumers) == (32, 1)
    assert tile.columns in (16, 32, 64, 128, 256)
    assert tile.depth % tile.hold == 0
    threads = 128 * (tile.consumers + 1)
    assert threads * tile.registers * tile.per_sm <= REGISTERS
    # 8 KiB of slack: the scales of both operands come through the ring in the weight gradient only.
    assert shared_bytes(tile) * tile.per_sm <= SHARED_BYTES + 8192


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128, 129, 4096, 10**6])
@pytest.mark.parametrize(("outputs", "depth"), [(6144, 4096), (4096, 12288), (777, 1536)])
def test_every_shape_has_a_tile(operator, rows, outputs, depth):
    assert isinstance(select(TABLE, operator, rows, outputs, depth), Tile)


def test_selection_takes_the_first_limit_that_holds():
    table = {
        "tiles": {"a": Tile(rows=64, consumers=1), "b": Tile()},
        "operators": {
            "int8": {"default": [[16, "a"], [None, "b"]], "shapes": {"8x4": [[None, "a"]]}}
        },
    }
    assert select(table, "int8", 16, 1, 1).rows == 64
    assert select(table, "int8", 17, 1, 1).rows == 128
    assert select(table, "int8", 17, 8, 4).rows == 64


def test_few_tokens_put_the_outputs_on_the_rows_of_the_product():
    assert select(TABLE, "fp8_block", 1, 6144, 4096).swap
    assert not select(TABLE, "fp8_block", 8192, 6144, 4096).swap
