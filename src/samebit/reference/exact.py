"""FP32 functions built only from operations IEEE 754 rounds one way: + - * / sqrt and bit moves.

Library exp, log and row sums differ between vector body, scalar tail and thread split, so a row's
bits could depend on its place in the batch. Nothing here can: each output element is a fixed chain
of correctly rounded operations on its own inputs. torch's fused addcmul, lerp and sum stay out.
"""

from __future__ import annotations

import torch

_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_LN2_HIGH = 0.693145751953125
"""ln 2 cut to 16 bits: n * _LN2_HIGH is exact for |n| <= 128."""
_LN2_LOW = 1.42860682030941723212e-6
_EXP_TERMS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_SQRT_HALF_BITS = 0x3F3504F3


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x, FP32, within 2 ulp. Exactly 0 below -87.3; saturates at e^88.3 above; NaN stays NaN."""
    bounded = x.clamp(-87.3, 88.3)
    n = (bounded * _LOG2E).round_()
    r = bounded.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)
    p = torch.full_like(r, 1 / 5040)
    for term in _EXP_TERMS:
        p.mul_(r).add_(term)
    power = n.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return p.mul_(power).masked_fill_(x < -87.3, 0.0)


def log(x: torch.Tensor) -> torch.Tensor:
    """ln x for positive normal FP32 x, within 2 ulp (0 and subnormals are the caller's business)."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS).bitwise_right_shift_(23)
    mantissa = (bits - exponent.bitwise_left_shift(23)).view(torch.float32)
    f = mantissa - 1.0
    s = f / (mantissa + 1.0)
    z = s * s
    p = torch.full_like(z, 2 / 11)
    for term in (2 / 9, 2 / 7, 2 / 5, 2 / 3):
        p.mul_(z).add_(term)
    tail = p.mul_(z).mul_(s).add_(exponent * _LN2_LOW)
    return tail.add_(s * 2.0).add_(exponent * _LN2_HIGH)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis as one fixed tree of pairwise adds: halves folded onto each other."""
    while x.shape[-1] > 1:
        n = x.shape[-1]
        half = n // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if n % 2:
            folded[..., 0] += x[..., -1]
        x = folded
    return x[..., 0]


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c with one FP32 rounding (computed in FP64; a, b, c FP32 or exact FP64)."""
    return (a.double() * b.double() + c.double()).float()
