"""Device functions that every quantiser shares: amax, scale, exact quotient, codes, BF16 rounding.

The definition (docs/numerics.md): scale = max(amax, 2^-100) / largest code with IEEE division, NaN
when amax is not finite; code = round-to-nearest-even(x / scale) with IEEE division. A group whose
scale is NaN has the codes 0x7F (e4m3) or 0 (INT8).

The quotient is the correctly rounded one without a division per element: with r = RN(1/s), two
steps q -= (q*s - x) * r end in RN(x/s) (Markstein, "IA-64 and Elementary Functions", theorem 8.1);
groups with a tiny scale are first multiplied by 2^64, so that no remainder is subnormal.

Triton's interpreter casts to e4m3 and BF16 wrongly and does not fuse `fma`, so there (and only
there) the same values come from integer arithmetic and a plain IEEE division.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import AMAX_FLOOR, BLOCK

NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)
FLOOR = tl.constexpr(AMAX_FLOOR)
E4M3_LARGEST = tl.constexpr(448.0)
INT8_LARGEST = tl.constexpr(127.0)
NUMERIC_OPTIONS = {"enable_fp_fusion": False}
"""Launch options of every kernel here: multiply and add are fused only where `fma` is written."""


def padded(width: int) -> int:
    """`width` rounded up to a multiple of the 128-wide block."""
    return triton.cdiv(width, BLOCK) * BLOCK


def empty_activation_scale(tokens: int, width: int, device: torch.device) -> torch.Tensor:
    """Uninitialised FP32 scales [tokens, ceil(width/128)], stored group-major.

    Contiguous along tokens (rows of whole 16 bytes), which is the order GEMM tiles read them in.
    """
    rows = triton.cdiv(width, BLOCK)
    storage_GT = torch.empty((rows, triton.cdiv(tokens, 4) * 4), dtype=torch.float32, device=device)
    return storage_GT[:, :tokens].t()


@triton.jit
def magnitude_bits(x):
    """|x| as int32 bits, ordered like the values with NaN above infinity (plain max drops NaN)."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def corrected(q, dividend, divisor, inverse):
    """RN(dividend / divisor) from a quotient estimate and inverse = RN(1 / divisor)."""
    # The remainder is q*s - x, not x - q*s: so a zero quotient keeps its sign.
    q = tl.fma(tl.fma(divisor, q, -dividend), -inverse, q)
    return tl.fma(tl.fma(divisor, q, -dividend), -inverse, q)


@triton.jit
def reciprocal(x):
    """RN(1 / x) of normal x whose reciprocal is normal: two Newton steps from the hardware's."""
    r = tl.inline_asm_elementwise(
        "rcp.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    one = tl.full(x.shape, 1.0, tl.float32)
    r = tl.fma(tl.fma(-x, r, one), r, r)
    return tl.fma(tl.fma(-x, r, one), r, r)


@triton.jit
def scale_from_bits(bits, LARGEST: tl.constexpr):
    """The scale of a group from the bits of its amax."""
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), FLOOR)
    largest = tl.full(amax.shape, LARGEST, tl.float32)
    if NATIVE:
        inverse = tl.full(amax.shape, 1.0 / LARGEST, tl.float32)
        scale = corrected(amax * inverse, amax, largest, inverse)
    else:
        scale = tl.div_rn(amax, largest)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def quotient(x, scale):
    """RN(x / scale); `scale` has one element per group and broadcasts against `x`."""
    if NATIVE:
        # 2^-40: below it q*s - x would need bits under 2^-149.
        boost = tl.where(scale < 9.094947017729282e-13, 18446744073709551616.0, 1.0)
        divisor = scale * boost
        inverse = tl.broadcast_to(reciprocal(divisor), x.shape)
        divisor = tl.broadcast_to(divisor, x.shape)
        dividend = x * boost
        return corrected(dividend * inverse, dividend, divisor, inverse)
    else:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def e4m3_code(q):
    """FP32 to e4m3 (as uint8): saturating, nearest even; NaN becomes 0x7F."""
    if NATIVE:
        return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = q.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
        size_bits = size.to(tl.int32, bitcast=True)
        normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9: adding 2^14 rounds to them.
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, subnormal, normal) | sign
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def int8_code(q):
    """FP32 to INT8 in [-127, 127], nearest even; NaN becomes 0."""
    clamped = tl.minimum(tl.maximum(q, -127.0), 127.0)
    # Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    code = (clamped + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(q == q, code, 0).to(tl.int8)


@triton.jit
def round_to_bf16(x):
    """FP32 to BF16, nearest even."""
    if NATIVE:
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def block_codes(x, bits):
    """e4m3 codes and scale of groups; `bits` is the amax of each group, broadcastable to `x`."""
    scale = scale_from_bits(bits, E4M3_LARGEST)
    return e4m3_code(quotient(x, scale)), scale


@triton.constexpr_function
def log2(value):
    """The exponent of a power of two."""
    return value.bit_length() - 1


@triton.jit
def tree_sum(x):
    """Sum over the last axis (a power of two) of a 2-D tile by adjacent pairs.

    Every step adds two numbers, so the result does not depend on the layout that the compiler
    chose for `x`; `tl.sum` over a longer axis adds in an order that does.
    """
    for _ in tl.static_range(log2(x.shape[1])):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def fold_rows(x, ROWS: tl.constexpr):
    """Fold the rows of a 2-D tile in halves (upper onto lower) until `ROWS` are left."""
    for _ in tl.static_range(log2(x.shape[0] // ROWS)):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), axis=0)
    return x
