"""The look-up of SiLU is the chain it stands for, at every BF16 value."""

import torch

from samebit.reference.activation import silu_mul
from samebit.reference.exact import exp


def test_every_bf16_gate_gives_the_bits_of_the_chain():
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    wide = gate.float()
    for factor in (1.0, -0.0078125, 3.0):
        up = torch.full_like(gate, factor)
        want = (wide / (exp(-wide) + 1.0) * up.float()).bfloat16()
        got = silu_mul(gate[None], up[None])[0]
        real = ~want.isnan()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[real].view(torch.int16), want[real].view(torch.int16))


def test_values_are_those_of_silu_and_columns_of_a_wider_buffer_will_do():
    both = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = both.split(48, dim=1)
    want = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_mul(gate, up).double(), want, rtol=2**-8, atol=1e-6)
