"""Warp-specialised, persistent Hopper GEMM in Gluon, shared by every operator of the family.

One producer warp feeds a ring of shared-memory stages by TMA; one or two consumer warp groups run `wgmma` on
64-row strips with FP32 accumulators. A, the M side, is the activations, or with SWAP the weights (few tokens:
outputs fill a `wgmma`'s 64 rows). An element depends on its row of A, its row of B and the order of K alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebit.kernels._gemm_problem import BLOCK, GLOBAL, INT8, NONE, RING, ROW, Config, Problem


@gluon.constexpr_function
def mma_layout(MODE, BN, BITS):
    """Accumulator layout of one consumer: 4 warps down the rows; integer wgmma stops at 128."""
    wide = min(BN, 128) if MODE == 3 else BN
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, 256 // BITS])


@gluon.jit
def _tiles(p):
    return gl.cdiv(p.rows, p.cfg.BM) * gl.cdiv(p.cols, p.cfg.BN)


@gluon.jit
def _tile(p, t):
    """First row and column of tile `t`; GROUP_ROWS row tiles share their columns in L2."""
    row_tiles = gl.cdiv(p.rows, p.cfg.BM)
    width = p.cfg.GROUP_ROWS * gl.cdiv(p.cols, p.cfg.BN)
    first = (t // width) * p.cfg.GROUP_ROWS
    size = gl.minimum(row_tiles - first, p.cfg.GROUP_ROWS)
    inner = t % width
    return (first + inner % size) * p.cfg.BM, (inner // size) * p.cfg.BN


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """(stage, phase) after this one in a ring."""
    following = stage + 1
    wrap = following == STAGES
    return gl.where(wrap, 0, following), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _produce(p):
    """The producer warp: keep the ring full, tile after tile, without draining between tiles."""
    cfg = p.cfg
    BK: gl.constexpr = p.a_desc.block_type.shape[1]
    BYTES: gl.constexpr = cfg.CONSUMERS * p.a_desc.block_type.nbytes + p.b_desc.block_type.nbytes
    SA_BYTES: gl.constexpr = p.sa_desc.block_type.nbytes if cfg.A_SCALE == RING else 0
    SB_BYTES: gl.constexpr = p.sb_desc.block_type.nbytes if cfg.B_SCALE == RING else 0
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        row, col = _tile(p, t)
        for k0 in range(0, p.steps, cfg.HOLD):
            mbarrier.wait(p.empty.index(stage), phase)
            bar = p.full.index(stage)
            mbarrier.expect(bar, cfg.HOLD * (BYTES + cfg.CONSUMERS * SA_BYTES + SB_BYTES))
            for i in gl.static_range(cfg.HOLD):
                # A step past the end is filled with zeros and not multiplied.
                k = k0 + i
                at = stage * cfg.HOLD + i
                for strip in gl.static_range(cfg.CONSUMERS):
                    slot = at * cfg.CONSUMERS + strip
                    first = row + strip * 64
                    a_buf = p.a_bufs.index(slot)
                    if cfg.BM < 64:
                        # A wgmma reads 64 rows; those past BM are stale and never stored.
                        a_buf = a_buf.slice(0, cfg.BM, 0)
                    tma.async_copy_global_to_shared(p.a_desc, [first, k * BK], bar, a_buf)
                    if cfg.A_SCALE == RING:
                        tma.async_copy_global_to_shared(
                            p.sa_desc, [k * p.stride_sag + first], bar, p.sa_bufs.index(slot)
                        )
                tma.async_copy_global_to_shared(p.b_desc, [col, k * BK], bar, p.b_bufs.index(at))
                if cfg.B_SCALE == RING:
                    tma.async_copy_global_to_shared(
                        p.sb_desc, [k * p.stride_sbg + col], bar, p.sb_bufs.index(at)
                    )
            stage, phase = next_stage(stage, phase, cfg.STAGES)


@gluon.jit
def _mma(p, at, d, WHICH: gl.constexpr, use_acc):
    a = p.a_bufs.index(at * p.cfg.CONSUMERS + WHICH)
    b = p.b_bufs.index(at).permute((1, 0))
    return warpgroup_mma(a, b, d, use_acc=use_acc, is_async=True)


@gluon.jit
def _promote(d, scale, acc):
    """fma(d, scale, acc) as volatile assembly: a plain fma may sink below the next product, which
    overwrites `d`; the compiler then copies `d` and serialises every `wgmma`."""
    scale = gl.broadcast(scale, d)[0]
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [d, scale, acc], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _prefetched(p, row, col, k, LAYOUT: gl.constexpr):
    """The scales of step `k` that do not come through the ring: fetched a stage or two ahead."""
    cfg = p.cfg
    k = gl.minimum(k, p.steps - 1)
    fetched = ()
    if cfg.A_SCALE == NONE:
        fetched = fetched + (gl.load(p.sa_ptr + (row // 128) * p.stride_sar + k * p.stride_sag),)
    elif cfg.A_SCALE == GLOBAL:
        # Rows past the end repeat the last one's scale; they are never stored.
        rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), p.rows - 1)
        fetched = fetched + (gl.load(p.sa_ptr + rows * p.stride_sar + k * p.stride_sag),)
    if cfg.B_SCALE == NONE:
        fetched = fetched + (gl.load(p.sb_ptr + (col // 128) * p.stride_sbc + k * p.stride_sbg),)
    elif cfg.B_SCALE == GLOBAL:
        cols = gl.minimum(col + gl.arange(0, cfg.BN, gl.SliceLayout(0, LAYOUT)), p.cols - 1)
        fetched = fetched + (gl.load(p.sb_ptr + cols * p.stride_sbc + k * p.stride_sbg),)
    return fetched


@gluon.jit
def _scale(p, fetched, at, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """fl(sa * sb) of ring slot `at`, in a shape that broadcasts over the accumulator."""
    cfg = p.cfg
    if cfg.A_SCALE == RING:
        sa = p.sa_bufs.index(at * cfg.CONSUMERS + WHICH).load(gl.SliceLayout(1, LAYOUT))
    else:
        sa = fetched[0]
    if cfg.B_SCALE == RING:
        sb_buf = p.sb_bufs.index(at)
        if cfg.BN < 32:
            sb_buf = sb_buf.slice(0, cfg.BN, 0)
        sb = sb_buf.load(gl.SliceLayout(0, LAYOUT))
    elif cfg.A_SCALE == RING:
        sb = fetched[0]
    else:
        sb = fetched[1]
    if cfg.A_SCALE == NONE:
        return gl.expand_dims(sa * sb, 0)
    elif cfg.B_SCALE == NONE:
        return gl.expand_dims(sa * sb, 1)
    else:
        return gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0)


@gluon.jit
def _finish(p, acc, row, col, row_end, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Scale (ROW, INT8), add the bias, round once and store one 64 x BN accumulator."""
    cfg = p.cfg
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, cfg.BN, gl.SliceLayout(0, LAYOUT))
    result = acc.to(gl.float32)
    if cfg.MODE == ROW or cfg.MODE == INT8:
        sa = gl.load(p.sa_ptr + rows * p.stride_sar, mask=rows < p.rows, other=0.0)
        sb = gl.load(p.sb_ptr + cols * p.stride_sbc, mask=cols < p.cols, other=0.0)
        result = result * (gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0))
    if cfg.HAS_BIAS:
        if cfg.SWAP:
            bias = gl.load(p.bias_ptr + rows, mask=rows < p.rows, other=0.0)
            result = result + gl.expand_dims(bias.to(gl.float32), 1)
        else:
            bias = gl.load(p.bias_ptr + cols, mask=cols < p.cols, other=0.0)
            result = result + gl.expand_dims(bias.to(gl.float32), 0)
    DTYPE: gl.constexpr = p.out_ptr.dtype.element_ty
    if cfg.TMA_OUT:
        buf = p.out_bufs.index(WHICH)
        tma.store_wait(0)
        buf.store(result.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(p.out_desc, [row, col], buf)
    else:
        value = result.to(DTYPE)
        if cfg.SWAP:
            # Outputs are contiguous in memory: hand each thread a run of them.
            OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
            value = gl.convert_layout(value, OUT)
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, OUT))
            cols = col + gl.arange(0, cfg.BN, gl.SliceLayout(0, OUT))
        end = p.cols
        if cfg.WHOLE:
            # Said in a form the compiler sees: neighbouring columns share their mask.
            end = p.cols // 16 * 16
        inside = gl.expand_dims(rows < row_end, 1) & gl.expand_dims(cols < end, 0)
        # Outputs are contiguous; `stride_out` is the distance between tokens.
        if cfg.SWAP:
            row_offsets = gl.expand_dims(rows.to(gl.int64), 1)
            col_offsets = gl.expand_dims(cols.to(gl.int64) * p.stride_out, 0)
        else:
            row_offsets = gl.expand_dims(rows.to(gl.int64) * p.stride_out, 1)
            col_offsets = gl.expand_dims(cols.to(gl.int64), 0)
        pointers = p.out_ptr + (row_offsets + col_offsets)
        if cfg.WHOLE:
            pointers = gl.multiple_of(pointers, [16, 16])
        if cfg.ADD:
            value = value + gl.load(pointers, mask=inside, other=0.0)
        gl.store(pointers, value, mask=inside)


