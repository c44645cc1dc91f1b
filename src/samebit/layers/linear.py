"""The linear module: an FP32 master and the one quantised weight that trainer and engine share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from samebit.layers.functional import LinearCall, linear
from samebit.operand import Operand, QuantizedWeight, allocate_weight
from samebit.quant.ops import Ops
from samebit.quant.plan import LinearShape, Plan


class Linear(nn.Module):
    """One (possibly fused) linear under a plan.

    master: FP32 Parameter [N, K], the named parts one after the other; bias: FP32 Parameter [N] or
    None. `rollout` and `train` are the quantised weights of the two forwards: one object when their
    precisions agree, two in a mixed recipe. Both are rewritten in place by `refresh`.
    """

    def __init__(self, shape: LinearShape, plan: Plan, bias: bool, ops: Ops, device: torch.device):
        super().__init__()
        self.shape, self.ops = shape, ops
        rows = tuple(n for _, n in shape.parts)
        self.rows = rows
        self.master = nn.Parameter(torch.zeros(sum(rows), shape.in_features, device=device))
        self.bias = nn.Parameter(torch.zeros(sum(rows), device=device)) if bias else None
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
        self.observe: Callable[[torch.Tensor, Operand], None] | None = None

    def forward(
        self, x_TK: torch.Tensor, side: str, token_groups: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """BF16 [T, K] -> one BF16 [T, rows] per named part. side: 'rollout' or 'train'."""
        call = LinearCall(
            self.ops,
            self.weights[side],
            self.specs[side],
            self.backward_spec,
            token_groups,
            self.observe,
        )
        return linear(x_TK, self.master, self.bias, call).split(self.rows, dim=1)

    @torch.no_grad()
    def refresh(self) -> None:
        """Requantise from the master into the same storage."""
        for weight in {id(w): w for w in self.weights.values()}.values():
            self.ops.refresh_weight(weight, self.master.detach())
