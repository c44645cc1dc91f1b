"""Qwen2 and Qwen2.5: Llama's names plus a QKV bias."""

from __future__ import annotations

from samebit.models import llama
from samebit.models.config import ModelConfig


def names(config: ModelConfig) -> dict[str, str]:
    """Checkpoint name of each parameter path (see models/llama.py)."""
    out = llama.names(config)
    for i in range(config.layers):
        for part in ("q", "k", "v"):
            out[f"layers.{i}.{part}.bias"] = f"model.layers.{i}.{llama.PARTS[part]}.bias"
    return out
