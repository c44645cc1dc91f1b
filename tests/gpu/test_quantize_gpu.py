"""What only the card can show: its casts and the divisionless quotient, over every input."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
import triton
import triton.language as tl

from samebit.kernels.activation import silu_mul_backward
from samebit.kernels.quantize_common import (
    E4M3_LARGEST,
    INT8_LARGEST,
    NUMERIC_OPTIONS,
    e4m3_code,
    e4m3_quotient,
    int8_code,
    int8_group_codes,
    magnitude_bits,
    quotient,
    reciprocal,
    round_to_bf16,
    scale_from_bits,
)
from samebit.kernels.quantize_gradient import (
    quantize_gradient,
    quantize_silu_mul_gradient,
    token_group_table,
)
from tests.kernels.pointwise_oracle import same_bits

pytestmark = pytest.mark.gpu
SIZE = 1 << 27


LENGTHS = [130, 3, 128, 700, 1, 5, 4000, 127, 2048]


def _gradient(N, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dy = torch.randn(sum(LENGTHS), N, generator=generator, device="cuda").bfloat16()
    dy[::17] *= 2.0**-20
    dy[1::19] *= 2.0**-90
    dy[7::31, ::2] = -0.0
    dy[134, 5], dy[2000, 300] = float("nan"), float("inf")
    return dy


@pytest.mark.parametrize("N", [4096, 576])
def test_gradient_of_many_segments_equals_the_plain_kernel(N):
    table = token_group_table(LENGTHS, "cuda")
    dy = _gradient(N)
    got = quantize_gradient(dy, table)
    for mine, plain in zip(got, quantize_gradient(dy, table, plain=True), strict=True):
        assert same_bits(mine, plain)


@pytest.mark.parametrize("F", [1536, 576])
def test_gradient_through_silu_equals_the_chain(F):
    table = token_group_table(LENGTHS, "cuda")
    width = -(-F // 128) * 128
    dy, gate, up = _gradient(F), _gradient(2 * F, 1)[:, F:], _gradient(2 * F, 2)[:, :F]
    both = torch.zeros((dy.shape[0], 2 * width), dtype=torch.bfloat16, device="cuda")
    silu_mul_backward(dy, gate, up, both[:, :F], both[:, width : width + F])
    got = quantize_silu_mul_gradient(dy, gate, up, table)
    for mine, chain in zip(got, quantize_gradient(both, table), strict=True):
        assert same_bits(mine, chain)


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
    tl.store(e4m3_ptr + i, e4m3_code(e4m3_quotient(x, scale, BF16)))
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


@triton.constexpr_function
def _tie_factor(tie):
    """The power of two that makes `tie`, of five bits, a place where codes change.

    Odd numbers are such places between normal codes; the others between subnormal ones.
    """
    zeros = (tie & -tie).bit_length() - 1
    return 1.0 if zeros == 0 else 2.0 ** -(10 + zeros)


@triton.constexpr_function
def _tie_middle(tie, side):
    """The middle between `tie` and its FP32 neighbour above or below."""
    return tie + side * 2.0 ** (-21 if tie == 16 and side < 0 else -20)


@triton.jit
def _differing(scale, TIE: tl.constexpr, SIDE: tl.constexpr):
    middle: tl.constexpr = _tie_middle(TIE, SIDE)
    factor: tl.constexpr = _tie_factor(TIE)
    near = (scale.to(tl.float64) * middle).to(tl.float32).to(tl.int32, bitcast=True)
    differ = tl.zeros(scale.shape, dtype=tl.int32)
    for step in tl.static_range(-1, 2):
        x = (near + step).to(tl.float32, bitcast=True) * factor
        mine = e4m3_code(e4m3_quotient(x, scale, False))
        differ += (mine != e4m3_code(tl.div_rn(x, scale))).to(tl.int32)
    return differ


@triton.jit
def _tie_kernel(differ_ptr, WIDTH: tl.constexpr):
    program = tl.program_id(0)
    scale = ((1 << 23) + program * WIDTH + tl.arange(0, WIDTH)).to(tl.float32)
    differ = tl.zeros((WIDTH,), dtype=tl.int32)
    for tie in tl.static_range(16, 32):
        differ += _differing(scale, tie, -1) + _differing(scale, tie, 1)
    tl.store(differ_ptr + program, tl.sum(differ))


def test_codes_of_fp32_quotients_near_every_tie_of_every_scale():
    programs = (1 << 23) // 1024
    differ = torch.empty(programs, dtype=torch.int32, device="cuda")
    _tie_kernel[(programs,)](differ, WIDTH=1024, **NUMERIC_OPTIONS)
    assert differ.sum().item() == 0
