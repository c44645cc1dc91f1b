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

from samebit.kernels.quantize_common import (
    NUMERIC_OPTIONS,
    block_codes,
    magnitude_bits,
    round_to_bf16,
    tree_sum,
)

WARPS = 4


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
        lo = lo.to(tl.float32)
        hi = hi.to(tl.float32)
        bits = tl.maximum(magnitude_bits(lo), magnitude_bits(hi))
        bits = tl.max(bits, axis=1, keep_dims=True)
        lo_codes, scale = block_codes(lo, bits, True)
        hi_codes, _ = block_codes(hi, bits, True)
        tl.store(out_ptr + offset, lo_codes, mask=inside)
        tl.store(out_ptr + offset + half, hi_codes, mask=inside)
        tl.store(scale_ptr + scale_offset, scale, mask=inside)
    else:
        tl.store(out_ptr + offset, lo, mask=inside)
        tl.store(out_ptr + offset + half, hi, mask=inside)


@triton.jit
def _rotate_heads(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    position,
    heads,
    eps,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """BF16 halves [HEADS, D/2] of the heads at `x_ptr`, normed and rotated as asked."""
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = h < heads
    x1 = tl.load(x_ptr + h * (2 * HALF) + d, mask=inside, other=0.0)
    x2 = tl.load(x_ptr + h * (2 * HALF) + HALF + d, mask=inside, other=0.0)
    if NORM:
        a1 = x1.to(tl.float32)
        a2 = x2.to(tl.float32)
        rstd = head_rstd(a1, a2, eps, HALF)
        x1 = round_to_bf16((a1 * rstd) * tl.load(weight_ptr + d).to(tl.float32))
        x2 = round_to_bf16((a2 * rstd) * tl.load(weight_ptr + HALF + d).to(tl.float32))
    if ROTATE:
        cos = tl.load(cos_ptr + position * HALF + d)
        sin = tl.load(sin_ptr + position * HALF + d)
        a1 = x1.to(tl.float32)
        a2 = x2.to(tl.float32)
        x1 = round_to_bf16(a1 * cos - a2 * sin)
        x2 = round_to_bf16(a2 * cos + a1 * sin)
    return x1, x2


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    q_out_ptr, q_scale_ptr, k_out_ptr, k_scale_ptr, v_out_ptr, v_scale_ptr,
    q_stride, k_stride, v_stride,
    page_size, page_stride, slot_stride, head_stride,
    scale_page_stride, scale_slot_stride, scale_head_stride,
    eps,
    HAS_SLOTS: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + t).to(tl.int64)
    d = tl.arange(0, HALF)[None, :]
    if part == 0:
        h = tl.arange(0, Q_HEADS)[:, None]
        lo, hi = _rotate_heads(
            q_ptr + t * q_stride, q_weight_ptr, cos_ptr, sin_ptr, position, H, eps,
            NORM, True, Q_HEADS, HALF,
        )  # fmt: skip
        offset = (t * H + h) * (2 * HALF) + d
        _store_head(lo, hi, q_out_ptr, q_scale_ptr, offset, t * H + h, h < H, FP8)
    else:
        slot = t
        if HAS_SLOTS:
            slot = tl.load(slots_ptr + t).to(tl.int64)
        if slot >= 0:
            page = slot // page_size
            row = slot % page_size
            g = tl.arange(0, KV_HEADS)[:, None]
            offset = page * page_stride + row * slot_stride + g * head_stride + d
            scale_offset = page * scale_page_stride + row * scale_slot_stride
            scale_offset = scale_offset + g * scale_head_stride
            k_lo, k_hi = _rotate_heads(
                k_ptr + t * k_stride, k_weight_ptr, cos_ptr, sin_ptr, position, G, eps,
                NORM, True, KV_HEADS, HALF,
            )  # fmt: skip
            v_lo, v_hi = _rotate_heads(
                v_ptr + t * v_stride, k_weight_ptr, cos_ptr, sin_ptr, position, G, eps,
                False, False, KV_HEADS, HALF,
            )  # fmt: skip
            _store_head(k_lo, k_hi, k_out_ptr, k_scale_ptr, offset, scale_offset, g < G, FP8)
            _store_head(v_lo, v_hi, v_out_ptr, v_scale_ptr, offset, scale_offset, g < G, FP8)


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
    _rope_kernel[(T, 2)](
        q_TN, k_TN, v_TN, q_weight, k_weight, cos, sin, positions_T,
        positions_T if slots_T is None else slots_T,
        q.view(codes), cos if q_scale is None else q_scale,
        store.k.view(codes), cos if k_scale is None else k_scale,
        store.v.view(codes), cos if v_scale is None else v_scale,
        q_TN.stride(0), k_TN.stride(0), v_TN.stride(0),
        page_size, *store.k.stride()[:3], *scale_strides, eps,
        HAS_SLOTS=slots_T is not None,
        NORM=norm_weights is not None,
        FP8=fp8,
        H=num_heads,
        G=G,
        Q_HEADS=triton.next_power_of_2(num_heads),
        KV_HEADS=triton.next_power_of_2(G),
        HALF=D // 2,
        num_warps=WARPS,
        **NUMERIC_OPTIONS,
    )  # fmt: skip
    return q, q_scale
