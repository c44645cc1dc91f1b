"""The two halves of a block, each one autograd function over the backend's fused operators.

A half takes the residual stream and the update that is still to be added to it, and returns the sum
and its own update: so the add, the norm and the quantisation are one kernel. Between forward and
backward live the residual sums (BF16), the operands of GEMMs (codes, where they are quantised: then
neither the norm's BF16 output nor the product SiLU * up) and what nothing cheap remakes. What
`Recompute` drops is made again by the same operators, so its bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd import Function

from samebit.layers.gradient import apply, deliver, give_back, keep, kept, target
from samebit.layers.kv import AnyStore
from samebit.layers.linear import LinearUse
from samebit.layout import Layout, PackedLayout
from samebit.operand import HeadCodes, Heads, Operand, Rotation
from samebit.spec import Attention

Tap = Callable[[str, torch.Tensor], None]
"""Called with (operator path, its output) after every operator; see `samebit trace`."""

Recompute = Literal["none", "codes", "mlp", "block"]
"""What a backward makes again: nothing, operands of GEMMs, gate and up too, all but residual sums."""


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """What every block of one forward shares."""

    ops: Any
    layout: Layout
    cache: AnyStore | None
    side: str
    attention: Attention
    rotation: Rotation
    recompute: Recompute
    tap: Tap | None

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.rotation.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class Gain:
    """A norm's gain: the FP32 master and its BF16 rounding."""

    master: torch.Tensor
    bf16: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionHalf:
    """Norm, QKV, rotary attention, output projection. path: of the block, for the tap."""

    call: ForwardCall
    index: int
    norm: Gain
    qkv: LinearUse
    query_norm: Gain | None
    key_norm: Gain | None
    out: LinearUse

    @property
    def gains(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """BF16 gains of the norms of queries and keys."""
        if self.query_norm is None or self.key_norm is None:
            return None
        return self.query_norm.bf16, self.key_norm.bf16


@dataclass(frozen=True, slots=True)
class MlpHalf:
    """Norm, gate and up, SiLU * up, down."""

    call: ForwardCall
    index: int
    norm: Gain
    gate_up: LinearUse
    down: LinearUse


def _normed(
    call: ForwardCall, x: torch.Tensor, update: torch.Tensor | None, norm: Gain, use: LinearUse
) -> tuple[torch.Tensor, Operand, torch.Tensor]:
    """(residual sum, operand of `use`, what the norm's backward needs)."""
    ops, precision = call.ops, use.spec.lhs
    if update is None:
        return (x, *ops.rms_norm_quantize(x, norm.bf16, norm.eps, precision))
    return ops.add_rms_norm_quantize(x, update, norm.bf16, norm.eps, precision)


def _watch_norm(
    call: ForwardCall, name: str, total: torch.Tensor, operand: Operand, norm: Gain, use: LinearUse
) -> None:
    """Show the norm's BF16 output, which a fused kernel may not write, and its codes to whom it concerns."""
    if call.tap is None and use.observe is None:
        return
    y = operand.codes
    if operand.scale is not None:
        y, _ = call.ops.rms_norm(total, norm.bf16, norm.eps)
    _tap_operand(call, name, y, operand)
    if use.observe is not None:
        use.observe(y, operand)


def _tap_operand(call: ForwardCall, name: str, x: torch.Tensor, operand: Operand) -> None:
    """Show x and the codes made of it: a fused kernel writes only these, so only they show its faults."""
    if call.tap is None:
        return
    call.tap(name, x)
    if operand.scale is not None:
        call.tap(f"{name}_codes", _bytes(operand.codes, operand.scale))


def _bytes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [T, bytes] of codes and scales, row by row."""
    return torch.cat([p.contiguous().view(torch.uint8).flatten(1) for p in (codes, scale)], 1)


def _multiply(ops: Any, operand: Operand, use: LinearUse) -> torch.Tensor:
    return ops.gemm(operand, use.weight, use.spec, use.bias)


def _multiply_parts(ops: Any, operand: Operand, use: LinearUse) -> tuple[torch.Tensor, ...]:
    return ops.gemm_parts(operand, use.weight, use.spec, use.bias)


def _kept_operand(call: ForwardCall, operand: Operand) -> Operand | None:
    """The operand where nothing is made again; else None: one pass over what is kept makes it."""
    return operand if call.recompute == "none" else None


def _linear_backward(
    call: ForwardCall, dy: Any, operand: Operand, use: LinearUse
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dX, what autograd is given for the master); dy in BF16 or as `silu_mul_gradient` made it."""
    layout, ops, into = call.layout, call.ops, target(call.ops, use.master)
    assert isinstance(layout, PackedLayout)
    dx, dw = ops.linear_backward(dy, operand, use.weight, layout.token_groups, use.backward, into)
    return dx, deliver(ops, use.master, dw)


def _norm_backward(
    call: ForwardCall,
    dy: torch.Tensor,
    total: torch.Tensor,
    norm: Gain,
    aux: torch.Tensor,
    dtotal: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient of the residual sum from both its uses, what autograd is given for the gain)."""
    into = target(call.ops, norm.master)
    dx, dgain = call.ops.rms_norm_backward(dy, total, norm.bf16, aux, dtotal, into)
    return dx, deliver(call.ops, norm.master, dgain)


# --- attention -----------------------------------------------------------------------------------


def _attend(
    half: AttentionHalf, qkv: tuple[torch.Tensor, ...]
) -> tuple[tuple[Heads, Heads, Heads] | None, torch.Tensor, torch.Tensor]:
    """((Q, K, V) of a packed forward, out BF16 [T, H, D], log-sum-exp [T, H])."""
    call = half.call
    ops, spec, rotation = call.ops, call.attention, call.rotation
    if call.cache is None:
        heads = ops.qk_norm_rope(qkv, rotation, half.gains, spec)
        _tap_heads(half, qkv, heads)
        return (heads, *ops.attention(*heads, call.layout, call.scale, spec))
    q, keys, values = _stored(half, qkv, call.cache)
    if call.tap is not None:
        assert not isinstance(call.layout, PackedLayout)
        _tap_heads(half, qkv, (q, *call.cache.read(half.index, call.layout.slots)))
    return (None, *ops.attention(q, keys, values, call.layout, call.scale, spec))


def _stored(
    half: AttentionHalf, qkv: tuple[torch.Tensor, ...], cache: AnyStore
) -> tuple[Heads, Heads, Heads]:
    """(Q of these tokens, all keys, all values), after the tokens' own were put into the cache."""
    call = half.call
    assert not isinstance(call.layout, PackedLayout)
    q = call.ops.qk_norm_rope_store(
        qkv, call.rotation, half.gains, call.attention, cache, half.index, call.layout.slots
    )
    return q, cache.keys[half.index], cache.values[half.index]


def _attend_cached(half: AttentionHalf, qkv: tuple[torch.Tensor, ...]) -> Operand:
    """Attention over the cache as the output projection reads it."""
    call = half.call
    assert call.cache is not None
    heads = _stored(half, qkv, call.cache)
    precision = half.out.spec.lhs
    return call.ops.attention_quantize(*heads, call.layout, call.scale, call.attention, precision)


def _tap_heads(
    half: AttentionHalf, qkv: tuple[torch.Tensor, ...], heads: tuple[Heads, Heads, Heads]
) -> None:
    """Show the projections and the heads of these tokens, as attention reads them."""
    call, path = half.call, f"layers.{half.index}"
    if call.tap is None:
        return
    call.tap(f"{path}.qkv", torch.cat(qkv, dim=1))
    shown: tuple[Heads, ...] = heads
    if any(isinstance(x, HeadCodes) for x in heads):
        # BF16 first: what the codes are made of
        shown = call.ops.qk_norm_rope(qkv, call.rotation, half.gains, Attention())
    for name, x, written in zip(("rotary_q", "rotary_k", "value"), shown, heads, strict=True):
        assert isinstance(x, torch.Tensor)
        call.tap(f"{path}.{name}", x)
        if isinstance(written, HeadCodes):
            call.tap(f"{path}.{name}_codes", _bytes(written.codes, written.scale))


class _AttentionHalf(Function):
    @staticmethod
    def forward(
        ctx: Any, x, update, gain, w_qkv, bias, query_gain, key_gain, w_out, half: AttentionHalf
    ):
        # the masters are arguments for autograd's sake; their values are in `half`
        call, path = half.call, f"layers.{half.index}"
        ops = call.ops
        total, operand, aux = _normed(call, x, update, half.norm, half.qkv)
        if call.tap is not None and half.index:
            call.tap(f"layers.{half.index - 1}.down", total)
        _watch_norm(call, f"{path}.norm_attention", total, operand, half.norm, half.qkv)
        qkv = _multiply_parts(ops, operand, half.qkv)
        if call.cache is not None and call.tap is None and half.out.observe is None:
            ctx.half = half
            keep(ctx, total, aux, *[None] * 10)
            return total, _multiply(ops, _attend_cached(half, qkv), half.out)
        heads, attended, lse = _attend(half, qkv)
        out_operand = ops.quantize_activation(attended.flatten(1), half.out.spec.lhs)
        _tap_operand(call, f"{path}.attention", attended.flatten(1), out_operand)
        if half.out.observe is not None:
            half.out.observe(attended.flatten(1), out_operand)
        y_TK = _multiply(ops, out_operand, half.out)
        ctx.half = half
        if call.recompute == "block" or heads is None:
            keep(ctx, total, aux, *[None] * 10)
        else:
            # with QK norm the projections are needed anyway, and one kernel makes the heads of them
            nothing = (None, None, None)
            shown = (*nothing, *heads) if half.gains is None else (*qkv, *nothing)
            codes, out_codes = _kept_operand(call, operand), _kept_operand(call, out_operand)
            keep(ctx, total, aux, codes, *shown, attended, lse, out_codes)
        return total, y_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        half: AttentionHalf = ctx.half
        call, ops = half.call, half.call.ops
        dtotal, dy = grads
        total, aux, operand, *six, attended, lse, out_operand = kept(ctx)
        qkv, heads = tuple(six[:3]), tuple(six[3:])
        del six
        if operand is None:
            _, operand, _ = _normed(call, total, None, half.norm, half.qkv)
        if qkv[0] is None and heads[0] is None:
            qkv = _multiply_parts(ops, operand, half.qkv)
        if heads[0] is None:
            heads = ops.qk_norm_rope(qkv, call.rotation, half.gains, call.attention)
        if attended is None:
            attended, lse = ops.attention(*heads, call.layout, call.scale, call.attention)
        if out_operand is None:
            out_operand = ops.quantize_activation(attended.flatten(1), half.out.spec.lhs)
        dattended, dout = _linear_backward(call, dy, out_operand, half.out)
        del out_operand
        dheads = ops.attention_backward(
            dattended.view(attended.shape), *heads, attended, lse, call.layout, call.scale
        )
        del dattended, heads, attended
        norms = (half.query_norm, half.key_norm)
        into = tuple(None if n is None else target(ops, n.master) for n in norms)
        into = None if None in into else into
        dqkv, dgains = ops.qk_norm_rope_backward(*dheads, qkv, call.rotation, half.gains, into)
        dquery = dkey = None
        if half.query_norm is not None and half.key_norm is not None:
            dquery = deliver(ops, half.query_norm.master, dgains[0])
            dkey = deliver(ops, half.key_norm.master, dgains[1])
        del dheads, qkv
        dbias, bias = None, half.qkv.bias_master
        if bias is not None:
            dbias = deliver(ops, bias, ops.bias_grad(dqkv, target(ops, bias)))
        dnormed, dweight = _linear_backward(call, dqkv, operand, half.qkv)
        dx, dgain = _norm_backward(call, dnormed, total, half.norm, aux, dtotal)
        dupdate = dx if ctx.needs_input_grad[1] else None
        return dx, dupdate, dgain, dweight, dbias, dquery, dkey, dout, None


def attention_half(
    x: torch.Tensor, update: torch.Tensor | None, half: AttentionHalf
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + update, attention's own update), BF16 [T, hidden] each."""
    query, key = half.query_norm, half.key_norm
    return apply(
        _AttentionHalf, x, update, half.norm.master, half.qkv.master, half.qkv.bias_master,
        None if query is None else query.master, None if key is None else key.master,
        half.out.master, half,
    )  # fmt: skip


# --- MLP -----------------------------------------------------------------------------------------


class _MlpHalf(Function):
    @staticmethod
    def forward(ctx: Any, x, update, gain, w_gate_up, w_down, half: MlpHalf):
        call, path = half.call, f"layers.{half.index}"
        ops = call.ops
        total, operand, aux = _normed(call, x, update, half.norm, half.gate_up)
        if call.tap is not None:
            call.tap(f"{path}.out", total)
        _watch_norm(call, f"{path}.norm_mlp", total, operand, half.norm, half.gate_up)
        gate, up = _multiply_parts(ops, operand, half.gate_up)
        product = ops.silu_mul_quantize(gate, up, half.down.spec.lhs)
        if call.tap is not None or half.down.observe is not None:
            shown = product.codes if product.scale is None else ops.silu_mul(gate, up)
            _tap_operand(call, f"{path}.silu_mul", shown, product)
            if half.down.observe is not None:
                half.down.observe(shown, product)
        y_TK = _multiply(ops, product, half.down)
        ctx.half = half
        both = (gate, up) if call.recompute in ("none", "codes") else (None, None)
        keep(ctx, total, aux, _kept_operand(call, operand), *both, _kept_operand(call, product))
        return total, y_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        half: MlpHalf = ctx.half
        call, ops = half.call, half.call.ops
        dtotal, dy = grads
        total, aux, operand, gate, up, product = kept(ctx)
        if operand is None:
            _, operand, _ = _normed(call, total, None, half.norm, half.gate_up)
        if gate is None:
            gate, up = _multiply_parts(ops, operand, half.gate_up)
        if product is None:
            product = ops.silu_mul_quantize(gate, up, half.down.spec.lhs)
        dproduct, ddown = _linear_backward(call, dy, product, half.down)
        del product
        use, layout = half.gate_up, call.layout
        assert isinstance(layout, PackedLayout)
        dboth = ops.silu_mul_gradient(dproduct, gate, up, layout.token_groups, use.backward)
        give_back(ctx, gate, up)
        del dproduct
        dnormed, dgate_up = _linear_backward(call, dboth, operand, use)
        del dboth
        dx, dgain = _norm_backward(call, dnormed, total, half.norm, aux, dtotal)
        return dx, dx, dgain, dgate_up, ddown, None


def mlp_half(
    x: torch.Tensor, update: torch.Tensor, half: MlpHalf
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + update, the MLP's own update), BF16 [T, hidden] each."""
    masters = (half.norm.master, half.gate_up.master, half.down.master)
    return apply(_MlpHalf, x, update, *masters, half)
