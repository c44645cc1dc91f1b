"""FP32 functions built only from operations IEEE 754 rounds one way: + - * / sqrt and bit moves.

Library exp, log and row sums differ between vector body, scalar tail and thread split, so a row's
bits could depend on its place in the batch. Nothing here can: each output element is a fixed chain
of correctly rounded operations on its own inputs. torch's fused addcmul, lerp and sum stay out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _number(value: float) -> torch.Tensor:
    """An FP32 (or int32) constant as a tensor: a Python number is made one at every use."""
    return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32)


_LOG2E = _number(1.4426950408889634)
_LN2_HIGH = _number(0.693145751953125)
"""ln 2 cut to 16 bits: n * _LN2_HIGH is exact for |n| <= 128."""
_LN2_LOW = _number(1.42860682030941723212e-6)
_EXP_FIRST, *_EXP_TERMS = (
    _number(c) for c in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
)
_LOG_FIRST, *_LOG_TERMS = (_number(c) for c in (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3))
_SQRT_HALF_BITS = _number(0x3F3504F3)
_ONE, _TWO = _number(1.0), _number(2.0)
_EXPONENT_ONE, _EXPONENT_BIAS = _number(1 << 23), _number(127 << 23)
_ROUNDER = _number(1.5 * 2.0**23)
"""Adding it rounds |x| < 2^22 to the nearest even integer and leaves it in the low bits."""
_JUST_BELOW = -87.30000305175781 - 2.0**-17
"""The FP32 number before fl(-87.3)."""
_PIECE = 1 << 16
"""Elements a pass works on: the chain of passes stays in cache. Changes no bit."""


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x, FP32, within 2 ulp. Exactly 0 below -87.3; saturates at e^88.3 above; NaN stays NaN."""
    if x.numel() <= 2 * _PIECE or x.is_cuda:
        return _exp(x)
    out = torch.empty(x.shape, device=x.device)
    flat = out.view(-1)
    for into, piece in zip(flat.split(_PIECE), x.reshape(-1).split(_PIECE), strict=True):
        into.copy_(_exp(piece))
    return out


def _exp(x: torch.Tensor) -> torch.Tensor:
    # -88 has the exponent -127, whose power of two below is exactly 0
    r = F.threshold(x, _JUST_BELOW, -88.0).clamp_(max=88.3)
    shifted = (r * _LOG2E).add_(_ROUNDER)
    n = shifted - _ROUNDER
    r.sub_(n * _LN2_HIGH).sub_(n.mul_(_LN2_LOW))
    p = r * _EXP_FIRST
    for term in _EXP_TERMS[:-1]:
        p.add_(term).mul_(r)
    p.add_(_EXP_TERMS[-1])
    power = shifted.view(torch.int32).mul_(_EXPONENT_ONE).add_(_EXPONENT_BIAS)
    return p.mul_(power.view(torch.float32))


def log(x: torch.Tensor) -> torch.Tensor:
    """ln x for positive normal FP32 x, within 2 ulp (0 and subnormals are the caller's business)."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS).bitwise_right_shift_(23)
    mantissa = (bits - exponent.bitwise_left_shift(23)).view(torch.float32)
    f = mantissa - _ONE
    s = f.div_(mantissa.add_(_ONE))
    z = s * s
    p = z * _LOG_FIRST
    for term in _LOG_TERMS[:-1]:
        p.add_(term).mul_(z)
    tail = p.add_(_LOG_TERMS[-1]).mul_(z).mul_(s)
    exponent = exponent.float()
    tail.add_(exponent * _LN2_LOW)
    return tail.add_(s.mul_(_TWO)).add_(exponent.mul_(_LN2_HIGH))


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis as one fixed tree of pairwise adds: halves folded onto each other."""
    owned = False
    while x.shape[-1] > 1:
        half, odd = divmod(x.shape[-1], 2)
        first, second, *last = x.split(half, -1) if odd else x.chunk(2, -1)
        x = first.add_(second) if owned else first + second
        if last:
            x[..., :1].add_(last[0])
        owned = True
    return x[..., 0]


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded FP32 square root of FP32 x >= 0.

    torch's FP32 root goes through a vector library that misrounds some values (0.929395318 is one).
    The root of a 24-bit number keeps 4 units of FP64's last place away from every midpoint of FP32,
    so rounding a root that FP64 has within 3 units gives the right FP32 number.
    """
    return torch.sqrt(x.double()).float()


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c with one FP32 rounding (computed in FP64; a, b, c FP32 or exact FP64)."""
    return (a.double() * b.double() + c.double()).float()
