"""The head through the platform's own products, logits kept: for recipes that promise no bits.

What people write themselves: BF16 logits of the library, kept between forward and backward, so the
head's three products are all there are. BF16 logits alone put about 0.01 nats between sampler and trainer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from samebit.operand import QuantizedWeight
from samebit.reference.sampling import Transform


def inverse_of(transform: Transform) -> float:
    """1/temperature (greedy: 1); ValueError where the distribution is restricted."""
    if transform.restricts:
        raise ValueError(
            f"a recipe with library GEMMs has no top_k = {transform.top_k}, top_p = {transform.top_p}: "
            "set rollout.top_k = 0 and rollout.top_p = 1.0, or use recipe bf16"
        )
    return 1.0 / transform.temperature if transform.temperature > 0 else 1.0


def library_log_prob(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy, log-sum-exp, FP32 [T] each; logits BF16 [T, V] to keep)."""
    logits = F.linear(hidden_TK, head.codes)
    z = _scaled(logits, vocabulary, transform)
    lse = torch.logsumexp(z, -1)
    logp = z - lse[:, None]
    entropy = -(torch.exp(logp) * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1)
    return logp.gather(1, targets_T[:, None])[:, 0], entropy, lse, logits


def _scaled(logits: torch.Tensor, vocabulary: int, transform: Transform) -> torch.Tensor:
    z = logits.float() * inverse_of(transform)
    z[:, vocabulary:] = float("-inf")
    return z


def library_log_prob_backward(
    dlogp_T: torch.Tensor,
    dentropy_T: torch.Tensor | None,
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
    entropy_T: torch.Tensor,
    lse_T: torch.Tensor,
    logits_TV: torch.Tensor,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dhidden BF16 [T, K], dweight FP32 [V, K], added to `into` when given)."""
    logp = _scaled(logits_TV, vocabulary, transform) - lse_T[:, None]
    p = torch.exp(logp)
    dz = -p * dlogp_T[:, None]
    if dentropy_T is not None:
        finite = logp.masked_fill(logp.isneginf(), 0.0)
        dz -= dentropy_T[:, None] * p * (finite + entropy_T[:, None])
    dz.scatter_add_(1, targets_T[:, None], dlogp_T[:, None])
    dlogits = (dz * inverse_of(transform)).bfloat16()
    dweight = dlogits.t().float() @ hidden_TK.float()
    return dlogits @ head.codes, dweight if into is None else into.add_(dweight)
