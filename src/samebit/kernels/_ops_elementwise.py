"""The operator set's embedding, norm, residual, activation and rotary part on Hopper."""

from __future__ import annotations

import functools

import torch

from samebit.kernels import embed as embed_kernels
from samebit.kernels.activation import silu_mul
from samebit.kernels.activation import silu_mul_backward as activation_backward
from samebit.kernels.norm import rms_norm as norm_forward
from samebit.kernels.norm_backward import rms_norm_backward as norm_backward
from samebit.kernels.rotate import rotate

__all__ = [
    "embed",
    "embed_backward",
    "residual_add",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "silu_mul",
    "silu_mul_backward",
]


def embed(ids_T: torch.Tensor, master_VK: torch.Tensor) -> torch.Tensor:
    """BF16 [T, K]: each row rounded from the FP32 master."""
    return embed_kernels.embed(ids_T, master_VK)


def embed_backward(
    dy_TK: torch.Tensor, ids_T: torch.Tensor, rows: int, into: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 [V, K]; rows are added in batch order, to `into` when given, without atomics."""
    grad = torch.zeros(rows, dy_TK.shape[1], device=dy_TK.device) if into is None else into
    return embed_kernels.embed_backward(dy_TK.contiguous(), ids_T, grad)


@functools.lru_cache
def host_number(value: float) -> torch.Tensor:
    """A number as autograd can save it, FP64 on the host."""
    return torch.tensor(value, dtype=torch.float64)


def rms_norm(
    x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [..., K] -> (BF16 normed, what the backward needs: here eps, FP64 on the host).

    The backward kernel makes each row's statistics again from the row it reads anyway.
    """
    y = norm_forward(x_TK.reshape(-1, x_TK.shape[-1]), gain_K, eps)
    return y.view(x_TK.shape), host_number(eps)


def rms_norm_backward(
    dy_TK: torch.Tensor,
    x_TK: torch.Tensor,
    gain_K: torch.Tensor,
    eps: torch.Tensor,
    dsum_TK: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx BF16, dgain FP32 [K]) of `rms_norm`; dsum is added in FP32, before dx is rounded."""
    width = x_TK.shape[-1]
    dx, dgain = norm_backward(
        dy_TK.reshape(-1, width).contiguous(),
        x_TK.reshape(-1, width),
        gain_K,
        float(eps),
        dsum_TK=None if dsum_TK is None else dsum_TK.reshape(-1, width).contiguous(),
        dweight_K=into,
    )
    return dx.view(x_TK.shape), dgain


def residual_add(x_TK: torch.Tensor, update_TK: torch.Tensor) -> torch.Tensor:
    """x + update: BF16 tensors are added in FP32 and rounded once."""
    return x_TK + update_TK


def silu_mul_backward(
    dy_TF: torch.Tensor, gate_TF: torch.Tensor, up_TF: torch.Tensor
) -> torch.Tensor:
    """BF16 [T, 2F]: dgate, then dup, as the fused projection wants them."""
    T, F = gate_TF.shape
    both_T2F = torch.empty((T, 2 * F), dtype=torch.bfloat16, device=gate_TF.device)
    activation_backward(dy_TF.contiguous(), gate_TF, up_TF, both_T2F[:, :F], both_T2F[:, F:])
    return both_T2F


def rotary(x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """BF16 [T, H, D], tables FP32 [T, D/2] of each row's position -> BF16 [T, H, D]."""
    return rotate(x_THD, cos_TC, sin_TC, backward=False)


def rotary_backward(
    dy_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
) -> torch.Tensor:
    """The transpose of the rotation: rotate by the negative angle."""
    return rotate(dy_THD, cos_TC, sin_TC, backward=True)
