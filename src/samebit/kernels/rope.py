"""QK norm, rotary embedding and the write of K and V into the cache, in one launch.

Rotate-half convention in FP32: y1 = x1*cos - x2*sin, y2 = x2*cos + x1*sin, each product rounded
(no contraction), the result rounded to BF16 once; with QK norm (Qwen3) the normed head is rounded
to BF16 before the rotation. FP8 forms quantise from the BF16 values, one scale per token and head.
Training and decoding run this same kernel: a head's bits depend on the head alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import cdiv, launch, next_power_of_2
from samebit.kernels.quantize_common import (
    NUMERIC_OPTIONS,
    amax_bits,
    block_codes,
    read_ahead,
    round_to_bf16,
    tree_sum,
    widened_once,
)

WARPS = 4
FEW = 256
"""Tokens of a decode step, at most: their programs are all there at once, and the time is one program's
way from its first load to its last store. So K and V have a program a token, and all is read at first."""
AHEAD = tl.constexpr(7 * 132)
"""Tokens whose programs an H200 holds at once: Q that far ahead is fetched while these compute. With
BF16 outputs it gained nothing, and the tokens of a decode step are all there at once."""


def rotary_table(
    positions: int, head_size: int, theta: float, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) FP32 [positions, head_size/2], computed in FP64 on the host."""
    exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / theta ** exponent[None, :]
    return angle.cos().float().to(device), angle.sin().float().to(device)


@triton.jit
def head_rstd(x1, x2, eps, HALF: tl.constexpr):
    """1/sqrt(mean(x^2) + eps) per head [heads, 1] of the two halves [heads, D/2].

    The sum is the tree that the norm of whole rows adds by: half a head on each side of its root.
    """
    total = (tree_sum(x1 * x1) + tree_sum(x2 * x2))[:, None]
    root = tl.sqrt_rn(total * (0.5 / HALF) + tl.cast(eps, tl.float32))
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def _store_head(lo, hi, out_ptr, scale_ptr, offset, scale_offset, inside, FP8: tl.constexpr):
    """Write BF16 halves [heads, D/2], or their codes and one scale per head."""
    half = lo.shape[1]
    if FP8:
        lo = widened_once(lo)
        hi = widened_once(hi)
        bits = tl.maximum(amax_bits(lo, 1), amax_bits(hi, 1))
        lo_codes, scale = block_codes(lo, bits, True)
        hi_codes, _ = block_codes(hi, bits, True)
        tl.store(out_ptr + offset, lo_codes, mask=inside)
        tl.store(out_ptr + offset + half, hi_codes, mask=inside)
        tl.store(scale_ptr + scale_offset, scale, mask=inside)
    else:
        tl.store(out_ptr + offset, lo, mask=inside)
        tl.store(out_ptr + offset + half, hi, mask=inside)


@triton.jit
def _load_heads(x_ptr, offset, inside, HALF: tl.constexpr):
    x1 = tl.load(x_ptr + offset, mask=inside, other=0.0)
    x2 = tl.load(x_ptr + offset + HALF, mask=inside, other=0.0)
    return x1, x2


