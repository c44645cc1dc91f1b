"""How many answers a second the verifier grades, by kind of answer.

    python bench/grading.py [--workers N] [--out FILE]

Each case grades groups of 8 completions to one question, a quarter of them right, through the same
call the trainer makes. Timed after one warm-up call; the median of five runs is reported, by the
wall clock and as processor time per grading (parent and workers), which says what idle cores would
do where the machine is shared. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from samebit.tasks._stats import RewardStats
from samebit.tasks.grading.math import MathGrader

GROUP = 8
RUNS = 5


def integers(source: random.Random, run: int, i: int) -> tuple[str, list[str]]:
    """Whole numbers, boxed, as grade-school problems have them."""
    gold = source.randint(-5000, 50000)
    wrong = [str(gold + source.randint(1, 50)) for _ in range(6)]
    return str(gold), [f"so \\boxed{{{answer}}}" for answer in [str(gold), f"{gold:,}", *wrong]]


def fractions(source: random.Random, run: int, i: int) -> tuple[str, list[str]]:
    """Fractions and decimals."""
    top, bottom = source.randint(1, 900), source.choice([2, 4, 5, 7, 8, 9])
    wrong = [f"\\frac{{{top + k}}}{{{bottom}}}" for k in range(1, 7)]
    answers = [f"\\frac{{{top}}}{{{bottom}}}", f"{2 * top}/{2 * bottom}", *wrong]
    return f"\\frac{{{top}}}{{{bottom}}}", [f"\\boxed{{{answer}}}" for answer in answers]


def algebra(source: random.Random, run: int, i: int) -> tuple[str, list[str]]:
    """Roots, polynomials, intervals and sets, all answers distinct: three in four need algebra."""
    a, b = 1000 * run + i + 2, source.randint(2, 60)
    shapes = [
        (f"{a}+\\sqrt{{{b}}}", "\\sqrt{{{1}}}+{0}"),
        (f"x^2+{a}x+{b}", "{1}+x^2+{0}x"),
        (f"[{b},{a + b}]", "\\left[{1},{0}+{1}\\right]"),
        (f"\\{{{a},{b}\\}}", "\\{{{1},{0}\\}}"),
    ]
    gold, shape = shapes[i % len(shapes)]
    answers = [gold, shape.format(a, b), *(shape.format(a + k, b + 1) for k in range(1, 7))]
    return gold, [f"\\boxed{{{answer}}}" for answer in answers]


def words(source: random.Random, run: int, i: int) -> tuple[str, list[str]]:
    """Answers without any mathematics, and completions that ramble."""
    gold = source.choice(["Tuesday", "B", "no solution"])
    return gold, [gold, gold.lower(), "I think it is " + gold, "A", "yes", "42", "no", "Monday"]


def mixed(source: random.Random, run: int, i: int) -> tuple[str, list[str]]:
    """The typical mix: 60 % whole numbers, 20 % fractions, 15 % algebra, 5 % words."""
    kinds = [integers] * 12 + [fractions] * 4 + [algebra] * 3 + [words]
    return kinds[i % len(kinds)](source, run, i // len(kinds) + 4 * (i % len(kinds)))


CASES: dict[str, tuple[Callable, int]] = {
    "integers": (integers, 500),
    "fractions": (fractions, 500),
    "words": (words, 500),
    "mixed": (mixed, 160),
    "algebra": (algebra, 40),
}


def measure(case: Callable, groups: int, workers: int) -> dict[str, float]:
    """Return the median rate and its spread over runs with fresh answers each."""
    grader = MathGrader(workers=workers)
    rates, costs = [], []
    for run in range(RUNS + 1):
        source = random.Random(run)
        questions = [case(source, run, i) for i in range(groups)]
        golds = [[gold] for gold, answers in questions for _ in answers]
        completions = [answer for _, answers in questions for answer in answers]
        assert len(completions) == GROUP * groups
        start, cpu_start = time.perf_counter(), cpu_seconds(grader)
        grader.grade(golds, completions, stats=RewardStats())
        if run > 0:
            rates.append(len(completions) / (time.perf_counter() - start))
            costs.append((cpu_seconds(grader) - cpu_start) / len(completions))
    grader.close()
    return {
        "gradings_per_s": round(statistics.median(rates), 1),
        "slowest_run": round(min(rates), 1),
        "fastest_run": round(max(rates), 1),
        "cpu_ms_per_grading": round(1000 * statistics.median(costs), 4),
        "gradings_per_run": GROUP * groups,
    }


def cpu_seconds(grader: MathGrader) -> float:
    """Return the processor time used so far by this process and the grader's workers."""
    ticks = 0
    for pid in grader.process_ids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """Return the processor's name as the system reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Run every case, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = {}
    for name, (case, groups) in CASES.items():
        results[name] = measure(case, groups, arguments.workers)
        rate, cost = results[name]["gradings_per_s"], results[name]["cpu_ms_per_grading"]
        print(f"{name:10} {rate:>10,.0f} gradings/s  {cost:8.3f} ms of processor time each")
    record = {
        "question": "gradings a second",
        "processor": processor(),
        "cores": os.cpu_count(),
        "workers": arguments.workers,
        "load_average_before": round(load, 2),
        "python": platform.python_version(),
        "math_verify": version("math-verify"),
        "results": results,
    }
    line = json.dumps(record)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(line)


if __name__ == "__main__":
    main()
