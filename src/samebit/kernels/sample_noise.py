"""The sampler's noise: a pure function of (seed, sample id, position, vocabulary id).

All integers are unsigned 32-bit with wrap-around; `lo` and `hi` are the halves of a 64-bit value.

    mix(x):  x ^= x >> 17; x *= 0xED5AD4BB; x ^= x >> 11; x *= 0xAC4C1B51;
             x ^= x >> 15; x *= 0x31848BAB; x ^= x >> 14         (a bijection, "triple32")
    chain(c): for w in (lo(seed), hi(seed), lo(sample id), hi(sample id), position):
                  c = mix(c ^ w) + 0x9E3779B9
    key0 = chain(0x243F6A88), key1 = chain(0x85A308D3)
    word = mix(mix(id + key0) ^ key1)
    v    = fl(fl32(word) * 2^-32 + 2^-33)         uniform in (0, 1], fine near 0
    E    = -log(1 - v), by its series below 2^-6  exponential
    noise = -log(E)                               Gumbel

The words and v are integer arithmetic and correctly rounded FP32, equal on every device; the two
logarithms are the device's own. Only the sampler needs them: training sees the token it chose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samebit.kernels.quantize_common import NATIVE


@triton.jit
def mix(x):
    """Bijective 32-bit hash."""
    x = x ^ (x >> 17)
    x = x * tl.full((), 0xED5AD4BB, tl.uint32)
    x = x ^ (x >> 11)
    x = x * tl.full((), 0xAC4C1B51, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), 0x31848BAB, tl.uint32)
    return x ^ (x >> 14)


@triton.jit
def _chain(key, seed_lo, seed_hi, sample_lo, sample_hi, position):
    step = tl.full((), 0x9E3779B9, tl.uint32)
    key = mix(key ^ seed_lo) + step
    key = mix(key ^ seed_hi) + step
    key = mix(key ^ sample_lo) + step
    key = mix(key ^ sample_hi) + step
    return mix(key ^ position) + step


@triton.jit
def token_keys(seed, sample_id, position):
    """(key0, key1) uint32 of tokens [T] from int64 seed, sample ids [T] and positions [T]."""
    seed_lo = (seed & 0xFFFFFFFF).to(tl.uint32)
    seed_hi = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    sample_lo = (sample_id & 0xFFFFFFFF).to(tl.uint32)
    sample_hi = ((sample_id >> 32) & 0xFFFFFFFF).to(tl.uint32)
    place = (position & 0xFFFFFFFF).to(tl.uint32)
    first = tl.full((), 0x243F6A88, tl.uint32)
    second = tl.full((), 0x85A308D3, tl.uint32)
    key0 = _chain(first, seed_lo, seed_hi, sample_lo, sample_hi, place)
    key1 = _chain(second, seed_lo, seed_hi, sample_lo, sample_hi, place)
    return key0, key1


@triton.jit
def noise_word(ids, key0, key1):
    """The 32-bit word of (token, id); ids and keys broadcast."""
    return mix(mix(ids.to(tl.uint32) + key0) ^ key1)


@triton.jit
def _log(x):
    """Natural logarithm, the hardware's approximation (about 22 bits of log2)."""
    if NATIVE:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def gumbel(word):
    """The Gumbel variate of a noise word."""
    v = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return -_log(tl.where(v < 0.015625, series, -_log(1.0 - v)))
