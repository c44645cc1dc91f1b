"""Both layouts of a BF16 output gradient from one read, in Gluon: rows from registers, columns after
a turn through shared memory in which a thread receives 32 tokens of two features and so inverts two
scales; its codes turn once more, to be stored in whole lines. The same bytes as the plain kernel's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from samebit.kernels.quantize_common import (
    FLOOR_BITS,
    RECIPROCAL_448_HIGH,
    RECIPROCAL_448_LOW,
)

WARPS = 8
REGISTERS = 80
"""Per thread, so that three programs fit on a multiprocessor."""
ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
COLUMN_LAYOUT = gl.constexpr(gl.BlockedLayout([32, 2], [1, 32], [4, 2], [0, 1]))
STORE_LAYOUT = gl.constexpr(gl.BlockedLayout([16, 1], [8, 4], [1, 8], [0, 1]))
SHARED_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0]))


@gluon.jit
def _magnitude(x):
    return x.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def _scale(bits):
    """The scale of groups from the bits of a BF16 amax; see quantize_common.scale_from_bits."""
    amax = gl.maximum(bits, FLOOR_BITS).to(gl.float32, bitcast=True)
    high = gl.full(amax.shape, RECIPROCAL_448_HIGH, gl.float32, amax.type.layout)
    return gl.fma(amax, high, amax * RECIPROCAL_448_LOW)


@gluon.jit
def _inverse(scale):
    return gl.inline_asm_elementwise(
        "{ .reg .f32 r, e, n, one; neg.f32 n, $1; mov.f32 one, 0f3F800000; rcp.approx.ftz.f32 r, $1; "
        "fma.rn.f32 e, n, r, one; fma.rn.f32 $0, e, r, r; }",
        "=f,f", [scale], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _quotient(x, scale):
    """BF16 x over scales that broadcast, good for codes; see quantize_common.quotient."""
    x = x.to(gl.float32)
    inverse = _inverse(scale)
    x, divisor = gl.broadcast(x, scale)
    x, inverse = gl.broadcast(x, inverse)
    return gl.inline_asm_elementwise(
        "{ .reg .f32 r, n, m; neg.f32 n, $2; neg.f32 m, $4; "
        "fma.rn.f32 r, $3, $1, n; fma.rn.f32 $0, r, m, $1; }",
        "=f,f,f,f,f", [x * inverse, x, divisor, inverse], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def quantize_gradient_kernel(
    x_ptr,
    groups_ptr,
    codes_ptr,
    scale_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    x_stride,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    transposed_stride,
    transposed_scale_stride,
    N,
    BLOCK: gl.constexpr,
):
    block_n = gl.program_id(0)
    group = gl.program_id(1)
    first = gl.load(groups_ptr + 2 * group)
    count = gl.load(groups_ptr + 2 * group + 1)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, ROW_LAYOUT))
    n = block_n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, ROW_LAYOUT))
    rows = row < count
    t = (first + row).to(gl.int64)
    inside = rows[:, None] & (n < N)[None, :]
    x = gl.load(x_ptr + t[:, None] * x_stride + n[None, :], mask=inside, other=0.0)
    shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], SHARED_LAYOUT, x)

    scale = _scale(gl.max(_magnitude(x), axis=1))
    codes = _quotient(x, scale[:, None]).to(gl.float8e4nv)
    gl.store(codes_ptr + t[:, None] * codes_stride + n[None, :], codes, mask=rows[:, None])
    gl.store(scale_ptr + t * scale_stride_t + block_n * scale_stride_g, scale, mask=rows)

    gl.thread_barrier()
    y = shared.load(COLUMN_LAYOUT)
    n = block_n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, COLUMN_LAYOUT))
    scale = _scale(gl.max(_magnitude(y), axis=0))
    target = transposed_scale_ptr + group.to(gl.int64) * transposed_scale_stride
    gl.store(target + n, scale, mask=n < N)
    q = _quotient(y, scale[None, :])
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, COLUMN_LAYOUT))
    if count < BLOCK:
        # A NaN scale would turn the zero padding into NaN codes.
        q = gl.where((row < count)[:, None], q, gl.zeros_like(q))
    codes = gl.convert_layout(q.to(gl.float8e4nv), STORE_LAYOUT)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, STORE_LAYOUT))
    n = block_n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, STORE_LAYOUT))
    target = (
        transposed_ptr + group.to(gl.int64) * BLOCK + n.to(gl.int64)[None, :] * transposed_stride
    )
    gl.store(target + row[:, None], codes)
