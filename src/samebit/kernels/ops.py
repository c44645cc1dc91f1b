"""The operator set on Hopper (compute capability 9.0): the names and signatures of `samebit.reference`.

Rows keep their bits whatever the batch, the layout or the tile; what a kernel does not implement is
a ValueError that names it, never another path.
"""

from samebit.kernels._ops_attention import (
    attention,
    attention_backward,
    attention_quantize,
    prepare_packed,
)
from samebit.kernels._ops_elementwise import (
    embed,
    embed_backward,
    residual_add,
    rms_norm,
    rms_norm_backward,
    rotary,
    rotary_backward,
    silu_mul,
    silu_mul_backward,
)
from samebit.kernels._ops_fused import (
    add_rms_norm,
    add_rms_norm_quantize,
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_store,
    rms_norm_quantize,
    silu_mul_quantize,
)
from samebit.kernels._ops_head import (
    draw,
    head_logits,
    log_prob,
    log_prob_backward,
    log_prob_planned,
    sample,
)
from samebit.kernels._ops_linear import (
    bias_grad,
    gemm,
    gemm_parts,
    input_grad,
    linear_backward,
    quantize_activation,
    quantize_heads,
    refresh_weight,
    silu_mul_gradient,
    weight_grad,
)
from samebit.kernels.library_ops import library_log_prob, library_log_prob_backward

NAME = "hopper"
ACCUMULATES = True
"""Whether gradients are added to the parameters' `.grad` by the operators themselves (`into`)."""
PLANS_HEAD = True
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
