"""The quantiser against numbers worked by hand and against an independent codec."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.formats import AMAX_FLOOR, E4M3, INT8
from samebit.operand import Operand, QuantizedWeight, allocate_weight
from samebit.reference.quantize import (
    dequantize,
    dequantize_weight,
    encode,
    quantize_activation,
    quantize_matrix,
    quantize_tokens,
    refresh_weight,
    rescale_tokens,
    scale_of,
)
from samebit.spec import BF16, FP8_BLOCK, FP8_ROW, FP8_TOKEN_GROUP, FP8_TOKENS, INT8_ROW, Precision

CPU = torch.device("cpu")


def e4m3_values() -> np.ndarray:
    """All finite e4m3 magnitudes from the format's definition (S.EEEE.MMM, bias 7, 0x7F is NaN)."""
    values = [m * 2.0**-9 for m in range(8)]
    values += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
    return np.array(values[:-1])


def nearest_even(x: float) -> float:
    """Reference rounding of one number to e4m3 after the clamp."""
    grid = e4m3_values()
    magnitude = min(abs(x), 448.0)
    above = int(np.searchsorted(grid, magnitude))
    if grid[min(above, len(grid) - 1)] == magnitude or above == 0:
        return math.copysign(grid[above], x)
    low, high = grid[above - 1], grid[above]
    to_low, to_high = magnitude - low, high - magnitude
    chosen = low if to_low < to_high or (to_low == to_high and (above - 1) % 2 == 0) else high
    return math.copysign(chosen, x)


def test_every_code_round_trips_and_every_midpoint_goes_to_the_even_code():
    grid = torch.tensor(e4m3_values(), dtype=torch.float32)
    one = torch.ones(1)
    assert torch.equal(encode(grid, one, E4M3).float(), grid)
    middles = (grid[1:] + grid[:-1]) / 2
    got = encode(middles, one, E4M3).view(torch.uint8)
    assert int((got % 2).sum()) == 0
    want = torch.tensor([nearest_even(float(m)) for m in middles], dtype=torch.float32)
    assert torch.equal(encode(middles, one, E4M3).float(), want)


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e6, 1e6, width=32))
def test_encoding_equals_the_definition(x):
    got = float(encode(torch.tensor([x]), torch.ones(1), E4M3).float())
    assert got == nearest_even(x)


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (448.0, 448.0),
        (464.0, 448.0),
        (464.5, 448.0),
        (465.0, 448.0),
        (1000.0, 448.0),
        (-1e9, -448.0),
    ],
)
def test_out_of_range_saturates_on_every_version(x, code):
    assert float(encode(torch.tensor([x]), torch.ones(1), E4M3).float()) == code


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("precision", [FP8_TOKEN_GROUP, FP8_ROW, INT8_ROW])
def test_a_group_that_is_not_finite_is_visible_and_stays_alone(bad, precision):
    x = torch.randn(3, 300).bfloat16()
    clean = quantize_activation(x, precision)
    x[1, 5] = bad
    got = quantize_activation(x, precision)
    assert torch.isnan(dequantize(got)[1, 5])
    for row in (0, 2):
        assert torch.equal(got.codes[row].view(torch.uint8), clean.codes[row].view(torch.uint8))
        assert torch.equal(got.scale[row], clean.scale[row])
    assert torch.isnan(scale_of(torch.tensor([math.inf]), E4M3)).all()


@pytest.mark.parametrize("precision", [FP8_TOKEN_GROUP, FP8_ROW, INT8_ROW])
def test_zero_groups_have_zero_codes_and_a_positive_finite_scale(precision):
    x = torch.zeros(2, 256).bfloat16()
    x[1, 200] = 3.0
    got = quantize_activation(x, precision)
    assert bool((got.codes[0].float() == 0).all())
    assert bool((got.scale > 0).all()) and bool(torch.isfinite(got.scale).all())
    assert float(dequantize(got)[1, 200]) == pytest.approx(3.0)
    floor = np.float32(AMAX_FLOOR) / np.float32(448 if precision != INT8_ROW else 127)
    assert float(got.scale[0, 0]) == float(floor)


def test_scales_are_amax_over_the_largest_code_by_hand():
    x = torch.zeros(1, 256).bfloat16()
    x[0, 0], x[0, 1], x[0, 128] = 7.0, -0.5, 2.0
    got = quantize_activation(x, FP8_TOKEN_GROUP)
    assert got.scale.tolist() == [[7.0 / 448, float(np.float32(2.0) / np.float32(448))]]
    # 0.5 / (7/448) = 32
    assert got.codes.float()[0, :2].tolist() == [448.0, -32.0]
    row = quantize_activation(x, INT8_ROW)
    assert row.codes[0, :2].tolist() == [127, -9]  # 0.5 / (7/127) = 9.07


