"""As many requests as a busy engine serves in an hour: no page leaked, no memory grown, no bit off.

    python -m tests.gpu.engine_soak --seconds 60 [--recipe fp8-kv] [--out FILE]

An hour of a 256-place engine on the Qwen3-8B shape is 31,600 tokens/s x 3,600 s (fp8-kv, 256 x 384, when
this was written; bench/results/h200/rollout.json), which at 512 tokens an answer is 222,000 requests. Here a
tiny model draws short answers on 1,024 places, so that as many admissions, endings, preemptions and page grants
take a minute or so; what an hour does to the card itself (heat, clocks) is not in it. Without a GPU the same
loop runs eagerly, with a model of one layer on 512 places. The record says what part was run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samebit.config import RolloutConfig
from samebit.engine.decode import GraphStep, bucket_sizes
from samebit.engine.native import Engine
from samebit.reference.sampling import Transform
from samebit.types import Group, Sampling
from tests.gpu.backend_cases import DEVICE, MODELS, learn, mismatch, random_model
from tests.gpu.engine_wide_cases import differing, leaked, prompts_of

Engine.pipelined = True

HOUR = 222_000
"""Requests of the hour that the module's head works out."""

DRAWS = (Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.9), Sampling(top_k=50))
"""Of the rounds: as many as the engine keeps graphs for."""

PLACES = 1024 if DEVICE.type == "cuda" else 512
CONFIG = MODELS["qwen3"]
CACHE_TOKENS = 128 * (PLACES + 40)
if DEVICE.type == "cpu":
    CONFIG = replace(
        MODELS["llama"], hidden=64, layers=1, heads=1, kv_heads=1, head_dim=64, intermediate=96
    )
    CACHE_TOKENS = 40 * PLACES  # pages are 16 tokens there: tight too


