"""exp, log and sums from single IEEE operations: accurate, and blind to place, shape and threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.reference.exact import exp, fma, log, row_sum, sqrt


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    spacing = torch.nextafter(want.float().abs(), torch.tensor(torch.inf)) - want.float().abs()
    return float(((got.double() - want).abs() / spacing.double()).max())


def test_exp_is_within_two_ulp_over_its_range():
    x = torch.linspace(-87.2, 88.2, 400_001)
    assert ulps(exp(x), torch.exp(x.double())) <= 2.0


def test_log_is_within_two_ulp_over_normal_numbers():
    x = torch.cat([torch.logspace(-37, 38, 200_001), torch.linspace(0.9, 1.1, 200_001)])
    x = x[x != 1.0]
    assert ulps(log(x), torch.log(x.double())) <= 2.0
    assert log(torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


def test_exp_at_the_edges():
    got = exp(torch.tensor([0.0, -math.inf, -88.0, math.inf, math.nan]))
    assert got[0] == 1.0 and got[1] == 0.0 and got[2] == 0.0
    assert math.isfinite(got[3]) and got[3] > 2e38
    assert torch.isnan(got[4])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(1, 6), st.integers(0, 2**31))
def test_row_sum_of_a_row_does_not_depend_on_the_other_rows(width, rows, seed):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    whole = row_sum(x)
    alone = torch.stack([row_sum(x[i]) for i in range(rows)])
    assert torch.equal(whole, alone)
    assert torch.allclose(whole.double(), x.double().sum(-1), atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_elementwise_results_do_not_depend_on_place_or_threads(threads):
    x = torch.randn(331, 571)
    want = exp(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(torch.stack([exp(row) for row in x]), want)
        assert torch.equal(exp(x.flatten()[7:]), want.flatten()[7:])
    finally:
        torch.set_num_threads(before)


def test_fma_rounds_once():
    a = torch.tensor([1.0 + 2.0**-12])
    # a * a = 1 + 2^-11 + 2^-24: rounding the product first loses the last term
    assert float(fma(a, a, torch.tensor([-1.0 - 2.0**-11]))) == 2.0**-24
    assert float(a * a - (1.0 + 2.0**-11)) == 0.0


def test_sqrt_is_correctly_rounded_where_the_library_s_is_not():
    x = torch.tensor([0.929395318, 2.0, 4.0, 0.0, 1e-30])
    want = torch.tensor([math.sqrt(float(v)) for v in x], dtype=torch.float64).float()
    assert torch.equal(sqrt(x), want)
    many = torch.rand(100_000) * 4
    exact = torch.tensor([math.sqrt(v) for v in many.tolist()], dtype=torch.float64).float()
    assert torch.equal(sqrt(many), exact)
    assert torch.isnan(sqrt(torch.tensor([math.nan, -1.0]))).all()
