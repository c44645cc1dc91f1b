"""Both layouts of a BF16 output gradient from one read, in Gluon: rows from registers, columns after
a turn through shared memory in which a thread receives 32 tokens of two features and so inverts two
scales; its codes turn once more, to be stored in whole lines. The same bytes as the plain kernel's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from samebit.kernels._quantize_gluon import (
    codes_of,
    magnitude_bits,
    rounded,
    scale_from_bits,
    widened,
)
from samebit.kernels.quantize_common import SIGMOID

WARPS = 8
REGISTERS = 64
"""Per thread, so that four programs fit on a multiprocessor."""
SILU_REGISTERS = 80
"""Three: two tiles in shared memory allow no more."""
STRIP = 32
"""Rows that one pass of the row layout covers."""
ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
COLUMN_LAYOUT = gl.constexpr(gl.BlockedLayout([32, 2], [1, 32], [4, 2], [0, 1]))
PAIR_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        lane_bases=[[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        warp_bases=[[32, 0], [64, 0], [0, 64]],
        block_bases=[],
        shape=[128, 128],
    )
)
"""COLUMN_LAYOUT with the two features of a word as neighbours, as shared memory delivers them."""
STORE_LAYOUT = gl.constexpr(gl.BlockedLayout([16, 1], [8, 4], [1, 8], [0, 1]))
SHARED_LAYOUT = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [0, 72], [1, 8], [2, 16], [4, 32],
         [8, 0], [16, 0], [32, 0], [64, 0]]
    )
)  # fmt: skip
"""16-byte pieces exchanged by row, and in a row's second half once more: a thread stores every other
piece, and without that two halves of a row would meet in the same banks."""


@gluon.jit
def _larger(a, b):
    """The BF16 of the larger magnitude (a NaN is the largest), two at a time; its sign means nothing."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
        "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _halved(x, LEAD: gl.constexpr, LENGTH: gl.constexpr, REST: gl.constexpr):
    """The larger of x[:, i, :] and x[:, LENGTH / 2 + i, :] for x [LEAD, LENGTH, REST]."""
    x = gl.permute(gl.reshape(x, (LEAD, 2, LENGTH // 2, REST)), (0, 2, 3, 1))
    a, b = gl.split(x)
    return _larger(a, b)


@gluon.jit
def _row_amax(x, ROWS: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Bits of max |x| of each row; a thread holds 16 neighbours, folded in its registers."""
    PARTS: gl.constexpr = ROWS * (BLOCK // 16)
    x = gl.reshape(x, (PARTS, 16, 1))
    x = _halved(x, PARTS, 16, 1)
    x = _halved(x, PARTS, 8, 1)
    x = _halved(x, PARTS, 4, 1)
    bits = gl.max(magnitude_bits(gl.reshape(x, (ROWS, BLOCK // 8))), axis=1)
    return gl.convert_layout(bits, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def _column_amax(x, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Bits of max |x| of each column; a thread holds 32 neighbours, folded in its registers."""
    PARTS: gl.constexpr = BLOCK // 32
    x = _halved(gl.reshape(x, (PARTS, 32, BLOCK)), PARTS, 32, BLOCK)
    x = _halved(x, PARTS, 16, BLOCK)
    x = _halved(x, PARTS, 8, BLOCK)
    x = _halved(x, PARTS, 4, BLOCK)
    bits = gl.max(magnitude_bits(gl.reshape(x, (2 * PARTS, BLOCK))), axis=0)
    return gl.convert_layout(bits, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _store_rows(
    x, first, row, count, block_n, codes_ptr, scale_ptr, codes_stride, scale_stride_t,
    scale_stride_g, BLOCK: gl.constexpr,
):  # fmt: skip
    """Codes and scales along features of BF16 rows in ROW_LAYOUT, `row` of the group's `count`."""
    n = block_n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, ROW_LAYOUT))
    rows = row < count
    t = (first + row).to(gl.int64)
    scale = scale_from_bits(_row_amax(x, x.shape[0], BLOCK, ROW_LAYOUT))
    codes = codes_of(widened(x), scale[:, None])
    gl.store(codes_ptr + t[:, None] * codes_stride + n[None, :], codes, mask=rows[:, None])
    gl.store(scale_ptr + t * scale_stride_t + block_n * scale_stride_g, scale, mask=rows)


@gluon.jit
def _store_columns(
    shared, group, count, block_n, N, transposed_ptr, transposed_scale_ptr, transposed_stride,
    transposed_scale_stride, BLOCK: gl.constexpr,
):  # fmt: skip
    """Codes, transposed, and scales along tokens of a BF16 tile in shared memory."""
    y = shared.load(PAIR_LAYOUT)
    n = block_n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, COLUMN_LAYOUT))
    scale = scale_from_bits(_column_amax(y, BLOCK, COLUMN_LAYOUT))
    target = transposed_scale_ptr + group.to(gl.int64) * transposed_scale_stride
    gl.store(target + n, scale, mask=n < N)
    y = gl.convert_layout(widened(y), COLUMN_LAYOUT)
    codes = codes_of(y, scale[None, :])
    store_turned(codes, transposed_ptr, transposed_stride, group, count, block_n, BLOCK)


@gluon.jit
def store_turned(
    codes, transposed_ptr, stride, group, count, block_n, BLOCK: gl.constexpr
):  # fmt: skip
    """Store e4m3 codes [tokens, features] as rows of tokens, in whole lines; zero past `count`."""
    codes = gl.convert_layout(codes, STORE_LAYOUT)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, STORE_LAYOUT))
    n = block_n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, STORE_LAYOUT))
    if count < BLOCK:
        # A NaN scale makes NaN codes of the zero padding.
        kept = gl.where((row < count)[:, None], codes.to(gl.int8, bitcast=True), 0)
        codes = kept.to(gl.float8e4nv, bitcast=True)
    target = transposed_ptr + group.to(gl.int64) * BLOCK + n.to(gl.int64)[None, :] * stride
    gl.store(target + row[:, None], codes)


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
    t = (first + row).to(gl.int64)
    inside = (row < count)[:, None] & (n < N)[None, :]
    x = gl.load(x_ptr + t[:, None] * x_stride + n[None, :], mask=inside, other=0.0)
    shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], SHARED_LAYOUT, x)
    _store_rows(
        x, first, row, count, block_n, codes_ptr, scale_ptr, codes_stride, scale_stride_t,
        scale_stride_g, BLOCK,
    )  # fmt: skip
    gl.thread_barrier()
    _store_columns(
        shared, group, count, block_n, N, transposed_ptr, transposed_scale_ptr, transposed_stride,
        transposed_scale_stride, BLOCK,
    )  # fmt: skip


