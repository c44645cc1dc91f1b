"""AdamW over FP32 masters with learning rates by role, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from samebit.config import TrainConfig
from samebit.models.decoder import Decoder
from samebit.spec import ROLES
from samebit.train.states_8bit import AdamW8bit
from samebit.train.states_host import AdamWHost

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


STATE_KEYS = {
    "fp32": ("step", "exp_avg", "exp_avg_sq"),
    "8bit": AdamW8bit.KEYS,
    "host": AdamWHost.KEYS,
}
"""What each `train.optimizer_states` keeps of a parameter."""


def build_optimizer(
    parameters: dict[str, nn.Parameter], config: TrainConfig
) -> torch.optim.Optimizer:
    """One parameter group per role; weight decay on matrices only; moments as the config says."""
    unknown = sorted(set(config.role_learning_rates) - set(PARAMETER_ROLES))
    if unknown:
        raise ValueError(
            f"train.role_learning_rates: unknown role {unknown[0]!r}; roles are "
            f"{', '.join(PARAMETER_ROLES)}"
        )
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter_role(name), parameter.dim() > 1), []).append(parameter)
    tables = [
        {
            "params": params,
            "role": role,
            "weight_decay": config.weight_decay if matrix else 0.0,
            "lr": 0.0,
        }
        for (role, matrix), params in groups.items()
    ]
    betas, eps = (config.beta1, config.beta2), config.epsilon
    if config.optimizer_states == "8bit":
        return AdamW8bit(tables, betas, eps)
    if config.optimizer_states == "host":
        return AdamWHost(tables, betas, eps)
    on_cuda = any(p.device.type == "cuda" for p in parameters.values())
    return torch.optim.AdamW(tables, betas=betas, eps=eps, fused=True if on_cuda else None)


def state_device(optimizer: torch.optim.Optimizer, key: str, parameter: torch.Tensor) -> str:
    """Where the optimiser keeps an entry of a parameter's state."""
    if isinstance(optimizer, AdamWHost):
        return "cpu"
    # torch counts steps on the host, except in its fused kernel
    on_host = key == "step" and not optimizer.defaults.get("fused")
    return "cpu" if on_host else str(parameter.device)


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


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def finite_norm(parameters: Iterable[nn.Parameter]) -> float:
    """L2 norm of all gradients, summed in FP64; NaN or inf where any gradient is not finite.

    The one place where an update waits for the device.
    """
    gradients = _gradients(parameters)
    if not gradients:
        return 0.0
    norms: list[float] = torch.stack(torch._foreach_norm(gradients)).double().tolist()
    total = 0.0
    for norm in norms:
        total += norm * norm
    return math.sqrt(total)


def nonfinite_roles(parameters: dict[str, nn.Parameter]) -> tuple[str, ...]:
    """Roles with a gradient that is not finite, sorted."""
    named = [(n, p.grad) for n, p in parameters.items() if p.grad is not None]
    if not named:
        return ()
    finite = torch.stack([torch.isfinite(grad).all() for _, grad in named]).tolist()
    found = {parameter_role(n) for (n, _), ok in zip(named, finite, strict=True) if not ok}
    return tuple(sorted(found))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients so that their norm is at most `limit` (0: never)."""
    gradients = _gradients(parameters)
    if limit > 0 and norm > limit and gradients:
        torch._foreach_mul_(gradients, limit / norm)


def trainable(model: Decoder) -> dict[str, nn.Parameter]:
    """Every master by name, tied ones once."""
    return dict(model.named_parameters())
