"""Every tile of every operator gives the plain kernel's bits, for any rows in any place."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch

pytestmark = [pytest.mark.gpu]
triton = pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from samebit.kernels import _gemm_plain as plain  # noqa: E402
from samebit.kernels._gemm_tuning import load_table  # noqa: E402
from samebit.kernels.gemm_bf16 import bf16_gemm  # noqa: E402
from samebit.kernels.gemm_fp8_block import fp8_block_gemm  # noqa: E402
from samebit.kernels.gemm_fp8_row import fp8_row_gemm  # noqa: E402
from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad  # noqa: E402
from samebit.kernels.gemm_int8 import int8_gemm  # noqa: E402

ROWS = (1, 2, 3, 15, 16, 17, 33, 64, 100, 128, 200, 256, 513, 1024, 4096)
MOST = max(ROWS)
TABLE = load_table("tuning_h200.json")
RAW = json.loads(resources.files("samebit.kernels").joinpath("tuning_h200.json").read_text())


def shipped(operator: str) -> list[str]:
    """Every tile the table may choose for `operator`."""
    entry = RAW["operators"][operator]
    lists = [entry["default"], *entry["shapes"].values()]
    return sorted({tile for pairs in lists for _, tile in pairs})


FORWARD = ("fp8_block", "fp8_row", "int8", "bf16")
CASES = [(operator, tile) for operator in FORWARD for tile in shipped(operator)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def pad(n: int) -> int:
    return -(-n // 128) * 128


def operands(operator: str, rows: int, outputs: int, depth: int, seed: int = 0):
    """x, x scale, w, w scale with outlier columns; weights and K padded with zero codes."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, device="cuda") * 0.01 + 0.001

    stored, deep = (outputs, depth) if operator == "bf16" else (pad(outputs), pad(depth))
    x = torch.zeros(rows, deep, device="cuda")
    w = torch.zeros(stored, deep, device="cuda")
    x[:, :depth], w[:outputs, :depth] = normal(rows, depth), normal(outputs, depth)
    x[:, 5] *= 20
    if operator == "bf16":
        return x.bfloat16(), None, w.bfloat16(), None
    groups = deep // 128
    if operator == "fp8_block":
        scales = uniform(groups, rows).T, uniform(stored // 128, groups)
    else:
        scales = uniform(rows), uniform(stored)
    if operator == "int8":
        x, w = ((t * 30).round().clamp(-127, 127).to(torch.int8) for t in (x, w))
    else:
        x, w = (t.clamp(-448, 448).to(torch.float8_e4m3fn) for t in (x, w))
    return x, scales[0], w, scales[1]


def run(operator, x, xs, w, ws, n, tile=None, bias=None):
    if operator == "bf16":
        return bf16_gemm(x, w, n=n, bias_N=bias, tile=tile)
    function = {"fp8_block": fp8_block_gemm, "fp8_row": fp8_row_gemm, "int8": int8_gemm}[operator]
    return function(x, xs, w, ws, n=n, bias_N=bias, tile=tile)


def run_plain(operator, x, xs, w, ws, n, bias=None):
    out = torch.full((x.shape[0], n), float("nan"), device="cuda", dtype=torch.bfloat16)
    mode = {
        "fp8_block": plain.BLOCK, "fp8_row": plain.ROW, "int8": plain.INT8, "bf16": plain.BF16
    }[operator]  # fmt: skip
    return plain.plain_gemm(
        x, w, out, mode, a_scale=xs, b_scale=ws, col_group=128 if operator == "fp8_block" else 1,
        promote={"fp8_block": 128, "fp8_row": 512}.get(operator, 0), bias_N=bias,
    )  # fmt: skip


def exact(operator, x, xs, w, ws, n):
    """FP64 product of the dequantised operands and of their magnitudes."""
    X, W = x.double(), w.double()
    if operator == "fp8_block":
        X = X * xs.double().repeat_interleave(128, 1)
        W = W * ws.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    elif operator != "bf16":
        X, W = X * xs.double()[:, None], W * ws.double()[:, None]
    return (X @ W.T)[:, :n], (X.abs() @ W.abs().T)[:, :n]


@pytest.mark.parametrize(("operator", "tile"), CASES)
def test_every_tile_gives_the_plain_bits_for_any_rows(operator, tile):
    x, xs, w, ws = operands(operator, MOST, 576, 1152)
    bias = torch.randn(576, device="cuda").bfloat16()
    expected = run_plain(operator, x, xs, w, ws, 576, bias)
    for rows in ROWS:
        place = (MOST - rows) // 2
        scale = None if xs is None else xs[place : place + rows]
        got = run(operator, x[place : place + rows], scale, w, ws, 576, TABLE["tiles"][tile], bias)
        differing = (bits(got) != bits(expected[place : place + rows])).sum().item()
        assert differing == 0, f"{rows} rows: {differing} elements differ"


@pytest.mark.parametrize("operator", FORWARD)
@pytest.mark.parametrize(("outputs", "depth"), [(576, 576), (192, 960), (960, 2112), (2112, 192)])
def test_shipped_choice_and_the_exact_product(operator, outputs, depth):
    """The shipped tiles agree on widths that are no multiples of 128, within the derived bound.

    Hopper's FP8 accumulator keeps 14 bits of the largest term inside a 128-block: each of the 4
    steps of 32 loses under 2^-13 of the block's magnitude sum, a span of 512 four times as many.
    Then one BF16 rounding (2^-9) and FP32 roundings (2^-24 a block).
    """
    x, xs, w, ws = operands(operator, 513, outputs, depth, seed=outputs)
    expected = run_plain(operator, x, xs, w, ws, outputs)
    for rows in (1, 16, 40, 128, 300, 513):
        scale = None if xs is None else xs[:rows]
        got = run(operator, x[:rows], scale, w, ws, outputs)
        assert torch.equal(bits(got), bits(expected[:rows])), f"{rows} rows"
    value, magnitude = exact(operator, x, xs, w, ws, outputs)
    lossy = {"fp8_block": 4 * 2**-13, "fp8_row": 16 * 2**-13}.get(operator, 2**-20)
    bound = value.abs() * 2**-8 + magnitude * (lossy + depth * 2**-24) + 1e-30
    assert ((expected.double() - value).abs() <= bound).all()


def test_scales_with_any_strides_give_the_same_bits():
    x, xs, w, ws = operands("fp8_block", 200, 256, 640)
    expected = fp8_block_gemm(x, xs, w, ws)
    assert torch.equal(bits(expected), bits(fp8_block_gemm(x, xs.contiguous(), w, ws)))
    for pitch in (201, 202, 203, 204):
        padded = torch.full((5, pitch), float("nan"), device="cuda")
        padded[:, :200] = xs.T
        assert torch.equal(bits(expected), bits(fp8_block_gemm(x, padded[:, :200].T, w, ws)))
    assert torch.equal(
        bits(expected[3:]), bits(fp8_block_gemm(x[3:], xs[3:], w, ws.T.contiguous().T))
    )


def test_output_is_written_everywhere_and_nowhere_else():
    x, xs, w, ws = operands("fp8_block", 70, 256, 384)
    wide = torch.full((72, 320), float("nan"), device="cuda", dtype=torch.bfloat16)
    fp8_block_gemm(x, xs, w, ws, wide[:70, 8:208], n=200)
    expected = fp8_block_gemm(x, xs, w, ws)[:, :200]
    assert torch.equal(bits(wide[:70, 8:208]), bits(expected))
    assert wide[70:].isnan().all() and wide[:, :8].isnan().all() and wide[:, 208:].isnan().all()


@pytest.mark.parametrize("outputs", [50257, 1000])
def test_bf16_head_in_fp32_with_an_odd_vocabulary(outputs):
    x, _, w, _ = operands("bf16", 130, outputs, 576)
    logits = bf16_gemm(x, w, out_dtype=torch.float32)
    one = bf16_gemm(x[77:78], w, out_dtype=torch.float32)
    assert torch.equal(bits(logits[77:78]), bits(one))
    value, magnitude = exact("bf16", x, None, w, None, outputs)
    assert ((logits.double() - value).abs() <= magnitude * 2**-15).all()


@pytest.mark.parametrize("tile", shipped("fp8_wgrad"))
@pytest.mark.parametrize(("outputs", "depth", "tokens"), [(576, 192, 640), (2112, 960, 1152)])
@pytest.mark.parametrize("per_block", [False, True])
def test_weight_gradient_bits_accumulation_and_bound(tile, outputs, depth, tokens, per_block):
    generator = torch.Generator("cuda").manual_seed(1)
    groups = tokens // 128
    dy = torch.randn(outputs, tokens, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    x = torch.randn(depth, tokens, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    sdy = torch.rand(groups, outputs, generator=generator, device="cuda").T
    sx = torch.rand(groups, -(-depth // 128) if per_block else depth, device="cuda").T
    group = 128 if per_block else 1
    expected = torch.full((outputs, depth), float("nan"), device="cuda")
    plain.plain_gemm(
        dy, x, expected, plain.BLOCK, a_scale=sdy, b_scale=sx, col_group=group, promote=128
    )
    got = fp8_block_wgrad(dy, sdy, x, sx, tile=TABLE["tiles"][tile])
    assert torch.equal(bits(got), bits(expected))
    start = torch.randn(outputs, depth, generator=generator, device="cuda")
    total = start.clone()
    fp8_block_wgrad(dy, sdy, x, sx, total, accumulate=True, tile=TABLE["tiles"][tile])
    assert torch.equal(bits(total), bits(start + expected))
    rows = sx.repeat_interleave(128, 0)[:depth] if per_block else sx
    D = dy.double() * sdy.double().repeat_interleave(128, 1)
    X = x.double() * rows.double().repeat_interleave(128, 1)
    bound = (D.abs() @ X.abs().T) * (4 * 2**-13)
    assert ((expected.double() - D @ X.T).abs() <= bound).all()


def test_zero_rows_launch_nothing():
    x, xs, w, ws = operands("fp8_block", 4, 128, 256)
    assert fp8_block_gemm(x[:0], xs[:0], w, ws).shape == (0, 128)


def test_nan_in_one_row_stays_in_that_row():
    x, xs, w, ws = operands("fp8_block", 48, 256, 384)
    clean = fp8_block_gemm(x, xs, w, ws)
    scales = xs.clone()
    scales[7, 1] = float("nan")
    got = fp8_block_gemm(x, scales, w, ws)
    assert got[7].isnan().all()
    keep = torch.arange(48, device="cuda") != 7
    assert torch.equal(bits(got[keep]), bits(clean[keep]))
