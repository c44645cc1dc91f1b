"""The sampler's noise: the definition of `samebit.reference.sampling`, in Triton.

The two 32-bit keys of a token come from (seed, sample id, position) on the host
(`reference.sampling.stream_key`); the word of an id is mix(mix(id ^ low) + high) with murmur3's
finaliser, and its top 23 bits h give u = (h + 0.5) * 2^-23, exactly. Words and u are equal on every
device; the two logarithms of -log(-log(u)) are the device's own. Near u = 1, where noise is large,
-log(u) is summed as a series in 1 - u, which is exact too: the hardware's logarithm keeps only an
absolute error there. Only the sampler needs noise: training sees the token it chose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samebit.kernels.quantize_common import NATIVE


@triton.jit
def mix(x):
    """murmur3's 32-bit finaliser."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_word(ids, low, high):
    """The 32-bit word of (token, id); ids int32 and keys uint32 broadcast."""
    return mix(mix(ids.to(tl.uint32) ^ low) + high)


@triton.jit
def _minus_log(x):
    """-log of normal positive x, the hardware's approximation (about 22 bits of log2)."""
    if NATIVE:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * -0.6931471805599453
    else:
        return 0.0 - tl.log(x)


@triton.jit
def gumbel(word):
    """The Gumbel variate of a noise word."""
    # h + 0.5 and 2^23 - (h + 0.5), exactly: h is the fraction of a float in [2^23, 2^24)
    half = ((word >> 9) | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.5
    u = half * 1.1920928955078125e-07
    rest = (8388608.0 - half) * 1.1920928955078125e-07
    series = rest * (1.0 + rest * (0.5 + rest * (0.3333333333333333 + rest * 0.25)))
    return _minus_log(tl.where(rest < 0.015625, series, _minus_log(u)))
