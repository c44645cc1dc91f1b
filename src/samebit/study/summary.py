"""What a study found: numbers of each run, of each arm over seeds, and which arms differ at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from samebit.study.plan import Arm, Job, Study
from samebit.study.runs import read_result, records_of

Records = Sequence[Mapping[str, Any]]

COLLAPSE_RULE = (
    "a run has collapsed when its last held-out reward is below half of its best one, or a loss or "
    "gradient was not finite"
)
INTERVAL_RULE = "mean and 95 % t interval over seeds; differences are taken seed by seed"

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""

MEANS = {
    "mismatch_mean": "mismatch/logp_abs_mean",
    "clip_share_positive": "rl/clip_share_positive",
    "clip_share_negative": "rl/clip_share_negative",
    "rho_over_cap_share": "mismatch/rho_over_cap_share",
    "bounds_differ_share": "rl/bounds_differ_share",
    "correction_weight_mean": "rl/correction_weight_mean",
    "entropy": "rl/entropy",
}
"""Averaged over the steps of a run."""
LARGEST = {"mismatch_max": "mismatch/logp_abs_max", "rho_max": "mismatch/rho_max"}
"""The largest over the steps of a run (NaN wins)."""
ROLE_MEANS = {
    "codes_moved_share": "quant/codes_moved_share/",
    "update_over_error": "quant/update_over_error/",
}
"""Averaged over roles and steps."""
FINALS = ("final_reward", "final_reward_sampler", "final_reward_bf16")
UNTIMED = ("time/", "perf/")
"""Metrics that differ between equal runs."""


def t_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half width of the 95 % interval of the mean); None with fewer than two values."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    quantile = _T_95[len(values) - 2] if len(values) - 2 < len(_T_95) else 1.96
    return mean, quantile * math.sqrt(variance / len(values))


def _values(records: Records, key: str) -> list[float]:
    return [float(r[key]) for r in records if isinstance(r.get(key), (int, float))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _largest(values: Sequence[float]) -> float | None:
    unordered = [v for v in values if v != v]
    return unordered[0] if unordered else max(values, default=None)


def has_collapsed(records: Records) -> bool:
    """COLLAPSE_RULE on the records of one run."""
    rewards = _values(records, "reward/eval_mean")
    watched = [*_values(records, "rl/loss"), *_values(records, "train/grad_norm")]
    if not all(math.isfinite(v) for v in watched):
        return True
    return bool(rewards) and rewards[-1] < 0.5 * max(rewards)


def run_numbers(records: Records) -> dict[str, Any]:
    """The numbers of one run; a metric that the run never wrote is None."""
    out: dict[str, Any] = {name: _mean(_values(records, key)) for name, key in MEANS.items()}
    out |= {name: _largest(_values(records, key)) for name, key in LARGEST.items()}
    for name, prefix in ROLE_MEANS.items():
        keys = {k for r in records for k in r if k.startswith(prefix)}
        finite = [v for k in keys for v in _values(records, k) if math.isfinite(v)]
        out[name] = _mean(finite)
    rewards = _values(records, "reward/eval_mean")
    out["first_reward"] = rewards[0] if rewards else None
    out["best_reward"] = max(rewards, default=None)
    out["collapsed"] = has_collapsed(records)
    return out


def same_records(a: Records, b: Records) -> bool:
    """Whether two runs agree bit for bit in every metric both wrote, times and speeds aside."""
    if len(a) != len(b):
        return False
    for left, right in zip(a, b, strict=True):
        shared = {k for k in left.keys() & right.keys() if not k.startswith(UNTIMED)}
        if any(repr(left[k]) != repr(right[k]) for k in shared):
            return False
    return True


def equal_arms(
    names: Sequence[str], records: Mapping[str, Mapping[int, Records]]
) -> list[list[str]]:
    """Groups of arms that no finished seed tells apart; `records` by arm and seed."""
    groups: list[list[str]] = []
    for name in names:
        mine = records.get(name, {})
        for group in groups:
            other = records[group[0]]
            seeds = mine.keys() & other.keys()
            if seeds and all(same_records(mine[s], other[s]) for s in seeds):
                group.append(name)
                break
        else:
            if mine:
                groups.append([name])
    return [group for group in groups if len(group) > 1]


def summarise(study: Study) -> dict[str, Any]:
    """Everything the table and the page show, as plain JSON-ready values."""
    records = records_of(study.jobs)
    runs = [_run(job, records.get(job.label, [])) for job in study.jobs]
    arms = [_arm(arm, study, [r for r in runs if r["arm"] == arm.name]) for arm in study.arms]
    _add_differences(arms, runs, study.baseline)
    done = {(r["arm"], r["seed"]) for r in runs if r["status"] == "done"}
    by_arm: dict[str, dict[int, Records]] = {}
    for job in study.jobs:
        if (job.arm, job.seed) in done:
            by_arm.setdefault(job.arm, {})[job.seed] = records[job.label]
    return {
        "name": study.header.name,
        "baseline": study.baseline,
        "seeds": list(study.header.seeds),
        "collapse_rule": COLLAPSE_RULE,
        "interval_rule": INTERVAL_RULE,
        "not_distinguishable": equal_arms([a.name for a in study.arms], by_arm),
        "arms": arms,
        "runs": runs,
    }


def _run(job: Job, records: Records) -> dict[str, Any]:
    result = read_result(job) or {"status": "not run"}
    kept = {k: result[k] for k in ("status", "error", "seconds", *FINALS) if k in result}
    return {
        "arm": job.arm,
        "seed": job.seed,
        "steps": max((r["step"] for r in records), default=0),
    } | (kept | (run_numbers(records) if records else {}))


def _arm(arm: Arm, study: Study, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    job = next(j for j in study.jobs if j.arm == arm.name)
    done = [r for r in runs if r["status"] == "done"]
    out: dict[str, Any] = {
        "name": arm.name,
        "note": arm.note,
        "recipe": job.config.recipe,
        "correction": str(job.config.rl.correction.get("name", "none")),
        "done": len(done),
        "failed": [f"seed {r['seed']}: {r.get('error')}" for r in runs if r["status"] == "failed"],
        "collapsed": sum(bool(r["collapsed"]) for r in done),
    }
    for name in (*MEANS, *ROLE_MEANS, "first_reward", "best_reward"):
        out[name] = _mean([r[name] for r in done if r[name] is not None])
    for name in LARGEST:
        out[name] = _largest([r[name] for r in done if r[name] is not None])
    for name in FINALS:
        values = [r[name] for r in done if name in r]
        out[name], out[f"{name}_half_width"] = t_interval(values) if values else (None, None)
    return out


def _add_differences(
    arms: list[dict[str, Any]], runs: Sequence[Mapping[str, Any]], baseline: str
) -> None:
    """Final reward minus the baseline's, paired by seed."""
    final = {(r["arm"], r["seed"]): r["final_reward"] for r in runs if "final_reward" in r}
    for arm in arms:
        pairs = [
            value - final[baseline, seed]
            for (name, seed), value in final.items()
            if name == arm["name"] and (baseline, seed) in final
        ]
        mean, half = t_interval(pairs) if pairs and arm["name"] != baseline else (None, None)
        arm["difference"], arm["difference_half_width"] = mean, half


def to_json(summary: Mapping[str, Any]) -> str:
    """The summary as JSON text; NaN and infinities as strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    return json.dumps(plain(summary), indent=1, ensure_ascii=False) + "\n"
