"""The producer of the warp-specialised attention forward: keys, values and scales by blocks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

ROWS = gl.constexpr(64)
"""Query rows of one consumer: a warp group's share of wgmma."""

SCALE_SLOTS = gl.constexpr(4)
"""Blocks of scales held. The keys' barriers bound the producer to two blocks ahead of the scores;
the softmax that reads the scales runs at most one block behind them."""


@gluon.jit
def work_tile(
    turn, num_tiles, work, context_lens, query_starts, num_sequences,
    H: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """(row, rows, prefix row, keys before, first token, head, sequence) of the turn-th tile.

    Turns run to and fro over the programs, so that tiles sorted by work are shared out evenly.
    Past the end the last tile is named; the caller stops by its index.
    """
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    index = gl.minimum(turn * programs + place, num_tiles - 1)
    unit = index // H
    head = index % H
    if PAGED:
        sequence = unit % num_sequences
        token0 = (num_tiles // H // num_sequences - 1 - unit // num_sequences) * (2 * ROWS)
        start = gl.load(query_starts + sequence)
        length = gl.load(query_starts + sequence + 1) - start
        before = gl.load(context_lens + sequence) - length
        return start, length, 0, before, token0, head, sequence
    record = work + unit * 8
    return (
        gl.load(record),
        gl.load(record + 1),
        gl.load(record + 2),
        gl.load(record + 3),
        gl.load(record + 4),
        head,
        0,
    )


@gluon.jit
def read_segment(segments, index):
    """(first row, rows, prefix row, keys before) of a packed segment."""
    record = segments + index * 4
    return gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)


@gluon.jit
def place(base, start, prefix_start, before, end, KB: gl.constexpr):
    """(whether a block of packed keys lies in one piece, its first row if so)."""
    in_prefix = base + KB <= before
    whole = in_prefix | ((base >= before) & (base + KB <= end))
    return whole, gl.where(in_prefix, prefix_start, start - before) + base


@gluon.jit
def turns(num_tiles):
    """Tiles of this program."""
    programs = gl.num_programs(0)
    whole = num_tiles // programs
    rest = num_tiles - whole * programs
    place = gl.where(whole % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return whole + (place < rest).to(gl.int32)


@gluon.jit
def _row_offset(
    position, base, start, prefix_start, before, table, page_stride, row_stride,
    PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Element offsets of the rows at `position`, all in the block (and page) that `base` opens."""
    if PAGED:
        page = gl.load(table + base // PAGE).to(gl.int64)
        return page * page_stride + (position % PAGE) * row_stride
    row = gl.where(position < before, prefix_start, start - before) + position
    return row.to(gl.int64) * row_stride


@gluon.jit
def gather(
    ptr, smem, base, end, start, prefix_start, before, table, page_stride, row_stride,
    D: gl.constexpr, KB: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Rows of a block that straddles the prompt's end or passes the end (there: zeros)."""
    CHUNK: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for chunk in gl.static_range(0, KB // CHUNK):
        position = base + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
        row = _row_offset(
            position, base, start, prefix_start, before, table, page_stride, row_stride, PAGE, PAGED
        )
        x = gl.load(ptr + row[:, None] + d[None, :], mask=(position < end)[:, None], other=0.0)
        smem.slice(chunk * CHUNK, CHUNK, dim=0).store(x)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _convert(
    step, v8_smem, v8_ready, v_smem, v_ready, v_free,
    KB: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Value codes of one block as FP16, into the consumers' stage."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(v8_ready.index(stage), phase)
    v = v8_smem.index(stage).load(LAYOUT).to(gl.float16)
    mbarrier.wait(v_free.index(stage), phase ^ 1)
    v_smem.index(stage).store(v)
    fence_async_shared()
    mbarrier.arrive(v_ready.index(stage), count=1)


@gluon.jit
def _fetch(
    whole, desc, row, column, ptr, smem, ready,
    base, end, start, prefix_start, before, table, page_stride, row_stride,
    D: gl.constexpr, KB: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """One block's keys or values: a bulk copy of whole blocks, a gather of others."""
    if whole:
        mbarrier.expect(ready, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [row, column], ready, smem)
    else:
        gather(
            ptr, smem, base, end, start, prefix_start, before, table, page_stride, row_stride,
            D, KB, PAGE, PAGED,
        )  # fmt: skip
        mbarrier.arrive(ready, count=1)


@gluon.jit
def _fetch_scales(
    k_scale_ptr, v_scale_ptr, ks_smem, vs_smem, ready,
    base, end, start, prefix_start, before, table, ks_page, ks_row, vs_page, vs_row,
    KB: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """One block's scales of keys and of values, an element a thread."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    position = base + gl.arange(0, KB, FLAT)
    inside = position < end
    async_copy.async_copy_global_to_shared(
        ks_smem,
        k_scale_ptr
        + _row_offset(
            position, base, start, prefix_start, before, table, ks_page, ks_row, PAGE, PAGED
        ),
        mask=inside,
    )
    async_copy.async_copy_global_to_shared(
        vs_smem,
        v_scale_ptr
        + _row_offset(
            position, base, start, prefix_start, before, table, vs_page, vs_row, PAGE, PAGED
        ),
        mask=inside,
    )
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def feed(
    given,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, PAGED: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """All tiles of this program: Q once a tile, then its blocks in order."""
    q_desc, k_desc, v_desc, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = given[0]
    work, block_table, context_lens, query_starts, table_width, num_sequences, num_tiles = given[1]
    q_smem, k_smem, v_smem, v8_smem, ks_smem, vs_smem = given[2]
    q_ready, q_free, k_ready, v_ready, k_free, v_free, v8_ready, s_ready = given[3]
    k_rows, k_head_rows, k_column, v_rows, v_head_rows, v_column = given[4]
    k_page, k_row, k_head, v_page, v_row, v_head = given[5]
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head = given[6]
    step = 0
    for turn in range(0, turns(num_tiles)):
        start, length, prefix_start, before, token0, head, sequence = work_tile(
            turn, num_tiles, work, context_lens, query_starts, num_sequences, H, PAGED
        )
        end = before + length
        num_blocks = (gl.minimum(before + token0 + 2 * ROWS, end) - 1) // KB + 1
        if token0 >= length:
            num_blocks = 0
        kv_head = head // (H // G)
        table = block_table + sequence * table_width
        for block in range(0, num_blocks):
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            base = block * KB
            whole, row = place(base, start, prefix_start, before, end, KB)
            v_base = row
            if PAGED:
                whole = base + KB <= end
                page = gl.load(table + base // PAGE)
                row = page * k_rows + base % PAGE
                v_base = page * v_rows + base % PAGE
            mbarrier.wait(k_free.index(stage), phase)
            _fetch(
                whole, k_desc, row + kv_head * k_head_rows, kv_head * k_column,
                k_ptr + kv_head * k_head, k_smem.index(stage), k_ready.index(stage),
                base, end, start, prefix_start, before, table, k_page, k_row, D, KB, PAGE, PAGED,
            )  # fmt: skip
            v_slot = v8_smem.index(stage)
            v_bar = v8_ready.index(stage)
            if FP8:
                slot = step % SCALE_SLOTS
                _fetch_scales(
                    k_scale_ptr + kv_head * ks_head, v_scale_ptr + kv_head * vs_head,
                    ks_smem.index(slot), vs_smem.index(slot), s_ready.index(slot),
                    base, end, start, prefix_start, before, table, ks_page, ks_row, vs_page, vs_row,
                    KB, PAGE, PAGED,
                )  # fmt: skip
            else:
                v_slot = v_smem.index(stage)
                v_bar = v_ready.index(stage)
                mbarrier.wait(v_free.index(stage), phase)
            _fetch(
                whole, v_desc, v_base + kv_head * v_head_rows, kv_head * v_column,
                v_ptr + kv_head * v_head, v_slot, v_bar,
                base, end, start, prefix_start, before, table, v_page, v_row, D, KB, PAGE, PAGED,
            )  # fmt: skip
            if block == 0:
                # After the first keys, which may come while the last tile still needs its Q.
                mbarrier.wait(q_free, (turn & 1) ^ 1)
                mbarrier.expect(q_ready, 2 * q_desc.block_type.nbytes)
                for group in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        q_desc,
                        [start + token0 + group * ROWS, head * D],
                        q_ready,
                        q_smem.index(group),
                    )
            if FP8:
                # One block late, so that the copies of this one are under way.
                if step > 0:
                    _convert(step - 1, v8_smem, v8_ready, v_smem, v_ready, v_free, KB, D, STAGES)
            step += 1
    if FP8:
        if step > 0:
            _convert(step - 1, v8_smem, v8_ready, v_smem, v_ready, v_free, KB, D, STAGES)
