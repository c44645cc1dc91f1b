"""SiLU(gate) * up: FP32 inside, rounded once to BF16."""

from __future__ import annotations

import torch

from samebit.reference.exact import exp


def silu_mul(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """gate / (1 + exp(-gate)) * up, BF16 in and out."""
    gate = gate_TF.float()
    return (gate / exp(-gate).add_(1.0)).mul_(up_TF.float()).bfloat16()


def silu_mul_backward(
    dy_TF: torch.Tensor, gate_TF: torch.Tensor, up_TF: torch.Tensor
) -> torch.Tensor:
    """BF16 [T, 2F]: dgate, then dup, as the fused projection wants them."""
    dy, gate, up = dy_TF.float(), gate_TF.float(), up_TF.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    return torch.cat([dgate.bfloat16(), (dy * silu).bfloat16()], dim=1)
