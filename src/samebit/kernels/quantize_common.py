"""Device functions that every quantiser shares: amax, scale, exact quotient, codes, BF16 rounding.

The definition (docs/numerics.md): scale = max(amax, 2^-100) / largest code with IEEE division, NaN
when amax is not finite; code = round-to-nearest-even(x / scale) with IEEE division. A group whose
scale is NaN has the codes 0x7F (e4m3) or 0 (INT8).

The quotient is the correctly rounded one without a division per element: with r = RN(1/s), two
steps q -= (q*s - x) * r end in RN(x/s) (Markstein, "IA-64 and Elementary Functions", theorem 8.1);
groups with a tiny scale are first multiplied by 2^64, so that no remainder is subnormal. Where only
the code is wanted, less does, because codes change at few places and all of them can be tried
(tests/gpu/test_quantize_gpu.py): one step for FP32, and for BF16 x and amax (callers say BF16=True)
a product with 1/s in two parts.

Triton's interpreter casts to e4m3 and BF16 wrongly and does not fuse `fma`, so there (and only
there) the same values come from integer arithmetic and a plain IEEE division.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import AMAX_FLOOR, BLOCK
from samebit.kernels.launch import cdiv

NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)
FLOOR = tl.constexpr(AMAX_FLOOR)
E4M3_LARGEST = tl.constexpr(448.0)
INT8_LARGEST = tl.constexpr(127.0)
PAIRED = tl.constexpr(2048)
"""Elements from which every thread of a launch has at least two (16 warps at most)."""
FLOOR_BITS = tl.constexpr(0x0D800000)
RECIPROCAL_448_HIGH = tl.constexpr(float.fromhex("0x1.24924a0000000p-9"))
RECIPROCAL_448_LOW = tl.constexpr(float.fromhex("-0x1.b6db6e0000000p-34"))
RECIPROCAL_127_HIGH = tl.constexpr(float.fromhex("0x1.02040a0000000p-7"))
RECIPROCAL_127_LOW = tl.constexpr(float.fromhex("-0x1.efdfc00000000p-31"))
NUMERIC_OPTIONS = {"enable_fp_fusion": False}
"""Launch options of every kernel here: multiply and add are fused only where `fma` is written."""


def padded(width: int) -> int:
    """`width` rounded up to a multiple of the 128-wide block."""
    return -(-width // BLOCK) * BLOCK


def empty_activation_scale(tokens: int, width: int, device: torch.device) -> torch.Tensor:
    """Uninitialised FP32 scales [tokens, ceil(width/128)], stored group-major.

    Contiguous along tokens (rows of whole 16 bytes), which is the order GEMM tiles read them in.
    """
    row = cdiv(tokens, 4) * 4
    return torch.empty_strided(
        (tokens, cdiv(width, BLOCK)), (1, row), dtype=torch.float32, device=device
    )


@triton.jit
def magnitude_bits(x):
    """|x| as int32 bits, ordered like the values with NaN above infinity (plain max drops NaN)."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def corrected(q, dividend, divisor, inverse):
    """One step from a quotient estimate towards RN(dividend / divisor); inverse = RN(1 / divisor)."""
    # The remainder is q*s - x, not x - q*s: so a zero quotient keeps its sign. In assembly because
    # Triton's minus is a subtraction from zero, an instruction of its own.
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, n, m; neg.f32 n, $2; neg.f32 m, $4; "
        "fma.rn.f32 r, $3, $1, n; fma.rn.f32 $0, r, m, $1; }",
        "=f,f,f,f,f", [q, dividend, divisor, inverse], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def reciprocal(x):
    """RN(1 / x) of normal x whose reciprocal is normal: two Newton steps from the hardware's."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e, n, one; neg.f32 n, $1; mov.f32 one, 0f3F800000; rcp.approx.ftz.f32 r, $1; "
        "fma.rn.f32 e, n, r, one; fma.rn.f32 r, e, r, r; "
        "fma.rn.f32 e, n, r, one; fma.rn.f32 $0, e, r, r; }",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def near_reciprocal(x):
    """1 / x to about half a unit in the last place: one Newton step."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e, n, one; neg.f32 n, $1; mov.f32 one, 0f3F800000; rcp.approx.ftz.f32 r, $1; "
        "fma.rn.f32 e, n, r, one; fma.rn.f32 $0, e, r, r; }",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_magnitude(a, b):
    """The larger of |a| and |b|; a NaN where one is."""
    return _larger(tl.abs(a), tl.abs(b))


