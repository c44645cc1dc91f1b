"""Which algorithm, correction, recipe and sampling make sense together."""

from __future__ import annotations

from samebit.rl.api import Algorithm, Correction
from samebit.types import Sampling


def check_pair(
    algorithm: Algorithm,
    correction: Correction,
    recipe_is_unified: bool,
    sampling: Sampling,
    group_size: int | None = None,
    updates_per_rollout: int = 1,
    partial_tokens: int = 0,
) -> list[str]:
    """Warnings, each with its reason; ValueError for a combination that makes no sense.

    `recipe_is_unified`: rollout and training forward are the same function, bit for bit.
    `partial_tokens`: what a sample is given in a step, 0: all of it.
    """
    _refuse_sampling(sampling, recipe_is_unified, updates_per_rollout)
    if partial_tokens:
        _refuse_parts(partial_tokens, algorithm, sampling)
    if group_size is not None and group_size < algorithm.min_group_size:
        raise ValueError(
            f"group_size = {group_size}: {_name(algorithm)} compares the samples of one prompt "
            f"and needs at least {algorithm.min_group_size}; use ppo or reinforce_pp for 1"
        )
    _refuse_bounds(algorithm, correction)
    if recipe_is_unified:
        return _unified_warnings(correction, updates_per_rollout)
    return _mixed_warnings(correction, updates_per_rollout)


def _refuse_sampling(sampling: Sampling, unified: bool, updates: int) -> None:
    if sampling.temperature == 0:
        raise ValueError(
            "temperature = 0: greedy samples of one prompt are all the same and teach nothing; "
            "set a temperature above 0 for training (evaluation may stay greedy)"
        )
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    if truncated and (updates > 1 or not unified):
        cause = (
            "a mixed recipe"
            if not unified
            else f"{updates} updates per rollout (epochs x mini_batches)"
        )
        raise ValueError(
            f"top_p = {sampling.top_p}, top_k = {sampling.top_k} with {cause}: the kept set of the "
            "sampler is not the policy's own, so ratios are wrong; set top_p = 1 and top_k = 0"
        )


def _refuse_parts(partial_tokens: int, algorithm: Algorithm, sampling: Sampling) -> None:
    given = f"partial_tokens = {partial_tokens}"
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"{given} with top_p = {sampling.top_p}, top_k = {sampling.top_k}: the set that older "
            "weights kept is not the policy's own, so ratios are wrong; set top_p = 1 and top_k = 0"
        )
    if algorithm.max_sampling_rounds > 1:
        raise ValueError(
            f"{given} with algorithm {_name(algorithm)!r}, which samples again until its step is full "
            f"(max_sampling_rounds = {algorithm.max_sampling_rounds}); set rl.max_sampling_rounds = 1, "
            "or rollout.partial_tokens = 0"
        )


def _refuse_bounds(algorithm: Algorithm, correction: Correction) -> None:
    if not correction.moves_bounds:
        return
    name = _name(algorithm)
    if "shadow" in correction.needs and (
        algorithm.ratio_level == "sequence" or not algorithm.exact_gradient
    ):
        raise ValueError(
            f"correction calibrated with {name}: calibration restores gradients that a token-level "
            f"clip has zeroed, and {name} has no such clip; use grpo, dr_grpo, dapo, rloo or ppo"
        )
    if algorithm.ratio_level == "sequence" and correction.level == "token":
        raise ValueError(
            f"correction acr at token level with {name}, whose clipped ratio is of the sequence: "
            "the two do not fit into one bound; set level = 'geometric'"
        )


def _unified_warnings(correction: Correction, updates: int) -> list[str]:
    warnings = []
    if correction.corrects_rollout:
        warnings.append(
            "the recipe is unified, so old and rollout log-probs are the same bits and this "
            "correction does exactly nothing; correction = 'none' says the same"
        )
    if "shadow" in correction.needs and updates == 1:
        warnings.append(
            "calibrated clipping with one update per rollout: every ratio is 1, nothing is ever "
            "clipped and the shadow passes are wasted"
        )
    return warnings


def _mixed_warnings(correction: Correction, updates: int) -> list[str]:
    warnings = []
    if not correction.corrects_rollout:
        warnings.append(
            "the recipe is mixed (the sampler is not the function that is trained) and nothing "
            "corrects for it: reported runs lose accuracy or collapse; use correction = 'tis' or "
            "'acr', or a unified recipe"
        )
    if "proximal" not in correction.needs and not correction.moves_bounds:
        warnings.append(
            "the sampler's log-probs are the denominator of the clipped ratio (QuRL eq. 3): "
            "quantisation noise alone then clips tokens"
        )
    if correction.moves_bounds and updates == 1:
        warnings.append(
            "with one update per rollout every ratio is 1, so moved clip bounds change nothing "
            "(acr is then tis)"
        )
    return warnings


def _name(algorithm: Algorithm) -> str:
    return type(algorithm).__module__.rsplit(".", 1)[-1]
