"""What the warp-specialised attention kernels share: a consumer's walk over blocks, and tiles in and out.

The scores of block i+1 run on the tensor cores while the softmax of block i runs; the steps and
their order are those of attention_prefill.py, hence the same bits.

Bundles: rings = (k_smem, v_smem, k_ready, v_ready, k_free, v_free), stages of keys and values with
their barriers; scales = (ks_smem, vs_smem, s_ready), of FP8 keys and values (else never looked at).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebit.kernels.attention_block import PV_LIFT
from samebit.kernels.attention_feed import ROWS, SCALE_SLOTS


@gluon.jit
def block_softmax(
    s, m, den, factor, position_R, base,
    MASKED: gl.constexpr, LAYOUT: gl.constexpr, KB: gl.constexpr,
):  # fmt: skip
    """(probabilities, new maximum, new sum, factor of the old accumulator) of one block."""
    if MASKED:
        column = base + gl.arange(0, KB, gl.SliceLayout(0, LAYOUT))
        s = gl.where(column[None, :] <= position_R[:, None], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    m_safe = m_new
    if MASKED:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(gl.fma(s, factor[:, None], -m_safe[:, None]))
    alpha = gl.exp2(m - m_safe)
    den = gl.fma(den, alpha, gl.sum(p, 1))
    return p, m_new, den, alpha


@gluon.jit
def _scores(step, q, k_smem, k_ready, KB: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Q K^T of the step-th block, in flight."""
    stage = step % STAGES
    mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
    zero = gl.zeros([ROWS, KB], gl.float32, LAYOUT)
    return warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _probabilities(
    s, m, den, step, block, end, scales, factor, position_R,
    MASKED: gl.constexpr, KB: gl.constexpr, LAYOUT: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """block_softmax with the scales of the keys before it and those of the values after it."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ks_smem, vs_smem, s_ready = scales
    slot = step % SCALE_SLOTS
    if FP8:
        mbarrier.wait(s_ready.index(slot), (step // SCALE_SLOTS) & 1)
        s = s * ks_smem.index(slot).load(COLUMN)[None, :]
    p, m, den, alpha = block_softmax(s, m, den, factor, position_R, block * KB, MASKED, LAYOUT, KB)
    if FP8:
        v_scale = vs_smem.index(slot).load(COLUMN) * PV_LIFT
        if MASKED:
            v_scale = gl.where(block * KB + gl.arange(0, KB, COLUMN) < end, v_scale, 0.0)
        p = p * v_scale[None, :]
    return p, m, den, alpha


@gluon.jit
def _advance(
    first, last, step0, end, q, p, acc, m, den, rings, scales, factor, position_R,
    MASKED: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Blocks first..last-1, each overlapping the product of the block before with its softmax."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    k_smem, v_smem, k_ready, v_ready, k_free, v_free = rings
    for block in range(first, last):
        step = step0 + block
        s = _scores(step, q, k_smem, k_ready, KB, STAGES, S_LAYOUT)
        stage = (step - 1) % STAGES
        mbarrier.wait(v_ready.index(stage), ((step - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(step % STAGES), count=1)
        prob, m, den, alpha = _probabilities(
            s, m, den, step, block, end, scales, factor, position_R, MASKED, KB, S_LAYOUT, FP8
        )
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_free.index(stage), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(prob.to(DTYPE), P_LAYOUT)
    return p, acc, m, den


@gluon.jit
def walk_split(
    lo, mid, hi, step0, end, q, rings, scales, factor, position_R, split, num_splits, q_free,
    RELEASE: gl.constexpr, D: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(accumulator, maximum, sum) of blocks lo..hi-1, which from `mid` on need the mask.

    step0: steps of the ring before block 0. RELEASE: tell q_free of the last split's last use of Q.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    k_smem, v_smem, k_ready, v_ready, k_free, v_free = rings
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    den = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    s = _scores(step0 + lo, q, k_smem, k_ready, KB, STAGES, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index((step0 + lo) % STAGES), count=1)
    prob, m, den, _alpha = _probabilities(
        s, m, den, step0 + lo, lo, end, scales, factor, position_R, True, KB, S_LAYOUT, FP8
    )
    p = gl.convert_layout(prob.to(DTYPE), P_LAYOUT)
    p, acc, m, den = _advance(
        lo + 1, mid, step0, end, q, p, acc, m, den, rings, scales, factor, position_R,
        False, KB, STAGES, FP8, S_LAYOUT, O_LAYOUT, DTYPE,
    )  # fmt: skip
    p, acc, m, den = _advance(
        mid, hi, step0, end, q, p, acc, m, den, rings, scales, factor, position_R,
        True, KB, STAGES, FP8, S_LAYOUT, O_LAYOUT, DTYPE,
    )  # fmt: skip
    if RELEASE:
        if split + 1 == num_splits:
            mbarrier.arrive(q_free, count=1)
    step = step0 + hi - 1
    mbarrier.wait(v_ready.index(step % STAGES), (step // STAGES) & 1)
    acc = warpgroup_mma(p, v_smem.index(step % STAGES), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(v_free.index(step % STAGES), count=1)
    return acc, m, den


@gluon.jit
def fold_split(acc, m, den, m_total, l_total, total_smem, seen, O_LAYOUT: gl.constexpr):
    """(accumulator, maximum, sum) of the splits so far and one more; the former's accumulator in shared memory.

    seen: rows that the split reaches. A row whose position precedes it skips it: no rounding, no sign
    change.
    """
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    m_new = gl.maximum(m_total, m)
    old = gl.exp2(m_total - m_new)
    new = gl.exp2(m - m_new)
    l_new = gl.fma(l_total, old, den * new)
    m_total = gl.where(seen, m_new, m_total)
    l_total = gl.where(seen, l_new, l_total)
    earlier = total_smem.load(O_LAYOUT)
    old = gl.convert_layout(old, ROW_O)[:, None]
    new = gl.convert_layout(new, ROW_O)[:, None]
    seen = gl.convert_layout(seen, ROW_O)[:, None]
    return gl.where(seen, gl.fma(earlier, old, acc * new), earlier), m_total, l_total


@gluon.jit
def store_tile(smem, out_ptr, start, first, length, head, H: gl.constexpr, D: gl.constexpr):
    """64 rows of one head out of shared memory, in stores that coalesce. first: token of row 0."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    d = gl.arange(0, D, gl.SliceLayout(0, OUT))
    offset = ((start + token).to(gl.int64) * H + head)[:, None] * D + d[None, :]
    gl.store(out_ptr + offset, smem.load(OUT), mask=(token < length)[:, None])
