"""The sampler's parts for more than 64 tokens in Gluon: two warp groups that take turns.

A producer warp feeds a ring of stages by TMA, tile after tile; a tile is 128 tokens of one vocabulary
tile. Each of two consumers multiplies every other tile of its program (64-row strips of tokens on the
M side, the weight's stage shared by both) and draws from it while the other one multiplies, so that
neither the memory nor the tensor core waits for noise and exponentials. The bits are those of
sample.py's kernel: the same products in the same order of K, the same folds (head_tile.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from samebit.kernels._gemm_hopper import next_stage
from samebit.kernels.head_tile import vocab_sum
from samebit.kernels.sample_noise import gumbel, noise_word

STRIP = gl.constexpr(64)
"""Tokens of a wgmma."""
TOKENS = gl.constexpr(128)
"""Of a tile: two strips."""
VOCAB = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
STAGES = gl.constexpr(6)
REGISTERS = 168
"""A thread's at launch; the consumers take 240 and leave the producer 24."""
_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _LAYOUT))
_BELOW = gl.constexpr(float("-inf"))
_NONE = gl.constexpr(2147483647)


@aggregate
class Draw:
    """What a program works on: sizes, the ring of stages, inputs by token, outputs by tile."""

    hidden_desc: tma.tensor_descriptor
    weight_desc: tma.tensor_descriptor
    inverse_ptr: gl.tensor
    cut_ptr: gl.tensor
    cut_id_ptr: gl.tensor
    noise_key_ptr: gl.tensor
    parts_ptr: gl.tensor
    T: gl.tensor
    steps: gl.tensor
    vocab_size: gl.tensor
    vocab_tiles: gl.tensor
    hidden_bufs: gl.shared_memory_descriptor
    weight_bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    RESTRICT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, descs, ptrs, sizes, bufs, bars, RESTRICT):
        self.hidden_desc, self.weight_desc = descs
        self.inverse_ptr, self.cut_ptr, self.cut_id_ptr = ptrs[0], ptrs[1], ptrs[2]
        self.noise_key_ptr, self.parts_ptr = ptrs[3], ptrs[4]
        self.T, self.steps, self.vocab_size, self.vocab_tiles = sizes
        self.hidden_bufs, self.weight_bufs = bufs
        self.full, self.empty, self.turn = bars
        self.RESTRICT = gl.constexpr(RESTRICT)


@gluon.jit
def _tiles(p):
    return gl.cdiv(p.T, TOKENS) * p.vocab_tiles


@gluon.jit
def _place(p, tile):
    """(first token, vocabulary tile). The token tiles of one vocabulary tile run side by side, and
    turn with it, so that no program gets the short last token tile every time."""
    token_tiles = gl.cdiv(p.T, TOKENS)
    vocab_tile = tile // token_tiles
    turn = vocab_tile // gl.maximum(gl.num_programs(0) // token_tiles, 1)
    return (tile + turn) % token_tiles * TOKENS, vocab_tile


