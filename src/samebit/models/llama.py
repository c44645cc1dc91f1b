"""Llama (SmolLM2, Llama 3.x): what its checkpoints call the parameters."""

from __future__ import annotations

from samebit.models.config import ModelConfig

TOP = {
    "embedding": "model.embed_tokens.weight",
    "norm_final": "model.norm.weight",
    "head": "lm_head.weight",
}
BLOCK = {
    "norm_attention": "input_layernorm.weight",
    "norm_mlp": "post_attention_layernorm.weight",
}
PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def names(config: ModelConfig) -> dict[str, str]:
    """Checkpoint name of each parameter path; a fused linear has one path per named part.

    Paths: 'embedding', 'norm_final', 'head' (untied only), 'layers.I.<norm>',
    'layers.I.<part>.weight' and '.bias'.
    """
    out = {k: v for k, v in TOP.items() if k != "head" or not config.tied}
    for i in range(config.layers):
        for path, name in BLOCK.items():
            out[f"layers.{i}.{path}"] = f"model.layers.{i}.{name}"
        for part, name in PARTS.items():
            out[f"layers.{i}.{part}.weight"] = f"model.layers.{i}.{name}.weight"
    return out
