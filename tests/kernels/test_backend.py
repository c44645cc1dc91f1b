"""The operator set over the kernels, without a GPU: names, layouts, refusals, and what the interpreter runs."""

import inspect

import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE

from samebit import reference  # isort: skip
from samebit.kernels import _ops_attention, _ops_linear, ops  # isort: skip
from samebit.kernels.attention_layout import KEY_BLOCK, SPLIT_KEYS  # isort: skip
from samebit.layout import PackedLayout, PagedLayout, Segment  # isort: skip
from samebit.operand import allocate_weight  # isort: skip
from samebit.quant.plan import load_recipe, recipe_names  # isort: skip
from samebit.reference.sampling import Transform  # isort: skip
from samebit.spec import (  # isort: skip
    FP8_BLOCK,
    FP8_HEAD,
    FP8_ROW,
    FP8_TOKEN_GROUP,
    INT4_ROW,
    INT8_ROW,
    Attention,
    Backward,
    Gemm,
)
from samebit.spec import BF16 as BF16_WEIGHT  # isort: skip


def test_the_operators_are_those_of_the_reference():
    assert set(ops.__all__) == set(reference.__all__)
    for name in set(ops.__all__) - {"ACCUMULATES", "NAME"}:
        mine = inspect.signature(getattr(ops, name)).parameters
        theirs = inspect.signature(getattr(reference, name)).parameters
        assert len(mine) == len(theirs), name


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_attends_with_the_compiled_constants(recipe):
    for flow in (load_recipe(recipe).rollout, load_recipe(recipe).train):
        _ops_attention.check_spec(flow.attention)
        assert (flow.attention.kv_block, flow.attention.kv_split) == (KEY_BLOCK, SPLIT_KEYS)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (Attention(kv_block=64), "kv_block=64"),
        (Attention(kv_split=0), "kv_split=0"),
        (Attention(kv=FP8_HEAD), "probabilities bf16"),
    ],
)
def test_other_attention_constants_are_refused_by_name(spec, named):
    with pytest.raises(ValueError, match=named):
        _ops_attention.check_spec(spec)


def test_a_format_without_a_kernel_is_refused_by_name():
    weight = allocate_weight((2,), 128, INT4_ROW, torch.device("cpu"))
    with pytest.raises(ValueError, match="int4"):
        ops.quantize_activation(torch.ones(2, 128).bfloat16(), INT4_ROW)
    with pytest.raises(ValueError, match="int4"):
        ops.refresh_weight(weight, torch.ones(2, 128))


def paged(sequence, positions, sequences=2):
    return PagedLayout(
        torch.arange(8).view(sequences, -1), torch.tensor(sequence), torch.tensor(positions), 16
    )


def test_a_mixed_batch_becomes_ranges_of_rows():
    found = _ops_attention.paged(paged([0, 0, 0, 1], [5, 6, 7, 31]))
    assert found.context_lens.tolist() == [8, 32]
    assert found.query_starts is not None and found.query_starts.tolist() == [0, 3, 4]
    assert (found.max_query_length, found.max_context) == (3, 32)
    assert found.block_table.dtype == torch.int32


def test_one_row_of_every_sequence_is_decode():
    layout = paged([0, 1], [5, 40])
    found = _ops_attention.paged(layout)
    assert found.query_starts is None and found.context_lens.tolist() == [6, 41]
    assert _ops_attention.paged(layout) is found


@pytest.mark.parametrize("rows", [([0, 1, 0], [5, 9, 6]), ([0, 0], [6, 5]), ([1, 0], [3, 3])])
def test_rows_out_of_order_are_refused(rows):
    with pytest.raises(ValueError, match="does not follow"):
        _ops_attention.paged(paged(*rows))


def test_a_pack_becomes_a_table_of_segments():
    segments = (Segment(0, 5), Segment(5, 2, 0, 5), Segment(7, 3, 0, 5), Segment(10, 4))
    found = _ops_attention.packed(PackedLayout(segments))
    assert found.segments.tolist() == [[0, 5, 0, 0], [5, 2, 0, 5], [7, 3, 0, 5], [10, 4, 0, 0]]
    assert (found.max_length, found.max_keys, found.num_tokens) == (5, 8, 14)


def test_restricted_sampling_agrees_with_its_log_probs_and_trains():
    generator = torch.Generator().manual_seed(4)
    head = allocate_weight((40,), 64, BF16_WEIGHT, DEVICE)
    ops.refresh_weight(head, torch.randn(40, 64, generator=generator))
    hidden = torch.randn(5, 64, generator=generator).to(BF16)
    transform = Transform(0.8, 6, 0.9)
    ids, logp = ops.sample(hidden, head, 37, transform, [(1, i, 0) for i in range(5)])
    trained, entropy, _ = ops.log_prob(hidden, head, ids, 37, transform)
    assert torch.equal(trained.view(torch.int32), logp.view(torch.int32))
    want = reference.log_prob(hidden, head, ids, 37, transform)
    torch.testing.assert_close(trained, want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, want[1], rtol=1e-5, atol=1e-5)
    again, _ = ops.sample(hidden, head, 37, Transform(0.0, 1, 1.0), [(0, 0, 0)] * 5)
    assert again.tolist() == (hidden.float() @ head.codes.float().t())[:, :37].argmax(-1).tolist()


def stored_product(x, x_scale, w, w_scale, n, bias_N=None, **_):
    """What the block GEMM returns over stored rows, by the reference's rule in FP64."""
    scale_x = x_scale.repeat_interleave(128, 1)
    scale_w = w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    out = (x.double() * scale_x) @ (w.double() * scale_w)[:n].t()
    return (out if bias_N is None else out + bias_N).bfloat16()