def test_a_partial_block_looks_at_real_elements_only_and_pads_with_zero_codes():
    got = quantize_activation(torch.full((2, 192), 5.0).bfloat16(), FP8_TOKEN_GROUP)
    assert got.codes.shape == (2, 256) and got.scale.shape == (2, 2)
    assert bool((got.codes[:, 192:].float() == 0).all())
    codes, scale = quantize_matrix(torch.randn(576, 192), FP8_BLOCK)
    assert codes.shape == (640, 256) and scale.shape == (5, 2)


def test_a_named_matrix_never_shares_a_block_with_its_neighbour():
    weight = allocate_weight((576, 192, 192), 576, FP8_BLOCK, CPU)
    assert weight.codes.shape == (640 + 256 + 256, 640) and weight.scale.shape == (9, 5)
    master = torch.randn(960, 576)
    master[576:768] *= 100.0  # k is large, q and v are small
    refresh_weight(weight, master)
    q_codes, q_scale = quantize_matrix(master[:576], FP8_BLOCK)
    assert torch.equal(weight.codes[:640].view(torch.uint8), q_codes.view(torch.uint8))
    assert torch.equal(weight.scale[:5], q_scale)
    error = (dequantize_weight(weight) - master).norm(dim=1) / master.norm(dim=1)
    assert (
        float(error[768:].max()) < 0.04
    )  # the small part is not quantised at the large one's scale


@pytest.mark.parametrize("precision", [BF16, FP8_BLOCK, FP8_ROW, INT8_ROW])
def test_refresh_keeps_addresses_and_returns_to_the_same_bits(precision):
    weight = allocate_weight((130, 20), 200, precision, CPU)
    a, b = torch.randn(150, 200), torch.randn(150, 200)

    def state(w: QuantizedWeight) -> list[torch.Tensor]:
        integers = w.codes.view(torch.uint8 if w.codes.element_size() == 1 else torch.int16)
        return [integers.clone()] + ([] if w.scale is None else [w.scale.clone()])

    address = weight.codes.data_ptr()
    refresh_weight(weight, a)
    first = state(weight)
    refresh_weight(weight, b)
    assert not torch.equal(state(weight)[0], first[0])
    refresh_weight(weight, a)
    assert all(torch.equal(x, y) for x, y in zip(state(weight), first, strict=True))
    assert weight.codes.data_ptr() == address and weight.version == 3


def test_transposed_blocks_are_the_blocks_transposed():
    w = torch.randn(256, 384)
    codes, scale = quantize_matrix(w, FP8_BLOCK)
    turned, turned_scale = quantize_matrix(w.t().contiguous(), FP8_BLOCK)
    assert torch.equal(codes.view(torch.uint8).t(), turned.view(torch.uint8))
    assert torch.equal(scale.t(), turned_scale)


def test_token_groups_do_not_see_other_segments():
    x = torch.randn(10, 64)
    groups = torch.tensor([[0, 4], [4, 6]], dtype=torch.int32)
    both = quantize_tokens(x, groups, FP8_TOKENS)
    x2 = x.clone()
    x2[4:] *= 1000.0
    again = quantize_tokens(x2, groups, FP8_TOKENS)
    assert torch.equal(both[:4], again[:4])
    alone = quantize_tokens(x[4:], torch.tensor([[0, 6]], dtype=torch.int32), FP8_TOKENS)
    assert torch.equal(both[4:], alone)


def test_a_block_of_tokens_by_hand():
    x = torch.zeros(3, 256)
    x[0, 0], x[1, 127], x[1, 1], x[2, 128] = 7.0, -28.0, 0.03125, 3.5
    groups = torch.tensor([[0, 2], [2, 1]], dtype=torch.int32)
    got = quantize_tokens(x, groups, FP8_BLOCK)
    # scale 28/448 = 1/16: 0.03125 is 0.5 scales, a code; the second group has its own scale
    assert torch.equal(got, x)
    x[1, 1] = 2.0**-15  # 2^-11 scales: a quarter of the smallest code
    assert float(quantize_tokens(x, groups, FP8_BLOCK)[1, 1]) == 0.0