@triton.jit
def read_ahead(addresses):
    """Ask L2 for the 32 bytes at each of `addresses`, which must be readable; nothing waits for them."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l", [addresses.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """The bits of max |x| along `axis`, which is kept: those of some NaN where there is one."""
    if NATIVE:
        # A maximum of floats takes |x| as an operand; of integers, the sign has to be masked first.
        return tl.reduce(tl.abs(x), axis, _larger, keep_dims=True).to(tl.int32, bitcast=True)
    else:
        return tl.max(magnitude_bits(x), axis=axis, keep_dims=True)


@triton.jit
def scale_from_bits(bits, LARGEST: tl.constexpr, BF16: tl.constexpr):
    """The scale of a group from the bits of its amax; BF16: amax is a BF16 value.

    Of a BF16 amax one fused product with 1/LARGEST in two parts is the correctly rounded quotient
    (tried for all). The second part is negative, so that an infinity makes infinity - infinity.
    """
    if NATIVE and BF16:
        amax = tl.maximum(bits, FLOOR_BITS).to(tl.float32, bitcast=True)
        high: tl.constexpr = RECIPROCAL_448_HIGH if LARGEST == 448.0 else RECIPROCAL_127_HIGH
        low: tl.constexpr = RECIPROCAL_448_LOW if LARGEST == 448.0 else RECIPROCAL_127_LOW
        return tl.fma(amax, tl.full(amax.shape, high, tl.float32), amax * low)
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), FLOOR)
    largest = tl.full(amax.shape, LARGEST, tl.float32)
    if NATIVE:
        inverse = tl.full(amax.shape, 1.0 / LARGEST, tl.float32)
        scale = corrected(amax * inverse, amax, largest, inverse)
        scale = corrected(scale, amax, largest, inverse)
    else:
        scale = tl.div_rn(amax, largest)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def _boosted(x, scale):
    """(x, scale, RN(1 / scale)) in x's shape, x and a tiny scale multiplied by 2^64."""
    # 2^-40: below it q*s - x would need bits under 2^-149.
    boost = tl.where(scale < 9.094947017729282e-13, 18446744073709551616.0, 1.0)
    divisor = scale * boost
    inverse = tl.broadcast_to(reciprocal(divisor), x.shape)
    return x * boost, tl.broadcast_to(divisor, x.shape), inverse


