"""The bench's bookkeeping, without a GPU: rows, records that replace one another, targets, refusals."""

from __future__ import annotations

import fnmatch
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from samebit.bench import api, records, targets
from samebit.bench.api import Case, Target
from samebit.cli import main

KERNELS = ("attention", "backward", "gemm", "head", "pointwise")


def suite(**fields: Any) -> Any:
    return SimpleNamespace(GROUP="kernels", ABOUT="", **fields)


@pytest.mark.parametrize("name", api.suite_names())
def test_a_suite_lists_rows_with_names_of_their_own_and_needs_no_triton_for_it(name: str):
    module = api.load_suite(name)
    assert module.GROUP in api.GROUPS and module.ABOUT
    names = [case.name for case in module.cases()]
    assert names and len(set(names)) == len(names)
    for case in module.cases():
        assert sum(way is not None for way in (case.prepare, case.measure, case.derive)) == 1


def test_row_names_are_unique_over_all_suites():
    names = [c.name for n in api.suite_names() for c in api.load_suite(n).cases()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", api.suite_names())
def test_every_target_is_about_rows_that_exist(name: str):
    rows = [case.name for case in api.load_suite(name).cases()]
    for target in getattr(api.load_suite(name), "TARGETS", ()):
        assert target.suite == name
        for pattern in target.rows.split("|"):
            known = any(fnmatch.fnmatchcase(row, pattern) for row in rows)
            # a pattern over sizes may name one that an operator is not measured at
            assert known or "*" in pattern, (target.what, pattern)
        assert not target.over or target.over in rows
        assert targets.evaluate(target, {row: {target.field: 1.0} for row in rows}).rows


def test_a_group_or_one_suite_is_run_and_others_are_refused_by_name():
    assert set(api.suites_of("kernels")) >= set(KERNELS)
    assert list(api.suites_of("gemm")) == ["gemm"]
    with pytest.raises(
        ValueError, match=r"no bench 'gem'; groups: kernels, rollout, step; suites: .*gemm"
    ):
        api.suites_of("gem")


def test_rows_are_chosen_by_part_of_a_name_or_by_pattern():
    cases = [Case("fp8/o/16"), Case("fp8/o/128"), Case("int8/o/16")]
    found = api.select(suite(cases=lambda: cases), ["int8", "*/o/128"])
    assert [c.name for c in found] == ["fp8/o/128", "int8/o/16"]
    assert api.select(suite(cases=lambda: cases), []) == cases
    with pytest.raises(ValueError, match="--rows bf16: no row of a matches"):
        list(api.every_case({"a": suite(cases=lambda: cases)}, ["bf16"]))


def test_only_rows_that_targets_are_about():
    aims = (Target("a", "s", "x/*|y", "ms", 1, 2), Target("b", "s", "z", "ms", 1, 2, over="w"))
    module = suite(cases=lambda: [Case(n) for n in ("x/1", "xx", "y", "z", "w", "v")], TARGETS=aims)
    names = [case.name for _, case in api.every_case({"s": module}, [], only_aimed=True)]
    assert names == ["x/1", "y", "z", "w"]


def test_time_runs_out_between_rows_and_a_failing_row_stops_no_other():
    now = [0.0]

    def measure(case: Case) -> dict[str, Any]:
        now[0] += 4.0
        if case.name == "b":
            raise RuntimeError("out\nof resources")
        return {"us": now[0]}

    kept: list[tuple[str, float]] = []
    done = api.run_cases(
        [Case(n) for n in "abcd"], measure, 10.0, lambda c, r: kept.append((c.name, r["us"])),
        clock=lambda: now[0],
    )  # fmt: skip
    assert kept == [("a", 4.0), ("c", 12.0)]
    assert done.measured == ["a", "c"] and done.left == ["d"]
    assert done.failed == {"b": "RuntimeError: out of resources"}


def test_a_record_replaces_its_row_and_leaves_the_others(tmp_path):
    path = tmp_path / "deep" / "kernels_gemm.json"
    for row, us in (("b", 2.0), ("a", 1.0), ("b", 3.0)):
        records.add(path, {"row": row, "us": us})
    assert records.read(path) == {"a": {"row": "a", "us": 1.0}, "b": {"row": "b", "us": 3.0}}
    assert [r["row"] for r in json.loads(path.read_text())["rows"]] == ["a", "b"]
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_another_kind_is_refused_by_name(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"rows": [{"operator": "norm"}]}')
    with pytest.raises(ValueError, match=r"x\.json holds no bench records \(KeyError\)"):
        records.add(path, {"row": "a"})


def test_numbers_are_kept_at_five_digits():
    assert records.rounded({"us": 123.456789, "rows": 7, "s": "x"}) == {
        "us": 123.46,
        "rows": 7,
        "s": "x",
    }


def test_targets_by_hand():
    held = {"a/1": {"ratio": 2.0}, "a/2": {"ratio": 0.5}, "a/3": {"ratio": 1.0}, "b": {"other": 1}}
    line = targets.evaluate(Target("a", "s", "a/1|a/2", "ratio", 0.9, 1.1), held)
    assert line.value == pytest.approx(1.0) and line.verdict == "must"
    assert (line.rows, line.worst, line.worst_value) == (2, "a/2", 0.5)
    least = targets.evaluate(Target("a", "s", "a/*", "ratio", 0.9, 0.95, least=0.6), held)
    assert least.value == pytest.approx(1.0) and least.verdict == "missed"
    worst = targets.evaluate(Target("a", "s", "a/*", "ratio", 0.5, 2.0, reduce="worst"), held)
    assert worst.value == 0.5 and worst.verdict == "must"
    time = Target("a", "s", "a/*", "ratio", 2.0, 1.0, more=False, reduce="worst")
    assert targets.evaluate(time, held).verdict == "must"
    some = targets.evaluate(Target("a", "s", "a/1|a/9", "ratio", 1, 2), held, ["a/1", "a/9"])
    assert some.verdict == "so far aim" and some.expected == 2
    none = targets.evaluate(Target("a", "s", "c", "ratio", 1, 2), held)
    assert none.value is None and none.verdict == "not measured"
    text = targets.table([line, none])
    assert "1.00x" in text and "not measured" in text and "a/2 0.50x" in text


def test_two_arms_are_compared_only_where_their_roofline_shares_are_near():
    held = {
        "slow": {"ms": 9.0, "share": 0.62},
        "fast": {"ms": 6.0, "share": 0.60},
        "odd": {"ms": 3.0, "share": 0.5},
    }
    ratio = targets.evaluate(
        Target("r", "s", "fast", "ms", 1.4, 1.7, over="slow", near="share"), held
    )
    assert ratio.value == pytest.approx(1.5) and ratio.verdict == "must"
    odd = targets.evaluate(Target("r", "s", "odd", "ms", 1.4, 1.7, over="slow", near="share"), held)
    assert odd.value == pytest.approx(3.0) and odd.verdict == "not comparable"
    assert targets.evaluate(Target("r", "s", "fast", "ms", 1, 2, over="gone"), held).value is None
    assert "12 points of roofline apart, nearer is the second" in targets.table([odd])
    blind = targets.evaluate(Target("r", "s", "fast", "ms", 1, 2, over="slow", near="other"), held)
    assert blind.verdict == "not comparable" and "not recorded" in targets.table([blind])


def test_the_same_rule_holds_for_rows_that_are_ratios_already():
    held = {"a/1": {"over": 1.4, "points": -0.05}, "a/2": {"over": 1.6, "points": 0.02}}
    near = Target("r", "s", "a/*", "over", 1.3, 1.5, reduce="worst", near="points")
    assert targets.evaluate(near, held).verdict == "must"
    held["a/2"]["points"] = 0.051
    far = targets.evaluate(near, held)
    assert far.verdict == "not comparable" and far.apart == pytest.approx(0.051)
    assert "nearer is the first" in targets.table([far])
    del held["a/1"]["points"]
    assert targets.evaluate(near, held).verdict == "not comparable"


def test_quantise_and_fused_operators_have_one_geometric_mean_before_their_own_rows():
    first, *each = api.load_suite("pointwise").TARGETS
    names = {c.name for c in api.load_suite("pointwise").cases() if c.name.endswith("/8B/8192")}
    marks = ("quantize", "rescale", "rows.int8", "+", "add_")
    meant = sorted(name for name in names if any(mark in name for mark in marks))
    assert sorted(first.rows.split("|")) == meant and len(meant) == 18
    assert (first.must, first.aim, first.reduce) == (0.85, 0.95, "geomean")
    # one poor operator is in the mean, and has its own verdict
    poor = "requantize_tokens/8B/8192"
    held = {name: {"share_of_copy": 0.5 if name == poor else 0.9} for name in names}
    line = targets.evaluate(first, held, names)
    assert line.value == pytest.approx(0.9 * (5 / 9) ** (1 / 18)) and line.verdict == "must"
    assert (line.rows, line.worst) == (18, poor)
    verdicts = {t.rows: targets.evaluate(t, held, names).verdict for t in each}
    assert len(verdicts) == 15 and verdicts[poor] == "missed"
    assert [v for row, v in verdicts.items() if row != poor] == ["must"] * 14


@pytest.mark.parametrize("suite", ["rollout", "step"])
def test_every_ratio_of_two_recipes_falls_under_the_rule(suite: str):
    """A share of memory is no time, and has no roofline."""
    for target in api.load_suite(suite).TARGETS:
        ratio = " over " in target.what and "vLLM" not in target.what
        assert bool(target.near) == ratio, target.what


def test_digits_are_added_where_fewer_would_hide_the_verdict():
    assert targets.number(0.85075, "x", (0.85, 0.7)) == "0.851x"
    assert targets.number(1.4969, "x", (1.5, 1.7)) == "1.497x"
    assert targets.number(0.85, "x", (0.85, 0.7)) == "0.85x"
    assert targets.number(0.5498, "%", (0.55,)) == "54.98 %"
    assert targets.number(600.4, "TFLOP/s", (600.0,)) == "600.4 TFLOP/s"


def test_the_command_lists_and_prints_its_table_anywhere(capsys: Any, tmp_path):
    assert main(["bench", "gemm", "--list", "--rows", "int8/8B.o"]) == 0
    listed = capsys.readouterr().out.split("\n")
    assert listed[0].split() == ["gemm", "int8/8B.o/16"]
    row = {"row": "backward/8B/1x8192", "tflops": 400.0}
    records.add(tmp_path / "kernels_attention.json", row)
    assert main(["bench", "attention", "--table", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out.split("\n")[2]
    assert first.startswith("attention backward") and "400 TFLOP/s" in first and " must " in first


def test_a_table_without_records_names_the_folder(capsys: Any, tmp_path):
    assert main(["bench", "step", "--table", "--out", str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'} holds none of step.json" in capsys.readouterr().err
    records.add(tmp_path / "step.json", {"row": "x"})
    assert main(["bench", "step", "--table", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"records: {tmp_path}" in said and "not measured" in said and "so far:" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_without_a_gpu_it_says_so(capsys: Any):
    assert main(["bench", "kernels"]) == 2
    assert "measures a Hopper GPU, and here torch sees no CUDA device" in capsys.readouterr().err
    assert main(["bench"]) == 2
    assert main(["bench", "nothing"]) == 2


def test_a_suite_is_one_file(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path):
    """The whole way from a new file to a record and its table, with the card replaced."""
    from samebit.cli import bench

    new = ModuleType("samebit.bench.suites.toy")
    new.GROUP, new.ABOUT = "step", "a toy"  # type: ignore[attr-defined]
    new.cases = lambda: iter([Case("toy/1", measure=lambda: {"ms": 2.0})])  # type: ignore[attr-defined]
    new.TARGETS = (Target("toy", "toy", "toy/1", "ms", 3.0, 1.0, "ms", more=False),)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "samebit.bench.suites.toy", new)
    monkeypatch.setattr(api, "suite_names", lambda: ["toy"])
    monkeypatch.setattr(bench, "_require_gpu", lambda name: None)
    monkeypatch.setattr(records, "provenance", lambda commit: {"commit": commit, "card": "none"})
    assert main(["bench", "step", "--out", str(tmp_path), "--commit", "abc"]) == 0
    held = records.read(tmp_path / "step_toy.json")
    assert held == {"toy/1": {"row": "toy/1", "ms": 2.0, "commit": "abc", "card": "none"}}
    assert "must (1 of 1 rows)" in capsys.readouterr().out
