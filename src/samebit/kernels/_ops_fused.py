"""The operator set's composites on Hopper, one kernel each; equal to the chain of their parts."""

from __future__ import annotations

from typing import Any

import torch

from samebit.formats import BLOCK, Format, get_format
from samebit.kernels import activation, norm
from samebit.kernels._ops_attention import check_spec
from samebit.kernels._ops_elementwise import host_number, rms_norm
from samebit.kernels.rope import KeyValueStore
from samebit.kernels.rope import qk_norm_rope_store as rope_store
from samebit.kernels.rope_backward import rope_backward
from samebit.operand import HeadCodes, Heads, Operand, Rotation
from samebit.spec import Attention, Precision

Gains = tuple[torch.Tensor, torch.Tensor] | None
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

HEAD_SIZES = (64, 128)


def _format(precision: Precision) -> tuple[Format, bool]:
    """(format, whether a scale belongs to a whole row) of codes the fused kernels write."""
    fmt = get_format(precision.format)
    if (precision.block, fmt.name) == ((1, BLOCK), "e4m3"):
        return fmt, False
    if precision.block == (1, 0) and fmt.name in ("e4m3", "int8"):
        return fmt, True
    raise ValueError(
        f"the Hopper kernels cannot quantise activations as {precision}; use e4m3 in 1x128 groups, "
        "or e4m3 or int8 per token"
    )


def _operand(
    codes: torch.Tensor | None, scale: torch.Tensor | None, precision: Precision, features: int
) -> Operand:
    assert codes is not None and scale is not None
    return Operand(codes, scale if scale.dim() == 2 else scale[:, None], precision, features)


def rms_norm_quantize(
    x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float, precision: Precision
) -> tuple[Operand, torch.Tensor]:
    """(the norm's output as a GEMM operand, what the norm's backward needs)."""
    width = x_TK.shape[1]
    if precision.block is None:
        y, kept = rms_norm(x_TK, gain_K, eps)
        return Operand(y, None, precision, width), kept
    fmt, per_row = _format(precision)
    result = norm.rms_norm_quantize(x_TK, gain_K, eps, fmt, per_row=per_row)
    return _operand(result.codes, result.scale, precision, width), host_number(eps)


