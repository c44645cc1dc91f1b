"""Answer extraction: boxes, tags, hashes; the last complete one; linear time on hostile text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.tasks.grading.extract import extract_answer, last_box

BOXES = [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\fbox{42}", "42"),
    (r"\boxed {7}", "7"),
    (r"maybe \boxed{12}, but finally \boxed{13}", "13"),
    (r"\boxed{12} and then \boxed{13", "12"),
    (r"\boxed{\fbox{1} + 2}", r"\fbox{1} + 2"),
    (r"\boxed{a \} b}", r"a \} b"),
    (r"} \boxed{5} {", "5"),
    (r"\\\boxed{5}", "5"),
    (r"\boxed{}", ""),
    (r"\boxed{5", None),
    ("no box", None),
]


@pytest.mark.parametrize(("text", "expected"), BOXES)
def test_the_box_that_closes_last_is_the_answer(text, expected):
    assert last_box(text) == expected


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("whole", " 7\n", "7"),
        ("whole", "<think>8</think> 7", "7"),
        ("tag", "<answer>1</answer> <answer> 2 </answer>", "2"),
        ("tag", "<answer>1</answer> <answer>2", "1"),
        ("tag", "</answer>", None),
        ("hash", "so\n#### 1,000\nbye", "1,000"),
        ("hash", "#### 1 #### 2", "2"),
        ("hash", "no mark", None),
        ("boxed", r"\boxed{1}</think> 7", None),
        ("auto", r"<answer>\boxed{42}</answer>", "42"),
        ("auto", r"\boxed{1} <answer>2</answer>", "2"),
        ("auto", r"\boxed{1} #### 2", "1"),
        ("auto", "work #### 2", "2"),
        ("auto", " just 2 ", "just 2"),
    ],
)
def test_rules(rule, text, expected):
    assert extract_answer(text, rule) == expected


@given(st.text(alphabet="\\boxedf{}<answer>/# \n17", max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_text_gives_a_piece_of_itself(text):
    for rule in ("whole", "tag", "hash", "boxed", "auto"):
        found = extract_answer(text, rule)
        assert found is None or (found in text and found == found.strip())


@given(st.lists(st.text(alphabet="ab{}\\", max_size=20), max_size=5), st.integers(0, 999))
@settings(max_examples=300, deadline=None)
def test_a_balanced_box_after_anything_without_boxes_is_found(pieces, value):
    before = "".join(pieces).rstrip("\\")
    assert last_box(before + f"\\boxed{{{value}}}") == str(value)


@pytest.mark.parametrize("unit", ["(", "{", r"\boxed{", "<answer>", "####", "</think>", "\\boxed "])
def test_a_megabyte_of_one_piece_is_read_in_one_pass(unit):
    # Anything worse than linear would not come back from this within the life of the suite.
    text = unit * (1_000_000 // len(unit))
    for rule in ("tag", "hash", "boxed", "auto"):
        extract_answer(text, rule)
