"""What the loop asks of a step's samples: which count, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from samebit.types import Group, Sample


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """reward/ and rollout/ numbers of a step's samples."""
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return {"rollout/tokens": 0.0}
    rewards = [r for g in groups for r in g.rewards if r is not None]
    lengths = [len(s.ids) for s in samples]
    out = {
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_share": sum(s.truncated for s in samples) / len(samples),
        "rollout/aborted_count": float(sum(aborted(s) for s in samples)),
        "rollout/empty_count": float(lengths.count(0)),
    }
    if rewards:
        out["reward/mean"] = sum(rewards) / len(rewards)
        out["reward/max"], out["reward/min"] = max(rewards), min(rewards)
    return out


def aborted(sample: Sample) -> bool:
    """Whether the engine gave a sample up: no fault of the policy, so no verdict."""
    return sample.finish_reason == "abort" or not sample.ids


def without_empty(groups: Sequence[Group]) -> list[Group]:
    """Samples without a token left out (nothing of them can be trained on), then empty groups."""
    kept = []
    for group in groups:
        pairs = [(s, r) for s, r in zip(group.samples, group.rewards, strict=True) if s.ids]
        if pairs:
            samples, rewards = zip(*pairs, strict=True)
            kept.append(Group(group.prompt, samples, rewards))
    return kept
