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
def _copy_box(desc, row, column, ready, slot):
    """Starts one bulk copy; what lies behind its rows in the slot stays stale."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    part = slot.slice(0, desc.block_type.shape[0], dim=0)
    tma.async_copy_global_to_shared(desc, [row, column], ready, part)


@gluon.jit
def _copy(descs, row, column, rows, ready, slot, KB: gl.constexpr):
    """Starts the copy of the first `rows` >= 1 rows of a block, in the smallest box that holds them."""
    whole, half, quarter = descs
    if rows > KB // 2:
        _copy_box(whole, row, column, ready, slot)
    elif rows > KB // 4:
        _copy_box(half, row, column, ready, slot)
    else:
        _copy_box(quarter, row, column, ready, slot)


@gluon.jit
def _fetch(
    item, page, base, end, descs, ring, ready, head, strides,
    KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the keys or values of the block at `base` as the item-th of the ring."""
    of_page, of_head, column = strides
    slot = item % SLOTS
    row = page * of_page + head * of_head + base % PAGE
    _copy(descs, row, head * column, end - base, ready.index(slot), ring.index(slot), KB)


@gluon.jit
def _fetch_scales(
    count, page, base, pointers, copied, s_ready, head, strides,
    KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a block's scales of keys and of values, an element a thread."""
    k_scale_ptr, v_scale_ptr = pointers
    ks_smem, vs_smem = copied
    ks_page, ks_row, ks_head, vs_page, vs_row, vs_head = strides
    SCALED: gl.constexpr = SLOTS // 2 + 2
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = base % PAGE + gl.arange(0, KB, FLAT)
    page = page.to(gl.int64)
    slot = count % SCALED
    async_copy.async_copy_global_to_shared(
        ks_smem.index(slot), k_scale_ptr + page * ks_page + head * ks_head + row * ks_row
    )
    async_copy.async_copy_global_to_shared(
        vs_smem.index(slot), v_scale_ptr + page * vs_page + head * vs_head + row * vs_row
    )
    async_copy.mbarrier_arrive(s_ready.index(slot), increment_count=False)


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
    descs = given[0]
    ring, ready, free = given[1]
    table, head, end, lo, hi = given[2]
    strides = given[3]
    page = gl.load(table + lo * KB // PAGE)
    block = lo
    for count in range(0, HEADS * (hi - lo)):
        # The next page number travels while this block waits for a free slot.
        next_block, next_head = _following(block, head, lo, hi)
        next_page = gl.load(table + next_block * KB // PAGE)
        for part in gl.static_range(2):
            item = 2 * count + part
            mbarrier.wait(free.index(item % SLOTS), ((item // SLOTS) & 1) ^ 1)
            _fetch(
                item, page, block * KB, end, descs[part], ring, ready, head, strides[part],
                KB, PAGE, SLOTS,
            )  # fmt: skip
        block = next_block
        head = next_head
        page = next_page


@gluon.jit
def _values(count, block, end, ring, ready, D: gl.constexpr, KB: gl.constexpr, SLOTS: gl.constexpr):
    """The values of one block as FP16, in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    item = 2 * count + 1
    mbarrier.wait(ready.index(item % SLOTS), (item // SLOTS) & 1)
    v = ring.index(item % SLOTS).load(LAYOUT).to(gl.float16)
    if (block + 1) * KB > end:
        # Rows past the end may hold NaN, and 0 x NaN would reach every output.
        row = block * KB + gl.arange(0, KB, gl.SliceLayout(1, LAYOUT))
        v = gl.where((row < end)[:, None], v, 0.0)
    return v


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
    total = HEADS * (hi - lo)
    ahead = lo
    ahead_head = head
    for count in range(0, gl.minimum(DEPTH, total)):
        page = gl.load(table + ahead * KB // PAGE)
        base = ahead * KB
        for part in gl.static_range(2):
            _fetch(
                2 * count + part, page, base, end, descs[part], ring, ready, ahead_head,
                strides[part], KB, PAGE, SLOTS,
            )  # fmt: skip
        _fetch_scales(
            count, page, base, scales, (ks_smem, vs_smem), s_ready, ahead_head, strides[2],
            KB, PAGE, SLOTS,
        )  # fmt: skip
        ahead, ahead_head = _following(ahead, ahead_head, lo, hi)
    block = lo
    page = gl.load(table + ahead * KB // PAGE)
    v = _values(0, block, end, ring, ready, D, KB, SLOTS)
    for count in range(0, total):
        mbarrier.wait(v16_free, (count & 1) ^ 1)
        v16_smem.store(v)
        # Also between the reads of the codes and the copy that overwrites them.
        fence_async_shared()
        mbarrier.arrive(v16_ready, count=1)
        if count + DEPTH < total:
            base = ahead * KB
            item = 2 * count
            further = item + 2 * DEPTH
            _fetch(
                further + 1, page, base, end, descs[1], ring, ready, ahead_head, strides[1],
                KB, PAGE, SLOTS,
            )  # fmt: skip
            mbarrier.wait(free.index(item % SLOTS), (item // SLOTS) & 1)
            _fetch(
                further, page, base, end, descs[0], ring, ready, ahead_head, strides[0],
                KB, PAGE, SLOTS,
            )  # fmt: skip
            _fetch_scales(
                count + DEPTH, page, base, scales, (ks_smem, vs_smem), s_ready, ahead_head,
                strides[2], KB, PAGE, SLOTS,
            )  # fmt: skip
        if count + 1 < total:
            ahead, ahead_head = _following(ahead, ahead_head, lo, hi)
            block, _ = _following(block, head, lo, hi)
            page = gl.load(table + ahead * KB // PAGE)
            v = _values(count + 1, block, end, ring, ready, D, KB, SLOTS)