@pytest.mark.parametrize("rows", [(100, 60, 20), (128, 256, 60), (200,)])
def test_padded_parts_come_back_as_logical_columns(monkeypatch, rows):
    monkeypatch.setattr(_ops_linear, "fp8_block_gemm", stored_product)
    generator = torch.Generator().manual_seed(1)
    weight = allocate_weight(rows, 192, FP8_BLOCK, torch.device("cpu"))
    reference.refresh_weight(weight, torch.randn(sum(rows), 192, generator=generator))
    x = reference.quantize_activation(
        torch.randn(9, 192, generator=generator).to(BF16), FP8_TOKEN_GROUP
    )
    bias = torch.randn(sum(rows), generator=generator).to(BF16)
    for b in (None, bias):
        spec = Gemm(FP8_TOKEN_GROUP, FP8_BLOCK, 128)
        mine, theirs = (o.gemm(x, weight, spec, b) for o in (ops, reference))
        assert mine.shape == (9, sum(rows))
        parts = ops.gemm_parts(x, weight, spec, b)
        assert [p.shape[1] for p in parts] == list(rows) and torch.equal(torch.cat(parts, 1), mine)
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7)


def test_a_promotion_that_is_not_compiled_is_refused():
    weight = allocate_weight((128,), 128, FP8_BLOCK, torch.device("cpu"))
    x = reference.quantize_activation(torch.ones(2, 128, dtype=BF16), FP8_TOKEN_GROUP)
    with pytest.raises(ValueError, match="not 256"):
        ops.gemm(x, weight, Gemm(FP8_TOKEN_GROUP, FP8_BLOCK, 256))


FP8_BACKWARD = load_recipe("fp8").backward


def test_an_fp8_backward_over_row_scales_is_refused():
    weight = allocate_weight((128,), 128, INT8_ROW, torch.device("cpu"))
    backward = Backward(
        input_grad=Gemm(FP8_TOKEN_GROUP, FP8_BLOCK, 128),
        weight_grad=load_recipe("fp8").backward.weight_grad,
    )
    with pytest.raises(ValueError, match="int8"):
        ops.input_grad(torch.ones(2, 128, dtype=BF16), weight, backward)
    saved = reference.quantize_activation(torch.ones(2, 128, dtype=BF16), INT8_ROW)
    with pytest.raises(ValueError, match="int8"):
        ops.weight_grad(torch.ones(2, 128, dtype=BF16), saved, torch.zeros(1, 2), backward)


@pytest.mark.parametrize("precision", [FP8_BLOCK, FP8_ROW, INT8_ROW], ids=str)
def test_refresh_writes_the_reference_bytes_in_place(precision):
    rows, device = (140, 60), torch.device(DEVICE)
    master = torch.randn(200, 192, device=device) * 0.02
    mine, theirs = (allocate_weight(rows, 192, precision, device) for _ in range(2))
    address = mine.codes.data_ptr()
    ops.refresh_weight(mine, master)
    reference.refresh_weight(theirs, master)
    assert mine.codes.data_ptr() == address and mine.version == 1
    assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    kept = mine.logical_rows() if precision.block == (1, 0) else slice(None)
    assert torch.equal(mine.scale[kept], theirs.scale[kept])


def test_the_input_gradient_reads_the_present_codes_transposed(monkeypatch):
    read = []

    def product(codes, scale, w_KN, w_scale, n):
        read.append(w_KN)
        return codes

    monkeypatch.setattr(_ops_linear, "fp8_block_gemm", product)
    weight = allocate_weight((128, 60), 192, FP8_BLOCK, torch.device(DEVICE))
    for _ in range(2):
        ops.refresh_weight(weight, torch.randn(188, 192, device=DEVICE))
        ops.input_grad(torch.ones(2, 188, dtype=BF16, device=DEVICE), weight, FP8_BACKWARD)
        assert torch.equal(read[-1].view(torch.uint8), weight.codes.view(torch.uint8).t())
    assert not weight._kept or set(weight._kept) == {"logical_rows"}


@pytest.mark.parametrize("dim", [64, 128])
def test_heads_are_quantised_as_the_reference_does(dim):
    fused = torch.randn(5, 3 * dim + 64, device=DEVICE).to(BF16)
    x = fused[:, 64:].unflatten(1, (3, dim))
    mine, theirs = (o.quantize_heads(x, FP8_HEAD) for o in (ops, reference))
    assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert torch.equal(mine.scale, theirs.scale)


@pytest.mark.parametrize("heads", [1, 3])
def test_rotary_is_the_reference_one(heads):
    fused = torch.randn(7, heads * 64 + 32, device=DEVICE).to(BF16)
    x = fused[:, 32:].unflatten(1, (heads, 64))
    cos, sin = torch.randn(2, 7, 32, device=DEVICE)
    assert torch.equal(ops.rotary(x, cos, sin), reference.rotary(x, cos, sin))
    assert torch.equal(ops.rotary_backward(x, cos, sin), reference.rotary_backward(x, cos, sin))


def test_norms_of_heads_take_views_and_give_their_shape_back():
    x = torch.randn(5, 4 * 64, device=DEVICE).to(BF16)[:, 64:].unflatten(1, (3, 64))
    gain = torch.randn(64, device=DEVICE).to(BF16)
    y, kept = ops.rms_norm(x, gain, 1e-6)
    expected, rstd = reference.rms_norm(x, gain, 1e-6)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
    dx, dgain = ops.rms_norm_backward(y, x, gain, kept)
    other_dx, other_dgain = reference.rms_norm_backward(y, x, gain, rstd)
    torch.testing.assert_close(dx, other_dx, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(dgain, other_dgain, rtol=1e-4, atol=1e-3)