def add_rms_norm(
    x_TK: torch.Tensor, update_TK: torch.Tensor, gain_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(residual sum BF16, its norm BF16, what the norm's backward needs)."""
    y, total = norm.add_rms_norm(x_TK, update_TK, gain_K, eps)
    return total, y, host_number(eps)


def add_rms_norm_quantize(
    x_TK: torch.Tensor,
    update_TK: torch.Tensor,
    gain_K: torch.Tensor,
    eps: float,
    precision: Precision,
) -> tuple[torch.Tensor, Operand, torch.Tensor]:
    """(residual sum BF16, its norm as a GEMM operand, what the norm's backward needs)."""
    width = x_TK.shape[1]
    if precision.block is None:
        total, y, kept = add_rms_norm(x_TK, update_TK, gain_K, eps)
        return total, Operand(y, None, precision, width), kept
    fmt, per_row = _format(precision)
    result = norm.rms_norm_quantize(x_TK, gain_K, eps, fmt, residual_TK=update_TK, per_row=per_row)
    assert result.residual is not None
    operand = _operand(result.codes, result.scale, precision, width)
    return result.residual, operand, host_number(eps)


def silu_mul_quantize(gate_TF: torch.Tensor, up_TF: torch.Tensor, precision: Precision) -> Operand:
    """silu(gate) * up as a GEMM operand."""
    width = gate_TF.shape[1]
    if precision.block is None:
        return Operand(activation.silu_mul(gate_TF, up_TF), None, precision, width)
    fmt, per_row = _format(precision)
    _, codes, scale = activation.silu_mul_quantize(gate_TF, up_TF, fmt, per_row=per_row)
    return _operand(codes, scale, precision, width)


def _rotate_into(
    qkv: Parts,
    rotation: Rotation,
    gains: Gains,
    store: KeyValueStore,
    slots_T: torch.Tensor | None,
) -> Heads:
    if rotation.head_dim not in HEAD_SIZES:
        raise ValueError(
            f"head size {rotation.head_dim} is not supported by the Hopper kernels; use 64 or 128"
        )
    codes, scale = rope_store(
        *qkv, rotation.positions, (rotation.cos, rotation.sin), store,
        num_heads=rotation.heads, slots_T=slots_T, norm_weights=gains, eps=rotation.eps,
    )  # fmt: skip
    return codes if scale is None else HeadCodes(codes, scale)


def qk_norm_rope(
    qkv: Parts, rotation: Rotation, gains: Gains, spec: Attention
) -> tuple[Heads, Heads, Heads]:
    """(Q [T, H, D], K, V [T, G, D]) of the projections: QK norm, rotation, and codes under `spec`."""
    check_spec(spec)
    fp8 = spec.kv.block is not None
    store = KeyValueStore.packed(
        len(qkv[0]), rotation.kv_heads, rotation.head_dim, fp8, qkv[0].device
    )
    q = _rotate_into(qkv, rotation, gains, store, None)
    if store.k_scale is None or store.v_scale is None:
        return q, store.k[0], store.v[0]
    return q, HeadCodes(store.k[0], store.k_scale[0]), HeadCodes(store.v[0], store.v_scale[0])


def _pages(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Rows [S, ...] as one page, pages [pages, page size, ...] as they are."""
    return x if x.dim() == dims else x[None]


def qk_norm_rope_store(
    qkv: Parts,
    rotation: Rotation,
    gains: Gains,
    spec: Attention,
    cache: Any,
    layer: int,
    slots_T: torch.Tensor,
) -> Heads:
    """Q of `qk_norm_rope`; K and V go to rows `slots` of a layer of the KV store, negative nowhere."""
    check_spec(spec)
    keys, values = cache.keys[layer], cache.values[layer]
    if isinstance(keys, HeadCodes):
        assert spec.kv.block is not None, "a BF16 plan with an FP8 cache"
        store = KeyValueStore(
            _pages(keys.codes, 4),
            _pages(values.codes, 4),
            _pages(keys.scale, 3),
            _pages(values.scale, 3),
        )
    else:
        assert spec.kv.block is None, "an FP8 plan with a BF16 cache"
        store = KeyValueStore(_pages(keys, 4), _pages(values, 4))
    return _rotate_into(qkv, rotation, gains, store, slots_T)


def qk_norm_rope_backward(
    dq_THD: torch.Tensor,
    dk_TGD: torch.Tensor,
    dv_TGD: torch.Tensor,
    qkv: Parts | None,
    rotation: Rotation,
    gains: Gains,
    into: Gains = None,
) -> tuple[torch.Tensor, Gains]:
    """(dqkv BF16 [T, N], FP32 gradients of the gains or None); qkv only where there are gains."""
    parts = (dq_THD, dk_TGD, dv_TGD)
    shape = (dq_THD.shape[0], sum(rotation.widths))
    dqkv_TN = torch.empty(shape, dtype=torch.bfloat16, device=dq_THD.device)
    targets = dqkv_TN.split(rotation.widths, dim=1)
    assert gains is None or qkv is not None
    dgains = [
        rope_backward(
            parts[i].contiguous(), rotation.positions, (rotation.cos, rotation.sin),
            dx_TN=targets[i], x_TN=None if qkv is None else qkv[i],
            norm_weight=None if gains is None else gains[i],
            dweight=None if into is None else into[i], eps=rotation.eps,
        )[1]
        for i in range(2)
    ]  # fmt: skip
    targets[2].copy_(dv_TGD.flatten(1))
    if dgains[0] is None or dgains[1] is None:
        return dqkv_TN, None
    return dqkv_TN, (dgains[0], dgains[1])
