"""Differentiable operators: one autograd function each around the backend's forward and backward.

Gradients between operators are BF16, gradients of parameters FP32 (Jet-RL 4.1). Parameters are FP32
masters; whatever is not quantised enters the forward as its BF16 rounding (docs/numerics.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from samebit.layout import PackedLayout
from samebit.operand import Operand, QuantizedWeight
from samebit.spec import Attention


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, master: torch.Tensor, bias: Any, call: Any):
        ops, spec = call.ops, call.spec
        operand = ops.quantize_activation(x_TK, spec.lhs)
        if call.observe is not None:
            call.observe(x_TK, operand)
        bias_N = None if bias is None else bias.bfloat16()
        y_TN = ops.gemm(operand, call.weight, spec, bias_N)
        ctx.call, ctx.has_bias = call, bias is not None
        scale = operand.scale if operand.scale is not None else torch.empty(0)
        ctx.save_for_backward(operand.codes, scale)
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (dy_TN,) = grads
        call = ctx.call
        codes, scale = ctx.saved_tensors
        held = None if call.spec.lhs.block is None else scale
        saved = Operand(codes, held, call.spec.lhs, call.weight.features)
        dx = call.ops.input_grad(dy_TN, call.weight, call.backward)
        dw = call.ops.weight_grad(dy_TN, saved, call.token_groups, call.backward)
        db = dy_TN.float().sum(0) if ctx.has_bias else None
        return dx, dw, db, None


class LinearCall:
    """What a linear's GEMMs need besides tensors."""

    __slots__ = ("backward", "observe", "ops", "spec", "token_groups", "weight")

    def __init__(self, ops: Any, weight: Any, spec: Any, backward: Any, groups: Any, observe: Any):
        self.ops, self.weight, self.spec = ops, weight, spec
        self.backward, self.token_groups, self.observe = backward, groups, observe


def linear(
    x_TK: torch.Tensor, master_NK: torch.Tensor, bias_N: torch.Tensor | None, call: LinearCall
) -> torch.Tensor:
    """BF16 [T, K] -> BF16 [T, N] under call.spec; gradients by call.backward."""
    return _Linear.apply(x_TK, master_NK, bias_N, call)  # type: ignore[return-value]


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, rows: torch.Tensor, ops: Any):
        ctx.ops, ctx.num_rows = ops, x_TK.shape[0]
        ctx.save_for_backward(rows)
        return x_TK[rows]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        dx = ctx.ops.embed_backward(grads[0], ctx.saved_tensors[0], ctx.num_rows)
        return dx.bfloat16(), None, None


def gather_rows(x_TK: torch.Tensor, rows: torch.Tensor, ops: Any) -> torch.Tensor:
    """x[rows]; repeated rows add their gradients in FP32, in order, before one rounding to BF16."""
    return _GatherRows.apply(x_TK, rows, ops)  # type: ignore[return-value]


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, master: torch.Tensor, eps: float, ops: Any):
        gain = master.bfloat16()
        y, rstd = ops.rms_norm(x, gain, eps)
        ctx.ops = ops
        ctx.save_for_backward(x, gain, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        dx, dgain = ctx.ops.rms_norm_backward(grads[0], *ctx.saved_tensors)
        return dx, dgain, None, None


def rms_norm(x: torch.Tensor, master_K: torch.Tensor, eps: float, ops: Any) -> torch.Tensor:
    """BF16 [..., K] -> BF16 [..., K]."""
    return _RMSNorm.apply(x, master_K, eps, ops)  # type: ignore[return-value]


class _ResidualAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, update: torch.Tensor, ops: Any):
        return ops.residual_add(x, update)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return grads[0], grads[0], None


