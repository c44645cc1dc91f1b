"""Plain quantisers equal the definition byte for byte (interpreted without a GPU)."""

import pytest
import torch

from tests.kernels.pointwise_oracle import (
    DEVICE,
    awkward,
    blocks,
    rescaled_blocks,
    rows_of,
    same_bits,
    token_blocks,
    weight_blocks,
)

from samebit import reference  # isort: skip
from samebit.formats import E4M3, INT8  # isort: skip
from samebit.reference.quantize import rescale_tokens as rescale_tokens_reference  # isort: skip
from samebit.spec import FP8_TOKEN_GROUP  # isort: skip
from samebit.kernels.quantize_activation import quantize_activation  # isort: skip
from samebit.kernels.quantize_common import empty_activation_scale  # isort: skip
from samebit.kernels.quantize_gradient import quantize_gradient, token_group_table  # isort: skip
from samebit.kernels.quantize_row import quantize_rows  # isort: skip
from samebit.kernels.quantize_saved import requantize_tokens, rescale_tokens  # isort: skip
from samebit.kernels.quantize_weight import quantize_weight, transpose_codes  # isort: skip


@pytest.mark.parametrize("tokens", [1, 4, 5, 127, 128])
def test_rows_of_scales_start_on_16_bytes(tokens):
    """What the copy engine asks for; nothing behind the last row is wanted."""
    scale = empty_activation_scale(tokens, 300, torch.device("cpu"))
    row = (tokens + 3) // 4 * 4
    assert scale.shape == (tokens, 3) and scale.stride() == (1, row)
    assert scale.untyped_storage().nbytes() == 4 * (2 * row + tokens)


def equal(codes, scale, expected):
    return same_bits(codes.view(torch.uint8), expected[0].view(torch.uint8)) and same_bits(
        scale.contiguous(), expected[1]
    )


@pytest.mark.parametrize(("T", "K"), [(1, 128), (14, 576), (35, 192), (13, 200)])
def test_activation(T, K):
    x = awkward(T, K)
    codes, scale = quantize_activation(x)
    assert equal(codes, scale, blocks(x))
    assert T == 1 or scale.stride(0) == 1


def test_activation_by_hand():
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, :5] = torch.tensor([448.0, -448.0, 0.5, 17.0, 2.0**-10])
    codes, scale = quantize_activation(x.to(DEVICE))
    assert scale.item() == 1.0
    # 17 lies between 16 (0x58) and 18 (0x59): to even. 2^-10 is half the smallest code: to zero.
    assert codes.view(torch.uint8)[0, :5].tolist() == [0x7E, 0xFE, 0x30, 0x58, 0x00]


def test_two_part_quotients_have_the_codes_of_ieee_division():
    """What the card computes for BF16 (`e4m3_quotient`), in FP64, for every mantissa of amax and x.

    8 + 24 bits of a product, and the sum of the two products, are exact in FP64.
    """
    mantissas = torch.arange(128, 256, dtype=torch.float32)
    scale = (mantissas / torch.full_like(mantissas, 448.0))[:, None]
    high = (1 / scale.double()).float()
    high = torch.where(high.double() * scale.double() > 1, high.nextafter(torch.zeros(1)), high)
    low = (1 - high.double() * scale.double()).float() * high
    assert bool((low >= 0).all())
    x = (mantissas * 2.0 ** -torch.arange(20.0)[:, None]).reshape(1, -1)
    q = (x.double() * high.double() + (x * low).double()).float()
    codes, expected = (v.clamp(max=448).to(E4M3.dtype).view(torch.uint8) for v in (q, x / scale))
    valid = x <= mantissas[:, None]
    assert int(valid.sum()) > 300_000 and bool((codes == expected)[valid].all())
    # One product with the nearest reciprocal has not: that is why there are two parts.
    once = (x * (1 / scale)).clamp(max=448).to(E4M3.dtype).view(torch.uint8)
    assert not bool((once == expected)[valid].all())


