"""What backward passes share: where parameters' gradients go, and how a forward keeps its values.

On a backend that accumulates (`ops.ACCUMULATES`) a gradient kernel adds to the leaf's `.grad` itself and
autograd is given nothing: no second FP32 copy of a weight, no pass that adds it. Hooks on such
parameters do not run there, and `torch.autograd.grad` does not see them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function

from samebit.operand import HeadCodes, Operand


def target(ops: Any, master: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient a kernel should add to; None: it makes a fresh one."""
    if master is None or not ops.ACCUMULATES or not master.is_leaf:
        return None
    return master.grad


def deliver(
    ops: Any, master: torch.Tensor | None, grad: torch.Tensor | None
) -> torch.Tensor | None:
    """What backward returns for `master`: the gradient, or None once it is in place."""
    if master is None or grad is None or not master.requires_grad:
        return None
    if ops.ACCUMULATES and master.is_leaf:
        master.grad = grad
        return None
    return grad


class _Undifferentiated:
    """The context of a forward that nobody differentiates."""

    half: Any = None


def apply(function: type[Function], *args: Any) -> Any:
    """function.apply(*args), or its forward alone where no gradient is wanted (less work for the host)."""
    if torch.is_grad_enabled():
        return function.apply(*args)
    return function.forward(_Undifferentiated(), *args)


@dataclass(frozen=True, slots=True)
class _Form:
    """How to put a kept value together again from `count` tensors."""

    count: int
    operand: Operand | None = None
    codes: bool = False


_NOTHING = torch.empty(0)


def keep(ctx: Any, *values: Any) -> None:
    """Save tensors, operands and head codes (None stays None) so that autograd frees them on time."""
    if isinstance(ctx, _Undifferentiated):
        return
    tensors: list[torch.Tensor | None] = []
    forms: list[_Form] = []
    for value in values:
        if isinstance(value, Operand):
            tensors += [value.codes, value.scale]
            forms.append(_Form(2, operand=replace(value, codes=_NOTHING, scale=None)))
        elif isinstance(value, HeadCodes):
            tensors += [value.codes, value.scale]
            forms.append(_Form(2, codes=True))
        else:
            tensors.append(value)
            forms.append(_Form(1))
    ctx.save_for_backward(*tensors)
    ctx.forms = forms


def kept(ctx: Any) -> list[Any]:
    """The values given to `keep`, in order."""
    assert not getattr(ctx, "given_back", False), "a block's backward runs once (see give_back)"
    tensors, at, values = ctx.saved_tensors, 0, []
    for form in ctx.forms:
        parts = tensors[at : at + form.count]
        at += form.count
        if form.operand is not None:
            values.append(replace(form.operand, codes=parts[0], scale=parts[1]))
        elif form.codes:
            values.append(HeadCodes(*parts))
        else:
            values.append(parts[0])
    return values


def give_back(ctx: Any, *tensors: torch.Tensor) -> None:
    """Free the memory of kept tensors that the rest of this backward does not read.

    Autograd holds what a forward saved until the whole node has run, beside the gradients that are made
    of it. A second backward through the node is refused by `kept`.
    """
    ctx.given_back = True
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