@triton.jit
def quotient(x, scale, BF16: tl.constexpr):
    """RN(x / scale); `scale` has one element per group and broadcasts against `x`.

    BF16: x and the amax behind `scale` are BF16 values; the quotient then serves for codes only.
    """
    if NATIVE and BF16:
        inverse = tl.broadcast_to(near_reciprocal(scale), x.shape)
        return corrected(x * inverse, x, tl.broadcast_to(scale, x.shape), inverse)
    elif NATIVE:
        dividend, divisor, inverse = _boosted(x, scale)
        q = corrected(dividend * inverse, dividend, divisor, inverse)
        return corrected(q, dividend, divisor, inverse)
    else:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def two_part_reciprocal(x):
    """(high, low): 1 / x = high + low to 46 bits, high rounded down, so that low is not negative."""
    # A negative low would turn -0 * high + -0 * low into +0.
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e, n, one; neg.f32 n, $2; mov.f32 one, 0f3F800000; rcp.approx.ftz.f32 r, $2; "
        "fma.rn.f32 e, n, r, one; fma.rm.f32 $0, e, r, r; "
        "fma.rn.f32 e, n, $0, one; mul.rn.f32 $1, e, $0; }",
        "=&f,=f,f", [x], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_quotient(x, scale, BF16: tl.constexpr):
    """A quotient whose e4m3 code is that of RN(x / scale); operands as for `quotient`."""
    if NATIVE and BF16:
        high, low = two_part_reciprocal(scale)
        return tl.fma(x, tl.broadcast_to(high, x.shape), x * tl.broadcast_to(low, x.shape))
    elif NATIVE:
        dividend, divisor, inverse = _boosted(x, scale)
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
def e4m3_word(q0, q1, q2, q3):
    """Four e4m3 codes as one int32, `q0` in the low byte: four tokens of a transposed row."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [q0, q1, q2, q3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = e4m3_code(q0).to(tl.int32) | (e4m3_code(q1).to(tl.int32) << 8)
        return low | (e4m3_code(q2).to(tl.int32) << 16) | (e4m3_code(q3).to(tl.int32) << 24)


@triton.jit
def int8_code(q):
    """FP32 to INT8 in [-127, 127], nearest even; NaN becomes 0."""
    clamped = tl.minimum(tl.maximum(q, -127.0), 127.0)
    # Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    code = (clamped + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(q == q, code, 0).to(tl.int8)


@triton.jit
def int8_group_codes(q, bits):
    """INT8 codes of groups whose amax has these `bits` (broadcast against q): |q| <= 127 or NaN.

    A group with a NaN or an infinity has zero codes. Neither a clamp nor a test per element.
    """
    if NATIVE:
        kept = tl.broadcast_to(tl.where(bits < 0x7F800000, -1, 0), q.shape)
        return tl.inline_asm_elementwise(
            "{ .reg .f32 m, a, b, c, d; .reg .b32 s, t; mov.f32 m, 0f4B400000; "
            "add.rn.f32 a, $1, m; add.rn.f32 b, $2, m; add.rn.f32 c, $3, m; add.rn.f32 d, $4, m; "
            "prmt.b32 s, a, b, 0x0040; prmt.b32 t, c, d, 0x0040; prmt.b32 s, s, t, 0x5410; "
            "and.b32 $0, s, $5; }",
            "=r,f,f,f,f,r,r,r,r", [q, kept], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return int8_code(tl.where(bits < 0x7F800000, q, float("nan")))


@triton.jit
def widened_once(x):
    """BF16 to FP32 with an instruction an element: left to itself, the compiler takes three a pair."""
    if NATIVE and x.shape[0] * x.shape[1] >= PAIRED:
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def widened(x):
    """BF16 to FP32, made anew at every use: the compiler keeps the pair, not its two FP32 values.

    Half the registers of a row that is read twice, and so twice the rows in flight. Where a thread may
    hold a single element there is no pair: its other half would be whatever a register holds.
    """
    if NATIVE and x.shape[0] * x.shape[1] >= PAIRED:
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def round_to_bf16(x):
    """FP32 to BF16, nearest even."""
    if NATIVE:
        # Two at a time: the conversion of one runs at a quarter of the rate, and is what comes out
        # where the result is used in FP32 again.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def block_codes(x, bits, BF16: tl.constexpr):
    """e4m3 codes and scale of groups; `bits` is the amax of each group, broadcastable to `x`."""
    scale = scale_from_bits(bits, E4M3_LARGEST, BF16)
    return e4m3_code(e4m3_quotient(x, scale, BF16)), scale


@triton.constexpr_function
def log2(value):
    """The exponent of a power of two."""
    return value.bit_length() - 1


SIGMOID = tl.constexpr(
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "
    "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
)
"""1 / (1 + 2^(-x * log2 e)) by the hardware's exponential and reciprocal, for gradients."""


@triton.jit
def gradient_sigmoid(x):
    """1 / (1 + exp(-x)) to a few ulp: gradients are rounded to 8 bits right after."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tree_sum(x, LEFT: tl.constexpr = 1):
    """Sum over the last axis (a power of two) of a 2-D tile by adjacent pairs, until `LEFT` are left.

    Every step adds two numbers, so the result does not depend on the layout that the compiler
    chose for `x`; `tl.sum` over a longer axis adds in an order that does.
    """
    for _ in tl.static_range(log2(x.shape[1] // LEFT)):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (x.shape[0] * LEFT,))


@triton.jit
def pair_sum(x):
    """The same sum of a short 1-D tensor, a scalar, in every thread's registers.

    A sum over threads of several warps crosses shared memory at each step; this crosses it once.
    """
    for _ in tl.static_range(log2(x.shape[0])):
        even, odd = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
        x = even + odd
    return tl.sum(x, axis=0)


@triton.jit
def fold_rows(x, ROWS: tl.constexpr):
    """Fold the rows of a 2-D tile in halves (upper onto lower) until `ROWS` are left."""
    for _ in tl.static_range(log2(x.shape[0] // ROWS)):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), axis=0)
    return x
