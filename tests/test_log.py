"""Metrics on disk: valid JSON always, torn lines repaired, resumed runs without doubles."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samebit.clock import Clock
from samebit.log import JsonLines, MetricsLog, format_metric, read_json_lines, step_line
from samebit.reporter import Reporter, format_seconds, last_line
from samebit.types import Group, Prompt, Sample


def test_numbers_json_lacks_are_strings_on_disk_and_floats_when_read(tmp_path: Path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"step": 1, "a/x": math.nan, "a/y": -math.inf, "a/z": 0.1, "text": "NaN"})
    lines.close()
    raw = (tmp_path / "m.jsonl").read_text()
    strict = json.loads(raw, parse_constant=lambda name: pytest.fail(f"bare {name} is no JSON"))
    assert strict == {"step": 1, "a/x": "NaN", "a/y": "-Infinity", "a/z": 0.1, "text": "NaN"}
    (read,) = read_json_lines(tmp_path / "m.jsonl")
    assert math.isnan(read["a/x"]) and read["a/y"] == -math.inf and read["text"] == "NaN"


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_line_cut_anywhere_is_dropped_and_the_file_goes_on(tmp_path: Path, cut: int):
    path = tmp_path / "m.jsonl"
    whole = b'{"step": 1, "a/x": 10}\n{"step": 2, "a/x": 20}\n'
    path.write_bytes(whole[:-cut])
    lines = JsonLines(path)
    lines.append({"step": 3})
    lines.close()
    steps = [record["step"] for record in read_json_lines(path)]
    # without its newline alone the object is whole
    assert steps == ([1, 2, 3] if cut == 1 else [1, 3])
    assert path.read_bytes().endswith(b"\n")


def test_a_damaged_line_in_the_middle_is_an_error_not_a_loss(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        JsonLines(path)
    assert path.read_text().count("\n") == 3


def test_resuming_drops_the_steps_after_the_checkpoint(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(6)) + '{"step": 6')
    lines = JsonLines(path, keep_through=3)
    lines.append({"step": 4, "again": True})
    lines.close()
    records = read_json_lines(path)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4] and records[-1]["again"]


def _group(name: str, rewards: tuple[float | None, ...]) -> Group:
    prompt = Prompt(id=name, ids=(1,), text=f"{name}?", columns={"answer": 4})
    none = np.zeros(1, np.float32)
    samples = tuple(
        Sample(name, i, (5,), none, none.astype(np.int32), "stop", text=f"{name}{i}")
        for i in range(len(rewards))
    )
    return Group(prompt, samples, rewards)


def test_metrics_log_writes_and_resumes(tmp_path: Path):
    log = MetricsLog(tmp_path)
    log.write(0, {"reward/eval_mean": 0.5})
    for step in (1, 2, 3):
        log.samples(step, [_group("a", (1.0, None)), _group("b", (0.0,))], 2)
        log.write(step, {"reward/mean": step / 10, "mismatch/logp_abs_max": 0.0})
    log.close()
    log = MetricsLog(tmp_path, 2)
    log.write(3, {"reward/mean": 0.9})
    log.close()
    records = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(r["step"], r.get("reward/mean")) for r in records] == [
        (0, None),
        (1, 0.1),
        (2, 0.2),
        (3, 0.9),
    ]
    samples = read_json_lines(tmp_path / "samples.jsonl")
    assert [(s["step"], s["completion"], s["reward"]) for s in samples] == [
        (1, "a0", 1.0),
        (1, "b0", 0.0),
        (2, "a0", 1.0),
        (2, "b0", 0.0),
    ]
    assert samples[0]["prompt"] == "a?" and samples[0]["answer"] == "4"
    assert list((tmp_path / "tb").glob("events.*"))
    MetricsLog(tmp_path, 0).close()
    assert read_json_lines(tmp_path / "metrics.jsonl") == []


def test_zero_is_shown_as_zero_only_when_exact():
    assert format_metric(0.0) == "0" and format_metric(1e-12) == "1e-12"
    assert step_line(3, 0, {"rl/clip_share_positive": 0.051}) == "step 3  clipped 5.1%"
    phases = {"time/step_s": 10.0, "time/rollout_s": 6.1, "time/backward_s": 0.9}
    assert step_line(3, 0, phases) == "step 3  s 10.0 (rollout 61%)"
    compiling = {"time/compile_s": 4.2}
    assert step_line(3, 0, phases | compiling) == "step 3  s 10.0 (compile 42% rollout 61%)"
    near = {"perf/roofline_update": 0.701, "perf/roofline_rollout": 0.42}
    assert step_line(3, 0, phases | near).endswith(
        " (rollout 61%; roofline rollout 42% update 70%)"
    )


def test_a_clock_knows_what_compiled_within_its_step(monkeypatch: pytest.MonkeyPatch):
    seconds = iter([5.0, 7.5])
    launch: Any = SimpleNamespace(is_known=lambda: True, first_launches_s=lambda: next(seconds))
    monkeypatch.setitem(sys.modules, "samebit.kernels.launch", launch)
    assert Clock().metrics()["time/compile_s"] == 2.5
    launch.is_known = lambda: False  # a machine without the card
    assert "time/compile_s" not in Clock().metrics()
    monkeypatch.delitem(sys.modules, "samebit.kernels.launch")
    clock = Clock()
    launch.is_known, launch.first_launches_s = lambda: True, lambda: 3.0
    monkeypatch.setitem(
        sys.modules, "samebit.kernels.launch", launch
    )  # the first launch imports it
    assert clock.metrics()["time/compile_s"] == 3.0


def test_the_last_line_says_exact_only_when_it_is():
    exact = {"mismatch/logp_abs_max": 0.0, "mismatch/logp_abs_mean": 0.0}
    assert "max |dlogp| 0  mean |dlogp| 0  (exactly 0" in last_line(exact)
    assert "not the same bits" in last_line({"mismatch/logp_abs_max": 1e-7})
    nowhere = {"mismatch/held_tokens_differing": 0.0, "mismatch/held_logp_abs_max": 0.0}
    assert "exactly 0" in last_line(exact | nowhere)
    for wrong in (
        {"mismatch/tokens_differing": 2.0},
        {"mismatch/tokens_differing_share": 0.1},
        {"mismatch/held_tokens_differing": 1.0},
        {"mismatch/held_logp_abs_max": 1e-7},
        {"mismatch/held_logp_abs_max": math.nan},
    ):
        assert "not the same bits" in last_line(exact | nowhere | wrong), wrong
        assert "not the same bits" in last_line(nowhere | wrong), wrong
    assert last_line({"reward/mean": 1.0}) == "mismatch: not measured"


def test_the_last_line_calls_a_share_a_share():
    mixed = {"mismatch/logp_abs_max": 0.4, "mismatch/tokens_differing_share": 1.0}
    assert "share of tokens differing 1 " in last_line(mixed)


def test_engine_progress_counts_to_the_end(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("samebit.reporter.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    reporter = Reporter(stream)
    update = reporter.progress("rollout")
    update(0, 4, 8)
    now[0] = 12.0
    update(1, 4, 30)
    update(4, 4, 60)
    reporter.step(1, 2, {"reward/mean": 0.5})
    assert stream.getvalue().splitlines() == [
        "rollout: 1/4, 12s elapsed, about 36s left",
        "step 1/2  reward 0.500",
    ]


def test_a_step_shows_where_its_time_went_and_how_much_is_left():
    stream = io.StringIO()
    reporter = Reporter(stream)
    values = {
        "time/step_s": 8.0,
        "time/rollout_s": 5.0,
        "time/backward_s": 2.0,
        "time/reward_s": 0.1,
    }
    reporter.step(1, 11, values | {"perf/mfu": 0.412})
    reporter.step(2, 11, {"time/step_s": 4.0, "time/eval_s": 2.0})
    assert stream.getvalue().splitlines() == [
        "step  1/11  mfu 41.2%  s 8.0 (rollout 62% backward 25%)  left 1m20s",
        "step  2/11  s 4.0  left 1m03s",  # the mean of 8 and 6 seconds, nine times
    ]


def test_progress_off_a_terminal_is_plain_lines(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("samebit.reporter.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    reporter = Reporter(stream)
    with reporter.task("sampling", 10) as advance:
        advance(1)
        now[0] = 20.0
        advance(3)
    reporter.note("done")
    assert stream.getvalue() == "sampling: 4/10, 20s elapsed, about 30s left\ndone\n"
    quiet = Reporter(stream, quiet=True)
    with quiet.task("x", 1) as advance:
        advance(1)
    quiet.note("never")
    assert "never" not in stream.getvalue()
    assert [format_seconds(s) for s in (42, 185, 7620)] == ["42s", "3m05s", "2h07m"]


@pytest.mark.parametrize(
    "text",
    ["a\u2028b", "a\u2029b", "a\u0085b", "\U0001f600", "half \ud83d of a pair", "a\r\nb\x00"],
)
def test_any_text_is_one_record_and_comes_back(tmp_path: Path, text: str):
    file = JsonLines(tmp_path / "a.jsonl")
    file.append({"step": 1, "completion": text})
    file.append({"step": 2, "completion": "next"})
    file.close()
    data = (tmp_path / "a.jsonl").read_bytes()
    assert data.count(b"\n") == 2
    data.decode("utf-8")
    assert [r["completion"] for r in read_json_lines(tmp_path / "a.jsonl")] == [text, "next"]
