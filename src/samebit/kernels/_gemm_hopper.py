"""Warp-specialised, persistent Hopper GEMM in Gluon, shared by every operator of the family.

One producer warp feeds a ring of shared-memory stages by TMA; one or two consumer warp groups run
`wgmma` on 64-row strips and keep the FP32 accumulators. Operand A is the M side of the MMA: the
activations, or with SWAP the weights (few tokens: outputs fill the 64 rows a `wgmma` needs).
The result of an element depends on its row of A, its row of B and the order of K, on nothing else.
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
from triton.language.core import _aggregate as aggregate

BLOCK = gl.constexpr(1)
ROW = gl.constexpr(2)
INT8 = gl.constexpr(3)
BF16 = gl.constexpr(4)


@aggregate
class Config:
    """What is fixed at compile time; none of it changes a result's bits."""

    MODE: gl.constexpr
    SWAP: gl.constexpr
    A_VEC: gl.constexpr  # one A scale per row (else one per 128 rows)
    B_VEC: gl.constexpr  # one B scale per column (else one per 128 columns)
    BM: gl.constexpr  # rows of A a tile covers
    BN: gl.constexpr  # rows of B a tile covers
    STRIP: gl.constexpr  # rows of A one consumer owns
    TN: gl.constexpr  # columns of one accumulator
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    GROUP_ROWS: gl.constexpr  # row tiles walked before the next column tile
    SPAN: gl.constexpr  # K steps between promotions (ROW)
    DEPTH: gl.constexpr  # products in flight a consumer (BLOCK)
    REST: gl.constexpr  # K steps modulo DEPTH
    HAS_BIAS: gl.constexpr
    ADD: gl.constexpr
    TMA_OUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, MODE, SWAP, A_VEC, B_VEC, BM, BN, STRIP, TN, CONSUMERS, STAGES, GROUP_ROWS,
                 SPAN, DEPTH, REST, HAS_BIAS, ADD, TMA_OUT):  # fmt: skip
        self.MODE = gl.constexpr(MODE)
        self.SWAP = gl.constexpr(SWAP)
        self.A_VEC = gl.constexpr(A_VEC)
        self.B_VEC = gl.constexpr(B_VEC)
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.STRIP = gl.constexpr(STRIP)
        self.TN = gl.constexpr(TN)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.STAGES = gl.constexpr(STAGES)
        self.GROUP_ROWS = gl.constexpr(GROUP_ROWS)
        self.SPAN = gl.constexpr(SPAN)
        self.DEPTH = gl.constexpr(DEPTH)
        self.REST = gl.constexpr(REST)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.ADD = gl.constexpr(ADD)
        self.TMA_OUT = gl.constexpr(TMA_OUT)