@triton.jit
def _rotate_heads(
    x_ptr,
    offset,
    inside,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    angle,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BF16 halves [heads, D/2] of the heads at x_ptr + offset, normed and rotated.

    `angle`: where a head's row of the table starts, [heads, 1] or a scalar. EARLY: everything is read
    before anything is computed; with many tokens that costs more in registers than it saves.
    """
    d = tl.arange(0, HALF)[None, :]
    x1, x2 = _load_heads(x_ptr, offset, inside, HALF)
    if EARLY:
        if NORM:
            w1 = tl.load(weight_ptr + d)
            w2 = tl.load(weight_ptr + HALF + d)
        cos = tl.load(cos_ptr + angle + d)
        sin = tl.load(sin_ptr + angle + d)
    if NORM:
        a1 = widened_once(x1)
        a2 = widened_once(x2)
        rstd = head_rstd(a1, a2, eps, HALF)
        a1 = a1 * rstd
        if not EARLY:
            w1 = tl.load(weight_ptr + d)
        x1 = round_to_bf16(a1 * w1.to(tl.float32))
        a2 = a2 * rstd
        if not EARLY:
            w2 = tl.load(weight_ptr + HALF + d)
        x2 = round_to_bf16(a2 * w2.to(tl.float32))
    if not EARLY:
        cos = tl.load(cos_ptr + angle + d)
        sin = tl.load(sin_ptr + angle + d)
    a1 = widened_once(x1)
    a2 = widened_once(x2)
    return round_to_bf16(a1 * cos - a2 * sin), round_to_bf16(a2 * cos + a1 * sin)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    q_out_ptr, q_scale_ptr, k_out_ptr, k_scale_ptr, v_out_ptr, v_scale_ptr,
    q_stride, k_stride, v_stride,
    page_size, page_stride, slot_stride, head_stride,
    scale_page_stride, scale_slot_stride, scale_head_stride,
    T, eps,
    HAS_SLOTS: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    FETCH: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    d = tl.arange(0, HALF)[None, :]
    if program < T:
        t = program.to(tl.int64)
        h = tl.arange(0, Q_HEADS)[:, None]
        angle = tl.load(positions_ptr + t).to(tl.int64) * HALF
        lo, hi = _rotate_heads(
            q_ptr + t * q_stride, h * (2 * HALF) + d, h < H, q_weight_ptr, cos_ptr, sin_ptr,
            angle, eps, NORM, HALF, EARLY,
        )  # fmt: skip
        if FETCH:
            later = tl.minimum(t + AHEAD, T - 1)
            piece = tl.minimum(tl.arange(0, Q_HEADS * HALF // 8) * 16, H * 2 * HALF - 1)
            read_ahead(q_ptr + later * q_stride + piece)
        offset = (t * H + h) * (2 * HALF) + d
        _store_head(lo, hi, q_out_ptr, q_scale_ptr, offset, t * H + h, h < H, FP8)
    else:
        # K and V of a few tokens: as many heads as a token has of Q.
        pair = tl.arange(0, TOKENS * KV_HEADS)[:, None]
        kv_t = (program - T).to(tl.int64) * TOKENS + pair // KV_HEADS
        g = pair % KV_HEADS
        kv_inside = (g < G) & (kv_t < T)
        kv_angle = tl.load(positions_ptr + kv_t, mask=kv_t < T, other=0).to(tl.int64) * HALF
        kv_slot = kv_t
        if HAS_SLOTS:
            kv_slot = tl.load(slots_ptr + kv_t, mask=kv_t < T, other=-1)
        written = kv_inside & (kv_slot >= 0)
        # 32 bits for the division alone: a store has fewer than 2^31 rows.
        kv_page = (kv_slot.to(tl.int32) // page_size).to(tl.int64)
        kv_row = kv_slot.to(tl.int64) - kv_page * page_size
        kv_target = kv_page * page_stride + kv_row * slot_stride + g * head_stride + d
        scale_target = (
            kv_page * scale_page_stride + kv_row * scale_slot_stride + g * scale_head_stride
        )
        kv_head = g * (2 * HALF) + d
        if EARLY:
            v_lo, v_hi = _load_heads(v_ptr, kv_t * v_stride + kv_head, kv_inside, HALF)
        k_lo, k_hi = _rotate_heads(
            k_ptr, kv_t * k_stride + kv_head, kv_inside, k_weight_ptr, cos_ptr, sin_ptr, kv_angle, eps,
            NORM, HALF, EARLY,
        )  # fmt: skip
        _store_head(k_lo, k_hi, k_out_ptr, k_scale_ptr, kv_target, scale_target, written, FP8)
        if not EARLY:
            v_lo, v_hi = _load_heads(v_ptr, kv_t * v_stride + kv_head, kv_inside, HALF)
        _store_head(v_lo, v_hi, v_out_ptr, v_scale_ptr, kv_target, scale_target, written, FP8)


@dataclass(frozen=True)
class KeyValueStore:
    """Where K and V go: [pages, page_size, G, D] each, any strides with D contiguous.

    BF16, or e4m3 codes with FP32 scales [pages, page_size, G] per token and head. A packed training
    batch is one page of T rows.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def packed(cls, T: int, G: int, D: int, fp8: bool, device: torch.device) -> KeyValueStore:
        """An uninitialised store of one page of `T` rows, for a training batch."""
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        k, v = (torch.empty((1, T, G, D), dtype=dtype, device=device) for _ in range(2))
        if not fp8:
            return cls(k, v)
        scales = (torch.empty((1, T, G), dtype=torch.float32, device=device) for _ in range(2))
        return cls(k, v, *scales)


def qk_norm_rope_store(
    q_TN: torch.Tensor,
    k_TN: torch.Tensor,
    v_TN: torch.Tensor,
    positions_T: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    store: KeyValueStore,
    *,
    num_heads: int,
    slots_T: torch.Tensor | None = None,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write rotated K and V to `store`; return Q [T, H, D] (BF16, or e4m3 codes) and its scales.

    q, k, v: BF16 [T, >= heads*D], views of the fused projection. `slots_T` int32 or int64: the row
    page * page_size + offset each token is written to, negative to write nothing; None writes token
    t to row t. `norm_weights`: BF16 gains [D] of the Q and the K norm. The store's dtype decides
    FP8: then Q is quantised per token and head too, scales FP32 [T, H].
    """
    T, device = q_TN.shape[0], q_TN.device
    _, page_size, G, D = store.k.shape
    fp8 = store.k.dtype == torch.float8_e4m3fn
    assert store.k.stride() == store.v.stride() and store.k.stride(3) == 1
    assert all(x.stride(1) == 1 for x in (q_TN, k_TN, v_TN)) and D % 2 == 0
    assert store.k.shape[0] * page_size < 1 << 31
    q_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    q = torch.empty((T, num_heads, D), dtype=q_dtype, device=device)
    q_scale = torch.empty((T, num_heads), dtype=torch.float32, device=device) if fp8 else None
    if T == 0:
        return q, q_scale
    cos, sin = table
    k_scale, v_scale = store.k_scale, store.v_scale
    scale_strides = (0, 0, 0)
    if fp8:
        assert k_scale is not None and v_scale is not None
        assert k_scale.stride() == v_scale.stride()
        scale_strides = k_scale.stride()
    q_weight, k_weight = norm_weights if norm_weights is not None else (cos, cos)
    codes = torch.uint8 if fp8 else torch.bfloat16
    q_heads, kv_heads = next_power_of_2(num_heads), next_power_of_2(G)
    tokens = 1 if T <= FEW else max(1, q_heads // kv_heads)
    launch(_rope_kernel, (T + cdiv(T, tokens),),
        q_TN, k_TN, v_TN, q_weight, k_weight, cos, sin, positions_T,
        positions_T if slots_T is None else slots_T,
        q.view(codes), cos if q_scale is None else q_scale,
        store.k.view(codes), cos if k_scale is None else k_scale,
        store.v.view(codes), cos if v_scale is None else v_scale,
        q_TN.stride(0), k_TN.stride(0), v_TN.stride(0),
        page_size, *store.k.stride()[:3], *scale_strides, T, eps,
        HAS_SLOTS=slots_T is not None,
        NORM=norm_weights is not None,
        FP8=fp8,
        FETCH=fp8 and T > AHEAD.value,
        H=num_heads,
        G=G,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        TOKENS=tokens,
        HALF=D // 2,
        EARLY=T <= FEW,
        num_warps=WARPS,
        **NUMERIC_OPTIONS,
    )  # fmt: skip
    return q, q_scale