def residual_add(x: torch.Tensor, update: torch.Tensor, ops: Any) -> torch.Tensor:
    """x + update rounded to BF16."""
    return _ResidualAdd.apply(x, update, ops)  # type: ignore[return-value]


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, ops: Any):
        ctx.ops = ops
        ctx.save_for_backward(gate, up)
        return ops.silu_mul(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        dgate, dup = ctx.ops.silu_mul_backward(grads[0], *ctx.saved_tensors)
        return dgate, dup, None


def silu_mul(gate_TF: torch.Tensor, up_TF: torch.Tensor, ops: Any) -> torch.Tensor:
    """silu(gate) * up, BF16."""
    return _SiluMul.apply(gate_TF, up_TF, ops)  # type: ignore[return-value]


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ops: Any):
        ctx.ops = ops
        ctx.save_for_backward(cos, sin)
        return ops.rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return ctx.ops.rotary_backward(grads[0], *ctx.saved_tensors), None, None, None


def rotary(
    x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, ops: Any
) -> torch.Tensor:
    """Rotate BF16 [T, H, D] by each row's FP32 table entries [T, D/2]."""
    return _Rotary.apply(x_THD, cos_TC, sin_TC, ops)  # type: ignore[return-value]


def quantize_qkv(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, spec: Attention, ops: Any
) -> tuple[Any, Any, Any]:
    """(Q, K, V) as codes with one scale per token and head, under spec.q and spec.kv."""
    return (
        ops.quantize_heads(q_THD, spec.q),
        ops.quantize_heads(k_TGD, spec.kv),
        ops.quantize_heads(v_TGD, spec.kv),
    )


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, layout: PackedLayout, scale: float, spec: Attention, ops: Any):
        if spec.kv.block is None:
            out, lse = ops.attention(q, k, v, layout, scale, spec)
        else:
            # straight-through: the backward is that of BF16 attention at the dequantised Q, K, V
            codes = quantize_qkv(q, k, v, spec, ops)
            out, lse = ops.attention(*codes, layout, scale, spec)
            q, k, v = (x.dequantised() for x in codes)
        ctx.ops, ctx.layout, ctx.scale = ops, layout, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        saved = ctx.saved_tensors
        dq, dk, dv = ctx.ops.attention_backward(grads[0], *saved, ctx.layout, ctx.scale)
        return dq, dk, dv, None, None, None, None


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    spec: Attention,
    ops: Any,
) -> torch.Tensor:
    """Packed causal attention, BF16 [T, H, D]."""
    return _Attention.apply(q_THD, k_TGD, v_TGD, layout, scale, spec, ops)  # type: ignore[return-value]


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, master: torch.Tensor, ops: Any):
        ctx.ops, ctx.rows = ops, master.shape[0]
        ctx.save_for_backward(ids)
        return ops.embed(ids, master)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return None, ctx.ops.embed_backward(grads[0], ctx.saved_tensors[0], ctx.rows), None


def embed(ids_T: torch.Tensor, master_VK: torch.Tensor, ops: Any) -> torch.Tensor:
    """BF16 [T, K] rows of the embedding."""
    return _Embed.apply(ids_T, master_VK, ops)  # type: ignore[return-value]


class _LogProb(Function):
    @staticmethod
    def forward(ctx: Any, hidden, master, head, targets, vocabulary: int, transform, ops: Any):
        ctx.ops, ctx.head, ctx.vocabulary, ctx.transform = ops, head, vocabulary, transform
        ctx.save_for_backward(hidden, targets)
        return ops.log_prob(hidden, head, targets, vocabulary, transform)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        hidden, targets = ctx.saved_tensors
        dhidden, dweight = ctx.ops.log_prob_backward(
            grads[0], grads[1], hidden, ctx.head, targets, ctx.vocabulary, ctx.transform
        )
        return dhidden, dweight, None, None, None, None, None


def log_prob(
    hidden_TK: torch.Tensor,
    master_VK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Any,
    ops: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of targets, entropy) FP32 [T]; the gradient of the head reaches `master_VK`."""
    return _LogProb.apply(hidden_TK, master_VK, head, targets_T, vocabulary, transform, ops)  # type: ignore[return-value]