def host_bytes() -> int:
    """Resident memory of this process, without what the C library keeps of freed memory.

    The engine lets it keep much (`keep_freed_memory`): untrimmed, one large temporary looks like a leak.
    """
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def device_bytes() -> int:
    """Device memory in use by anybody, graphs and the driver's own included."""
    if DEVICE.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def requests_of(round_index: int, vocabulary: int) -> tuple[list[Any], int, Sampling]:
    """(prompts, samples of each, sampling) of a round; rounds differ in everything."""
    chance = random.Random(round_index)
    samples = chance.choice((1, 4, 8, 16))
    lengths = [int(10 ** chance.uniform(0, 2.6)) for _ in range(4 * PLACES // samples)]
    if round_index % 8 == 7:
        lengths[0] = 2000 if DEVICE.type == "cuda" else 200
    sampling = replace(
        chance.choice(DRAWS),
        max_tokens=chance.choice((2, 6, 16, 48)),
        stop_ids=tuple(range(0, vocabulary, chance.choice((6, 16, 60)))),
    )
    return prompts_of(lengths, vocabulary, round_index), samples, sampling


class Soak:
    """The engine under load, and the marks taken."""

    def __init__(self, recipe: str):
        self.model = random_model(CONFIG, recipe, DEVICE)
        options = RolloutConfig(max_batch=PLACES, prefill_tokens=4096, cache_tokens=CACHE_TOKENS)
        self.engine = Engine(self.model, options, None, 3)
        if DEVICE.type == "cuda":
            self.make_graphs()
            self.make_room()
        self.rounds = self.requests = self.tokens = self.aborted = 0
        self.wrong = self.compared = self.unequal = self.leaked = self.updates = 0
        self.seconds: list[float] = []
        self.marks: list[dict[str, float]] = []

    def make_graphs(self) -> None:
        """Every graph that the rounds want, after others that go for them.

        A graph takes a megabyte or two of the host's memory, which is no leak.
        """
        vocabulary = self.model.config.tokenizer_size
        for at, draw in enumerate((Sampling(temperature=0.5), Sampling(temperature=0.6), *DRAWS)):
            for rows, longest in itertools.product(bucket_sizes(PLACES), (4, 1100)):
                prompts = prompts_of([longest, *[4] * (rows - 1)], vocabulary, at)
                self.engine.generate(prompts, 1, replace(draw, max_tokens=3), 0)

    def make_room(self) -> None:
        """An update larger than any of the rounds', under each kind of transform.

        A kernel that spills has the driver take room for it when it is first launched, 78 MB for the head's
        gradient over more than 512 tokens: no leak either.
        """
        vocabulary = self.model.config.tokenizer_size
        # a count that is no multiple of 16 has another kernel, which spills more
        for draw, prompts in itertools.product((DRAWS[0], DRAWS[-1]), (63, 64)):
            sampling = replace(draw, max_tokens=47 if prompts % 2 else 48)
            groups = self.engine.generate(prompts_of([16] * prompts, vocabulary, 0), 1, sampling, 0)
            self.engine.release()
            learn(self.model, groups, Transform(draw.temperature, draw.top_k, draw.top_p))
            self.engine.refresh()

    def round(self) -> None:
        """Requests of one kind, now and then cut short, compared or followed by an update."""
        prompts, samples, sampling = requests_of(self.rounds, self.model.config.tokenizer_size)
        first = self.requests
        cut = 0.05 if self.rounds % 10 == 9 else None
        begun = time.perf_counter()
        groups = self.engine.generate(prompts, samples, sampling, first, deadline_s=cut)
        self.seconds.append(time.perf_counter() - begun)
        found = [s for g in groups for s in g.samples]
        self.requests += len(found)
        self.tokens += sum(len(s.ids) for s in found)
        self.aborted += sum(s.finish_reason == "abort" for s in found)
        if self.rounds % 12 == 3 and cut is None:
            self.compare(groups, sampling)
            again = self.engine.generate(prompts[:3], samples, sampling, first)
            self.unequal += differing(groups[:3], again)
        if self.rounds % 6 == 5:
            self.leaked += leaked(self.engine)
            if self.rounds % 12 == 11:
                self.engine.release()
                if cut is None:
                    learn(self.model, [g for g in groups[:4] if all(s.ids for s in g.samples)])
                    self.updates += 1
                self.engine.refresh()
        self.rounds += 1

    def compare(self, groups: list[Group], sampling: Sampling) -> None:
        """Against the training forward."""
        transform = Transform(sampling.temperature, sampling.top_k, sampling.top_p)
        some = [g for g in groups[:32] if all(s.ids for s in g.samples)]
        wrong, tokens, _ = mismatch(self.model, some, transform)
        self.wrong, self.compared = self.wrong + wrong, self.compared + tokens

    def mark(self) -> None:
        """Note what is held now, without the tensor maps that launches keep up to a bound."""
        if DEVICE.type == "cuda":
            from samebit.kernels import launch

            launch.forget_maps()
        gc.collect()
        step = self.engine._step
        self.marks.append(
            {
                "round": self.rounds, "requests": self.requests,
                "host_mb": round(host_bytes() / 1e6, 1),
                "device_mb": round(device_bytes() / 1e6, 1),
                "objects": len(gc.get_objects()), "graphs_made": self.engine.stats.captures,
                "graphs_held": len(step.keys()) if isinstance(step, GraphStep) else 0,
            }
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        """What was run and what it left; ok: nothing leaked, grown by a fiftieth, or differing."""
        self.leaked += leaked(self.engine)
        self.engine.release()
        self.mark()
        last = self.marks[-1]
        half = next((m for m in self.marks if m["requests"] >= self.requests / 3), self.marks[0])
        grown = {k: round(last[k] - half[k], 1) for k in ("host_mb", "device_mb", "objects")}
        steady = all(grown[k] <= 0.02 * half[k] for k in grown)
        stats = self.engine.stats
        self.engine.close()
        return {
            "device": DEVICE.type, "requests": self.requests,
            "share_of_an_hour": round(self.requests / HOUR, 3),
            "tokens": self.tokens, "rounds": self.rounds, "aborted": self.aborted,
            "places": PLACES, "seconds_in_rollouts": round(sum(self.seconds), 1),
            "updates": self.updates, "preemptions": stats.preemptions, "forwards": stats.forwards,
            "graphs_made": stats.captures, "differing": self.wrong, "compared": self.compared,
            "unequal": self.unequal, "leaked": self.leaked, "grown_since_a_third": grown,
            "ok": steady and not (self.leaked or self.wrong or self.unequal) and self.compared > 0,
            "marks": self.marks,
        }  # fmt: skip


def main() -> None:
    """Run until the hour's requests are served or the seconds are over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=HOUR)
    parser.add_argument("--recipe", default="fp8-kv")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    soak, end = Soak(arguments.recipe), time.monotonic() + arguments.seconds
    every = 12
    while soak.requests < arguments.requests and time.monotonic() < end:
        soak.round()
        if soak.rounds % every == 0:
            soak.mark()
            every = max(12, soak.rounds // 72 * 12)  # right after a release
    result = soak.record()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({k: v for k, v in result.items() if k != "marks"}) + "\n")
    for mark in result["marks"]:
        sys.stdout.write(f"{mark}\n")


if __name__ == "__main__":
    main()
