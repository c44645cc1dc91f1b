"""Pieces of the e4m3 quantiser in Gluon, for BF16 values: the same bytes as quantize_common's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from samebit.kernels.quantize_common import (
    FLOOR_BITS,
    RECIPROCAL_448_HIGH,
    RECIPROCAL_448_LOW,
)


@gluon.jit
def widened(x):
    """BF16 to FP32, an instruction an element."""
    return gl.inline_asm_elementwise(
        "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
        "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def rounded(x):
    """FP32 to BF16, nearest even, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def magnitude_bits(x):
    """Bits of |x| as int32, a NaN above infinity."""
    return (x.to(gl.int16, bitcast=True).to(gl.int32) << 16) & 0x7FFFFFFF


@gluon.jit
def scale_from_bits(bits):
    """The scale of groups from the bits of a BF16 amax; see quantize_common.scale_from_bits."""
    amax = gl.maximum(bits, FLOOR_BITS).to(gl.float32, bitcast=True)
    high = gl.full(amax.shape, RECIPROCAL_448_HIGH, gl.float32, amax.type.layout)
    return gl.fma(amax, high, amax * RECIPROCAL_448_LOW)


@gluon.jit
def codes_of(x, scale):
    """E4M3 codes of BF16 x (widened) over scales that broadcast; see quantize_common.e4m3_quotient."""
    high, low = gl.inline_asm_elementwise(
        "{ .reg .f32 r, e, n, one; neg.f32 n, $2; mov.f32 one, 0f3F800000; rcp.approx.ftz.f32 r, $2; "
        "fma.rn.f32 e, n, r, one; fma.rm.f32 $0, e, r, r; "
        "fma.rn.f32 e, n, $0, one; mul.rn.f32 $1, e, $0; }",
        "=&f,=f,f", [scale], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    x, high = gl.broadcast(x, high)
    x, low = gl.broadcast(x, low)
    return gl.fma(x, high, x * low).to(gl.float8e4nv)


@gluon.jit
def scale_of(y, LAYOUT: gl.constexpr):
    """The scale of each row of BF16 y, in its layout LAYOUT."""
    bits = gl.max(magnitude_bits(y), axis=1)
    return gl.convert_layout(scale_from_bits(bits), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