@gluon.jit
def _produce(p):
    """The producer warp: keep the ring full, tile after tile, without draining between tiles."""
    BYTES: gl.constexpr = p.weight_desc.block_type.nbytes
    STRIP_BYTES: gl.constexpr = p.hidden_desc.block_type.nbytes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), _tiles(p), gl.num_programs(0)):
        token, vocab_tile = _place(p, tile)
        held = gl.minimum(gl.cdiv(p.T - token, STRIP), 2)
        for k in range(p.steps):
            mbarrier.wait(p.empty.index(stage), phase)
            bar = p.full.index(stage)
            for i in gl.static_range(1, 3):
                mbarrier.expect(bar, BYTES + i * STRIP_BYTES, pred=held == i)
            at = k * BLOCK_K
            weight = p.weight_bufs.index(stage)
            tma.async_copy_global_to_shared(p.weight_desc, [vocab_tile * VOCAB, at], bar, weight)
            for i in gl.static_range(2):
                hidden = p.hidden_bufs.index(2 * stage + i)
                tma.async_copy_global_to_shared(
                    p.hidden_desc, [token + STRIP * i, at], bar, hidden, pred=held > i
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _mma(p, stage, WHICH: gl.constexpr, acc, use_acc):
    hidden = p.hidden_bufs.index(2 * stage + WHICH)
    weight = p.weight_bufs.index(stage).permute((1, 0))
    return warpgroup_mma(hidden, weight, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _stage(p, acc, other, stage, phase, COUNT: gl.constexpr, use_acc):
    """Add a stage's products of COUNT strips; only they are left in flight."""
    mbarrier.wait(p.full.index(stage), phase)
    first = _mma(p, stage, 0, acc, use_acc)
    if COUNT == 2:
        second = _mma(p, stage, 1, other, use_acc)
        acc, other = warpgroup_mma_wait(2, deps=(first, second))
    else:
        acc = warpgroup_mma_wait(1, deps=(first,))
    return acc, other


@gluon.jit
def _products(p, acc, other, stage, phase, WHICH: gl.constexpr, COUNT: gl.constexpr):
    """FP32 dot products of COUNT strips; a stage is given back when the next one's are under way, the
    turn when no stage is left to wait for."""
    acc, other = _stage(p, acc, other, stage, phase, COUNT, False)
    last = stage
    stage, phase = next_stage(stage, phase, STAGES)
    for _ in range(1, p.steps):
        acc, other = _stage(p, acc, other, stage, phase, COUNT, True)
        mbarrier.arrive(p.empty.index(last), count=1)
        last = stage
        stage, phase = next_stage(stage, phase, STAGES)
    mbarrier.arrive(p.turn.index(1 - WHICH), count=1)
    if COUNT == 2:
        acc, other = warpgroup_mma_wait(0, deps=(acc, other))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(p.empty.index(last), count=1)
    return acc, other


@gluon.jit
def _better(x, ids, z, WIDTH: gl.constexpr):
    """Of pairs of ids that differ in one bit ([64, n, 2, WIDTH] in memory order), the larger key; the
    smaller id where keys are equal. [64, n * WIDTH] each."""
    shape: gl.constexpr = [64, x.shape[1] // (2 * WIDTH), 2, WIDTH]
    x0, x1 = gl.reshape(x, shape).permute((0, 1, 3, 2)).split()
    i0, i1 = gl.reshape(ids, shape).permute((0, 1, 3, 2)).split()
    z0, z1 = gl.reshape(z, shape).permute((0, 1, 3, 2)).split()
    later = x1 > x0
    small: gl.constexpr = [64, x.shape[1] // 2]
    x = gl.reshape(gl.where(later, x1, x0), small)
    return x, gl.reshape(gl.where(later, i1, i0), small), gl.reshape(gl.where(later, z1, z0), small)


@gluon.jit
def _winner(key, ids, z):
    """(best key, its id, its logit) of each row; a row without a key above -inf has no id.

    Bits of the id from low to high where they lie in a thread (0, 3 to 6), then bits 1 and 2.
    """
    # NaN, which never wins, would hide what it is compared with
    key = gl.maximum(key, _BELOW)
    key, ids, z = _better(key, ids, z, 1)
    for _ in gl.static_range(4):
        key, ids, z = _better(key, ids, z, 4)
    best = gl.max(key, 1)
    wins = (key == gl.expand_dims(best, 1)) & (key > _BELOW)
    winner = gl.min(gl.where(wins, ids, _NONE), 1)
    logit = gl.max(gl.where(ids == gl.expand_dims(winner, 1), z, _BELOW), 1)
    return best, winner, logit


@gluon.jit
def _draw_strip(p, acc, token, vocab_tile):
    """Store the parts of 64 tokens and 128 ids: max, sum of exponentials, best key, its id and logit."""
    row = token + gl.arange(0, STRIP, _ROW)
    rows = row < p.T
    column = gl.arange(0, VOCAB, gl.SliceLayout(0, _LAYOUT))
    ids = gl.expand_dims(vocab_tile * VOCAB + column, 0)
    inverse = gl.load(p.inverse_ptr + row, mask=rows, other=0.0)
    scale = gl.where(inverse == 0.0, 1.0, inverse)
    z = acc * gl.expand_dims(scale, 1)
    z = gl.where(ids < p.vocab_size, z, _BELOW)
    if p.RESTRICT:
        cut = gl.expand_dims(gl.load(p.cut_ptr + row, mask=rows, other=0.0), 1)
        cut_id = gl.expand_dims(gl.load(p.cut_id_ptr + row, mask=rows, other=0), 1)
        z = gl.where((z < cut) | ((z == cut) & (ids > cut_id)), _BELOW, z)
    top = gl.max(z, 1)
    base = gl.where(top == _BELOW, 0.0, top)
    total = gl.convert_layout(vocab_sum(gl.exp(z - gl.expand_dims(base, 1)), False), _ROW)
    low = gl.load(p.noise_key_ptr + 2 * row, mask=rows, other=0).to(gl.uint32, bitcast=True)
    high = gl.load(p.noise_key_ptr + 2 * row + 1, mask=rows, other=0).to(gl.uint32, bitcast=True)
    noise = gumbel(noise_word(ids, gl.expand_dims(low, 1), gl.expand_dims(high, 1)))
    key = gl.where(gl.expand_dims(inverse == 0.0, 1), z, z + noise)
    best, winner, logit = _winner(key, gl.broadcast(ids, z)[0], z)
    at = p.parts_ptr + row.to(gl.int64) * p.vocab_tiles + vocab_tile
    part = p.T.to(gl.int64) * p.vocab_tiles
    gl.store(at, top, mask=rows)
    gl.store(at + part, total, mask=rows)
    gl.store(at + 2 * part, gl.convert_layout(best, _ROW), mask=rows)
    winner = gl.convert_layout(winner, _ROW).to(gl.float32, bitcast=True)
    gl.store(at + 3 * part, winner, mask=rows)
    gl.store(at + 4 * part, gl.convert_layout(logit, _ROW), mask=rows)


@gluon.jit
def _consume(p, WHICH: gl.constexpr):
    """One consumer warp group: every other tile of the program."""
    count = gl.to_tensor(WHICH)
    start = gl.program_id(0) + count * gl.num_programs(0)
    for tile in range(start, _tiles(p), 2 * gl.num_programs(0)):
        token, vocab_tile = _place(p, tile)
        done = count * p.steps
        stage = done % STAGES
        phase = done // STAGES & 1
        acc = gl.zeros([STRIP, VOCAB], gl.float32, _LAYOUT)
        other = acc
        held = gl.minimum(gl.cdiv(p.T - token, STRIP), 2)
        # A stage's barrier tells odd phases from even ones only: whoever waits for it must be no
        # more than a phase behind, so wait first until the other one's last stage is there.
        mbarrier.wait(p.turn.index(WHICH), (count // 2 + 1 - WHICH) & 1)
        if held == 2:
            acc, other = _products(p, acc, other, stage, phase, WHICH, 2)
        else:
            acc, other = _products(p, acc, other, stage, phase, WHICH, 1)
        for strip in range(held):
            _draw_strip(p, acc, token + strip * STRIP, vocab_tile)
            acc = other
        count += 2


@gluon.jit(do_not_specialize=["T", "steps", "vocab_size", "vocab_tiles"])
def sample_hopper_kernel(
    hidden_desc, weight_desc, inverse_temperature_ptr, cut_ptr, cut_id_ptr, noise_key_ptr,
    parts_ptr, T, steps, vocab_size, vocab_tiles, RESTRICT: gl.constexpr,
):  # fmt: skip
    """Two consumers and a producer over a persistent grid of tiles; parts FP32 [5, T, vocab tiles]."""
    hidden_bufs = gl.allocate_shared_memory(
        hidden_desc.dtype, [2 * STAGES, STRIP, BLOCK_K], hidden_desc.layout
    )
    weight_bufs = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES, VOCAB, BLOCK_K], weight_desc.layout
    )
    # 256 bytes each: the copy engine needs what lies behind them aligned to 128 bytes
    full = gl.allocate_shared_memory(gl.int64, [32, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [32, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [32, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    p = Draw(
        (hidden_desc, weight_desc),
        (inverse_temperature_ptr, cut_ptr, cut_id_ptr, noise_key_ptr, parts_ptr),
        (gl.to_tensor(T), gl.to_tensor(steps), gl.to_tensor(vocab_size), gl.to_tensor(vocab_tiles)),
        (hidden_bufs, weight_bufs),
        (full, empty, turn),
        RESTRICT,
    )
    gl.warp_specialize(
        [(_consume, (p, 0)), (_consume, (p, 1)), (_produce, (p,))], [4, 1], [240, 24]
    )