def test_rescaled_codes_by_hand():
    codes = torch.zeros(4, 256)
    codes[0, :2] = torch.tensor([448.0, 2.0**-9])
    codes[1, :4] = torch.tensor([448.0, -5.0, 2.0**-9, 3 * 2.0**-9])
    codes[2, :2], codes[3, 128] = 1.0, 448.0
    scale = torch.tensor([[2.0, 1.0], [0.5, 1.0], [8.0, 1.0], [1.0, 3.0]])
    saved = Operand(codes.to(E4M3.dtype), scale, FP8_TOKEN_GROUP, 200)
    got = rescale_tokens(saved, torch.tensor([[0, 2], [2, 2]], dtype=torch.int32))
    assert got.shape == (4, 200)
    assert got[0, :2].tolist() == [896.0, 2.0**-8]  # the largest scale of its group: unchanged
    # codes times 1/4: 112; -1.25; 2^-11 and 3 * 2^-11 round to 0 and to 2^-9
    assert got[1, :4].tolist() == [224.0, -2.5, 0.0, 2.0**-8]
    assert got[2, :2].tolist() == [8.0, 8.0] and float(got[3, 128]) == 448.0 * 3.0


def test_a_bad_token_spoils_its_block_and_no_other():
    x = torch.randn(6, 300).bfloat16()
    x[1, 130] = math.inf
    saved = quantize_activation(x, FP8_TOKEN_GROUP)
    got = rescale_tokens(saved, torch.tensor([[0, 3], [3, 3]], dtype=torch.int32))
    bad = torch.zeros(6, 300, dtype=torch.bool)
    bad[:3, 128:256] = True
    assert torch.equal(got.isnan(), bad)


def test_codes_come_from_the_master_not_from_its_bf16_export():
    master = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    direct, _ = quantize_matrix(master, FP8_BLOCK)
    through, _ = quantize_matrix(master.bfloat16().float(), FP8_BLOCK)
    moved = float((direct.view(torch.uint8) != through.view(torch.uint8)).float().mean())
    assert 0.01 < moved < 0.05


def test_unsupported_precisions_are_named():
    with pytest.raises(ValueError, match=r"e4m3\[128x1\]"):
        quantize_activation(torch.zeros(1, 128).bfloat16(), FP8_TOKENS)
    with pytest.raises(ValueError, match="takes no block"):
        Precision("bf16", (1, 128))
    assert INT8.max == 127.0


@settings(max_examples=500, deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40),
    width=st.integers(1, 300),
    precision=st.sampled_from([FP8_TOKEN_GROUP, FP8_ROW, INT8_ROW]),
)
def test_any_bf16_bits_give_close_codes_or_a_visible_fault(bits, width, precision):
    """Denormals, infinities, NaN and signed zeros of every kind, repeated to a row of any width."""
    row = np.resize(np.array(bits, dtype=np.uint16), width).view(np.int16)
    x = torch.from_numpy(row.copy()).view(torch.bfloat16)[None]
    got = quantize_activation(x, precision)
    back = dequantize(got)[0, :width].double()
    size = 128 if precision == FP8_TOKEN_GROUP else width
    for start in range(0, width, size):
        group = x[0, start : start + size].double()
        found = back[start : start + size]
        if not bool(torch.isfinite(group).all()):
            assert bool(torch.isnan(found).all()), "a fault is never turned into a number"
            continue
        amax = max(float(group.abs().max()), AMAX_FLOOR)
        # half a step at the top of the range: 1/28 of it for e4m3, 1/254 for INT8
        limit = amax * ((1 / 254) if precision == INT8_ROW else (1 / 28)) * (1 + 1e-5)
        assert float((found - group).abs().max()) <= limit
        assert bool(((found == 0) | (found.sign() == group.sign())).all())


@settings(max_examples=200, deadline=None)
@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
)
def test_any_fp32_master_bits_give_close_codes_or_a_visible_fault(bits, rows, columns):
    flat = np.resize(np.array(bits, dtype=np.int32), rows * columns)
    master = torch.from_numpy(flat.copy()).view(torch.float32).reshape(rows, columns)
    weight = allocate_weight((rows,), columns, FP8_BLOCK, CPU)
    refresh_weight(weight, master)
    back = dequantize_weight(weight)[:rows, :columns].double()
    for r in range(0, rows, 128):
        for c in range(0, columns, 128):
            block = master[r : r + 128, c : c + 128].double()
            found = back[r : r + 128, c : c + 128]
            if not bool(torch.isfinite(block).all()):
                assert bool(torch.isnan(found).all())
                continue
            amax = max(float(block.abs().max()), AMAX_FLOOR)
            assert float((found - block).abs().max()) <= amax / 28 * (1 + 1e-5)
