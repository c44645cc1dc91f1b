"""The models that benches take the shape of."""

from __future__ import annotations

from samebit.models.config import ModelConfig

MODELS = {
    "qwen3-8b": ModelConfig(
        family="qwen3", hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8,
        head_dim=128, vocab_size=151936, tokenizer_size=151669, rope_theta=1e6, rms_eps=1e-6,
        tied=False, max_position=40960, qk_norm=True,
    ),
    "llama-3.1-8b": ModelConfig(
        family="llama", hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8,
        head_dim=128, vocab_size=128256, tokenizer_size=128256, rope_theta=5e5, rms_eps=1e-5,
        tied=False, max_position=131072,
    ),
    "qwen3-0.6b": ModelConfig(
        family="qwen3", hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8,
        head_dim=128, vocab_size=151936, tokenizer_size=151669, rope_theta=1e6, rms_eps=1e-6,
        tied=True, max_position=40960, qk_norm=True,
    ),
    "smollm2-135m": ModelConfig(
        family="llama", hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3,
        head_dim=64, vocab_size=49152, tokenizer_size=49152, rope_theta=1e5, rms_eps=1e-5,
        tied=True, max_position=8192,
    ),
}  # fmt: skip
"""Shapes as published; benches allocate fewer positions."""
