"""The operator set on Hopper (compute capability 9.0): the names and signatures of `samebit.reference`.

Rows keep their bits whatever the batch, the layout or the tile; what a kernel does not implement is
a ValueError that names it, never another path.
"""

from samebit.kernels._ops_attention import attention, attention_backward
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
from samebit.kernels._ops_head import draw, head_logits, log_prob, log_prob_backward, sample
from samebit.kernels._ops_linear import (
    gemm,
    input_grad,
    quantize_activation,
    quantize_heads,
    refresh_weight,
    weight_grad,
)

NAME = "hopper"

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
