"""The feeder of attention decode: keys, values and scales of a program's blocks, head after head.

It does not stop between two heads: the copies of the next one's first blocks are under way while
the consumer ends the one before. Of a sequence's last block only the rows that exist are fetched, in the
smallest of three boxes that holds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)


@gluon.jit
def _copy_if(wanted, desc, row, column, ready, slot):
    """Starts one bulk copy; what lies behind its rows in the slot stays stale."""
    mbarrier.expect(ready, desc.block_type.nbytes, pred=wanted)
    part = slot.slice(0, desc.block_type.shape[0], dim=0)
    tma.async_copy_global_to_shared(desc, [row, column], ready, part, pred=wanted)


@gluon.jit
def _copy(descs, row, column, rows, ready, slot, KB: gl.constexpr):
    """Starts the copy of the first `rows` >= 1 rows of a block, in the smallest box that holds them."""
    whole, half, quarter = descs
    _copy_if(rows > KB // 2, whole, row, column, ready, slot)
    _copy_if((rows > KB // 4) & (rows <= KB // 2), half, row, column, ready, slot)
    _copy_if(rows <= KB // 4, quarter, row, column, ready, slot)


@gluon.jit
def _fetch_k(
    count, page, base, end, descs, scales, ring, copied, ready, s_ready, head, strides,
    KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the keys of the block at `base` and, with codes, of both scales."""
    k_scale_ptr, v_scale_ptr = scales
    ks_smem, vs_smem = copied
    k_page, k_head, k_column = strides[0]
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head = strides[2]
    slot = (2 * count) % SLOTS
    inside = base % PAGE
    row = page * k_page + head * k_head + inside
    _copy(descs[0], row, head * k_column, end - base, ready.index(slot), ring.index(slot), KB)
    if FP8:
        SCALED: gl.constexpr = SLOTS // 2 + 2
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        row = inside + gl.arange(0, KB, FLAT)
        page = page.to(gl.int64)
        async_copy.async_copy_global_to_shared(
            ks_smem.index(count % SCALED),
            k_scale_ptr + page * ks_page + head * ks_head + row * ks_row,
        )
        async_copy.async_copy_global_to_shared(
            vs_smem.index(count % SCALED),
            v_scale_ptr + page * vs_page + head * vs_head + row * vs_row,
        )
        async_copy.mbarrier_arrive(s_ready.index(count % SCALED), increment_count=False)


@gluon.jit
def _fetch_v(
    count, page, base, end, descs, ring, ready, head, strides,
    KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the values of the block at `base`."""
    v_page, v_head, v_column = strides[1]
    slot = (2 * count + 1) % SLOTS
    row = page * v_page + head * v_head + base % PAGE
    _copy(descs[1], row, head * v_column, end - base, ready.index(slot), ring.index(slot), KB)


@gluon.jit
def _following(block, head, lo, hi):
    """(block, head) after this one: the next block, or the next head's first."""
    last = block + 1 == hi
    return gl.where(last, lo, block + 1), gl.where(last, head + 1, head)


@gluon.jit
def feed(
    given, KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """BF16: copies alone, as far ahead as there are free slots."""
    descs, scales = given[0]
    ring, ks_smem, vs_smem, ready, free, s_ready = given[1]
    table, head, end, lo, hi = given[2]
    strides = given[3]
    page = gl.load(table + lo * KB // PAGE)
    block = lo
    for count in range(0, HEADS * (hi - lo)):
        # The next page number travels while this block waits for a free slot.
        next_block, next_head = _following(block, head, lo, hi)
        next_page = gl.load(table + next_block * KB // PAGE)
        base = block * KB
        item = 2 * count
        mbarrier.wait(free.index(item % SLOTS), ((item // SLOTS) & 1) ^ 1)
        _fetch_k(
            count, page, base, end, descs, scales, ring, (ks_smem, vs_smem), ready, s_ready, head,
            strides, KB, PAGE, SLOTS, False,
        )  # fmt: skip
        item += 1
        mbarrier.wait(free.index(item % SLOTS), ((item // SLOTS) & 1) ^ 1)
        _fetch_v(count, page, base, end, descs, ring, ready, head, strides, KB, PAGE, SLOTS)
        block = next_block
        head = next_head
        page = next_page


@gluon.jit
def feed_codes(
    given, D: gl.constexpr, KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """E4M3: copies SLOTS // 2 blocks ahead, and the conversion of each block's values."""
    descs, scales = given[0]
    ring, v16_smem, ks_smem, vs_smem = given[1]
    ready, free, s_ready, v16_ready, v16_free = given[2]
    table, head, end, lo, hi = given[3]
    strides = given[4]
    DEPTH: gl.constexpr = SLOTS // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    total = HEADS * (hi - lo)
    ahead = lo
    ahead_head = head
    for count in range(0, gl.minimum(DEPTH, total)):
        page = gl.load(table + ahead * KB // PAGE)
        _fetch_k(
            count, page, ahead * KB, end, descs, scales, ring, (ks_smem, vs_smem), ready, s_ready,
            ahead_head, strides, KB, PAGE, SLOTS, True,
        )  # fmt: skip
        _fetch_v(
            count, page, ahead * KB, end, descs, ring, ready, ahead_head, strides, KB, PAGE, SLOTS
        )
        ahead, ahead_head = _following(ahead, ahead_head, lo, hi)
    block = lo
    for count in range(0, total):
        item = 2 * count
        page = gl.load(table + ahead * KB // PAGE)
        v_slot = (item + 1) % SLOTS
        mbarrier.wait(ready.index(v_slot), ((item + 1) // SLOTS) & 1)
        v = ring.index(v_slot).load(LAYOUT).to(gl.float16)
        if (block + 1) * KB > end:
            # Rows past the end may hold NaN, and 0 x NaN would reach every output.
            row = block * KB + gl.arange(0, KB, gl.SliceLayout(1, LAYOUT))
            v = gl.where((row < end)[:, None], v, 0.0)
        mbarrier.wait(v16_free, (count & 1) ^ 1)
        v16_smem.store(v)
        fence_async_shared()
        mbarrier.arrive(v16_ready, count=1)
        if count + DEPTH < total:
            base = ahead * KB
            further = count + DEPTH
            _fetch_v(
                further, page, base, end, descs, ring, ready, ahead_head, strides, KB, PAGE, SLOTS
            )
            mbarrier.wait(free.index(item % SLOTS), (item // SLOTS) & 1)
            _fetch_k(
                further, page, base, end, descs, scales, ring, (ks_smem, vs_smem), ready, s_ready,
                ahead_head, strides, KB, PAGE, SLOTS, True,
            )  # fmt: skip
        ahead, ahead_head = _following(ahead, ahead_head, lo, hi)
        block, _ = _following(block, head, lo, hi)
