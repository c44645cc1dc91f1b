"""What only the card can show: its casts and the divisionless quotient, over every input."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
import triton
import triton.language as tl

from samebit.kernels.quantize_common import (
    E4M3_LARGEST,
    INT8_LARGEST,
    NUMERIC_OPTIONS,
    e4m3_code,
    int8_code,
    int8_group_codes,
    magnitude_bits,
    quotient,
    reciprocal,
    round_to_bf16,
    scale_from_bits,
)

pytestmark = pytest.mark.gpu
SIZE = 1 << 27


@triton.jit
def _cast_kernel(x_ptr, e4m3_ptr, int8_ptr, bf16_ptr, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + i)
    tl.store(e4m3_ptr + i, e4m3_code(x))
    tl.store(int8_ptr + i, int8_code(x))
    tl.store(bf16_ptr + i, round_to_bf16(x))


@pytest.mark.parametrize("part", range(0, 32, 4))
def test_casts_of_every_fp32_value(part):
    for piece in range(part, part + 4):
        first = piece * SIZE - (1 << 31)
        bits = torch.arange(first, first + SIZE, device="cuda", dtype=torch.int64).to(torch.int32)
        x = bits.view(torch.float32)
        e4m3 = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
        int8 = torch.empty(SIZE, dtype=torch.int8, device="cuda")
        bf16 = torch.empty(SIZE, dtype=torch.bfloat16, device="cuda")
        _cast_kernel[(SIZE // 1024,)](x, e4m3, int8, bf16, WIDTH=1024, **NUMERIC_OPTIONS)
        nan = x.isnan()
        expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(e4m3, torch.where(nan, torch.full_like(e4m3, 0x7F), expected))
        whole = torch.where(nan, 0.0, x.clamp(-127, 127).round()).to(torch.int8)
        assert torch.equal(int8, whole)
        expected = x.to(torch.bfloat16)
        assert torch.equal(bf16.isnan(), nan)
        assert torch.equal(bf16.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


@triton.jit
def _scale_kernel(bits_ptr, e4m3_ptr, int8_ptr, inverse_ptr, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    bits = tl.load(bits_ptr + i)
    tl.store(e4m3_ptr + i, scale_from_bits(bits, E4M3_LARGEST, False))
    tl.store(int8_ptr + i, scale_from_bits(bits, INT8_LARGEST, False))
    tl.store(inverse_ptr + i, reciprocal(bits.to(tl.float32, bitcast=True)))


@pytest.mark.parametrize("part", range(0, 16, 4))
def test_scales_and_reciprocals_of_every_positive_fp32_value(part):
    for piece in range(part, part + 4):
        first = piece * SIZE
        bits = torch.arange(first, first + SIZE, device="cuda", dtype=torch.int64).to(torch.int32)
        e4m3, int8, inverse = (torch.empty(SIZE, device="cuda") for _ in range(3))
        _scale_kernel[(SIZE // 1024,)](bits, e4m3, int8, inverse, WIDTH=1024, **NUMERIC_OPTIONS)
        amax = bits.view(torch.float32)
        finite = amax.isfinite()
        floored = amax.clamp_min(2.0**-100)
        for scale, largest in ((e4m3, 448.0), (int8, 127.0)):
            # A tensor divisor: torch multiplies by the reciprocal of a scalar one.
            expected = floored / torch.full_like(amax, largest)
            assert torch.equal(torch.where(finite, scale, 0), torch.where(finite, expected, 0))
            assert bool(scale[~finite].isnan().all())
        used = (amax > 2.0**-110) & (amax < 2.0**125)
        expected = torch.ones_like(amax) / amax
        assert torch.equal(torch.where(used, inverse, 0), torch.where(used, expected, 0))


@triton.jit
def _quotient_kernel(
    x_ptr, amax_ptr, e4m3_ptr, int8_ptr, q_ptr, scale_ptr, columns, WIDTH: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    amax = tl.load(amax_ptr + row + tl.arange(0, 1))[:, None]
    x = tl.load(x_ptr + k)
    i = row.to(tl.int64) * columns + k
    scale = scale_from_bits(magnitude_bits(amax), E4M3_LARGEST, BF16)
    q = quotient(x, scale, BF16)
    tl.store(q_ptr + i, q)
    tl.store(scale_ptr + row + tl.arange(0, 1)[:, None], scale)
    tl.store(e4m3_ptr + i, e4m3_code(q))
    scale = scale_from_bits(magnitude_bits(amax), INT8_LARGEST, BF16)
    codes = int8_group_codes(quotient(x, scale, BF16), magnitude_bits(amax))
    tl.store(int8_ptr + i, codes)


def _check_quotients(x, amax, bf16=False):
    """Codes and scales of x and -x under every amax, against IEEE divisions."""
    for signed in (x, -x):
        _check_signed_quotients(signed, amax, bf16)


def _check_signed_quotients(x, amax, bf16):
    rows, columns = amax.numel(), x.numel()
    assert columns % 1024 == 0
    e4m3 = torch.empty((rows, columns), dtype=torch.uint8, device="cuda")
    int8 = torch.empty((rows, columns), dtype=torch.int8, device="cuda")
    q = torch.empty((rows, columns), dtype=torch.float32, device="cuda")
    scale = torch.empty(rows, dtype=torch.float32, device="cuda")
    _quotient_kernel[(rows, columns // 1024)](
        x, amax, e4m3, int8, q, scale, columns, WIDTH=1024, BF16=bf16, **NUMERIC_OPTIONS
    )
    # A divisor that is a tensor: torch multiplies by the reciprocal of a scalar one.
    largest = torch.full_like(amax, 448.0)
    expected_scale = amax.clamp_min(2.0**-100) / largest
    assert torch.equal(scale, expected_scale)
    valid = x[None, :].abs() <= amax[:, None]
    expected = x[None, :] / expected_scale[:, None]
    codes = expected.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(torch.where(valid, e4m3, 0), torch.where(valid, codes, 0))
    # Below half the smallest code a quotient of subnormals may be inexact; it is zero all the same.
    large = valid & (expected.abs() > 2.0**-12) if not bf16 else valid & False
    assert torch.equal(torch.where(large, q, 0.0), torch.where(large, expected, 0.0))
    int8_scale = amax.clamp_min(2.0**-100) / torch.full_like(amax, 127.0)
    codes = (x[None, :] / int8_scale[:, None]).clamp(-127, 127).round().to(torch.int8)
    assert torch.equal(torch.where(valid, int8, 0), torch.where(valid, codes, 0))


@pytest.mark.parametrize("part", range(4))
def test_quotient_of_every_pair_of_bf16_values(part):
    bits = torch.arange(0x7F80, device="cuda", dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).float()
    x = torch.cat([x, x.new_zeros(-x.numel() % 1024)])
    for amax in x[:0x7F80][part::4].split(1024):
        _check_quotients(x, amax.contiguous())
        _check_quotients(x, amax.contiguous(), bf16=True)


def test_quotient_of_random_fp32_pairs():
    generator = torch.Generator(device="cuda").manual_seed(0)
    for _ in range(3):
        exponent = torch.randint(-126, 127, (1024,), generator=generator, device="cuda")
        amax = (1 + torch.rand(1024, generator=generator, device="cuda")) * 2.0**exponent
        near = torch.randint(-126, 127, (1 << 15,), generator=generator, device="cuda")
        x = (1 + torch.rand(1 << 15, generator=generator, device="cuda")) * 2.0**near
        _check_quotients(x, amax)
        for scale in (1.0, 2.0**-95, 2.0**100):
            u = torch.rand(1 << 15, generator=generator, device="cuda") * 2 - 1
            amax = (1 + torch.rand(1024, generator=generator, device="cuda")) * scale
            _check_quotients(u * 2 * scale, amax)
