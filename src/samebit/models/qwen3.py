"""Qwen3: Llama's names plus query and key norms."""

from __future__ import annotations

from samebit.models import llama
from samebit.models.config import ModelConfig


def names(config: ModelConfig) -> dict[str, str]:
    """Checkpoint name of each parameter path (see models/llama.py)."""
    out = llama.names(config)
    for i in range(config.layers):
        out[f"layers.{i}.query_norm"] = f"model.layers.{i}.self_attn.q_norm.weight"
        out[f"layers.{i}.key_norm"] = f"model.layers.{i}.self_attn.k_norm.weight"
    return out
