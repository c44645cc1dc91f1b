"""Composites of the operator set: what a backend may run as one kernel, defined as the chain of its parts."""

from __future__ import annotations

from typing import Any

import torch

from samebit.layout import PagedLayout
from samebit.operand import Heads, Operand, QuantizedWeight, Rotation
from samebit.reference.activation import silu_mul, silu_mul_backward
from samebit.reference.attention import attention
from samebit.reference.gemm import gemm, input_grad, weight_grad
from samebit.reference.norm import residual_add, rms_norm, rms_norm_backward
from samebit.reference.quantize import quantize_activation, quantize_heads
from samebit.reference.rotary import rotary, rotary_backward
from samebit.spec import Attention, Backward, Gemm, Precision

Gains = tuple[torch.Tensor, torch.Tensor] | None
"""BF16 gains [D] of the query norm and of the key norm; None without them."""
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K and V columns of the fused projection, BF16 [T, heads * D] each; views of one buffer or not."""


def gemm_parts(
    lhs: Operand, weight: QuantizedWeight, spec: Gemm, bias_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """`gemm` of a fused weight, one BF16 [T, rows] per named part (views)."""
    return gemm(lhs, weight, spec, bias_N).split(weight.rows, dim=1)


def rms_norm_quantize(
    x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float, precision: Precision
) -> tuple[Operand, torch.Tensor]:
    """(the norm's output as a GEMM operand, what the norm's backward needs)."""
    y, kept = rms_norm(x_TK, gain_K, eps)
    return quantize_activation(y, precision), kept


def add_rms_norm(
    x_TK: torch.Tensor, update_TK: torch.Tensor, gain_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(residual sum BF16, its norm BF16, what the norm's backward needs)."""
    total = residual_add(x_TK, update_TK)
    return (total, *rms_norm(total, gain_K, eps))


def add_rms_norm_quantize(
    x_TK: torch.Tensor,
    update_TK: torch.Tensor,
    gain_K: torch.Tensor,
    eps: float,
    precision: Precision,
) -> tuple[torch.Tensor, Operand, torch.Tensor]:
    """(residual sum BF16, its norm as a GEMM operand, what the norm's backward needs)."""
    total = residual_add(x_TK, update_TK)
    return (total, *rms_norm_quantize(total, gain_K, eps, precision))


def silu_mul_quantize(gate_TF: torch.Tensor, up_TF: torch.Tensor, precision: Precision) -> Operand:
    """silu(gate) * up as a GEMM operand."""
    return quantize_activation(silu_mul(gate_TF, up_TF), precision)


def attention_quantize(
    q_THD: Heads,
    k_SGD: Heads,
    v_SGD: Heads,
    layout: PagedLayout,
    scale: float,
    spec: Attention,
    precision: Precision,
) -> Operand:
    """`attention` over a cache, as the operand of the product after it."""
    out, _ = attention(q_THD, k_SGD, v_SGD, layout, scale, spec)
    return quantize_activation(out.flatten(1), precision)


def qk_norm_rope(
    qkv: Parts, rotation: Rotation, gains: Gains, spec: Attention
) -> tuple[Heads, Heads, Heads]:
    """(Q [T, H, D], K, V [T, G, D]) of the projections: QK norm, rotation, and codes under `spec`.

    BF16, or e4m3 codes with one scale per token and head where spec.kv has scales.
    """
    q, k, v = (x.unflatten(1, (-1, rotation.head_dim)) for x in qkv)
    if gains is not None:
        q, _ = rms_norm(q, gains[0], rotation.eps)
        k, _ = rms_norm(k, gains[1], rotation.eps)
    q, k = rotary(q, *rotation.rows), rotary(k, *rotation.rows)
    if spec.kv.block is None:
        return q, k, v
    return quantize_heads(q, spec.q), quantize_heads(k, spec.kv), quantize_heads(v, spec.kv)


def qk_norm_rope_store(
    qkv: Parts,
    rotation: Rotation,
    gains: Gains,
    spec: Attention,
    cache: Any,
    layer: int,
    slots_T: torch.Tensor,
) -> Heads:
    """Q of `qk_norm_rope`; K and V go to rows `slots` int64 [T] of a layer of the KV store."""
    q, k, v = qk_norm_rope(qkv, rotation, gains, spec)
    cache.write(layer, slots_T, k, v)
    return q


def qk_norm_rope_backward(
    dq_THD: torch.Tensor,
    dk_TGD: torch.Tensor,
    dv_TGD: torch.Tensor,
    qkv: Parts | None,
    rotation: Rotation,
    gains: Gains,
    into: Gains = None,
) -> tuple[torch.Tensor, Gains]:
    """(dqkv BF16 [T, N], FP32 gradients of the gains or None); qkv only where there are gains."""
    dq, dk = (rotary_backward(d, *rotation.rows) for d in (dq_THD, dk_TGD))
    dgains = None
    if gains is not None:
        assert qkv is not None
        q, k, _ = (x.unflatten(1, (-1, rotation.head_dim)) for x in qkv)
        dq, dq_gain = _norm_backward(dq, q, gains[0], rotation.eps, into and into[0])
        dk, dk_gain = _norm_backward(dk, k, gains[1], rotation.eps, into and into[1])
        dgains = (dq_gain, dk_gain)
    return torch.cat([d.flatten(1) for d in (dq, dk, dv_TGD)], dim=1), dgains


def _norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gain: torch.Tensor, eps: float, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    _, kept = rms_norm(x, gain, eps)
    return rms_norm_backward(dy, x, gain, kept, None, into)


def silu_mul_gradient(
    dy_TF: torch.Tensor,
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    token_groups: torch.Tensor,
    backward: Backward,
) -> torch.Tensor:
    """`silu_mul_backward` as `linear_backward` of the linear that made gate and up takes it."""
    return silu_mul_backward(dy_TF, gate_TF, up_TF)


def linear_backward(
    dy_TN: torch.Tensor,
    saved: Operand,
    weight: QuantizedWeight,
    token_groups: torch.Tensor,
    backward: Backward,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dX BF16 [T, K], dW FP32 [N, K]) of a linear; dW is added to `into` when given."""
    dx = input_grad(dy_TN, weight, backward)
    return dx, weight_grad(dy_TN, saved, token_groups, backward, into)


def bias_grad(dy_TN: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """FP32 [N]: dY summed over tokens, added to `into` when given."""
    db = dy_TN.float().sum(0)
    return db if into is None else into.add_(db)
