"""The whole verifier: verdicts through processes, hostile answers, counts, threads."""

from __future__ import annotations

import random
import threading

import pytest

from samebit.tasks._stats import RewardStats
from samebit.tasks.grading.algebra import _numbers_only
from samebit.tasks.grading.math import MAX_ANSWER_CHARACTERS, MathGrader


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(workers=2)
    yield grader
    grader.close()


def grade(grader, pairs, **changes):
    stats = RewardStats()
    golds = [[gold] if isinstance(gold, str) else gold for gold, _ in pairs]
    return grader.grade(golds, [text for _, text in pairs], stats=stats, **changes), stats


RIGHT = [
    (r"m \geq \sqrt{2}", r"m \in [\sqrt{2}, +\infty)"),
    ("5", "x=5"),
    ("840", r"\boxed{840}"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}"),
    ("42", r"<answer>\boxed{42}</answer>"),
    ("42", r"\fbox{42}"),
    ("13", r"maybe \boxed{12}, but finally \boxed{13}"),
    ("1000", "so\n#### 1,000"),
    ("(x+1)^2", "$x^2+2x+1$"),
    (r"\sqrt{8}", r"2\sqrt 2"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1, 2", "2, 1"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    ("2000", r"2\times 10^3"),
    (r"x\in(0,1)", "(0,1)"),
    (r"2\sqrt{3}", r"2\sqrt{3} \text{ cm}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix}"),
    (["7", "x=8"], "8"),
]
WRONG = [
    ("13", r"maybe \boxed{13}, but finally \boxed{12}"),
    ("5", "The answer is 5"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("5", "5x"),
    ("5", "5 or 6"),
    ("x", "y"),
    ("1234", "12,34"),
    ("1/2", "1/0"),
    ("5", "5 m"),
    ("3", r"\boxed{ 1 2 }"),
    ("1234", "1,2,3,4"),
    ("5", r"\boxed{5"),
    (["7", "8"], "9"),
]


def test_table_of_right_and_wrong(grader):
    rewards, stats = grade(grader, RIGHT + WRONG)
    assert [p for p, r in zip(RIGHT + WRONG, rewards, strict=True) if r != (p in RIGHT)] == []
    assert stats["crashes"] == stats["timeouts"] == 0


def test_every_right_answer_grades_itself_as_right(grader):
    pairs = [(gold, gold) for gold, _ in RIGHT if isinstance(gold, str)]
    assert grade(grader, pairs)[0] == [1.0] * len(pairs)


HOSTILE = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{2^{2^{100}}}",
    r"\boxed{(10^9)!}",
    "(" * 200_000,
]


def test_pathological_answers_among_good_ones(grader):
    good = [(rf"\sqrt{{{i}}}+1", rf"\boxed{{1+\sqrt{{{i}}}}}") for i in range(2, 62)]
    pairs = good + [("5", text) for text in HOSTILE]
    random.Random(0).shuffle(pairs)
    rewards, stats = grade(grader, pairs)
    assert rewards == [float(pair in good) for pair in pairs]
    assert stats["timeouts"] + stats["memory"] == 3
    assert stats["too_long"] == 1
    assert stats["crashes"] == 0
    assert grade(grader, good)[0] == [1.0] * 60


def test_equal_hostile_answers_of_a_group_cost_one_time_out(grader):
    rewards, stats = grade(grader, [("5", HOSTILE[1])] * 64)
    assert rewards == [0.0] * 64
    assert stats["timeouts"] == 64


def test_a_megabyte_of_latex_is_counted_and_earns_nothing(grader):
    texts = [
        r"\boxed{" + r"\frac{1}{" * 100_000,
        r"\boxed{" + "x+" * 500_000 + "}",
        "9" * 5_000_000,
    ]
    rewards, stats = grade(grader, [("5", text) for text in texts])
    assert rewards == [0.0] * 3
    assert stats["too_long"] == 3
    assert grade(grader, [("5", r"\boxed{5}" + " " * MAX_ANSWER_CHARACTERS)])[0] == [1.0]


def test_code_in_an_answer_is_never_run(grader, tmp_path):
    marker = tmp_path / "marker"
    calls = [
        f"__import__('os').system('touch {marker}')",
        f"open('{marker}', 'w')",
        f"eval(\"open('{marker}', 'w')\")",
        f"(lambda: exec(\"open('{marker}', 'w')\"))()",
        "x.__class__.__base__.__subclasses__()",
        f"\\text{{open('{marker}', 'w')}}",
    ]
    texts = [shape.format(call) for call in calls for shape in ("{}", r"\boxed{{{}}}", "${}$")]
    rewards, _ = grade(grader, [(gold, text) for text in texts for gold in ("5", "x")])
    assert set(rewards) == {0.0}
    assert not marker.exists()


def test_the_stand_in_for_eval_builds_literals_only():
    assert _numbers_only("Integer (5 )", {}, {}) == 5
    assert str(_numbers_only("Symbol ('x_1' )", {}, {})) == "x_1"
    for code in ("__import__('os')", "Integer (5 )+1", "Symbol ('x').func", "Integer (int('5'))"):
        with pytest.raises(ValueError, match="only number and symbol literals"):
            _numbers_only(code, {}, {})


def test_verdicts_are_the_same_in_a_thread(grader):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(grade(grader, RIGHT[:8])[0]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0] * 8] * 8


def test_strict_compares_text(grader):
    rewards, _ = grade(grader, [("1/2", "0.5"), ("1/2", " 1/2 ")], strict=True)
    assert rewards == [0.0, 1.0]


def test_any_text_gets_a_verdict(grader):
    """A fixed pseudo-random crop of 400 LaTeX-like texts: each graded 0 or 1, none left open."""
    source = random.Random(5)
    pieces = [*"0123456789+-*/^_=(){}[],.<>!|&%$ xyn\\", r"\frac{", r"\sqrt", r"\boxed{", r"\infty"]
    pieces += [r"\text{", r"\left(", r"\cup", r"\in", r"\pi", r"\begin{", r"\times", "\ud800", "−"]
    texts = ["".join(source.choices(pieces, k=source.randint(0, 25))) for _ in range(400)]
    rewards, stats = grade(grader, [(source.choice(["5", "x", r"\{1,2\}"]), t) for t in texts])
    assert set(rewards) <= {0.0, 1.0}, stats.metrics()
