"""Bits of every operator on a Hopper GPU over the lists of sizes, counted; run as a script, writes JSON.

    python -m tests.gpu.parity_cases --workers 16 --out bench/results/h200/parity.json

Each case compares 16- or 32-bit patterns and says how many it compared and how many differ: GEMM tiles
with the plain kernel, attention's decode and prefill with the packed training forward, the sampler with
the training head. The bar is 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch

from tests.gpu.backend_cases import attempt

ROWS = (1, 2, 3, 15, 16, 17, 33, 64, 100, 128, 200, 256, 513, 1024, 4096, 8192)
WIDTHS = ((576, 576), (192, 960), (960, 2112), (2112, 192))
"""(outputs, K), none a multiple of 128 but by padding."""
FORWARD = ("fp8_block", "fp8_row", "int8", "bf16")
RATIOS = (1, 2, 3, 4, 6, 7, 8)
"""Query heads per key/value head."""
LENGTH = 4096
VOCABULARIES = ((576, 50257, 50257), (1024, 151936, 151669))
"""(K, stored ids, ids of the tokenizer)."""


class Count:
    """Compared and differing elements."""

    def __init__(self) -> None:
        self.compared = self.differing = 0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count the elements of two tensors whose bits differ."""
        assert a.shape == b.shape and a.dtype == b.dtype
        word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = (x.contiguous().view(word) for x in (a, b))
        self.compared += a.numel()
        self.differing += int((a != b).sum())

    def result(self) -> dict[str, object]:
        """The case's record."""
        ok = self.differing == 0 and self.compared > 0
        return {"compared": self.compared, "differing": self.differing, "ok": ok}


def shipped(operator: str) -> list[str]:
    """Every tile the tuning table may choose."""
    text = resources.files("samebit.kernels").joinpath("tuning_h200.json").read_text()
    entry = json.loads(text)["operators"][operator]
    return sorted({t for pairs in (entry["default"], *entry["shapes"].values()) for _, t in pairs})


