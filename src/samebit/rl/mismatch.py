"""How far the sampler's log-probs are from the trainer's, before any update.

The trainer's log-probs must come from the forward that is differentiated, at the weights the tokens
were drawn under. Definitions and units: docs/metrics.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebit.rl import metrics
from samebit.rl.metrics import Metrics

EXPONENT_LIMIT = 300.0
"""FP64 exp(2 * 300) is finite, so an absurd gap is reported as a huge number and not as NaN."""


def differing(first_T: Tensor, second_T: Tensor) -> Tensor:
    """Where two FP32 tensors are not the same bits, bool [T]; NaN always differs, 0 and -0 too."""
    assert first_T.dtype == second_T.dtype == torch.float32, "bit comparison is of FP32"
    unequal_T = first_T.contiguous().view(torch.int32) != second_T.contiguous().view(torch.int32)
    return unequal_T | torch.isnan(first_T)


def measure(
    trainer_logp_T: Tensor,
    rollout_logp_T: Tensor,
    mask_T: Tensor,
    stale_T: Tensor | None = None,
    cap: float = 2.0,
) -> Metrics:
    """The `mismatch/` metrics of one micro-batch; merge them over the step.

    All [T]; log-probs FP32, masks bool. `stale_T` marks tokens drawn under an older weight version:
    counted under `mismatch/stale_*` only. Tokens the engine gave no log-prob for (NaN) count as
    differing and as missing, and enter no mean. A trainer's NaN stays NaN in every number.
    """
    with torch.no_grad():
        older_T = torch.zeros_like(mask_T) if stale_T is None else stale_T
        fresh_T, old_T = mask_T & ~older_T, mask_T & older_T
        missing_T = torch.isnan(rollout_logp_T)
        known_T = fresh_T & ~missing_T
        unequal_T = differing(trainer_logp_T, rollout_logp_T)
        gap_T = trainer_logp_T.double() - rollout_logp_T.double()
        gap_T = torch.where(mask_T & ~missing_T, gap_T, torch.zeros_like(gap_T))
        size_T = gap_T.abs()
        bounded_T = gap_T.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
        rho_T = torch.exp(bounded_T)
        return Metrics(
            {
                "mismatch/logp_abs_max": metrics.maximum(size_T, known_T),
                "mismatch/logp_abs_mean": metrics.mean(size_T, known_T),
                "mismatch/tokens_differing_share": metrics.share(unequal_T, fresh_T),
                "mismatch/tokens_differing": metrics.total((unequal_T & fresh_T).sum()),
                "mismatch/tokens": metrics.total(fresh_T.sum()),
                "mismatch/missing_tokens": metrics.total((missing_T & fresh_T).sum()),
                "mismatch/k1": metrics.mean(-gap_T, known_T),
                "mismatch/k3": metrics.mean(torch.expm1(bounded_T) - bounded_T, known_T),
                "mismatch/exp_abs_mean": metrics.mean(torch.exp(bounded_T.abs()), known_T),
                "mismatch/ess": metrics.effective_sample_size(rho_T, known_T),
                "mismatch/rho_max": metrics.maximum(rho_T, known_T),
                "mismatch/rho_over_cap_share": metrics.share(rho_T > cap, known_T),
                "mismatch/stale_tokens": metrics.total(old_T.sum()),
                "mismatch/stale_logp_abs_max": metrics.maximum(size_T, old_T & ~missing_T),
                "mismatch/stale_logp_abs_mean": metrics.mean(size_T, old_T & ~missing_T),
            }
        )
