"""The numbers of a study, worked by hand; which arms are told apart; the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from samebit.config_dump import dump
from samebit.study.page import markdown, write_results
from samebit.study.plan import Study, load_study
from samebit.study.summary import (
    equal_arms,
    has_collapsed,
    run_numbers,
    same_records,
    summarise,
    t_interval,
    to_json,
)

FILE = """
[study]
out = "OUT"
seeds = [0, 1, 2]
[base]
model = "m"
[base.task]
name = "digits"
[[arm]]
name = "a"
[[arm]]
name = "b"
recipe = "int8-rollout"
rl.correction = "tis"
[[arm]]
name = "c"
recipe = "int8-rollout"
rl.correction = "acr"
"""


def test_t_interval_by_hand():
    mean, half = t_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / math.sqrt(3))  # s = 1, two degrees
    assert t_interval([5.0]) == (5.0, None)
    assert t_interval([1.0, 1.0]) == (1.0, 0.0)
    many = [0.0, 1.0] * 50
    assert t_interval(many)[1] == pytest.approx(1.96 * math.sqrt(25 / 99 / 100))


def record(step: int, **more: float) -> dict[str, Any]:
    names = {key.replace("__", "/"): value for key, value in more.items()}
    return {"step": step, "time/step_s": 0.1 * step} | names


@pytest.mark.parametrize(
    ("rewards", "loss", "collapsed"),
    [
        ([0.2, 0.4, 0.21], 0.1, False),
        ([0.2, 0.4, 0.19], 0.1, True),
        ([0.2, 0.4, 0.4], math.nan, True),
        ([0.2, 0.4, 0.4], math.inf, True),
        ([], 0.1, False),
    ],
)
def test_collapse_rule(rewards: list[float], loss: float, collapsed: bool):
    records = [record(i, reward__eval_mean=r) for i, r in enumerate(rewards)]
    assert has_collapsed([*records, record(9, rl__loss=loss)]) == collapsed


def test_numbers_of_a_run_by_hand():
    records = [
        record(0, reward__eval_mean=0.3),
        record(
            1,
            mismatch__logp_abs_mean=0.1,
            mismatch__logp_abs_max=2.0,
            quant__codes_moved_share__qkv=0.2,
            quant__codes_moved_share__down=0.4,
        ),
        record(
            2,
            mismatch__logp_abs_mean=0.3,
            mismatch__logp_abs_max=1.0,
            quant__codes_moved_share__qkv=0.0,
            quant__codes_moved_share__down=0.2,
            rl__clip_share_positive=0.5,
            reward__eval_mean=0.5,
        ),
    ]
    found = run_numbers(records)
    assert found["mismatch_mean"] == pytest.approx(0.2) and found["mismatch_max"] == 2.0
    assert found["codes_moved_share"] == pytest.approx(0.2)
    assert found["clip_share_positive"] == 0.5 and found["bounds_differ_share"] is None
    assert (found["first_reward"], found["best_reward"]) == (0.3, 0.5)
    records.append(record(3, mismatch__logp_abs_max=math.nan))
    assert math.isnan(run_numbers(records)["mismatch_max"])


def test_runs_are_the_same_when_every_shared_metric_has_the_same_bits():
    a = [record(1, rl__loss=0.1)]
    timed = [dict(a[0], **{"time/step_s": 9.0, "perf/x": 1.0})]
    assert same_records(a, timed)
    assert same_records(a, [dict(a[0], **{"rl/acr_widened_share": 0.0})])
    assert not same_records(a, [record(1, rl__loss=math.nextafter(0.1, 1.0))])
    assert not same_records(a, [*a, record(2)])
    nan = [record(1, rl__loss=math.nan)]
    assert same_records(nan, [record(1, rl__loss=math.nan)])


def test_arms_are_told_apart_by_any_seed():
    one, two = [record(1, rl__loss=0.1)], [record(1, rl__loss=0.2)]
    records = {"a": {0: one, 1: one}, "b": {0: one, 1: two}, "c": {0: one, 1: one}, "d": {}}
    assert equal_arms(["a", "b", "c", "d"], records) == [["a", "c"]]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Arm a: done thrice. b: done twice and failed once. c: as b bit for bit."""
    path = tmp_path / "study.toml"
    path.write_text(FILE.replace("OUT", str(tmp_path / "out")))
    study = load_study(path)
    rewards = {"a": (0.5, 0.6, 0.7), "b": (0.4, 0.6, None), "c": (0.4, 0.6, None)}
    for job in study.jobs:
        job.folder.mkdir(parents=True)
        (job.folder / "config.toml").write_text(dump(job.config))
        reward = rewards[job.arm][job.seed]
        result: dict[str, Any] = {"status": "failed", "error": "ValueError: no luck"}
        if reward is not None:
            result = {"status": "done", "seconds": 1.0, "final_reward": reward}
            result |= {"final_reward_sampler": reward / 2, "final_reward_bf16": reward}
            gap = 0.0 if job.arm == "a" else 0.25
            records = [
                record(0, reward__eval_mean=0.3),
                record(1, mismatch__logp_abs_max=gap, rl__loss=0.1, reward__eval_mean=reward),
            ]
            if job.arm == "c":
                records[1]["rl/bounds_differ_share"] = 0.0
            text = "".join(json.dumps(r) + "\n" for r in records)
            (job.folder / "metrics.jsonl").write_text(text)
        (job.folder / "result.json").write_text(json.dumps(result))
    return study


def test_arms_over_seeds_by_hand(study: Study):
    summary = summarise(study)
    a, b, c = summary["arms"]
    assert a["final_reward"] == pytest.approx(0.6) and a["difference"] is None
    assert a["final_reward_half_width"] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert (a["done"], b["done"], b["collapsed"]) == (3, 2, 0)
    assert b["failed"] == ["seed 2: ValueError: no luck"]
    assert b["difference"] == pytest.approx(-0.05)  # (-0.1, 0): paired, seed 2 has no pair
    assert b["difference_half_width"] == pytest.approx(12.706 * 0.05)
    assert b["mismatch_max"] == 0.25 and a["mismatch_max"] == 0.0
    assert summary["not_distinguishable"] == [["b", "c"]]
    assert json.loads(to_json(summary))["arms"][2]["name"] == c["name"] == "c"


def test_the_table_says_what_was_found(study: Study):
    text = markdown(summarise(study))
    row = next(line for line in text.splitlines() if line.startswith("| b |"))
    assert "0.500 ± 1.271" in row and "-0.050 ± 0.635" in row and "2 (1 failed)" in row
    assert "Not distinguishable (the same bits in every metric): b, c." in text
    assert "Failed: c, seed 2: ValueError: no luck." in text


def test_files_and_page(study: Study, tmp_path: Path):
    written = write_results(study, tmp_path / "results")
    assert [p.name for p in written] == ["study.json", "study.md", "study.html"]
    page = written[2].read_text()
    assert "Not distinguishable" in page and page.count("<h1>") == 2
    assert page.index("minus baseline") < page.index("<h2>Training</h2>")
    assert "http://" not in page.replace("http://www.w3.org", "")
