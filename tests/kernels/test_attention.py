"""Attention against dense FP64, and its three layouts against one another, without a GPU.

The interpreter's BF16 product and rounding are not the card's, so these run FP16 and e4m3 data and
store FP32; what they prove is indexing, masks, splits and folds.
"""

import pytest
import torch

from tests.kernels.attention_oracle import (
    SEGMENTS,
    chunk,
    decode_step,
    dense,
    packed,
    quantise,
    to_pages,
)
from tests.kernels.interpreter import DEVICE

from samebit.kernels import attention as module  # isort: skip
from samebit.kernels import attention_decode_launch as decode  # isort: skip
from samebit.kernels import attention_gradient as gradient  # isort: skip
from samebit.kernels import attention_pages as pages  # isort: skip
from samebit.kernels.attention import (  # isort: skip
    attention_backward,
    attention_codes,
    attention_forward,
    decodes_to_codes,
)
from samebit.kernels.attention_layout import PagedLayout  # isort: skip

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu holds these on a card")
T = SEGMENTS[-1][0] + SEGMENTS[-1][1]
STEPS = (0, 36, 49, 100, 129)


@pytest.fixture(autouse=True)
def small_constants(monkeypatch):
    """Blocks of 64 keys and splits of 128, so that 167 keys span two splits."""
    for where in (module, decode, pages):
        monkeypatch.setattr(where, "KEY_BLOCK", 64)
    for where in (module, decode):
        monkeypatch.setattr(where, "SPLIT_KEYS", 128)


