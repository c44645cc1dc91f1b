"""Saved activation codes brought along tokens, in Gluon: `rescale_tokens` and `requantize_tokens`.

A tile of 128 tokens x 128 features is read in whole lines, turned in shared memory so that a thread
holds 16 tokens of four features, and stored in whole lines of tokens. The same bytes as the plain
kernels'.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from samebit.kernels._gradient_hopper import WARPS, store_turned
from samebit.kernels.quantize_common import FLOOR

LOAD_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
TOKEN_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
LANES = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
WORD_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0]],
        LANES, [[16, 0], [32, 0], [64, 0]], [], [128, 128],
    )
)  # fmt: skip
"""The four features of a word are neighbours, as shared memory delivers them."""
TURNED_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [0, 1], [0, 2]],
        LANES, [[16, 0], [32, 0], [64, 0]], [], [128, 128],
    )
)  # fmt: skip
"""The same elements in the same threads, tokens as neighbours: codes are packed in this order."""
SHARED_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, order=[1, 0]))


@gluon.jit
def _corrected(q, dividend, divisor, inverse):
    """See quantize_common.corrected."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 r, n, m; neg.f32 n, $2; neg.f32 m, $4; "
        "fma.rn.f32 r, $3, $1, n; fma.rn.f32 $0, r, m, $1; }",
        "=f,f,f,f,f", [q, dividend, divisor, inverse], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _reciprocal(x):
    """See quantize_common.reciprocal."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 r, e, n, one; neg.f32 n, $1; mov.f32 one, 0f3F800000; rcp.approx.ftz.f32 r, $1; "
        "fma.rn.f32 e, n, r, one; fma.rn.f32 r, e, r, r; "
        "fma.rn.f32 e, n, r, one; fma.rn.f32 $0, e, r, r; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _scale(amax):
    """The scale of groups from a non-negative FP32 amax; see quantize_common.scale_from_bits."""
    kept = gl.maximum(amax, FLOOR)
    largest = gl.full(amax.shape, 448.0, gl.float32, amax.type.layout)
    inverse = gl.full(amax.shape, 1.0 / 448.0, gl.float32, amax.type.layout)
    scale = _corrected(kept * inverse, kept, largest, inverse)
    scale = _corrected(scale, kept, largest, inverse)
    return gl.where(amax.to(gl.int32, bitcast=True) >= 0x7F800000, float("nan"), scale)


@gluon.jit
def _boost(scale):
    """What x and the scale are multiplied by before they are divided; see quantize_common."""
    return gl.where(scale < 9.094947017729282e-13, 18446744073709551616.0, 1.0)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _tile(codes_ptr, codes_stride, first, count, block_k, BLOCK: gl.constexpr):
    """Codes of a tile [tokens, features] in shared memory, zero past `count` tokens."""
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, LOAD_LAYOUT))
    k = block_k * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LOAD_LAYOUT))
    address = codes_ptr + (first + row).to(gl.int64)[:, None] * codes_stride + k[None, :]
    codes = gl.load(address, mask=(row < count)[:, None], other=0)
    return gl.allocate_shared_memory(gl.uint8, [BLOCK, BLOCK], SHARED_LAYOUT, codes)


@gluon.jit
def _values(shared):
    """The tile's codes as FP32 in WORD_LAYOUT."""
    return shared.load(WORD_LAYOUT).to(gl.float8e4nv, bitcast=True).to(gl.float32)


@gluon.jit
def _codes(q):
    """Codes of FP32 q in WORD_LAYOUT, packed along tokens."""
    return gl.convert_layout(q, TURNED_LAYOUT).to(gl.float8e4nv)


@gluon.jit
def rescale_tokens_kernel(
    codes_ptr,
    scale_ptr,
    groups_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    transposed_stride,
    transposed_scale_stride,
    K,
    BLOCK: gl.constexpr,
):
    block_k = gl.program_id(0)
    group = gl.program_id(1)
    first = gl.load(groups_ptr + 2 * group)
    count = gl.load(groups_ptr + 2 * group + 1)
    row = gl.arange(0, BLOCK, TOKEN_LAYOUT)
    scales = scale_ptr + block_k * scale_stride_g + (first + row).to(gl.int64) * scale_stride_t
    scale = gl.load(scales, mask=row < count, other=0.0)
    shared = _tile(codes_ptr, codes_stride, first, count, block_k, BLOCK)

    largest = gl.reduce(gl.abs(scale), 0, _larger)
    target = transposed_scale_ptr + group.to(gl.int64) * transposed_scale_stride
    gl.store(target + block_k, largest)
    boost = _boost(largest)
    divisor = gl.full([BLOCK], largest * boost, gl.float32, TOKEN_LAYOUT)
    inverse = _reciprocal(divisor)
    dividend = scale * boost
    ratio = _corrected(dividend * inverse, dividend, divisor, inverse)
    ratio = _corrected(ratio, dividend, divisor, inverse)
    ratio = gl.convert_layout(ratio, gl.SliceLayout(1, WORD_LAYOUT))
    q = _values(shared) * ratio[:, None]
    store_turned(_codes(q), transposed_ptr, transposed_stride, group, count, block_k, BLOCK)


@gluon.jit
def requantize_tokens_kernel(
    codes_ptr,
    scale_ptr,
    groups_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    transposed_stride,
    transposed_scale_stride,
    K,
    BLOCK: gl.constexpr,
):
    block_k = gl.program_id(0)
    group = gl.program_id(1)
    first = gl.load(groups_ptr + 2 * group)
    count = gl.load(groups_ptr + 2 * group + 1)
    row = gl.arange(0, BLOCK, TOKEN_LAYOUT)
    scales = scale_ptr + block_k * scale_stride_g + (first + row).to(gl.int64) * scale_stride_t
    saved = gl.load(scales, mask=row < count, other=1.0)
    shared = _tile(codes_ptr, codes_stride, first, count, block_k, BLOCK)

    saved = gl.convert_layout(saved, gl.SliceLayout(1, WORD_LAYOUT))
    x = _values(shared) * saved[:, None]
    scale = _scale(gl.reduce(gl.abs(x), 0, _larger))
    k = block_k * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, WORD_LAYOUT))
    target = transposed_scale_ptr + group.to(gl.int64) * transposed_scale_stride
    gl.store(target + k, scale, mask=k < K)

    boost = _boost(scale)
    divisor = scale * boost
    inverse = _reciprocal(divisor)
    dividend = x * boost[None, :]
    dividend, divisor = gl.broadcast(dividend, divisor[None, :])
    dividend, inverse = gl.broadcast(dividend, inverse[None, :])
    # One step suffices for the codes; see quantize_common.e4m3_quotient.
    q = _corrected(dividend * inverse, dividend, divisor, inverse)
    store_turned(_codes(q), transposed_ptr, transposed_stride, group, count, block_k, BLOCK)
