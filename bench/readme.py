"""Write the README's tables of measurements on a GPU from the records they are about.

    python bench/readme.py            rewrites README.md between its `<!-- records: NAME -->` markers

A line whose records are missing is left out. `tests/test_readme.py` fails where the README says something else
than the records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
H200 = ROOT / "bench" / "results" / "h200"
STUDIES = ROOT / "docs" / "results"

Rows = Mapping[str, Mapping[str, Any]]

MODELS = {"qwen3-8b": "Qwen3-8B", "llama-3.1-8b": "Llama-3.1-8B", "qwen3-0.6b": "Qwen3-0.6B"}
LENGTHS = (2048, 8192)
APART = "\N{DAGGER}"


def read(path: Path) -> dict[str, Any]:
    """A file of records; {} where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rows(name: str) -> Rows:
    """Records of a suite by row."""
    return {row["row"]: row for row in read(H200 / f"{name}.json").get("rows", ())}


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    body = [head, ["---"] * len(head), *map(list, lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


def mean(values: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def together(values: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = values
    return f"{', '.join(first)} and {last}" if first else last


def gemm(sizes: Iterable[int] = (16, 128, 512, 8192, 32768)) -> str:
    """Ratios to cuBLAS BF16 by rows of the activations: the mean over the four linears, the lowest."""
    records = rows("kernels_gemm")
    operators = {
        "fp8_block": "FP8 block",
        "fp8_row": "FP8 row",
        "int8": "INT8",
        "bf16": "BF16, same bits",
    }
    lines = []
    for tokens in sizes:
        line = [f"{tokens:,}"]
        for operator in operators:
            names = [f"{operator}/8B.{shape}/{tokens}" for shape in ("qkv", "o", "gate_up", "down")]
            ratios = [records[n]["ratio"] for n in names if n in records]
            line.append(f"{mean(ratios):.2f} ({min(ratios):.2f})" if len(ratios) == 4 else "")
        if any(line[1:]):
            lines.append(line)
    return table(["tokens", *operators.values()], lines)


def ratio(records: Rows, row: str, value: float) -> str:
    """`1.33x`, marked where the record says that the arms are no even ones (`bench.api.comparable`)."""
    assert row in records, f"no {row}: samebit bench step --rows training/,integrated/"
    return f"{value:.2f}x" + ("" if records[row]["comparable"] == "yes" else APART)


def caveat(records: Rows) -> str:
    """What the mark means, and which way it moves the ratios that have it; empty where none has."""
    points = [r["roofline_points"] for r in records.values() if r.get("comparable", "yes") != "yes"]
    if not points:
        return ""
    nearer = " In each of them `bf16-fast` is the nearer one: even arms would give more."
    return (
        f"{APART} Not comparable by our own rule: the two arms are more than five points of their "
        f"rooflines apart.{nearer if all(p < 0 for p in points) else ''}"
    )


def phases(records: Rows) -> Iterable[list[str]]:
    for model, shown in MODELS.items():
        for length in LENGTHS:
            r = records.get(f"micro/{model}/{length}/once")
            if r is None:
                continue
            recipes = ("fp8", "fp8-kv", "bf16")
            over = [
                f"`{n}` "
                + ratio(records, f"training/{model}/{length}/{n}", r[f"{n}_over_bf16-fast"])
                for n in recipes
            ]
            what = f"training phase, 256 answers of {length:,} tokens, {shown}, over `bf16-fast`"
            torch = f"`bf16-fast` {r['bf16-fast_over_torch']:.2f}x of plain torch"
            yield [what, f"{', '.join(over)}; {torch}", "`step.json`"]


def decodes(records: Rows) -> Iterable[list[str]]:
    for size in ("128x384", "256x384", "256x1792", "32x1200"):
        times = {
            recipe: records[f"decode/qwen3-8b/{recipe}/{size}"]["ms"]
            for recipe in ("fp8-kv", "fp8", "bf16", "bf16-fast")
            if f"decode/qwen3-8b/{recipe}/{size}" in records
        }
        if len(times) < 2:
            continue
        sequences, context = size.split("x")
        what = f"decode step, {sequences} sequences x {int(context):,} tokens, Qwen3-8B, ms"
        yield [what, ", ".join(f"`{r}` {ms:.2f}" for r, ms in times.items()), "`rollout.json`"]


def slower(records: Rows) -> Iterable[list[str]]:
    """Where launches are the time, and FP8, with its quantisers, has more of them."""
    recipes = ("fp8-kv", "bf16-fast")
    kinds = (
        (
            "one prompt of {} tokens, one forward launched kernel by kernel, Qwen3-8B, ms",
            "prefill/qwen3-8b/{}/1x{}",
            (100, 1000),
        ),
        (
            "decode step, {} sequences x 384 tokens, SmolLM2-135M, ms",
            "decode/smollm2-135m/{}/{}x384",
            (1, 64, 256, 1024),
        ),
    )
    for what, row, sizes in kinds:
        names = {recipe: [row.format(recipe, size) for size in sizes] for recipe in recipes}
        if any(name not in records for found in names.values() for name in found):
            continue
        times = {n: [f"{records[name]['ms']:.2f}" for name in names[n]] for n in recipes}
        shown = what.format(together(f"{size:,}" for size in sizes))
        result = "; ".join(f"`{recipe}` {together(found)}" for recipe, found in times.items())
        yield [shown, result, "`rollout.json`"]


def as_run(records: Rows, row: str, recipes: Iterable[str]) -> dict[str, float]:
    """Seconds of a whole step by recipe, of those that were run."""
    found = {recipe: records.get(f"{row}/{recipe}", {}).get("step_s") for recipe in recipes}
    return {recipe: seconds for recipe, seconds in found.items() if seconds}


def steps(records: Rows) -> Iterable[list[str]]:
    recipes = ("fp8-kv", "fp8", "bf16", "bf16-fast")
    for model, shown in MODELS.items():
        for length in LENGTHS:
            names = [f"integrated/{model}/{length}/{r}" for r in recipes]
            over = [(n, records.get(n, {}).get("over_bf16-fast")) for n in names]
            ratios = [f"`{n.rsplit('/', 1)[1]}` {ratio(records, n, x)}" for n, x in over if x]
            what = f"of 256 answers of {length:,} tokens, {shown}"
            if ratios:
                yield [
                    f"whole step {what}, made of the above, over `bf16-fast`",
                    ", ".join(ratios),
                    "`step.json`",
                ]
            if run := as_run(records, f"step/{model}/256x{length}", recipes):
                seconds = ", ".join(f"`{r}` {s:.1f}" for r, s in run.items())
                yield [f"whole step {what}, as run, s", seconds, "`step.json`"]
    run = as_run(records, "step/smollm2-135m/64x256", recipes)
    if "bf16-fast" in run and len(run) > 1:  # beside bf16-fast or not at all
        what = "whole step of 64 answers of 256 tokens, prompt included, SmolLM2-135M, as run, ms"
        yield [what, ", ".join(f"`{r}` {1e3 * s:.0f}" for r, s in run.items()), "`step.json`"]


def models() -> str:
    """Whole models and what they are made of."""
    gradient = [r["ratio"] for n, r in rows("kernels_backward").items() if n.startswith("fp8/8B.")]
    lines = []
    if gradient:
        what = "input and weight gradient of a linear, quantising included, 8,192 tokens, over cuBLAS BF16"
        over = f"{mean(gradient):.2f}x (lowest {min(gradient):.2f}x)"
        lines.append([what, over, "`kernels_backward.json`"])
    step, rollout = rows("step"), rows("rollout")
    lines += [*phases(step), *decodes(rollout), *slower(rollout), *steps(step)]
    small, large = (step.get(f"whole/qwen3-8b/2048/8192/{r}/once") for r in ("fp8", "bf16-fast"))
    if small and large:
        share = small["peak_gib"] / large["peak_gib"]
        verdict = "the must is 0.85" + ("" if share <= 0.85 else ": missed")
        peaks = f"{small['peak_gib']:.1f} and {large['peak_gib']:.1f} GiB ({share:.3f}x, {verdict})"
        lines.append(["peak memory of all 36 layers, `fp8` and `bf16-fast`", peaks, "`step.json`"])
    refresh = rollout.get("refresh/qwen3-8b/fp8-kv")
    if refresh:
        what = "requantise all weights of 8B in place"
        lines.append([what, f"{refresh['ms']:.1f} ms", "`rollout.json`"])
    return f"{table(['what', 'result', 'file under `h200/`'], lines)}\n\n{caveat(step)}".rstrip()


def runs(name: str) -> dict[str, list[dict[str, Any]]]:
    return read(STUDIES / f"{name}.json").get("runs", {})


def rewards(run: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Held-out reward before any update, the last one, and its step."""
    held = [(r["step"], r["reward/eval_mean"]) for r in run if "reward/eval_mean" in r]
    return held[0][1], held[-1][1], held[-1][0]


def tokens(found: Iterable[list[dict[str, Any]]], key: str) -> int:
    return int(sum(r.get(f"mismatch/{key}", 0) for run in found for r in run))


def learning(name: str, what: str, mixed: bool) -> list[str]:
    found = {n: run for n, run in runs(name).items() if n.endswith("-rollout") == mixed}
    if not found:
        return []
    ends: dict[str, list[str]] = {}
    for run_name, run in found.items():
        ends.setdefault(run_name.split(",")[0], []).append(f"{rewards(run)[1]:.2f}")
    reached = together(f"{', '.join(e)} (`{recipe}`)" for recipe, e in ends.items())
    start = max(rewards(run)[0] for run in found.values())
    step = {rewards(run)[2] for run in found.values()}
    lengths = sorted({run[-1]["step"] for run in found.values()})
    shown = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    story = (
        f"{what}, {shown} steps; held-out reward from at most {start:.2f} to {reached} "
        f"at step {max(step)}"
    )
    compared, wrong = (tokens(found.values(), key) for key in ("tokens", "tokens_differing"))
    number = f"{wrong:,}" if wrong else "**0**"
    return [story, f"{compared:,}", number, f"`docs/results/{name}.md`"]


def total(cases: Iterable[Mapping[str, Any]], key: str) -> int:
    """A number of cases added up; a case of several comparisons has a list of them."""
    found = (case.get(key, 0) for case in cases)
    return int(sum(sum(n) if isinstance(n, list) else n for n in found))


def difference(count: int, whole: bool) -> str:
    """A number of differing values; bold where it is 0 and all cases (`whole`) passed."""
    if count:
        return f"{count:,}"
    return "**0**" if whole else "0, but cases failed or are missing"


def outcome(record: Mapping[str, Any]) -> tuple[str, list[str], bool]:
    """(`43 of 44 cases`, the failed ones, whether all passed) of a record of cases."""
    done, wanted = record["cases_ok"], record["cases_total"]
    failed = [name for name, case in record["cases"].items() if not case["ok"]]
    return f"{done} of {wanted} cases", failed, done == wanted and not failed


def kernel_parity() -> Iterable[list[str]]:
    for name in ("parity", "parity_crowded"):
        record = read(H200 / f"{name}.json")
        if not record:
            continue
        cases, failed, whole = outcome(record)
        what = (
            "rows of every GEMM, attention, head and sampler over all row counts, tiles and widths "
            "of the kernel tests"
        )
        if name == "parity_crowded":
            what = "the same once more while some forty processes shared the card"
        if not whole:
            named = f"not: {', '.join(failed)}; " if failed else ""
            what += f": {cases} ({named}docs/kernels-gemm.md)"
        compared = f"{record['elements_compared']:,} elements"
        result = difference(record["elements_differing"], whole)
        if record["elements_differing"]:
            result += ", **cause not proven**"
        yield [what, compared, result, f"`h200/{name}.json`"]


def stress() -> Iterable[list[str]]:
    record = read(H200 / "gemm_stress.json")
    if not record:
        return
    kinds = [v for v in record.values() if isinstance(v, dict) and "products" in v]
    products, wrong = (sum(kind[key] for kind in kinds) for key in ("products", "wrong"))
    yield [
        f"that case's products again (1 to 64 tokens; fast kernel, plain kernel with and without its fence) in "
        f"{record['processes']} processes at once",
        f"{products:,} products",
        difference(wrong, True),
        "`h200/gemm_stress.json`",
    ]


OTHER = {
    "deterministic": "gradients of a batch made again, whatever is recomputed: the same bits",
    "quantisers": "codes and scales against the reference: the same bits",
    "memory": "the engine's memory, given back and taken again",
    "gradients": "gradients against the CPU reference, within a bound",
    "products": "products against the reference, within a bound",
}
"""Cases of the engine's records that compare no token of a rollout."""

Cases = list[tuple[str, Mapping[str, Any]]]


def engine_cases() -> tuple[Cases, int]:
    """Named cases of both records (a name may be in both), and how many were not run; none without a record."""
    engine, backend = read(H200 / "engine_cases.json"), read(H200 / "backend.json")
    if not engine or not backend:
        return [], 0
    found = [*engine.items(), *backend["cases"].items()]
    return found, backend["cases_total"] - len(backend["cases"])


def is_other(name: str) -> bool:
    return name.split("/")[0] in OTHER


def passed(cases: Cases) -> str:
    """`89 of 90 cases; not: NAME`."""
    failed = [name for name, case in cases if not case["ok"]]
    named = f"; not: {', '.join(failed)}" if failed else ""
    return f"{len(cases) - len(failed)} of {len(cases)} cases{named}"


def engine_parity() -> Iterable[list[str]]:
    cases, missing = engine_cases()
    unrun = f"; {missing} not run" if missing else ""
    rollouts = [(name, case) for name, case in cases if not is_other(name)]
    counted = [(name, case) for name, case in rollouts if "tokens" in case]
    others = [(name, case) for name, case in rollouts if "tokens" not in case]
    kinds = (
        (
            "tokens of rollouts by CUDA graphs (every bucket, chunked prefill, preemption, "
            "8,192-token answers) against the training forward, before and after an optimiser step",
            counted,
        ),
        (
            "rollouts whose tokens the record does not count: against the engine without a cache, also with "
            "weights that moved; the mismatch that the trainer itself reports over three steps",
            others,
        ),
    )
    for what, group in kinds:
        if not group:
            continue
        whole = not missing and all(case["ok"] for _, case in group)
        number = total((case for _, case in group), "tokens")
        yield [
            what,
            (f"{number:,} tokens in " if number else "") + passed(group) + unrun,
            difference(total((case for _, case in group), "differing"), whole),
            "`h200/engine_cases.json`, `h200/backend.json`",
        ]


def engine_others() -> str:
    """A sentence on the cases that compare no token of a rollout; empty without records."""
    cases = [(name, case) for name, case in engine_cases()[0] if is_other(name)]
    if not cases:
        return ""
    kinds = [name.split("/")[0] for name, _ in cases]
    words = "; ".join(f"{text} ({kinds.count(k)})" for k, text in OTHER.items() if k in kinds)
    return (
        f"`h200/engine_cases.json` and `h200/backend.json` also hold cases that compare no tokens of "
        f"rollouts, and are counted in no row: {words}. Passed: {passed(cases)}."
    )


def zeros() -> str:
    """What must be the same bits, and how much of it was compared."""
    lines = [
        *kernel_parity(),
        *stress(),
        *engine_parity(),
        learning("addition", "tokens of SmolLM2-135M learning additions", False),
        learning("counting", "the same with answers of 384 tokens, counting on", False),
        learning(
            "addition",
            "additions under `fp8-rollout`, the mix this project exists to replace",
            True,
        ),
    ]
    compared = table(["compared", "how much", "differing", "file"], filter(None, lines))
    return f"{compared}\n\n{engine_others()}".rstrip()


SECTIONS: dict[str, Callable[[], str]] = {"gemm": gemm, "models": models, "zeros": zeros}


def rendered(text: str) -> str:
    """README text with every marked table made anew."""
    for name, make in SECTIONS.items():
        pattern = rf"(<!-- records: {name} -->\n).*?(\n<!-- end -->)"
        text, count = re.subn(pattern, lambda m, make=make: m[1] + make() + m[2], text, flags=re.S)
        assert count == 1, f"README.md has {count} places for the table {name!r}"
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