def problem(H, G, D, fp8, seed=0):
    """(q, k, v, scales by keyword, dequantised q, k, v)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(T, n, D, generator=generator) for n in (H, G, G)]
    if not fp8:
        tensors = [x.half() for x in tensors]
        return *tensors, {}, tensors
    codes, scales = zip(*map(quantise, tensors), strict=True)
    named = dict(zip(("q_scale_TH", "k_scale", "v_scale"), scales, strict=True))
    return *codes, named, [c.float() * s[..., None] for c, s in zip(codes, scales, strict=True)]


def forward(q, k, v, layout, scale, **scales):
    return attention_forward(q, k, v, layout, scale, out=torch.full(q.shape, 9.0), **scales)


def paged(x, page, head_major=False):
    return to_pages(x, SEGMENTS, page, torch.Generator().manual_seed(1), head_major=head_major)


@pytest.mark.parametrize(
    ("H", "G", "D", "fp8", "page"), [(6, 2, 64, False, 16), (4, 1, 64, True, 64)]
)
def test_layouts_agree_bit_for_bit_and_with_dense(H, G, D, fp8, page):
    q, k, v, scales, exact = problem(H, G, D, fp8)
    out, lse = forward(q, k, v, packed(SEGMENTS), D**-0.5, **scales)
    want, want_lse = dense(*exact, SEGMENTS, D**-0.5)
    assert (out - want).norm() / want.norm() < 4e-4
    assert (lse - want_lse).abs().max() < 2e-6
    k_pages, table = paged(k, page)
    v_pages, _ = paged(v, page)
    cache = {name: paged(scales[name], page)[0] for name in ("k_scale", "v_scale") if fp8}
    for first, last in ((0, 20), (20, 130)):
        layout, rows = chunk(SEGMENTS, table, first, last, DEVICE)
        extra = {**cache, **({"q_scale_TH": scales["q_scale_TH"][rows]} if fp8 else {})}
        got, got_lse = forward(q[rows], k_pages, v_pages, layout, D**-0.5, **extra)
        assert torch.equal(got, out[rows])
        assert torch.equal(got_lse, lse[rows])
    for step in STEPS:
        layout, rows = decode_step(SEGMENTS, table, step, DEVICE)
        extra = {**cache, **({"q_scale_TH": scales["q_scale_TH"][rows]} if fp8 else {})}
        got, got_lse = forward(q[rows], k_pages, v_pages, layout, D**-0.5, **extra)
        for index, (_, length, _, _) in enumerate(SEGMENTS):
            if step < length:
                assert torch.equal(got[index], out[rows[index]])
                assert torch.equal(got_lse[index], lse[rows[index]])
            else:
                assert (got[index] == 9.0).all(), "an idle slot is left alone"


def test_one_stale_key_row_changes_the_outcome():
    q, k, v, _, _ = problem(2, 1, 64, False)
    k_pages, table = paged(k, 64)
    v_pages, _ = paged(v, 64)
    layout, rows = decode_step(SEGMENTS, table, 49, DEVICE)
    before, _ = forward(q[rows], k_pages, v_pages, layout, 0.125)
    k_pages[table[1, 0], 5] += 1.0
    after, _ = forward(q[rows], k_pages, v_pages, layout, 0.125)
    assert not torch.equal(before[1], after[1])
    assert torch.equal(before[3], after[3])


@pytest.mark.parametrize("samples_per_item", [1, 2])
def test_backward_equals_the_dense_gradient(samples_per_item):
    q, k, v, _, _ = problem(2, 1, 64, False)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, SEGMENTS, 0.125)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).half()
    out.backward(dout.double())
    layout = packed(SEGMENTS, samples_per_item=samples_per_item)
    got = attention_backward(
        q, k, v, out.detach().half(), lse.detach().float(), dout, layout, 0.125
    )
    for mine, leaf in zip(got, leaves, strict=True):
        assert (mine.double() - leaf.grad).norm() / leaf.grad.norm() < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(T, 4, 64)}, "ratio must be whole"),
        ({"q_THD": torch.zeros(T, 6, 96)}, "head size 96 is not supported"),
        ({"v": torch.zeros(T, 1, 64)}, "must match"),
        ({"k": torch.zeros(T, 2, 64).half()}, "they must agree"),
        ({"k_scale": torch.zeros(T, 2)}, "exactly with e4m3"),
        ({"q_THD": torch.zeros(6, T, 64).transpose(0, 1)}, "must be contiguous"),
    ],
)
def test_undefined_inputs_are_refused(change, message):
    call = {
        "q_THD": torch.zeros(T, 6, 64),
        "k": torch.zeros(T, 2, 64),
        "v": torch.zeros(T, 2, 64),
        "layout": packed(SEGMENTS),
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=message):
        attention_forward(**{**call, **change})


class Recorder:
    """Stands for a kernel: checks that a launch names every parameter once, and keeps its grid."""

    def __init__(self, kernel):
        self.names, self.grid, self.constants = kernel.arg_names, None, {}

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, enable_fp_fusion=True, maxnreg=None, **constants):
            assert self.names[len(arguments) :] == [n for n in self.names if n in constants]
            assert set(constants) <= set(self.names)
            self.grid, self.constants = grid, constants

        return launch


@pytest.fixture
def recorders(monkeypatch):
    """Every specialised kernel replaced by a Recorder, and the card taken for granted."""
    made = {}
    for where in (module, decode, gradient):
        monkeypatch.setattr(where, "on_card", lambda _: True)
        for name, value in vars(where).items():
            if name.startswith("attention_") and name.endswith("_kernel"):
                made[name] = Recorder(value)
                monkeypatch.setattr(where, name, made[name])
    for where in (module, decode):
        monkeypatch.setattr(where, "processors", lambda _: 3)
    return made


@pytest.mark.parametrize("fp8", [False, True])
def test_specialised_launches_name_every_parameter(recorders, fp8):
    q, k, v, scales, _ = problem(6, 2, 64, fp8)
    attention_forward(q, k, v, packed(SEGMENTS), 0.125, **scales)
    # Tiles of 128 tokens: 5 segments by 2 tiles, of which 6 hold tokens.
    name, grid = ("attention_stream_kernel", (3,)) if fp8 else ("attention_hopper_kernel", (30, 2))
    assert recorders[name].grid == grid
    k_pages, table = paged(k, 64, head_major=True)
    v_pages, _ = paged(v, 64)
    cache = {name: paged(scales[name], 64)[0] for name in ("k_scale", "v_scale") if fp8}
    for layout, rows in (
        chunk(SEGMENTS, table, 0, 130, DEVICE),
        decode_step(SEGMENTS, table, 129, DEVICE),
    ):
        extra = {**cache, **({"q_scale_TH": scales["q_scale_TH"][rows]} if fp8 else {})}
        attention_forward(q[rows], k_pages, v_pages, layout, 0.125, **extra)
    assert recorders["attention_stream_kernel"].grid == (2 * 5 * 6,)
    if fp8:  # two programs on each of three multiprocessors
        assert recorders["attention_decode_codes_kernel"].grid == (6,)
    else:
        assert recorders["attention_decode_hopper_kernel"].grid == (5 * 2, 2)
    assert recorders["attention_fold_kernel"].constants["FINISHED"] == 1
    assert recorders["attention_decode_kernel"].grid is None


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("length", [100, 5000])
def test_a_decode_launch_for_codes_names_every_parameter(recorders, monkeypatch, length, fp8):
    monkeypatch.setattr(decode, "SPLIT_KEYS", 1024)
    monkeypatch.setattr(decode, "KEY_BLOCK", 128)
    monkeypatch.setattr(pages, "KEY_BLOCK", 128)
    H, G, D = 32, 8, 128
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    q = torch.zeros(128, H, D, dtype=dtype)
    cache = torch.zeros(3, G, 128, D, dtype=dtype).transpose(1, 2)
    scale = torch.zeros(3, G, 128).transpose(1, 2)
    named = {"q_scale_TH": torch.zeros(128, H), "k_scale": scale, "v_scale": scale} if fp8 else {}
    numbers = torch.zeros(128, dtype=torch.int32)
    layout = PagedLayout(torch.zeros(128, 40, dtype=torch.int32), numbers, None, 1, length)
    assert decodes_to_codes(q, cache, cache, layout)
    codes, scale = attention_codes(q, cache, cache, layout, 0.1, **named)
    assert codes.shape == (128, 4096)
    assert scale.shape == (128, 32)
    kernel = recorders[f"attention_decode_{'codes' if fp8 else 'hopper'}_kernel"]
    assert kernel.constants["QUANTIZE"] is True
    assert kernel.grid == ((6,) if fp8 else (128 * G, 2 if length == 5000 else 1))
    assert (recorders["attention_fold_kernel"].grid == (128, H)) == (length == 5000)


def test_backward_launches_name_every_parameter(recorders):
    q, k, v, _, _ = problem(6, 2, 64, False)
    lse = torch.zeros(T, 6)
    attention_backward(q, k, v, q, lse, q, packed(SEGMENTS), 0.125)
    assert recorders["attention_dkdv_hopper_kernel"].grid == (8 * 2, 2)
    assert recorders["attention_dq_hopper_kernel"].grid == (5 * 6, 2)
    assert recorders["attention_reduce_kernel"].grid == (1, 130)


def test_page_rows_of_both_storage_orders():
    slots_first = torch.empty(7, 128, 4, 64, dtype=torch.bfloat16)
    assert pages.page_rows(slots_first) == ((7 * 128, 256, 256), (128, 0, 64))
    heads_first = torch.empty(7, 4, 128, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert pages.page_rows(heads_first) == ((7 * 4 * 128, 64, 64), (512, 128, 0))
    odd = torch.empty(7, 128 * 256 + 8, dtype=torch.bfloat16)[:, : 128 * 256].view(7, 128, 4, 64)
    assert pages.page_rows(odd) is None
    keys_beside_values = torch.zeros(7, 128, 4, 2, 64, dtype=torch.bfloat16)[:, :, :, 0]
    assert pages.page_rows(keys_beside_values) == ((7 * 128, 448, 512), (128, 0, 128))


def test_page_size_must_fit_the_key_block():
    _, table = paged(torch.zeros(T, 1, 64), 48)
    layout, _ = decode_step(SEGMENTS, table, 0, DEVICE)
    cache = torch.zeros(8, 48, 1, 64)
    with pytest.raises(ValueError, match="page size 48 must divide 64"):
        attention_forward(torch.zeros(5, 1, 64), cache, cache, layout, 0.125)
