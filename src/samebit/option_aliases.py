"""Other tools' spellings of our keys and of algorithms' and corrections' options. Imports nothing."""

from __future__ import annotations

OPTION_ALIASES: dict[str, tuple[str, ...]] = {
    "epsilon": ("clip_low", "clip_high"),
    "clip_ratio": ("clip_low", "clip_high"),
    "eps_clip": ("clip_low", "clip_high"),
    "clip_ratio_low": ("clip_low",),
    "clip_ratio_high": ("clip_high",),
    "epsilon_high": ("clip_high",),
    "eps_clip_high": ("clip_high",),
    "clip_ratio_c": ("dual_clip",),
    "eps_clip_c": ("dual_clip",),
    "delta": ("dual_clip",),
    "beta": ("kl_coefficient",),
    "kl_loss_coef": ("kl_coefficient",),
    "entropy_coeff": ("entropy_coefficient",),
    "entropy_coef": ("entropy_coefficient",),
    "loss_agg_mode": ("averaging",),
    "rollout_is_threshold": ("cap",),
    "tis_clip": ("cap",),
    "truncated_importance_sampling_ratio": ("cap",),
    "vllm_importance_sampling_clip_max": ("cap",),
    "rollout_is": ("level",),
}
"""Other tools' keys and ours. One that sets two of ours yields to one that sets a single one."""

KEY_ALIASES: dict[str, dict[str, str]] = {
    "rl": {
        "num_generations": "group_size",
        "num_generations_per_prompt": "group_size",
        "n_samples_per_prompt": "group_size",
        "num_prompts_per_step": "prompts_per_step",
        "rollout_batch_size": "prompts_per_step",
    },
    "rollout": {
        "max_new_tokens": "max_tokens",
        "max_completion_length": "max_tokens",
        "max_response_length": "max_tokens",
        "max_response_len": "max_tokens",
        "stop_token_ids": "stop_ids",
        "max_num_seqs": "max_batch",
    },
    "train": {
        "lr": "learning_rate",
        "max_steps": "steps",
        "lr_scheduler_type": "schedule",
        "grad_clip": "max_grad_norm",
    },
}
"""Other tools' spellings of our keys, by section, where they mean the same thing."""
