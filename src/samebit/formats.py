"""Number formats: the only place that holds their constants.

A format is what a tensor's elements are stored in; a granularity (spec.py) is which elements
share a scale. `scale` always means *multiply to dequantise*.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128
"""Elements along K that share an activation scale, and the side of a weight block (Jet-RL 4.2)."""

AMAX_FLOOR = 2.0**-100
"""Smallest amax a scale is derived from: an all-zero group gets a positive, finite scale."""


@dataclass(frozen=True)
class Format:
    """One element format. `max` is the largest finite code value; None for unscaled formats."""

    name: str
    dtype: torch.dtype
    bytes: int
    max: float | None = None

    @property
    def scaled(self) -> bool:
        """Whether tensors of this format carry scales."""
        return self.max is not None


FP32 = Format("fp32", torch.float32, 4)
BF16 = Format("bf16", torch.bfloat16, 2)
FP16 = Format("fp16", torch.float16, 2)
E4M3 = Format("e4m3", torch.float8_e4m3fn, 1, 448.0)
INT8 = Format("int8", torch.int8, 1, 127.0)
"""INT8 is symmetric: -128 is never produced, so negation is exact."""

INT4 = Format("int4", torch.int8, 1, 7.0)
"""Sixteen levels less one, symmetric as INT8; a code takes a byte (a stress format, not a fast one)."""

FORMATS = {f.name: f for f in (FP32, BF16, FP16, E4M3, INT8, INT4)}


def get_format(name: str) -> Format:
    """The format called `name`; ValueError naming the known ones otherwise."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known formats: {', '.join(FORMATS)}")
    return FORMATS[name]