@gluon.jit
def silu_mul_gradient_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    groups_ptr,
    codes_ptr,
    scale_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    transposed_stride,
    transposed_scale_stride,
    F,
    STRIP: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """dgate and dup of a tile, in both layouts, never stored in BF16. dup's columns follow dgate's."""
    block_f = gl.program_id(0)
    blocks = gl.num_programs(0)
    group = gl.program_id(1)
    first = gl.load(groups_ptr + 2 * group)
    count = gl.load(groups_ptr + 2 * group + 1)
    f = block_f * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, ROW_LAYOUT))
    dgate_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], SHARED_LAYOUT)
    dup_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], SHARED_LAYOUT)
    # A strip of rows at a time: the FP32 of three whole tiles does not fit the registers.
    for start in gl.static_range(0, BLOCK, STRIP):
        row = start + gl.arange(0, STRIP, gl.SliceLayout(1, ROW_LAYOUT))
        t = (first + row).to(gl.int64)
        inside = (row < count)[:, None] & (f < F)[None, :]
        dy = gl.load(dy_ptr + t[:, None] * dy_stride + f[None, :], mask=inside, other=0.0)
        gate = gl.load(gate_ptr + t[:, None] * gate_stride + f[None, :], mask=inside, other=0.0)
        up = gl.load(up_ptr + t[:, None] * up_stride + f[None, :], mask=inside, other=0.0)
        dy = widened(dy)
        gate = widened(gate)
        # The expressions of activation's backward kernel: the same bits.
        sigmoid = gl.inline_asm_elementwise(
            SIGMOID, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1
        )
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        dgate = rounded((dy * widened(up)) * slope)
        dgate_tile.slice(start, STRIP).store(dgate)
        dup = rounded(dy * (gate * sigmoid))
        dup_tile.slice(start, STRIP).store(dup)
        _store_rows(
            dgate, first, row, count, block_f, codes_ptr, scale_ptr, codes_stride, scale_stride_t,
            scale_stride_g, BLOCK,
        )  # fmt: skip
        _store_rows(
            dup, first, row, count, block_f + blocks, codes_ptr, scale_ptr, codes_stride,
            scale_stride_t, scale_stride_g, BLOCK,
        )  # fmt: skip
    gl.thread_barrier()
    N = 2 * blocks * BLOCK
    _store_columns(
        dgate_tile, group, count, block_f, N, transposed_ptr, transposed_scale_ptr,
        transposed_stride, transposed_scale_stride, BLOCK,
    )  # fmt: skip
    _store_columns(
        dup_tile, group, count, block_f + blocks, N, transposed_ptr, transposed_scale_ptr,
        transposed_stride, transposed_scale_stride, BLOCK,
    )  # fmt: skip
