"""The operator set's head on Hopper: log-probs, their backward, and samples from one tile product."""

from __future__ import annotations

import torch

from samebit.kernels.gemm_bf16 import bf16_gemm
from samebit.kernels.head import HeadParts, head_log_prob, inverse_temperature, known_normaliser
from samebit.kernels.head_backward import HeadGradient, head_log_prob_backward
from samebit.kernels.head_restrict import HeadCut, head_cut
from samebit.kernels.sample import NO_TOKEN, noise_keys
from samebit.kernels.sample import sample as draw_tokens
from samebit.operand import QuantizedWeight
from samebit.reference.sampling import Transform


def _distribution(
    hidden_TK: torch.Tensor, head: QuantizedWeight, vocabulary: int, transform: Transform
) -> tuple[torch.Tensor, HeadCut | None]:
    """What turns logits into the sampling distribution: (fl(1/temperature) [T], the cut or None)."""
    inverse = inverse_temperature(transform.temperature, hidden_TK.shape[0], hidden_TK.device)
    if not transform.restricts:
        return inverse, None
    top_k, top_p = transform.top_k, transform.top_p
    return inverse, head_cut(hidden_TK, head.codes, inverse, vocabulary, top_k, top_p)


def head_logits(hidden_TK: torch.Tensor, head: QuantizedWeight, vocabulary: int) -> torch.Tensor:
    """FP32 [T, V] logits, unrounded; ids >= `vocabulary` are -inf."""
    logits = bf16_gemm(hidden_TK.contiguous(), head.codes, out_dtype=torch.float32)
    if vocabulary < logits.shape[1]:
        logits[:, vocabulary:] = float("-inf")
    return logits


def log_prob(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy, log-sum-exp), FP32 [T] each, logits never materialised."""
    hidden_TK = hidden_TK.contiguous()
    inverse, cut = _distribution(hidden_TK, head, vocabulary, transform)
    logp, lse, entropy = head_log_prob(
        hidden_TK, head.codes, targets_T, inverse, vocabulary, entropy=True, cut=cut
    )
    assert entropy is not None
    return logp, entropy, lse


def log_prob_backward(
    dlogp_T: torch.Tensor,
    dentropy_T: torch.Tensor | None,
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
    entropy_T: torch.Tensor,
    lse_T: torch.Tensor,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dhidden BF16 [T, K], dweight FP32 [V, K]); logits are made again tile by tile.

    entropy, lse: the forward's. dweight is added to `into` when given.
    """
    hidden_TK = hidden_TK.contiguous()
    inverse, cut = _distribution(hidden_TK, head, vocabulary, transform)
    gradient = HeadGradient(dlogp_T.contiguous())
    if dentropy_T is not None:
        gradient = HeadGradient(dlogp_T.contiguous(), entropy_T, dentropy_T.contiguous())
    dhidden, dweight = head_log_prob_backward(
        hidden_TK,
        head.codes,
        targets_T,
        inverse,
        lse_T,
        gradient,
        vocabulary,
        dweight_VK=into,
        cut=cut,
    )
    return dhidden.bfloat16(), dweight


def log_prob_planned(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
    known_T: torch.Tensor,
    dlogp_T: torch.Tensor,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob, entropy, dhidden BF16, dweight FP32) in one pass over the vocabulary.

    known: the log-probs as the sampler stored them; dlogp: the loss's gradient there. The log-probs
    returned are this pass's own, with the bits of `log_prob`.
    """
    hidden_TK = hidden_TK.contiguous()
    inverse, cut = _distribution(hidden_TK, head, vocabulary, transform)
    lse = known_normaliser(hidden_TK, head.codes, targets_T, inverse, known_T)
    parts = HeadParts.empty(head.codes.shape[0], hidden_TK.shape[0], True, hidden_TK.device)
    dhidden, dweight = head_log_prob_backward(
        hidden_TK, head.codes, targets_T, inverse, lse, HeadGradient(dlogp_T.contiguous()),
        vocabulary, dweight_VK=into, parts=parts, parts_entropy=True, cut=cut,
    )  # fmt: skip
    logp, _, entropy = parts.combine(True)
    assert entropy is not None
    return logp, entropy, dhidden.bfloat16(), dweight


def sample(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    vocabulary: int,
    transform: Transform,
    counters: list[tuple[int, int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [T], log-probs FP32 [T]); the log-prob is `log_prob`'s for that id, bit for bit."""
    ids, logp = draw(hidden_TK, head, vocabulary, transform, noise_keys(counters, hidden_TK.device))
    lost = torch.nonzero(ids == NO_TOKEN)
    if lost.numel():
        raise ValueError(
            f"logits of batch row {int(lost[0])} are NaN: the model's weights or activations are not "
            "finite"
        )
    return ids, logp


def draw(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    vocabulary: int,
    transform: Transform,
    keys_T2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` from noise keys int32 [T, 2] on the device, without a word to the host.

    A row of NaN logits yields the id NO_TOKEN and a NaN log-prob; whoever reads them must look.
    """
    hidden_TK = hidden_TK.contiguous()
    inverse, cut = _distribution(hidden_TK, head, vocabulary, transform)
    ids, logp, _ = draw_tokens(hidden_TK, head.codes, inverse, keys_T2, vocabulary, cut=cut)
    return ids, logp
