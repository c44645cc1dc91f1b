"""AdamW over FP32 masters with learning rates by role, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from samebit.config import TrainConfig
from samebit.models.decoder import Decoder
from samebit.spec import ROLES

PARAMETER_ROLES = (*ROLES, "embedding", "norm", "value")


def parameter_role(name: str) -> str:
    """The role a parameter's learning rate is chosen by; tied heads count as embedding."""
    parts = name.split(".")
    for role in ROLES:
        if role in parts:
            return role
    if "embedding" in parts:
        return "embedding"
    if "value" in parts:
        return "value"
    assert any("norm" in p for p in parts), name
    return "norm"


def build_optimizer(parameters: dict[str, nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """One parameter group per role; weight decay on matrices only."""
    unknown = sorted(set(config.role_learning_rates) - set(PARAMETER_ROLES))
    if unknown:
        raise ValueError(
            f"train.role_learning_rates: unknown role {unknown[0]!r}; roles are "
            f"{', '.join(PARAMETER_ROLES)}"
        )
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter_role(name), parameter.dim() > 1), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": params,
                "role": role,
                "weight_decay": config.weight_decay if matrix else 0.0,
                "lr": 0.0,
            }
            for (role, matrix), params in groups.items()
        ],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Rate of optimiser step `update` (from 0) of `total`: warm-up, then the schedule, to 0 at the end."""
    warmup = config.warmup_steps
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    progress = (update - warmup) / max(1, total - warmup)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))),
    }[config.schedule]
    return config.learning_rate * max(0.0, factor)


def set_learning_rates(optimizer: torch.optim.Optimizer, base: float, config: TrainConfig) -> None:
    """Base rate times the factor of each group's role."""
    for group in optimizer.param_groups:
        group["lr"] = base * config.role_learning_rates.get(group["role"], 1.0)


def finite_norm(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> float:
    """L2 norm of all gradients, summed in FP64; NaN or inf where any gradient is not finite."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad)
            total += norm.double().cpu() ** 2
    return float(total.sqrt())


def nonfinite_roles(parameters: dict[str, nn.Parameter]) -> tuple[str, ...]:
    """Roles with a gradient that is not finite, sorted."""
    found = {
        parameter_role(name)
        for name, parameter in parameters.items()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    }
    return tuple(sorted(found))


def clip_gradients(parameters: list[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients so that their norm is at most `limit` (0: never)."""
    if limit > 0 and norm > limit:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)


def trainable(model: Decoder) -> dict[str, nn.Parameter]:
    """Every master by name, tied ones once."""
    return dict(model.named_parameters())