@aggregate
class Problem:
    """The operands, the ring of stages and the configuration."""

    cfg: Config
    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    out_ptr: gl.tensor
    sa_ptr: gl.tensor
    sb_ptr: gl.tensor
    bias_ptr: gl.tensor
    rows: gl.tensor
    cols: gl.tensor
    steps: gl.tensor
    stride_or: gl.tensor
    stride_oc: gl.tensor
    stride_sar: gl.tensor
    stride_sag: gl.tensor
    stride_sbc: gl.tensor
    stride_sbg: gl.tensor
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    out_bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, cfg, a_desc, b_desc, out_desc, out_ptr, sa_ptr, sb_ptr, bias_ptr, rows, cols,
                 steps, stride_or, stride_oc, stride_sar, stride_sag, stride_sbc, stride_sbg,
                 a_bufs, b_bufs, out_bufs, full, empty):  # fmt: skip
        self.cfg = cfg
        self.a_desc = a_desc
        self.b_desc = b_desc
        self.out_desc = out_desc
        self.out_ptr = out_ptr
        self.sa_ptr = sa_ptr
        self.sb_ptr = sb_ptr
        self.bias_ptr = bias_ptr
        self.rows = rows
        self.cols = cols
        self.steps = steps
        self.stride_or = stride_or
        self.stride_oc = stride_oc
        self.stride_sar = stride_sar
        self.stride_sag = stride_sag
        self.stride_sbc = stride_sbc
        self.stride_sbg = stride_sbg
        self.a_bufs = a_bufs
        self.b_bufs = b_bufs
        self.out_bufs = out_bufs
        self.full = full
        self.empty = empty


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
def _advance(stage, phase, STAGES: gl.constexpr):
    following = stage + 1
    wrap = following == STAGES
    return gl.where(wrap, 0, following), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _produce(p):
    """The producer warp: keep the ring full, tile after tile, without draining between tiles."""
    cfg = p.cfg
    BK: gl.constexpr = p.a_desc.block_type.shape[1]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        row, col = _tile(p, t)
        for k in range(p.steps):
            mbarrier.wait(p.empty.index(stage), phase)
            bar = p.full.index(stage)
            mbarrier.expect(bar, p.a_desc.block_type.nbytes + p.b_desc.block_type.nbytes)
            a_buf = p.a_bufs.index(stage)
            if cfg.BM < 64:
                # A wgmma reads 64 rows; those past BM hold stale data and are never stored.
                a_buf = a_buf.slice(0, cfg.BM, 0)
            tma.async_copy_global_to_shared(p.a_desc, [row, k * BK], bar, a_buf)
            tma.async_copy_global_to_shared(p.b_desc, [col, k * BK], bar, p.b_bufs.index(stage))
            stage, phase = _advance(stage, phase, cfg.STAGES)


@gluon.constexpr_function
def mma_layout(MODE, TN, BITS):
    """Accumulator layout of one consumer: 4 warps down the rows. Integer wgmma stops at 128 here."""
    wide = min(TN, 128) if MODE == 3 else TN
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, 256 // BITS])