def test_activation_of_a_strided_view_equals_that_of_a_copy():
    wide = awkward(13, 640)
    view = wide[:, 128:448]
    assert equal(*quantize_activation(view), blocks(view))


def test_tokens_a_program_change_no_bit(monkeypatch):
    x = awkward(37, 320)
    few = quantize_activation(x)
    monkeypatch.setattr("samebit.kernels.quantize_activation.rows_for", lambda tokens: 32)
    assert all(same_bits(a, b) for a, b in zip(few, quantize_activation(x), strict=True))


@pytest.mark.parametrize(("N", "K"), [(128, 128), (200, 192), (40, 300)])
def test_weight_into_a_fused_buffer(N, K):
    w = awkward(N, K, torch.float32)
    Np, Kp = -(-N // 128) * 128, -(-K // 128) * 128
    codes = torch.full((Np + 128, Kp), 7, dtype=torch.uint8, device=DEVICE).view(E4M3.dtype)
    scale = torch.full((Np // 128 + 1, Kp // 128), -1.0, device=DEVICE)
    transposed = torch.empty((Kp, Np), dtype=E4M3.dtype, device=DEVICE)
    quantize_weight(w, codes[128:], scale[1:], transposed)
    assert equal(codes[128:], scale[1:], weight_blocks(w))
    assert bool((codes[:128].view(torch.uint8) == 7).all()) and bool((scale[0] == -1).all())
    assert torch.equal(transposed.view(torch.uint8), codes[128:].view(torch.uint8).t())
    assert torch.equal(transpose_codes(codes[128:]).view(torch.uint8), transposed.view(torch.uint8))


def test_token_groups_start_at_segments():
    table = token_group_table([130, 0, 5, 128], "cpu")
    assert table.tolist() == [[0, 128], [128, 2], [130, 5], [135, 128]]


@pytest.mark.parametrize("N", [200, 201])
@pytest.mark.parametrize("lengths", [[130, 3, 20], [128, 25], [153]])
def test_gradient_both_layouts(lengths, N):
    dy = awkward(153, N)
    table = token_group_table(lengths, DEVICE)
    codes, scale, transposed, transposed_scale = quantize_gradient(dy, table)
    assert equal(codes, scale, blocks(dy))
    assert equal(transposed, transposed_scale, token_blocks(dy, table))


def test_requantize_tokens():
    x = awkward(70, 200)[12:].contiguous()
    codes, scale = quantize_activation(x)
    table = token_group_table([33, 25], DEVICE)
    values = codes.cpu().float() * scale.cpu().repeat_interleave(128, 1)
    expected = token_blocks(values[:, :200], table)
    assert equal(*requantize_tokens(codes, scale, table, 200), expected)


@pytest.mark.parametrize("lengths", [[33, 25], [1, 57], [2, 3, 53]])
def test_rescale_tokens(lengths):
    x = awkward(70, 200)[12:].contiguous()
    x[:, 128:] *= 2.0 ** torch.randint(-9, 9, (58, 1), device=DEVICE)
    x[40, 130] = float("nan")
    codes, scale = quantize_activation(x)
    table = token_group_table(lengths, DEVICE)
    expected = rescaled_blocks(codes, scale, table)
    assert equal(*rescale_tokens(codes, scale, table, 200), expected)


def test_rescaled_values_are_the_reference_s():
    x = awkward(70, 200)[12:]
    saved = reference.quantize_activation(x, FP8_TOKEN_GROUP)
    table = token_group_table([33, 25], DEVICE)
    codes, scale = rescale_tokens(saved.codes, saved.scale, table, 200)
    values = codes.float() * scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    mine = torch.cat([values[:200, :33], values[:200, 128:153]], 1).t()
    assert same_bits(mine.contiguous(), rescale_tokens_reference(saved, table))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", [E4M3, INT8])
def test_rows(fmt, dtype):
    x = awkward(14, 300, dtype)
    assert equal(*quantize_rows(x, fmt), rows_of(x, fmt.max))


def test_rows_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="32768"):
        quantize_rows(torch.zeros(1, 32769), INT8)
