"""Differentiable operators outside the blocks: embedding, row gather, final norm, head.

Gradients between operators are BF16, gradients of parameters FP32 (Jet-RL 4.1). Parameters are FP32
masters; whatever is not quantised enters the forward as its BF16 rounding (docs/numerics.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from samebit.layers.gradient import deliver, target
from samebit.operand import QuantizedWeight


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, rows: torch.Tensor, ops: Any):
        ctx.ops, ctx.num_rows = ops, x_TK.shape[0]
        ctx.save_for_backward(rows)
        return x_TK[rows]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        dx = ctx.ops.embed_backward(grads[0], ctx.saved_tensors[0], ctx.num_rows)
        return dx.bfloat16(), None, None


def gather_rows(x_TK: torch.Tensor, rows: torch.Tensor, ops: Any) -> torch.Tensor:
    """x[rows]; repeated rows add their gradients in FP32, in order, before one rounding to BF16."""
    return _GatherRows.apply(x_TK, rows, ops)  # type: ignore[return-value]


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, master: torch.Tensor, ops: Any):
        ctx.ops, ctx.master = ops, master
        ctx.save_for_backward(ids)
        return ops.embed(ids, master)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        ops, master = ctx.ops, ctx.master
        (ids,) = ctx.saved_tensors
        grad = ops.embed_backward(grads[0], ids, master.shape[0], target(ops, master))
        return None, deliver(ops, master, grad), None


def embed(ids_T: torch.Tensor, master_VK: torch.Tensor, ops: Any) -> torch.Tensor:
    """BF16 [T, K] rows of the embedding."""
    return _Embed.apply(ids_T, master_VK, ops)  # type: ignore[return-value]


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, x, update, master, gain, eps: float, ops: Any):
        total, y, kept = ops.add_rms_norm(x, update, gain, eps)
        ctx.ops, ctx.master = ops, master
        ctx.save_for_backward(total, gain, kept)
        ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        ops, master = ctx.ops, ctx.master
        into = target(ops, master)
        dx, dgain = ops.rms_norm_backward(grads[0], *ctx.saved_tensors, None, into)
        return dx, dx, deliver(ops, master, dgain), None, None, None


def add_rms_norm(
    x_TK: torch.Tensor,
    update_TK: torch.Tensor,
    master_K: torch.Tensor,
    gain_K: torch.Tensor,
    eps: float,
    ops: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + update, the sum), BF16 [T, K]; only the norm is differentiable.

    gain: the BF16 rounding of master, which gets the gradient.
    """
    return _AddNorm.apply(x_TK, update_TK, master_K, gain_K, eps, ops)  # type: ignore[return-value]


class _LogProb(Function):
    @staticmethod
    def forward(ctx: Any, hidden, master, head, targets, vocabulary: int, transform, ops: Any):
        logp, entropy, lse = ops.log_prob(hidden, head, targets, vocabulary, transform)
        ctx.ops, ctx.master, ctx.head = ops, master, head
        ctx.vocabulary, ctx.transform = vocabulary, transform
        ctx.save_for_backward(hidden, targets, entropy, lse)
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        ops, master = ctx.ops, ctx.master
        hidden, targets, entropy, lse = ctx.saved_tensors
        dlogp = torch.zeros_like(lse) if grads[0] is None else grads[0]
        dhidden, dweight = ops.log_prob_backward(
            dlogp, grads[1], hidden, ctx.head, targets, ctx.vocabulary, ctx.transform,
            entropy, lse, target(ops, master),
        )  # fmt: skip
        return dhidden, deliver(ops, master, dweight), None, None, None, None, None


class _LibraryLogProb(Function):
    @staticmethod
    def forward(ctx: Any, hidden, master, head, targets, vocabulary: int, transform, ops: Any):
        logp, entropy, *more = ops.library_log_prob(hidden, head, targets, vocabulary, transform)
        ctx.ops, ctx.master, ctx.head = ops, master, head
        ctx.vocabulary, ctx.transform = vocabulary, transform
        ctx.save_for_backward(hidden, targets, entropy, *more)
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        ops, master = ctx.ops, ctx.master
        hidden, targets, entropy, lse, logits = ctx.saved_tensors
        dlogp = torch.zeros_like(lse) if grads[0] is None else grads[0]
        dhidden, dweight = ops.library_log_prob_backward(
            dlogp, grads[1], hidden, ctx.head, targets, ctx.vocabulary, ctx.transform,
            entropy, lse, logits, target(ops, master),
        )  # fmt: skip
        return dhidden, deliver(ops, master, dweight), None, None, None, None, None


class _PlannedLogProb(Function):
    @staticmethod
    def forward(ctx: Any, hidden, master, head, targets, vocabulary: int, transform, planned, ops):
        known, dlogp = planned
        logp, entropy, dhidden, dweight = ops.log_prob_planned(
            hidden, head, targets, vocabulary, transform, known, dlogp, target(ops, master)
        )
        ctx.save_for_backward(dhidden, deliver(ops, master, dweight))
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor):
        return *ctx.saved_tensors, None, None, None, None, None, None


def planned_log_prob(
    hidden_TK: torch.Tensor,
    master_VK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Any,
    planned: tuple[torch.Tensor, torch.Tensor],
    ops: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_prob` whose gradient is known: planned = (the sampler's log-probs, dloss/dlogp at them).

    The head's gradient is made at once, in the same pass; what backward is then given is not looked
    at. So a backward must follow, and the loss must be the one that was planned for.
    """
    return _PlannedLogProb.apply(
        hidden_TK, master_VK, head, targets_T, vocabulary, transform, planned, ops
    )  # type: ignore[return-value]


def log_prob(
    hidden_TK: torch.Tensor,
    master_VK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Any,
    ops: Any,
    library: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of targets, entropy) FP32 [T]; the gradient of the head reaches `master_VK`.

    library: through the platform's own products, logits kept (recipes that promise no bits).
    """
    function = _LibraryLogProb if library else _LogProb
    return function.apply(hidden_TK, master_VK, head, targets_T, vocabulary, transform, ops)  # type: ignore[return-value]