@gluon.jit
def _row_index(p, row, LAYOUT: gl.constexpr):
    return row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _col_index(p, col, LAYOUT: gl.constexpr):
    return col + gl.arange(0, p.cfg.TN, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _a_scale_ptr(p, row, LAYOUT: gl.constexpr):
    if p.cfg.A_VEC:
        # Rows past the end repeat the last one's scale; they are never stored.
        return p.sa_ptr + gl.minimum(_row_index(p, row, LAYOUT), p.rows - 1) * p.stride_sar
    else:
        return p.sa_ptr + (row // 128) * p.stride_sar


@gluon.jit
def _b_scale(p, col, k, LAYOUT: gl.constexpr):
    if p.cfg.B_VEC:
        index = _col_index(p, col, LAYOUT)
        return gl.load(p.sb_ptr + k * p.stride_sbg + index * p.stride_sbc, mask=index < p.cols, other=0.0)
    else:
        return gl.load(p.sb_ptr + (col // 128) * p.stride_sbc + k * p.stride_sbg)


@gluon.jit
def _product(p, sa, sb):
    """fl(sa * sb) in a shape that broadcasts over the accumulator."""
    if p.cfg.A_VEC:
        if p.cfg.B_VEC:
            return gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0)
        else:
            return gl.expand_dims(sa * sb, 1)
    else:
        return gl.expand_dims(sa * sb, 0)


@gluon.jit
def _promote(d, scale, acc):
    """fma(d, scale, acc) as volatile assembly: a plain fma may sink below the next product, which
    overwrites `d`; the compiler then copies `d` and serialises every `wgmma`."""
    scale = gl.broadcast(scale, d)[0]
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [d, scale, acc], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _issue(p, stage, phase, d, A_AT: gl.constexpr, B_AT: gl.constexpr, use_acc):
    """Wait for a stage and start its product into `d`."""
    mbarrier.wait(p.full.index(stage), phase)
    return _mma(p, stage, d, A_AT, B_AT, use_acc)


@gluon.jit
def _mma(p, stage, d, A_AT: gl.constexpr, B_AT: gl.constexpr, use_acc):
    a = p.a_bufs.index(stage).slice(A_AT, 64, 0)
    b = p.b_bufs.index(stage)
    if p.cfg.TN != p.cfg.BN:
        b = b.slice(B_AT, p.cfg.TN, 0)
    return warpgroup_mma(a, b.permute((1, 0)), d, use_acc=use_acc, is_async=True)


@gluon.jit
def _finish(p, acc, row, col, row_end, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Scale (ROW, INT8), add the bias, round once and store one 64 x TN accumulator."""
    cfg = p.cfg
    rows = _row_index(p, row, LAYOUT)
    cols = _col_index(p, col, LAYOUT)
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
        if cfg.SWAP:
            # Outputs are contiguous in memory: hand each thread a run of them.
            OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
            value = gl.convert_layout(result.to(DTYPE), OUT)
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, OUT))
            cols = col + gl.arange(0, cfg.TN, gl.SliceLayout(0, OUT))
        else:
            value = result.to(DTYPE)
        inside = gl.expand_dims(rows < row_end, 1) & gl.expand_dims(cols < p.cols, 0)
        offsets = gl.expand_dims(rows.to(gl.int64) * p.stride_or, 1) + gl.expand_dims(
            cols.to(gl.int64) * p.stride_oc, 0
        )
        if cfg.ADD:
            value = value + gl.load(p.out_ptr + offsets, mask=inside, other=0.0)
        gl.store(p.out_ptr + offsets, value, mask=inside)


@gluon.jit
def _consume_deep(p, WHICH: gl.constexpr):
    """BLOCK, one accumulator: DEPTH K blocks multiply at once, each promoted as it completes.

    Nothing is in flight over the loop's edge: the assembler serialises products that are.
    """
    cfg = p.cfg
    LAYOUT: gl.constexpr = mma_layout(cfg.MODE, cfg.TN, p.a_desc.dtype.primitive_bitwidth)
    AT: gl.constexpr = WHICH * 64
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for t in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        row, col = _tile(p, t)
        row_end = gl.minimum(p.rows, row + cfg.BM)
        row += AT
        acc = gl.zeros([64, cfg.TN], gl.float32, LAYOUT)
        dots = (acc,)
        for _ in gl.static_range(cfg.DEPTH - 1):
            dots = dots + (acc,)
        whole = p.steps - cfg.REST
        for k in range(0, whole, cfg.DEPTH):
            acc, dots, stage, phase = _deep_step(
                p, acc, dots, stage, phase, row, col, k, cfg.DEPTH, AT, LAYOUT
            )
        if cfg.REST > 0:
            acc, dots, stage, phase = _deep_step(
                p, acc, dots, stage, phase, row, col, whole, cfg.REST, AT, LAYOUT
            )
        _finish(p, acc, row, col, row_end, WHICH, LAYOUT)
    if cfg.TMA_OUT:
        tma.store_wait(0)


@gluon.jit
def _deep_step(p, acc, dots, stage, phase, row, col, k, COUNT: gl.constexpr, AT: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Start COUNT products, then wait for and promote them in order."""
    sa_ptr = _a_scale_ptr(p, row, LAYOUT)
    tokens = ()
    stages = ()
    scales_a = ()
    scales_b = ()
    for i in gl.static_range(COUNT):
        tokens = tokens + (_issue(p, stage, phase, dots[i], AT, 0, False),)
        scales_a = scales_a + (gl.load(sa_ptr + (k + i) * p.stride_sag),)
        scales_b = scales_b + (_b_scale(p, col, k + i, LAYOUT),)
        stages = stages + (stage,)
        stage, phase = _advance(stage, phase, p.cfg.STAGES)
    done = ()
    for i in gl.static_range(COUNT):
        dot = warpgroup_mma_wait(COUNT - 1 - i, deps=(tokens[i],))
        mbarrier.arrive(p.empty.index(stages[i]), count=1)
        acc = _promote(dot, _product(p, scales_a[i], scales_b[i]), acc)
        done = done + (dot,)
    for i in gl.static_range(COUNT, p.cfg.DEPTH):
        done = done + (dots[i],)
    return acc, done, stage, phase


@gluon.jit
def _consume_split(p, WHICH: gl.constexpr):
    """BLOCK, two accumulators a consumer and one product at a time; the other consumer multiplies
    while this one promotes. The two halves are rows of A (STRIP = 128) or rows of B (BN = 2 TN)."""
    cfg = p.cfg
    LAYOUT: gl.constexpr = mma_layout(cfg.MODE, cfg.TN, p.a_desc.dtype.primitive_bitwidth)
    AT: gl.constexpr = WHICH * cfg.STRIP
    DOWN: gl.constexpr = 64 if cfg.STRIP == 128 else 0
    RIGHT: gl.constexpr = 0 if cfg.STRIP == 128 else cfg.TN
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for t in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        row, col = _tile(p, t)
        row_end = gl.minimum(p.rows, row + cfg.BM)
        row += AT
        acc0 = gl.zeros([64, cfg.TN], gl.float32, LAYOUT)
        acc1 = gl.zeros([64, cfg.TN], gl.float32, LAYOUT)
        d = gl.zeros([64, cfg.TN], gl.float32, LAYOUT)
        sa_ptr0 = _a_scale_ptr(p, row, LAYOUT)
        sa_ptr1 = _a_scale_ptr(p, row + DOWN, LAYOUT)
        for k in range(p.steps):
            token = _issue(p, stage, phase, d, AT, 0, False)
            sa0 = gl.load(sa_ptr0 + k * p.stride_sag)
            sa1 = sa0
            if DOWN > 0:
                sa1 = gl.load(sa_ptr1 + k * p.stride_sag)
            sb0 = _b_scale(p, col, k, LAYOUT)
            sb1 = sb0
            if RIGHT > 0:
                sb1 = _b_scale(p, col + RIGHT, k, LAYOUT)
            d = warpgroup_mma_wait(0, deps=(token,))
            acc0 = _promote(d, _product(p, sa0, sb0), acc0)
            token = _mma(p, stage, d, AT + DOWN, RIGHT, False)
            d = warpgroup_mma_wait(0, deps=(token,))
            mbarrier.arrive(p.empty.index(stage), count=1)
            acc1 = _promote(d, _product(p, sa1, sb1), acc1)
            stage, phase = _advance(stage, phase, cfg.STAGES)
        _finish(p, acc0, row, col, row_end, WHICH, LAYOUT)
        _finish(p, acc1, row + DOWN, col + RIGHT, row_end, WHICH, LAYOUT)
    if cfg.TMA_OUT:
        tma.store_wait(0)


@gluon.jit
def _consume_span(p, WHICH: gl.constexpr):
    """ROW: products of SPAN K steps chained in the tensor core, then added to the accumulator."""
    cfg = p.cfg
    LAYOUT: gl.constexpr = mma_layout(cfg.MODE, cfg.TN, p.a_desc.dtype.primitive_bitwidth)
    AT: gl.constexpr = WHICH * 64
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for t in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        row, col = _tile(p, t)
        row_end = gl.minimum(p.rows, row + cfg.BM)
        row += AT
        acc = gl.zeros([64, cfg.TN], gl.float32, LAYOUT)
        d = gl.zeros([64, cfg.TN], gl.float32, LAYOUT)
        for k0 in range(0, p.steps, cfg.SPAN):
            token = warpgroup_mma_wait(1, deps=(_issue(p, stage, phase, d, AT, 0, False),))
            last = stage
            stage, phase = _advance(stage, phase, cfg.STAGES)
            for k in range(k0 + 1, gl.minimum(k0 + cfg.SPAN, p.steps)):
                product = _issue(p, stage, phase, token, AT, 0, True)
                token = warpgroup_mma_wait(1, deps=(product,))
                mbarrier.arrive(p.empty.index(last), count=1)
                last = stage
                stage, phase = _advance(stage, phase, cfg.STAGES)
            d = warpgroup_mma_wait(0, deps=(token,))
            mbarrier.arrive(p.empty.index(last), count=1)
            acc = acc + d
        _finish(p, acc, row, col, row_end, WHICH, LAYOUT)
    if cfg.TMA_OUT:
        tma.store_wait(0)


@gluon.jit
def _consume_chain(p, WHICH: gl.constexpr):
    """INT8, BF16: one accumulator in the tensor core over all of K."""
    cfg = p.cfg
    LAYOUT: gl.constexpr = mma_layout(cfg.MODE, cfg.TN, p.a_desc.dtype.primitive_bitwidth)
    ACC: gl.constexpr = gl.int32 if cfg.MODE == INT8 else gl.float32
    AT: gl.constexpr = WHICH * 64
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for t in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        row, col = _tile(p, t)
        row_end = gl.minimum(p.rows, row + cfg.BM)
        row += AT
        acc = gl.zeros([64, cfg.TN], ACC, LAYOUT)
        acc = warpgroup_mma_wait(1, deps=(_issue(p, stage, phase, acc, AT, 0, False),))
        last = stage
        stage, phase = _advance(stage, phase, cfg.STAGES)
        for k in range(1, p.steps):
            product = _issue(p, stage, phase, acc, AT, 0, True)
            acc = warpgroup_mma_wait(1, deps=(product,))
            mbarrier.arrive(p.empty.index(last), count=1)
            last = stage
            stage, phase = _advance(stage, phase, cfg.STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(p.empty.index(last), count=1)
        _finish(p, acc, row, col, row_end, WHICH, LAYOUT)
    if cfg.TMA_OUT:
        tma.store_wait(0)


@gluon.jit
def _consume(p, WHICH: gl.constexpr):
    cfg = p.cfg
    if cfg.MODE == BLOCK:
        if cfg.STRIP == 128 or cfg.BN != cfg.TN:
            _consume_split(p, WHICH)
        else:
            _consume_deep(p, WHICH)
    elif cfg.MODE == ROW:
        _consume_span(p, WHICH)
    else:
        _consume_chain(p, WHICH)


@gluon.jit(do_not_specialize=["steps", "stride_or", "stride_oc", "stride_sar", "stride_sag",
                              "stride_sbc", "stride_sbg"])  # fmt: skip
def hopper_gemm_kernel(
    a_desc, b_desc, out_desc, out_ptr, sa_ptr, sb_ptr, bias_ptr, rows, cols, steps,
    stride_or, stride_oc, stride_sar, stride_sag, stride_sbc, stride_sbg,
    MODE: gl.constexpr, SWAP: gl.constexpr, A_VEC: gl.constexpr, B_VEC: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STRIP: gl.constexpr, TN: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP_ROWS: gl.constexpr, SPAN: gl.constexpr,
    DEPTH: gl.constexpr, REST: gl.constexpr, HAS_BIAS: gl.constexpr, ADD: gl.constexpr, TMA_OUT: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Producer warp and CONSUMERS warp groups over a persistent grid of tiles."""
    cfg = Config(MODE, SWAP, A_VEC, B_VEC, BM, BN, STRIP, TN, CONSUMERS, STAGES, GROUP_ROWS, SPAN,
                 DEPTH, REST, HAS_BIAS, ADD, TMA_OUT)  # fmt: skip
    BK: gl.constexpr = a_desc.block_type.shape[1]
    HELD: gl.constexpr = 64 if BM < 64 else BM
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, HELD, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_desc.layout)
    out_bufs = a_bufs
    if TMA_OUT:
        out_bufs = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 64, TN], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    p = Problem(cfg, a_desc, b_desc, out_desc, out_ptr, sa_ptr, sb_ptr, bias_ptr,
                gl.to_tensor(rows), gl.to_tensor(cols), steps, stride_or, stride_oc, stride_sar,
                stride_sag, stride_sbc, stride_sbg, a_bufs, b_bufs, out_bufs, full, empty)  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([(_consume, (p, 0)), (_produce, (p,))], [1], [24])
    else:
        gl.warp_specialize(
            [(_consume, (p, 0)), (_consume, (p, 1)), (_produce, (p,))], [4, 1], [REGISTERS, 24]
        )
