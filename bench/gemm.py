"""Time the GEMM kernels beside cuBLAS on one GPU, and choose the tiles that the package ships.

    python bench/gemm.py tune   --out DIR     # every candidate; writes the records and a table
    python bench/gemm.py record --out DIR     # the shipped table, through the public functions

One record per (operator, shape, rows): medians of CUDA-graph replays over rotating weight buffers
on random data, with cuBLAS BF16 timed before and after. Correctness is checked by the tests only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import time
from pathlib import Path

import torch
import triton
from gemm_cases import BUCKETS, CANDIDATES, SHAPES, TILES, Case, library_fp8, make_case

from samebit.kernels._gemm_fast import Tile

START = time.time()
BANDWIDTH = 4.30e12
"""Bytes per second of a large device copy, read plus written, on an H200 (measured)."""
RATE = {"bf16": 800e12, "fp8": 1350e12, "int8": 1500e12}
"""Operations per second of the best product seen on random data, by operand format."""


def timed(launches, replays: int = 5) -> float:
    """Median microseconds of one launch, over `replays` replays of a graph of all of them."""
    launches[0]()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def floor_us(case: Case) -> float:
    """The larger of operations over RATE and bytes over BANDWIDTH, in microseconds."""
    size = 2 if case.operator == "bf16" else 1
    moved = (case.rows + case.outputs) * case.depth * size
    moved += case.rows * case.outputs * (4 if case.operator.startswith("fp8_wgrad") else 2)
    work = 2 * case.rows * case.outputs * case.depth
    return 1e6 * max(work / RATE[case.operator.split("_")[0]], moved / BANDWIDTH)


def cublas_us(x_MK: torch.Tensor, weights: list[torch.Tensor], out_MN: torch.Tensor) -> float:
    return timed([lambda w=w: torch.mm(x_MK, w.t(), out=out_MN) for w in weights])


def measure(shape: str, rows: int, operators, tune: bool) -> list[dict]:
    """Records of every operator at one shape."""
    outputs, depth = SHAPES[shape]
    copies = max(2, min(16, int(3e8 / (outputs * depth)) + 1)) if rows <= 1024 else 3
    x_MK = torch.randn(rows, depth, device="cuda").bfloat16()
    weights = [
        torch.randn(outputs, depth, device="cuda").bfloat16() for _ in range(max(2, copies // 2))
    ]
    out_MN = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    before = cublas_us(x_MK, weights, out_MN)
    records = []
    for operator in operators:
        case = make_case(operator, shape, rows, copies)
        times = {}
        for name in candidates(operator, rows) if tune else [None]:
            tile = None if name is None else TILES[name]
            try:
                times[name or "shipped"] = timed(case.launches(tile))
            except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                print(f"  {operator} {name}: {str(error)[:160]}")
        if not times:
            continue
        library = library_fp8(case) if rows >= 4096 else {}
        library = {name: timed(launches) for name, launches in library.items()}
        best = min(times, key=times.get)
        records.append(
            {
                "operator": operator, "shape": shape, "rows": rows, "outputs": outputs,
                "depth": depth, "tile": best, "us": times[best], "floor_us": floor_us(case),
                "candidates": times, "library_us": library,
            }
        )  # fmt: skip
        del case
    after = cublas_us(x_MK, weights, out_MN)
    for record in records:
        record["cublas_bf16_us"] = min(before, after)
        record["cublas_bf16_us_before_after"] = [before, after]
        record["ratio"] = record["cublas_bf16_us"] / record["us"]
    return records


def candidates(operator: str, rows: int) -> list[str]:
    for limit, names in CANDIDATES[operator]:
        if limit is None or rows <= limit:
            return names
    return []


def build_table(records: list[dict]) -> dict:
    """The table of the fastest tiles; the default list has the smallest summed relative time."""
    operators: dict = {}
    used: set[str] = set()
    for operator in CANDIDATES:
        if operator.endswith("xblock"):
            continue
        mine = [r for r in records if r["operator"] == operator]
        if not mine:
            continue
        shapes: dict = {}
        default = []
        buckets = sorted({r["rows"] for r in mine})
        for rows in buckets:
            group = [r for r in mine if r["rows"] == rows]
            limit = None if rows == buckets[-1] else rows
            for r in group:
                key = f"{r['outputs']}x{r['depth']}"
                shapes.setdefault(key, []).append([limit, r["tile"]])
            common = set.intersection(*(set(r["candidates"]) for r in group))
            cost = {n: sum(r["candidates"][n] / r["us"] for r in group) for n in common}
            default.append([limit, min(cost, key=cost.get)])
        for pairs in [*shapes.values(), default]:
            pairs[-1][0] = None
            used.update(name for _, name in pairs)
        operators[operator] = {"default": default, "shapes": shapes}
    plain = Tile()
    tiles = {
        name: {k: v for k, v in vars(TILES[name]).items() if v != getattr(plain, k)}
        for name in sorted(used)
    }
    return {"device": torch.cuda.get_device_name(), "tiles": tiles, "operators": operators}


def _warm(names: list[tuple[str, str]]) -> None:
    for operator, name in names:
        try:
            case = make_case(operator, "warm", 32, 1)
            case.launches(TILES[name])[0]()
            torch.cuda.synchronize()
        except (RuntimeError, triton.runtime.errors.OutOfResources):
            continue


def compile_in_parallel(workers: int) -> None:
    """Fill the compiler's cache from several processes before anything is timed."""
    jobs = sorted(
        {(op, name) for op, lists in CANDIDATES.items() for _, names in lists for name in names}
    )
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_warm, args=(jobs[i::workers],), daemon=True) for i in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()


def provenance() -> dict:
    """Commit, versions and card, for every results file."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "unix_time": int(START),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("tune", "record"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--commit", default="", help="where there is no repository to ask")
    parser.add_argument("--operators", nargs="*", help="only these")
    arguments = parser.parse_args()
    if arguments.workers:
        compile_in_parallel(arguments.workers)
        print(f"compiled in {time.time() - START:.0f} s")
    header = provenance()
    header["commit"] = arguments.commit or header["commit"]
    records: list[dict] = []
    for shape, rows, operators in BUCKETS:
        if arguments.operators:
            operators = [name for name in operators if name in arguments.operators]
        if not operators:
            continue
        if time.time() - START > arguments.seconds:
            print(f"stopped before {shape} x {rows}: out of time")
            break
        for record in measure(shape, rows, operators, arguments.mode == "tune"):
            records.append(record)
            times = " ".join(f"{n}:{t:.1f}" for n, t in record["candidates"].items())
            library = " ".join(f"{n}:{t:.1f}" for n, t in record["library_us"].items())
            print(
                f"{record['operator']} {shape} {rows} bf16 {record['cublas_bf16_us']:.1f} "
                f"ours {record['us']:.1f} ({record['ratio']:.2f}x) {times} {library}",
                flush=True,
            )
        result = {**header, "records": records}
        (arguments.out / f"gemm_{arguments.mode}.json").write_text(json.dumps(result, indent=1))
    if arguments.mode == "tune":
        table = build_table(records)
        (arguments.out / "tuning_h200.json").write_text(json.dumps(table, indent=1))
    print(f"done in {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
