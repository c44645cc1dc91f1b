"""What the Hopper GEMM is given: its compile-time configuration and its operands."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

BLOCK = gl.constexpr(1)
ROW = gl.constexpr(2)
INT8 = gl.constexpr(3)
BF16 = gl.constexpr(4)

NONE = gl.constexpr(0)
"""Scale source: one scalar per 128 rows, read from global memory."""
GLOBAL = gl.constexpr(1)
"""Scale source: one scale per row, read from global memory by any strides."""
RING = gl.constexpr(2)
"""Scale source: one scale per row, contiguous along rows, brought in by TMA beside the operands."""


@aggregate
class Config:
    """What is fixed at compile time; none of it changes a result's bits."""

    MODE: gl.constexpr
    SWAP: gl.constexpr
    A_SCALE: gl.constexpr  # NONE, GLOBAL or RING
    B_SCALE: gl.constexpr
    BM: gl.constexpr  # rows of A a tile covers
    BN: gl.constexpr  # rows of B a tile covers
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    HOLD: gl.constexpr  # K steps a stage holds
    DEPTH: gl.constexpr  # K steps a consumer multiplies at once (BLOCK): HOLD or a multiple
    REST: gl.constexpr  # K steps modulo DEPTH
    SPAN: gl.constexpr  # stages between promotions (ROW)
    GROUP_ROWS: gl.constexpr  # row tiles walked before the next column tile
    HAS_BIAS: gl.constexpr
    ADD: gl.constexpr
    TMA_OUT: gl.constexpr
    WHOLE: gl.constexpr  # columns a multiple of 16, rows of `out` aligned

    @gluon.constexpr_function
    def __init__(self, MODE, SWAP, A_SCALE, B_SCALE, BM, BN, CONSUMERS, STAGES, HOLD, DEPTH, REST,
                 SPAN, GROUP_ROWS, HAS_BIAS, ADD, TMA_OUT, WHOLE):  # fmt: skip
        self.MODE = gl.constexpr(MODE)
        self.SWAP = gl.constexpr(SWAP)
        self.A_SCALE = gl.constexpr(A_SCALE)
        self.B_SCALE = gl.constexpr(B_SCALE)
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.STAGES = gl.constexpr(STAGES)
        self.HOLD = gl.constexpr(HOLD)
        self.DEPTH = gl.constexpr(DEPTH)
        self.REST = gl.constexpr(REST)
        self.SPAN = gl.constexpr(SPAN)
        self.GROUP_ROWS = gl.constexpr(GROUP_ROWS)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.ADD = gl.constexpr(ADD)
        self.TMA_OUT = gl.constexpr(TMA_OUT)
        self.WHOLE = gl.constexpr(WHOLE)


@aggregate
class Problem:
    """The operands, the ring of stages and the configuration."""

    cfg: Config
    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    sa_desc: tma.tensor_descriptor
    sb_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    out_ptr: gl.tensor
    sa_ptr: gl.tensor
    sb_ptr: gl.tensor
    bias_ptr: gl.tensor
    rows: gl.tensor
    cols: gl.tensor
    steps: gl.tensor
    stride_out: gl.tensor
    stride_sar: gl.tensor
    stride_sag: gl.tensor
    stride_sbc: gl.tensor
    stride_sbg: gl.tensor
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    sa_bufs: gl.shared_memory_descriptor
    sb_bufs: gl.shared_memory_descriptor
    out_bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, cfg, descs, ptrs, sizes, strides, bufs, bars):
        self.cfg = cfg
        self.a_desc, self.b_desc, self.sa_desc, self.sb_desc, self.out_desc = descs
        self.out_ptr, self.sa_ptr, self.sb_ptr, self.bias_ptr = ptrs
        self.rows, self.cols, self.steps = sizes
        self.stride_out = strides[0]
        self.stride_sar, self.stride_sag = strides[1], strides[2]
        self.stride_sbc, self.stride_sbg = strides[3], strides[4]
        self.a_bufs, self.b_bufs, self.sa_bufs, self.sb_bufs, self.out_bufs = bufs
        self.full, self.empty = bars
