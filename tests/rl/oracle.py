"""An independent oracle: every loss and weight again, in plain Python, one token at a time.

Written from the papers' formulas, sharing no code with the package; FP64 floats and math only.
"""

from __future__ import annotations

import math
from statistics import mean, stdev


def tokens_of(batch) -> list[dict]:
    """Unmasked tokens as dictionaries of floats."""
    names = [n for n in batch.tensors_T() if n not in ("mask_T", "sequence_T")]
    rows = []
    for i in range(len(batch.mask_T)):
        if bool(batch.mask_T[i]):
            row = {n.removesuffix("_T"): float(getattr(batch, n)[i].detach()) for n in names}
            row["sequence"] = int(batch.sequence_T[i])
            row["index"] = i
            rows.append(row)
    return rows


def average(rows: list[dict], values: list[float], mode: str, max_length: int) -> float:
    """verl's four averaging modes, by nested means."""
    by_sequence: dict[int, list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        by_sequence.setdefault(row["sequence"], []).append(value)
    if not rows:
        return 0.0
    if mode == "token-mean":
        return mean(values)
    if mode == "seq-mean-token-mean":
        return mean(mean(v) for v in by_sequence.values())
    sums = mean(sum(v) for v in by_sequence.values())
    return sums if mode == "seq-mean-token-sum" else sums / max_length


def ratios_rho(rows: list[dict], level: str) -> list[float]:
    """rho of each token at a level."""
    logs: dict[int, list[float]] = {}
    for row in rows:
        logs.setdefault(row["sequence"], []).append(row["old_logp"] - row["rollout_logp"])
    if level == "token":
        return [math.exp(r["old_logp"] - r["rollout_logp"]) for r in rows]
    join = sum if level == "sequence" else mean
    return [math.exp(join(logs[r["sequence"]])) for r in rows]


def clipped(ratio: float, a: float, low: float, high: float, dual: float | None) -> float:
    """PPO's clipped objective, negated."""
    value = -min(ratio * a, min(max(ratio, low), high) * a)
    if dual is not None and a < 0:
        value = min(value, dual * abs(a))
    return value


def policy_values(name: str, rows: list[dict], config, uppers: list[float]) -> list[float]:
    """Per-token policy loss of an algorithm, without correction weight."""
    low = 1 - config.clip_low
    logs: dict[int, list[float]] = {}
    for row in rows:
        logs.setdefault(row["sequence"], []).append(row["logp"] - row["old_logp"])
    values = []
    for row, upper in zip(rows, uppers, strict=True):
        if name == "gspo":
            ratio = math.exp(mean(logs[row["sequence"]]))
        else:
            ratio = math.exp(row["logp"] - row["old_logp"])
        if name == "cispo":
            values.append(-min(max(ratio, low), upper) * row["advantage"] * row["logp"])
        else:
            values.append(clipped(ratio, row["advantage"], low, upper, config.dual_clip))
    return values


def kl_value(row: dict, estimator: str) -> float:
    """k1, k2 or k3 of a token."""
    gap = row["logp"] - row["ref_logp"]
    kind = estimator.rstrip("+")
    return {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[kind]


def value_loss(row: dict, clip: float) -> float:
    """PPO's clipped value loss of a token."""
    value, old, target = row["value"], row["old_value"], row["return"]
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def group_advantages(rewards, groups, name: str) -> list[float]:
    """grpo, dr_grpo or rloo advantages by explicit loops; None is no verdict."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group and r is not None]
        others = [
            r
            for j, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if g == group and r is not None and j != i
        ]
        if reward is None or len(members) < 2:
            result.append(0.0)
        elif name == "rloo":
            result.append(reward - mean(others))
        elif name == "dr_grpo":
            result.append(reward - mean(members))
        else:
            spread = stdev(members)
            result.append((reward - mean(members)) / (spread + 1e-6) if spread > 0 else 0.0)
    return result


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE as the double sum of its definition."""
    n = len(rewards)
    deltas = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)
    ]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
