"""The definition of every operator in torch, on any device; exact or row-invariant by construction.

The names below are the operator set. A backend is a module with these names and signatures
(docs/numerics.md, section 6); quant/ops.py picks one by device and never falls back.
"""

from samebit.reference.activation import silu_mul, silu_mul_backward
from samebit.reference.attention import attention, prepare_packed
from samebit.reference.attention_backward import attention_backward
from samebit.reference.embedding import embed, embed_backward
from samebit.reference.fused import (
    add_rms_norm,
    add_rms_norm_quantize,
    attention_quantize,
    bias_grad,
    gemm_parts,
    linear_backward,
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_store,
    rms_norm_quantize,
    silu_mul_gradient,
    silu_mul_quantize,
)
from samebit.reference.gemm import gemm, input_grad, weight_grad
from samebit.reference.head import (
    draw,
    head_logits,
    log_prob,
    log_prob_backward,
    log_prob_planned,
    sample,
)
from samebit.reference.library_head import library_log_prob, library_log_prob_backward
from samebit.reference.norm import residual_add, rms_norm, rms_norm_backward
from samebit.reference.quantize import quantize_activation, quantize_heads, refresh_weight
from samebit.reference.rotary import rotary, rotary_backward

NAME = "reference"
ACCUMULATES = False
"""Whether gradients are added to the parameters' `.grad` by the operators themselves (`into`)."""
PLANS_HEAD = False
"""Whether `log_prob_planned` costs less than `log_prob` and its backward."""

__all__ = [
    "ACCUMULATES",
    "NAME",
    "PLANS_HEAD",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "attention",
    "attention_backward",
    "attention_quantize",
    "bias_grad",
    "draw",
    "embed",
    "embed_backward",
    "gemm",
    "gemm_parts",
    "head_logits",
    "input_grad",
    "library_log_prob",
    "library_log_prob_backward",
    "linear_backward",
    "log_prob",
    "log_prob_backward",
    "log_prob_planned",
    "prepare_packed",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "qk_norm_rope_store",
    "quantize_activation",
    "quantize_heads",
    "refresh_weight",
    "residual_add",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rotary",
    "rotary_backward",
    "sample",
    "silu_mul",
    "silu_mul_backward",
    "silu_mul_gradient",
    "silu_mul_quantize",
    "weight_grad",
]
