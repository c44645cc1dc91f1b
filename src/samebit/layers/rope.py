"""Rotary tables: angles in FP64 on the host, stored FP32, one table for every consumer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def rope_table(
    head_dim: int, length: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), FP32 [length, head_dim / 2]. scaling: the config's rope dict or None.

    Supports rope types default, linear, llama3 and yarn (as transformers defines them); ValueError
    otherwise.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float64), exponent)
    frequency, gain = _scaled(frequency, scaling or {}, head_dim, theta)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return (torch.cos(angle) * gain).float(), (torch.sin(angle) * gain).float()


def _scaled(
    frequency: torch.Tensor, scaling: Mapping[str, Any], head_dim: int, theta: float
) -> tuple[torch.Tensor, float]:
    """(frequencies, factor on cos and sin) of a rope type."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequency, 1.0
    if kind == "linear":
        return frequency / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(frequency, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequency, scaling, head_dim, theta)
    raise ValueError(f"rope type {kind!r} is not supported; use default, linear, llama3 or yarn")


def _yarn(
    frequency: torch.Tensor, scaling: Mapping[str, Any], head_dim: int, theta: float
) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, a linear ramp between."""
    factor = float(scaling["factor"])
    original = float(scaling["original_max_position_embeddings"])

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(scaling["beta_fast"])), dimension(float(scaling["beta_slow"]))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float64)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequency / factor * ramp + frequency * (1 - ramp), float(scaling["attention_factor"])


def _llama3(frequency: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, a smooth band between (its model card)."""
    factor, low, high, original = (
        float(scaling[k])
        for k in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    wavelength = 2 * math.pi / frequency
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequency / factor + smooth * frequency
