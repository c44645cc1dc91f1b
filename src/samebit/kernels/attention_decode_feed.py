"""The feeders of attention decode: keys and values of a program's blocks by bulk copies.

Of a sequence's last block only the rows that exist are fetched, in the smallest of three boxes that
holds them. The feeder of codes walks several items (a head's splits of a sequence) without a stop: the
copies of the next one's first blocks are under way while the consumer ends the one before.
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
def feed(given, KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr):
    """BF16: copies alone, as far ahead as there are free slots."""
    descs = given[0]
    ring, ready, free = given[1]
    table, head, end, lo, hi = given[2]
    strides = given[3]
    page = gl.load(table + lo * KB // PAGE)
    for block in range(lo, hi):
        # The next page number travels while this block waits for a free slot.
        following = gl.load(table + gl.minimum(block + 1, hi - 1) * KB // PAGE)
        for part in gl.static_range(2):
            item = 2 * (block - lo) + part
            mbarrier.wait(free.index(item % SLOTS), ((item // SLOTS) & 1) ^ 1)
            _fetch(
                item, page, block * KB, end, descs[part], ring, ready, head, strides[part],
                KB, PAGE, SLOTS,
            )  # fmt: skip
        page = following


@gluon.jit
def turns_of(num_items):
    """Turns after which every item is taken."""
    return gl.cdiv(num_items, gl.num_programs(0))


@gluon.jit
def item_of(turn, num_items, G: gl.constexpr, chunks):
    """(whether there is one, rank of its sequence, chunk of its splits, head) of this program's turn-th item.

    Turns run to and fro over the programs: items by falling work are shared out evenly.
    """
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    item = turn * programs + place
    real = item < num_items
    item = gl.minimum(item, num_items - 1)
    unit = item // G
    return real, unit // chunks, unit % chunks, item % G


@gluon.jit
def sequence_of(turn, num_items, order, chunks, G: gl.constexpr, ORDERED: gl.constexpr):
    """The sequence of this program's turn-th item (the last item's past the end)."""
    _, rank, _, _ = item_of(turn, num_items, G, chunks)
    if ORDERED:
        rank = gl.load(order + rank)
    return rank


@gluon.jit
def blocks_of(real, chunk, end, CHUNK: gl.constexpr, KB: gl.constexpr):
    """(first, last + 1) key block of an item; none of one that is not."""
    lo = chunk * CHUNK
    hi = gl.maximum(gl.minimum(lo + CHUNK, gl.cdiv(end, KB)), lo)
    return lo, gl.where(real, hi, lo)


@gluon.jit
def _values(count, rows, ring, ready, D: gl.constexpr, KB: gl.constexpr, SLOTS: gl.constexpr):
    """The values of one block of `rows` keys as FP16, in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    item = 2 * count + 1
    mbarrier.wait(ready.index(item % SLOTS), (item // SLOTS) & 1)
    v = ring.index(item % SLOTS).load(LAYOUT).to(gl.float16)
    if rows < KB:
        # Rows past the end may hold NaN, and 0 x NaN would reach every output.
        row = gl.arange(0, KB, gl.SliceLayout(1, LAYOUT))
        v = gl.where((row < rows)[:, None], v, 0.0)
    return v


@gluon.jit
def _advance(
    cursor, num_items, chunks, tables,
    G: gl.constexpr, CHUNK: gl.constexpr, KB: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """The cursor at the next block, in this item or the next that has one; `block` == `hi`: none is left.

    A cursor is (turn, block, hi, end, sequence, the next item's sequence and end, the sequence after it):
    those of later items are loaded long before they are needed.
    """
    turn, block, hi, end, index, index1, end1, index2 = cursor
    order, context_lens = tables
    turns = turns_of(num_items)
    block += 1
    while (block >= hi) & (turn + 1 < turns):
        turn += 1
        index = index1
        end = end1
        index1 = index2
        end1 = gl.load(context_lens + index2)
        index2 = sequence_of(turn + 2, num_items, order, chunks, G, ORDERED)
        real, _, chunk, _ = item_of(turn, num_items, G, chunks)
        block, hi = blocks_of(real, chunk, end, CHUNK, KB)
    return turn, block, hi, end, index, index1, end1, index2


@gluon.jit
def _fetch_block(
    count, cursor, page, places, descs, scales, data, bars, strides, PART: gl.constexpr,
    G: gl.constexpr, KB: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the cursor's block as the count-th: its keys and scales (PART 0) or its values."""
    num_items, chunks = places
    ring, _, ks_smem, vs_smem = data
    ready, _, s_ready, _, _ = bars
    turn, block, _, end, _, _, _, _ = cursor
    _, _, _, head = item_of(turn, num_items, G, chunks)
    base = block * KB
    _fetch(
        2 * count + PART, page, base, end, descs[PART], ring, ready, head, strides[PART],
        KB, PAGE, SLOTS,
    )  # fmt: skip
    if PART == 0:
        _fetch_scales(
            count,
            page,
            base,
            scales,
            (ks_smem, vs_smem),
            s_ready,
            head,
            strides[2],
            KB,
            PAGE,
            SLOTS,
        )


@gluon.jit
def _page(cursor, block_table, table_width, KB: gl.constexpr, PAGE: gl.constexpr):
    """The page of the cursor's block (of a block that exists, where none is left)."""
    _, block, hi, _, index, _, _, _ = cursor
    place = gl.maximum(gl.minimum(block, hi - 1), 0) * KB // PAGE
    return gl.load(block_table + index.to(gl.int64) * table_width + place)


@gluon.jit
def _rows(cursor, KB: gl.constexpr):
    """Keys of the cursor's block; 0 where none is left."""
    _, block, hi, end, _, _, _, _ = cursor
    return gl.where(block < hi, gl.minimum(end - block * KB, KB), 0)


@gluon.jit
def feed_codes(
    given, G: gl.constexpr, D: gl.constexpr, KB: gl.constexpr, PAGE: gl.constexpr,
    CHUNK: gl.constexpr, SLOTS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """E4M3: copies two blocks ahead, and the conversion of each block's values."""
    descs, scales = given[0]
    data = given[1]
    bars = given[2]
    block_table, table_width, context_lens, order, num_items, chunks = given[3]
    strides = given[4]
    ring, v16_smem, _, _ = data
    ready, free, _, v16_ready, v16_free = bars
    places = (num_items, chunks)
    tables = (order, context_lens)
    gl.static_assert(SLOTS == 4)
    index = sequence_of(0, num_items, order, chunks, G, ORDERED)
    index1 = sequence_of(1, num_items, order, chunks, G, ORDERED)
    index2 = sequence_of(2, num_items, order, chunks, G, ORDERED)
    end = gl.load(context_lens + index)
    end1 = gl.load(context_lens + index1)
    real, _, chunk, _ = item_of(0, num_items, G, chunks)
    lo, hi = blocks_of(real, chunk, end, CHUNK, KB)
    cursor = (gl.to_tensor(0), lo - 1, hi, end, index, index1, end1, index2)
    cursor = _advance(cursor, num_items, chunks, tables, G, CHUNK, KB, ORDERED)
    rows = _rows(cursor, KB)
    rows1 = gl.to_tensor(0)
    for ahead in gl.static_range(2):
        page = _page(cursor, block_table, table_width, KB, PAGE)
        found = _rows(cursor, KB)
        if found > 0:
            _fetch_block(
                ahead, cursor, page, places, descs, scales, data, bars, strides, 0,
                G, KB, PAGE, SLOTS,
            )  # fmt: skip
            _fetch_block(
                ahead, cursor, page, places, descs, scales, data, bars, strides, 1,
                G, KB, PAGE, SLOTS,
            )  # fmt: skip
        if ahead == 1:
            rows1 = found
        cursor = _advance(cursor, num_items, chunks, tables, G, CHUNK, KB, ORDERED)
    page = _page(cursor, block_table, table_width, KB, PAGE)
    if rows > 0:
        v = _values(0, rows, ring, ready, D, KB, SLOTS)
        count = 0
        while rows > 0:
            mbarrier.wait(v16_free, (count & 1) ^ 1)
            v16_smem.store(v)
            # Also between the reads of the codes and the copy that overwrites them.
            fence_async_shared()
            mbarrier.arrive(v16_ready, count=1)
            rows2 = _rows(cursor, KB)
            if rows2 > 0:
                item = 2 * count
                _fetch_block(
                    count + 2, cursor, page, places, descs, scales, data, bars, strides, 1,
                    G, KB, PAGE, SLOTS,
                )  # fmt: skip
                mbarrier.wait(free.index(item % SLOTS), (item // SLOTS) & 1)
                _fetch_block(
                    count + 2, cursor, page, places, descs, scales, data, bars, strides, 0,
                    G, KB, PAGE, SLOTS,
                )  # fmt: skip
                cursor = _advance(cursor, num_items, chunks, tables, G, CHUNK, KB, ORDERED)
                page = _page(cursor, block_table, table_width, KB, PAGE)
            if rows1 > 0:
                v = _values(count + 1, rows1, ring, ready, D, KB, SLOTS)
            rows = rows1
            rows1 = rows2
            count += 1
