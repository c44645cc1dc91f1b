"""The definition of every operator in torch, on any device; exact or row-invariant by construction.

The names below are the operator set. A backend is a module with these names and signatures
(docs/numerics.md, section 6); quant/ops.py picks one by device and never falls back.
"""

from samebit.reference.activation import silu_mul, silu_mul_backward
from samebit.reference.attention import attention
from samebit.reference.attention_backward import attention_backward
from samebit.reference.embedding import embed, embed_backward
from samebit.reference.gemm import gemm, input_grad, weight_grad
from samebit.reference.head import draw, head_logits, log_prob, log_prob_backward, sample
from samebit.reference.norm import residual_add, rms_norm, rms_norm_backward
from samebit.reference.quantize import quantize_activation, quantize_heads, refresh_weight
from samebit.reference.rotary import rotary, rotary_backward

NAME = "reference"

__all__ = [
    "NAME",
    "attention",
    "attention_backward",
    "draw",
    "embed",
    "embed_backward",
    "gemm",
    "head_logits",
    "input_grad",
    "log_prob",
    "log_prob_backward",
    "quantize_activation",
    "quantize_heads",
    "refresh_weight",
    "residual_add",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "sample",
    "silu_mul",
    "silu_mul_backward",
    "weight_grad",
]
