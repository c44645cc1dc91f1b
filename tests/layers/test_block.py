"""The halves of a block: recomputation keeps every bit, taps and observers only look."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from samebit import reference
from samebit.layers.gradient import deliver, keep, kept, target
from samebit.layout import PackedLayout, Segment
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder
from samebit.models.load import plan_for
from samebit.operand import HeadCodes
from samebit.quant.plan import load_recipe, recipe_names
from samebit.reference.sampling import Transform
from samebit.spec import FP8_TOKEN_GROUP

TINY = ModelConfig(
    family="qwen3", hidden=96, intermediate=160, layers=2, heads=3, kv_heads=1, head_dim=32,
    vocab_size=50, tokenizer_size=47, rope_theta=10000.0, rms_eps=1e-6, tied=True,
    max_position=64, qk_norm=True, qkv_bias=True,
)  # fmt: skip
PLAIN = replace(TINY, family="llama", qk_norm=False, qkv_bias=False)
LAYOUT = PackedLayout((Segment(0, 7), Segment(7, 3, 0, 7), Segment(10, 4, 0, 7), Segment(14, 6)))


@torch.no_grad()
def model_of(config: ModelConfig, recipe: str) -> Decoder:
    model = Decoder(config, plan_for(load_recipe(recipe), config))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.refresh()
    return model


def ids() -> torch.Tensor:
    return torch.randint(0, 47, (20,), generator=torch.Generator().manual_seed(1))


def gradients(model: Decoder, recompute: str = "none", batches: int = 1) -> list[torch.Tensor]:
    model.recompute = recompute
    model.zero_grad()
    for _ in range(batches):
        hidden = model(ids(), LAYOUT, "train")
        logp, entropy = model.log_prob(hidden[:-1], ids()[1:], Transform())
        (logp * torch.linspace(-1, 1, 19) + 0.1 * entropy).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["qwen3", "llama"])
def test_recomputation_changes_no_bit_of_a_gradient(config, recipe):
    model = model_of(config, recipe)
    kept_all = gradients(model)
    assert any(float(g.abs().max()) > 0 for g in kept_all)
    for mode in ("codes", "mlp", "block"):
        again = gradients(model, mode)
        assert all(torch.equal(a, b) for a, b in zip(kept_all, again, strict=True)), mode


def saved_bytes(model: Decoder, mode: str) -> int:
    model.recompute = mode
    found: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = model(ids(), LAYOUT, "train")
        total = sum(found.values())
        del hidden
    return total


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-kv"])
def test_each_mode_keeps_less(recipe):
    model = model_of(PLAIN, recipe)
    modes = ("none", "codes", "mlp", "block")
    none, codes, mlp, block = (saved_bytes(model, mode) for mode in modes)
    padded = (128, 128, 128, 256)  # columns of codes that qkv, out, gate and up, down read
    assert none - codes >= (0 if recipe == "bf16" else 2 * 20 * sum(padded))
    assert codes - mlp >= 2 * 20 * (2 * 160) * 2
    # two residual sums a block, the last sum, and small change (rstd, ids, gains)
    assert block < (2 * 2 + 1) * 20 * 96 * 2 * 1.3
    assert block < mlp


def test_gate_and_up_are_given_back_before_the_block_has_run_backward(monkeypatch):
    model = model_of(PLAIN, "fp8")
    seen, ops = [], model.ops
    inner = ops.silu_mul_gradient

    def silu_mul_gradient(dproduct, gate, up, *rest):
        seen.append((gate, up))
        return inner(dproduct, gate, up, *rest)

    def linear_backward(*arguments, inner=ops.linear_backward):
        sizes.append([x.untyped_storage().nbytes() for pair in seen for x in pair])
        return inner(*arguments)

    sizes: list[list[int]] = []
    monkeypatch.setattr(ops, "silu_mul_gradient", silu_mul_gradient)
    monkeypatch.setattr(ops, "linear_backward", linear_backward)
    hidden = model(ids(), LAYOUT, "train")
    hidden.float().square().sum().backward(retain_graph=True)
    # down, gate and up, out, qkv of the last block, then of the first
    assert [len(s) for s in sizes] == [0, 2, 2, 2, 2, 4, 4, 4]
    assert not any(size for s in sizes for size in s)
    with pytest.raises(AssertionError, match="runs once"):
        hidden.float().square().sum().backward()


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-kv", "int8"])
def test_a_tap_sees_every_operator_and_changes_nothing(recipe):
    model = model_of(TINY, recipe)
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        plain = model(ids(), LAYOUT, "train")
        tapped = model(ids(), LAYOUT, "train", tap=lambda name, x: seen.setdefault(name, x))
    assert torch.equal(plain, tapped)
    heads = ["rotary_q", "rotary_k", "value"]
    if recipe == "fp8-kv":
        heads = [n for name in heads for n in (name, f"{name}_codes")]
    names = ["norm_attention", "norm_attention_codes", "qkv", *heads, "attention"]
    names += ["attention_codes", "out", "norm_mlp", "norm_mlp_codes", "silu_mul", "silu_mul_codes"]
    names = [n for n in [*names, "down"] if recipe != "bf16" or not n.endswith("_codes")]
    assert list(seen) == [f"layers.{i}.{name}" for i in range(2) for name in names]
    block = model.layers[1]
    expected, _ = reference.rms_norm(seen["layers.0.down"], block.norm_attention_bf16, 1e-6)
    assert torch.equal(seen["layers.1.norm_attention"], expected)
    total, _ = reference.rms_norm(seen["layers.1.down"], model.norm_final_bf16, 1e-6)
    assert torch.equal(total, plain)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "int8"])
def test_an_observer_gets_the_input_and_its_operand(recipe):
    model = model_of(TINY, recipe)
    plain, seen = gradients(model), {}
    for name, module in model.linears():
        module.observe = lambda x, operand, name=name: seen.setdefault(name, (x, operand))
    observed = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert len(seen) == 8
    for name, (x, operand) in seen.items():
        again = reference.quantize_activation(x, operand.precision)
        assert torch.equal(again.codes.view(torch.uint8), operand.codes.view(torch.uint8)), name


def test_gradients_of_two_micro_batches_add_up():
    model = model_of(TINY, "fp8")
    once = [g.clone() for g in gradients(model)]
    twice = gradients(model, batches=2)
    assert all(
        torch.allclose(b, 2 * a, rtol=1e-5, atol=1e-6) for a, b in zip(once, twice, strict=True)
    )


class Accumulating:
    """A backend whose gradient kernels add to `.grad` themselves."""

    ACCUMULATES = True

    def __getattr__(self, name: str):
        return getattr(reference, name)


@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["qwen3", "llama"])
@pytest.mark.parametrize("batches", [1, 2])
def test_gradients_written_in_place_are_those_that_autograd_adds(config, batches):
    model = model_of(config, "fp8")
    expected = [g.clone() for g in gradients(model, batches=batches)]
    model.ops = Accumulating()
    found = gradients(model, batches=batches)
    for a, b in zip(found, expected, strict=True):
        # a tied embedding adds head and embedding in another order
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_accumulating_backend_writes_leaves_only():
    ops = Accumulating()
    leaf = torch.nn.Parameter(torch.ones(3))
    assert target(ops, leaf) is None
    assert deliver(ops, leaf, torch.full((3,), 2.0)) is None
    assert leaf.grad is target(ops, leaf) and leaf.grad.tolist() == [2.0] * 3
    derived = leaf * 2
    grad = torch.ones(3)
    assert target(ops, derived) is None and deliver(ops, derived, grad) is grad
    assert deliver(reference, leaf, grad) is grad and target(reference, leaf) is None
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    assert deliver(ops, frozen, grad) is None and frozen.grad is None


def test_kept_values_come_back_whole():
    operand = reference.quantize_activation(torch.randn(3, 200).bfloat16(), FP8_TOKEN_GROUP)
    heads = HeadCodes(torch.zeros(3, 1, 4).to(torch.float8_e4m3fn), torch.ones(3, 1))
    plain = torch.arange(4.0)

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    ctx = Context()
    keep(ctx, plain, None, operand, heads)
    first, nothing, again, codes = kept(ctx)
    assert first is plain and nothing is None
    assert again == operand and codes == heads


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_planned_head_gives_the_gradients_of_the_loss_it_was_planned_for(accumulate):
    model = model_of(replace(TINY, tied=False), "fp8")
    if accumulate:
        model.ops = Accumulating()
    dlogp = torch.linspace(-1, 1, 19)
    found = []
    for planned in (False, True):
        model.zero_grad()
        hidden = model(ids(), LAYOUT, "train")[:-1]
        if planned:
            plan = (found[0][0], dlogp)
            logp, entropy = model.planned_log_prob(hidden, ids()[1:], Transform(), plan)
        else:
            logp, entropy = model.log_prob(hidden, ids()[1:], Transform())
        (logp * dlogp).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        found.append((logp.detach(), entropy.detach(), *grads))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