def gemm_rows(operator: str, tile: str) -> dict[str, object]:
    """One tile at every number of rows, in the middle of a larger batch, with a bias."""
    from tests.gpu.test_gemm_bits import TABLE, operands, run, run_plain

    count, outputs = Count(), 576
    x, xs, w, ws = operands(operator, max(ROWS), outputs, 1152)
    bias = torch.randn(outputs, device="cuda").bfloat16()
    expected = run_plain(operator, x, xs, w, ws, outputs, bias)
    for rows in ROWS:
        part = slice((max(ROWS) - rows) // 2, (max(ROWS) - rows) // 2 + rows)
        scale = None if xs is None else xs[part]
        got = run(operator, x[part], scale, w, ws, outputs, TABLE["tiles"][tile], bias)
        count.add(got, expected[part])
    return count.result()


def gemm_widths(operator: str, tile: str) -> dict[str, object]:
    """One tile at widths that are not multiples of 128."""
    from tests.gpu.test_gemm_bits import TABLE, operands, run, run_plain

    count = Count()
    for outputs, depth in WIDTHS:
        x, xs, w, ws = operands(operator, 513, outputs, depth, seed=depth)
        expected = run_plain(operator, x, xs, w, ws, outputs)
        for rows in (1, 16, 33, 128, 513):
            scale = None if xs is None else xs[:rows]
            got = run(operator, x[:rows], scale, w, ws, outputs, TABLE["tiles"][tile])
            count.add(got, expected[:rows])
    return count.result()


def weight_gradient(tile: str) -> dict[str, object]:
    """The weight gradient, new and added to, with scales per feature and per block of 128."""
    from samebit.kernels import _gemm_plain as plain
    from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad
    from tests.gpu.test_gemm_bits import TABLE

    count = Count()
    for outputs, depth, tokens in ((576, 192, 640), (2112, 960, 1152), (192, 2112, 8192)):
        dy, x = (
            torch.randn(n, tokens, device="cuda").to(torch.float8_e4m3fn) for n in (outputs, depth)
        )
        sdy = torch.rand(tokens // 128, outputs, device="cuda").T
        for group in (1, 128):
            sx = torch.rand(tokens // 128, -(-depth // group), device="cuda").T
            want = torch.empty((outputs, depth), device="cuda")
            plain.plain_gemm(
                dy, x, want, plain.BLOCK, a_scale=sdy, b_scale=sx, col_group=group, promote=128
            )
            tuned = TABLE["tiles"][tile]
            count.add(fp8_block_wgrad(dy, sdy, x, sx, tile=tuned), want)
            start = torch.randn(outputs, depth, device="cuda")
            total = start.clone()
            fp8_block_wgrad(dy, sdy, x, sx, total, accumulate=True, tile=tuned)
            count.add(total, start + want)
    return count.result()


def head(K: int, V: int, vocab: int) -> dict[str, object]:
    """Sampler's and trainer's log-probs and log-sum-exps at every number of rows, and a restricted few."""
    from samebit.kernels.head import head_log_prob, inverse_temperature
    from samebit.kernels.head_restrict import head_cut
    from samebit.kernels.sample import noise_keys, sample

    count, T = Count(), max(ROWS)
    hidden = torch.randn(T, K, device="cuda").bfloat16()
    weight = (torch.randn(V, K, device="cuda") * 4 / K**0.5).bfloat16()
    inverse = inverse_temperature(0.8, T, "cuda")
    inverse[::5] = 0.0
    keys = noise_keys([(5, i, 2 * i) for i in range(T)], "cuda")
    ids, logp, lse = sample(hidden, weight, inverse, keys, vocab)
    trained, trained_lse, _ = head_log_prob(hidden, weight, ids, inverse, vocab)
    count.add(trained, logp)
    count.add(trained_lse, lse)
    for rows in ROWS[:-1]:
        part = slice((T - rows) // 2, (T - rows) // 2 + rows)
        drawn = sample(hidden[part], weight, inverse[part], keys[part], vocab)
        again = head_log_prob(hidden[part], weight, ids[part], inverse[part], vocab, entropy=True)
        for a, b in ((drawn[0], ids), (drawn[1], logp), (again[0], logp), (again[1], lse)):
            count.add(a, b[part])
    few = slice(100, 228)
    cut = head_cut(hidden[few], weight, inverse[few], vocab, 50, 0.95)
    drawn, logp, _ = sample(hidden[few], weight, inverse[few], keys[few], vocab, cut=cut)
    for rows in (1, 17, 128):
        part = slice(100, 100 + rows)
        cut = head_cut(hidden[part], weight, inverse[part], vocab, 50, 0.95)
        got = head_log_prob(hidden[part], weight, drawn[:rows], inverse[part], vocab, cut=cut)
        count.add(got[0], logp[:rows])
    return count.result()


def attention(ratio: int, D: int, keys: str) -> dict[str, object]:
    """Decode at every position of 4,096, alone and in other batches, prefill in chunks, and packed with
    others: all against the training forward of the sequence alone."""
    from samebit.kernels.attention import attention_forward
    from tests.kernels.attention_oracle import chunk, packed, quantise, to_pages

    count, G = Count(), 2
    alone = [(0, LENGTH, 0, 0)]
    pack = [*alone, (LENGTH, 700, 0, 0), (LENGTH + 700, 130, LENGTH, 700)]
    total = LENGTH + 830
    generator = torch.Generator("cuda").manual_seed(ratio * D)
    q, k, v = (
        torch.randn(total, n, D, generator=generator, device="cuda") for n in (ratio * G, G, G)
    )
    named: dict[str, torch.Tensor] = {}
    if keys == "fp8":
        (q, qs), (k, ks), (v, vs) = quantise(q), quantise(k), quantise(v)
        named = {"q_scale_TH": qs, "k_scale": ks, "v_scale": vs}
    else:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[:LENGTH].contiguous()

    scales = {name: cut(s) for name, s in named.items()}
    want, want_lse = attention_forward(
        cut(q), cut(k), cut(v), packed(alone, "cuda"), D**-0.5, **scales
    )
    out, lse = attention_forward(q, k, v, packed(pack, "cuda"), D**-0.5, **named)
    count.add(out[:LENGTH], want)
    count.add(lse[:LENGTH], want_lse)

    def paged(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return to_pages(cut(x), alone, 128, torch.Generator().manual_seed(3), head_major=True)

    (k_pages, table), (v_pages, _) = paged(k), paged(v)
    cache = {name: paged(named[name])[0] for name in ("k_scale", "v_scale") if named}

    def call(layout, rows: list[int]) -> None:
        extra = {**cache, **({"q_scale_TH": qs[rows].contiguous()} if named else {})}
        got, got_lse = attention_forward(
            q[rows].contiguous(), k_pages, v_pages, layout, D**-0.5, **extra
        )
        count.add(got, want[rows])
        count.add(got_lse, want_lse[rows])

    batches = [list(range(LENGTH)), list(range(7, LENGTH, 124)), [0], [1023], [1024], [LENGTH - 1]]
    for positions in batches:
        call(every_position(table, positions), positions)
    for first in range(0, LENGTH, 1000):
        call(*chunk(alone, table, first, min(first + 1000, LENGTH), "cuda"))
    return count.result()


def every_position(table: torch.Tensor, positions: list[int]):
    """A decode batch of one sequence at several positions, as sequences that share its pages."""
    from samebit.kernels.attention_layout import PagedLayout

    lengths = torch.tensor(positions, dtype=torch.int32, device="cuda") + 1
    shared = table.expand(len(positions), -1).contiguous()
    return PagedLayout(shared, lengths, None, 1, max(positions) + 1)


def cases() -> dict[str, Callable[[], dict[str, object]]]:
    """Every case by name, dearest first."""
    out: dict[str, Callable[[], dict[str, object]]] = {}
    for D in (128, 64):
        for keys in ("fp8", "bf16"):
            for ratio in RATIOS:
                out[f"attention/{ratio}x{D}/{keys}"] = lambda a=(ratio, D, keys): attention(*a)
    for K, V, vocab in VOCABULARIES:
        out[f"head/{vocab}"] = lambda a=(K, V, vocab): head(*a)
    for operator in FORWARD:
        for tile in shipped(operator):
            out[f"widths/{operator}/{tile}"] = lambda a=(operator, tile): gemm_widths(*a)
            out[f"rows/{operator}/{tile}"] = lambda a=(operator, tile): gemm_rows(*a)
    for tile in shipped("fp8_wgrad"):
        out[f"weight_gradient/{tile}"] = lambda t=tile: weight_gradient(t)
    return out


def run_cases(names: list[str], path: str | None) -> dict[str, dict[str, object]]:
    """Results of the named cases, one line each, kept in `path` as they come."""
    results: dict[str, dict[str, object]] = {}
    table = cases()
    for name in names:
        results[name] = attempt(name, table[name])
        torch.cuda.empty_cache()
        if path:
            Path(path).write_text(json.dumps(results))
    return results


def run_parallel(names: list[str], workers: int, seconds: float) -> dict[str, dict[str, object]]:
    """The cases dealt out over processes; a case that did not finish in time has an error."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(workers)]
        command = [sys.executable, "-m", "tests.gpu.parity_cases"]
        processes = [
            subprocess.Popen([*command, *names[i::workers], "--part", str(file)])
            for i, file in enumerate(files)
            if names[i::workers]
        ]
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        found: dict[str, dict[str, object]] = {}
        for file in files:
            if file.exists():
                found |= json.loads(file.read_text())
    return {name: found.get(name, {"ok": False, "error": "not finished"}) for name in names}


def main() -> None:
    """Run the cases named (default: all); JSON where --out says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out")
    parser.add_argument("--part", help="results of one of several processes")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--commit", default="", help="where there is no repository to ask")
    arguments = parser.parse_args()
    names = arguments.names or list(cases())
    if arguments.workers > 1:
        results = run_parallel(names, arguments.workers, arguments.seconds)
    else:
        results = run_cases(names, arguments.part)
    if arguments.out:
        from samebit.bench.records import provenance

        record = {
            **provenance(arguments.commit),
            "command": "python -m tests.gpu.parity_cases --workers N --out FILE",
            "cases_ok": sum(bool(r["ok"]) for r in results.values()),
            "cases_total": len(results),
            "elements_compared": sum(int(r.get("compared", 0)) for r in results.values()),
            "elements_differing": sum(int(r.get("differing", 0)) for r in results.values()),
        }
        lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in results.items())
        head = json.dumps(record, indent=1)[:-2]
        Path(arguments.out).write_text(head + ',\n "cases": {\n' + lines + "\n }\n}\n")


if __name__ == "__main__":
    main()
