"""The linear module: an FP32 master and the one quantised weight that trainer and engine share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from samebit.operand import Operand, QuantizedWeight, allocate_weight
from samebit.quant.ops import Ops
from samebit.quant.plan import LinearShape, Plan
from samebit.spec import Backward, Gemm

Observer = Callable[[torch.Tensor, Operand], None]
"""Called with a linear's BF16 input and the operand made of it."""


@dataclass(frozen=True, slots=True)
class LinearUse:
    """One side's view of a linear: what its GEMMs read and where its gradients go."""

    weight: QuantizedWeight
    spec: Gemm
    backward: Backward
    master: nn.Parameter
    bias_master: nn.Parameter | None
    bias: torch.Tensor | None
    observe: Observer | None


class Linear(nn.Module):
    """One (possibly fused) linear under a plan.

    master: FP32 Parameter [N, K], the named parts one after the other; bias: FP32 Parameter [N] or
    None. `rollout` and `train` are the quantised weights of the two forwards: one object when their
    precisions agree, two in a mixed recipe. They and the BF16 bias are rewritten in place by
    `refresh`.
    """

    bias_bf16: torch.Tensor | None

    def __init__(self, shape: LinearShape, plan: Plan, bias: bool, ops: Ops, device: torch.device):
        super().__init__()
        self.shape, self.ops = shape, ops
        rows = tuple(n for _, n in shape.parts)
        self.rows = rows
        self.master = nn.Parameter(torch.zeros(sum(rows), shape.in_features, device=device))
        self.bias = nn.Parameter(torch.zeros(sum(rows), device=device)) if bias else None
        rounded = None if self.bias is None else self.bias.detach().bfloat16()
        self.register_buffer("bias_bf16", rounded, persistent=False)
        self.backward_spec = plan.recipe.backward
        self.specs = {
            "rollout": plan.recipe.rollout.gemm(shape.role),
            "train": plan.recipe.train.gemm(shape.role),
        }
        train = allocate_weight(rows, shape.in_features, self.specs["train"].rhs, device)
        self.weights: dict[str, QuantizedWeight] = {"train": train, "rollout": train}
        if self.specs["rollout"].rhs != self.specs["train"].rhs:
            self.weights["rollout"] = allocate_weight(
                rows, shape.in_features, self.specs["rollout"].rhs, device
            )
        self.observe: Observer | None = None

    def use(self, side: str) -> LinearUse:
        """What a forward of `side` ('rollout' or 'train') needs of this linear."""
        return LinearUse(
            self.weights[side],
            self.specs[side],
            self.backward_spec,
            self.master,
            self.bias,
            self.bias_bf16,
            self.observe,
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Requantise from the master into the same storage."""
        for weight in {id(w): w for w in self.weights.values()}.values():
            self.ops.refresh_weight(weight, self.master.detach())
        if self.bias is not None and self.bias_bf16 is not None:
            self.bias_bf16.copy_(self.bias)