@gluon.jit
def _block_group(p, acc, dots, fetched, stage, phase, row, col, k, COUNT: gl.constexpr,
                 WHICH: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Multiply COUNT blocks at once, then promote them in order as they complete.

    `fetched` holds the scales of this group and the next; those of the one after are started here.
    """
    HOLD: gl.constexpr = p.cfg.HOLD
    DEPTH: gl.constexpr = p.cfg.DEPTH
    PAIRS: gl.constexpr = p.cfg.A_SCALE != NONE and p.cfg.B_SCALE != NONE
    tokens = ()
    stages = ()
    for i in gl.static_range(COUNT):
        if i % HOLD == 0:
            mbarrier.wait(p.full.index(stage), phase)
        tokens = tokens + (_mma(p, stage * HOLD + i % HOLD, dots[i], WHICH, False),)
        stages = stages + (stage,)
        if i % HOLD == HOLD - 1 or i == COUNT - 1:
            stage, phase = next_stage(stage, phase, p.cfg.STAGES)
    later = ()
    for i in gl.static_range(DEPTH):
        later = later + (fetched[DEPTH + i],)
    for i in gl.static_range(DEPTH):
        later = later + (_prefetched(p, row, col, k + 2 * DEPTH + i, LAYOUT),)
    done = ()
    for i in gl.static_range(COUNT):
        if not PAIRS:
            scale = _scale(p, fetched[i], stages[i] * HOLD + i % HOLD, WHICH, LAYOUT)
        dot = warpgroup_mma_wait(COUNT - 1 - i, deps=(tokens[i],))
        if PAIRS:
            # One scale per element: made here, they need not live through the product.
            scale = _scale(p, fetched[i], stages[i] * HOLD + i % HOLD, WHICH, LAYOUT)
        if i % HOLD == HOLD - 1 or i == COUNT - 1:
            mbarrier.arrive(p.empty.index(stages[i]), count=1)
        acc = _promote(dot, scale, acc)
        done = done + (dot,)
    for i in gl.static_range(COUNT, DEPTH):
        done = done + (dots[i],)
    return acc, done, later, stage, phase


@gluon.jit
def _block_tile(p, stage, phase, row, col, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """BLOCK: acc = fma(dot128, fl(sa * sb), acc), blocks in K order.

    No product is in flight over the loop's edge: the assembler would serialise them all.
    """
    cfg = p.cfg
    acc = gl.zeros([64, cfg.BN], gl.float32, LAYOUT)
    dots = ()
    fetched = ()
    for _ in gl.static_range(cfg.DEPTH):
        dots = dots + (acc,)
    for i in gl.static_range(2 * cfg.DEPTH):
        fetched = fetched + (_prefetched(p, row, col, i, LAYOUT),)
    whole = p.steps - cfg.REST
    for k in range(0, whole, cfg.DEPTH):
        acc, dots, fetched, stage, phase = _block_group(
            p, acc, dots, fetched, stage, phase, row, col, k, cfg.DEPTH, WHICH, LAYOUT
        )
    if cfg.REST > 0:
        acc, dots, fetched, stage, phase = _block_group(
            p, acc, dots, fetched, stage, phase, row, col, whole, cfg.REST, WHICH, LAYOUT
        )
    return acc, stage, phase


@gluon.jit
def _chain(p, acc, stage, phase, stages, WHICH: gl.constexpr):
    """Products of `stages` stages added up inside the tensor core, starting from zero."""
    cfg = p.cfg
    mbarrier.wait(p.full.index(stage), phase)
    for i in gl.static_range(cfg.HOLD):
        product = _mma(p, stage * cfg.HOLD + i, acc, WHICH, i > 0)
        acc = warpgroup_mma_wait(cfg.HOLD, deps=(product,))
    last = stage
    stage, phase = next_stage(stage, phase, cfg.STAGES)
    for _ in range(1, stages):
        mbarrier.wait(p.full.index(stage), phase)
        for i in gl.static_range(cfg.HOLD):
            product = _mma(p, stage * cfg.HOLD + i, acc, WHICH, True)
            acc = warpgroup_mma_wait(cfg.HOLD, deps=(product,))
        mbarrier.arrive(p.empty.index(last), count=1)
        last = stage
        stage, phase = next_stage(stage, phase, cfg.STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(p.empty.index(last), count=1)
    return acc, stage, phase


@gluon.jit
def _row_tile(p, stage, phase, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """ROW: acc = acc + (SPAN stages chained in the tensor core)."""
    cfg = p.cfg
    acc = gl.zeros([64, cfg.BN], gl.float32, LAYOUT)
    dot = gl.zeros([64, cfg.BN], gl.float32, LAYOUT)
    stages = p.steps // cfg.HOLD
    for first in range(0, stages, cfg.SPAN):
        count = gl.minimum(cfg.SPAN, stages - first)
        dot, stage, phase = _chain(p, dot, stage, phase, count, WHICH)
        acc = acc + dot
    return acc, stage, phase


@gluon.jit
def _consume(p, WHICH: gl.constexpr):
    """One consumer warp group: its 64 rows of every tile."""
    cfg = p.cfg
    LAYOUT: gl.constexpr = mma_layout(cfg.MODE, cfg.BN, p.a_desc.dtype.primitive_bitwidth)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for t in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        row, col = _tile(p, t)
        row_end = gl.minimum(p.rows, row + cfg.BM)
        row += WHICH * 64
        if cfg.MODE == BLOCK:
            acc, stage, phase = _block_tile(p, stage, phase, row, col, WHICH, LAYOUT)
        elif cfg.MODE == ROW:
            acc, stage, phase = _row_tile(p, stage, phase, WHICH, LAYOUT)
        else:
            ACC: gl.constexpr = gl.int32 if cfg.MODE == INT8 else gl.float32
            acc = gl.zeros([64, cfg.BN], ACC, LAYOUT)
            acc, stage, phase = _chain(p, acc, stage, phase, p.steps // cfg.HOLD, WHICH)
        _finish(p, acc, row, col, row_end, WHICH, LAYOUT)
    if cfg.TMA_OUT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "cols", "steps", "stride_sag", "stride_sbg"])
def hopper_gemm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, out_desc, out_ptr, sa_ptr, sb_ptr, bias_ptr,
    rows, cols, steps, stride_out, stride_sar, stride_sag, stride_sbc, stride_sbg,
    MODE: gl.constexpr, SWAP: gl.constexpr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    HOLD: gl.constexpr, DEPTH: gl.constexpr, REST: gl.constexpr, SPAN: gl.constexpr,
    GROUP_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, ADD: gl.constexpr,
    TMA_OUT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Producer warp and CONSUMERS warp groups over a persistent grid of tiles."""
    cfg = Config(MODE, SWAP, A_SCALE, B_SCALE, BM, BN, CONSUMERS, STAGES, HOLD, DEPTH, REST, SPAN,
                 GROUP_ROWS, HAS_BIAS, ADD, TMA_OUT, WHOLE)  # fmt: skip
    SLOTS: gl.constexpr = STAGES * HOLD
    BK: gl.constexpr = a_desc.block_type.shape[1]
    STRIPS: gl.constexpr = SLOTS * CONSUMERS
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STRIPS, 64, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [SLOTS, BN, BK], b_desc.layout)
    sa_bufs = a_bufs
    if A_SCALE == RING:
        sa_bufs = gl.allocate_shared_memory(
            gl.float32, [STRIPS] + sa_desc.block_type.shape, sa_desc.layout
        )
    sb_bufs = b_bufs
    if B_SCALE == RING:
        sb_bufs = gl.allocate_shared_memory(
            gl.float32, [SLOTS] + sb_desc.block_type.shape, sb_desc.layout
        )
    out_bufs = a_bufs
    if TMA_OUT:
        out_bufs = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 64, BN], out_desc.layout)
    # 256 bytes each: the copy engine needs what lies behind them aligned to 128 bytes.
    full = gl.allocate_shared_memory(gl.int64, [32, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [32, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    p = Problem(
        cfg,
        (a_desc, b_desc, sa_desc, sb_desc, out_desc),
        (out_ptr, sa_ptr, sb_ptr, bias_ptr),
        (gl.to_tensor(rows), gl.to_tensor(cols), steps),
        (gl.to_tensor(stride_out), gl.to_tensor(stride_sar), stride_sag,
         gl.to_tensor(stride_sbc), stride_sbg),
        (a_bufs, b_bufs, sa_bufs, sb_bufs, out_bufs),
        (full, empty),
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([(_consume, (p, 0)), (_produce, (p,))], [1], [24])
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (p, 0)), (_consume, (p, 1)), (_produce, (p,))], [4, 1], [240, 24]
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [(_consume, (p, 0)), (_consume, (p, 1)), (_consume, (p, 2)), (_produce, (p,))],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [(_consume, (p, 0)), (_consume, (p, 1)), (_consume, (p, 2)), (_consume, (p, 3)),
             (_produce, (p,))],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )  # fmt: skip
