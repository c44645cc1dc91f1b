"""Proof on the spot that rollout and training are the same bits on this machine.

Each result has a bar; `failed` lists the ones that missed it. Everything is built in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from samebit.formats import E4M3
from samebit.layout import PackedLayout, Segment
from samebit.machine import devices, environment, kind
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder, linear_shapes
from samebit.quant.ops import get_ops
from samebit.quant.plan import load_recipe, recipe_names, resolve
from samebit.reference.attention import ROWS
from samebit.reference.gemm import (
    ROW_LIMIT,
    ROW_STEP,
    matmul_rows,
    matmul_rows_fp32,
    packed,
)
from samebit.reference.sampling import Transform
from samebit.spec import ROLES, Attention
from samebit.trace import differing_tokens, rollout_side, training_side

TINY = ModelConfig(
    family="qwen3",
    hidden=192,
    intermediate=320,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=64,
    vocab_size=203,
    tokenizer_size=197,
    rope_theta=10000.0,
    rms_eps=1e-6,
    tied=False,
    max_position=256,
    qkv_bias=True,
    qk_norm=True,
)
"""Awkward on purpose: partial blocks, grouped heads, bias, head norms, masked ids; every device's."""

LENGTHS = (18, 5, 11, 24)
SHAPES = ((576, 960), (1536, 576), (576, 2048))
"""(K, N) of the library products that are tried over every allowed row count."""


@dataclass(frozen=True)
class Result:
    """One check: what was found and whether it met its bar."""

    name: str
    passed: bool
    detail: str
    seconds: float


def results(device: str = "") -> Iterator[Result]:
    """Every check in turn: of one device type, or of all that `devices` lists.

    ValueError for a device that cannot be used.
    """
    chosen = [device] if device else devices()
    for name in chosen:
        get_ops(torch.device(name), "--device")
        for check_name, check in _checks(name):
            start = time.perf_counter()
            passed, detail = check()
            yield Result(check_name, passed, detail, time.perf_counter() - start)


CPU_ONLY = ("int4",)
"""Formats that the Hopper kernels refuse; recipes that use one are checked on the CPU alone."""


def _runs_on(name: str, device: str) -> bool:
    recipe = load_recipe(name)
    used = {f.gemm(role).lhs.format for f in (recipe.rollout, recipe.train) for role in ROLES}
    return device == "cpu" or not used & set(CPU_ONLY)


def _checks(device: str) -> list[tuple[str, Callable[[], tuple[bool, str]]]]:
    names = [name for name in recipe_names() if _runs_on(name, device)]
    unified = [name for name in names if kind(name) == "unified"]
    mixed = [name for name in names if kind(name) == "mixed"]
    library = [name for name in names if kind(name) == "library"]
    where = "" if device == "cpu" else f" on {device}"
    whole_models: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        *((f"parity of {n}{where}", lambda n=n: _parity(n, device)) for n in unified),
        *((f"mismatch of {n} is seen{where}", lambda n=n: _mixed(n, device)) for n in mixed),
        *((f"mismatch of {n} is small{where}", lambda n=n: _library(n, device)) for n in library),
    ]
    if device != "cpu":
        return whole_models
    return [
        ("e4m3 cast rounds to nearest even", _cast),
        ("library matmul rows do not know each other", _matmul_rows),
        ("attention products do not know each other", _attention_products),
        *whole_models,
    ]


def number_of_checks(device: str = "") -> int:
    """How many results there will be."""
    return sum(len(_checks(name)) for name in ([device] if device else devices()))


def report(device: str = "") -> dict[str, Any]:
    """Environment and results as plain values."""
    found = [asdict(result) for result in results(device)]
    failed = [result["name"] for result in found if not result["passed"]]
    return {"environment": environment(), "results": found, "failed": failed}


def _cast() -> tuple[bool, str]:
    """Every BF16 value within range against the definition over all 254 finite codes."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).float()
    x = x[torch.isfinite(x) & (x.abs() <= 448.0)]
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(E4M3.dtype)
    values = codes.float().double()[:127]
    magnitude = x.abs().double()
    upper = torch.searchsorted(values, magnitude).clamp(max=126)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - values[lower], values[upper] - magnitude
    tie_even = torch.where(lower % 2 == 0, lower, upper)
    nearest = torch.where(below < above, lower, torch.where(above < below, upper, tie_even))
    want = torch.copysign(values[nearest], x.double())
    wrong = int((x.to(E4M3.dtype).float().double() != want).sum())
    return wrong == 0, f"{len(x):,} values, {wrong} wrong"


def _random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _matmul_rows() -> tuple[bool, str]:
    """Row bits for every allowed row count and at another place in the batch."""
    tried = 0
    for product, dtype in ((matmul_rows, torch.bfloat16), (matmul_rows_fp32, torch.float32)):
        for features, outputs in SHAPES:
            x = _random(ROW_LIMIT, features, dtype=torch.bfloat16, seed=features).to(dtype)
            w = _random(outputs, features, dtype=torch.bfloat16, seed=outputs).to(dtype)
            w = packed(w)
            whole = product(x, w)
            for rows in range(ROW_STEP, ROW_LIMIT + 1, ROW_STEP):
                start = (ROW_LIMIT - rows) // 3
                part = product(x[start : start + rows].contiguous(), w)
                tried += 1
                if not _same(part, whole[start : start + rows]):
                    return False, (
                        f"BF16 products to {dtype}, {rows} rows of K {features}, N {outputs}, differ "
                        f"from {ROW_LIMIT} rows: this library is not row-invariant at "
                        f"{torch.get_num_threads()} threads"
                    )
    return True, f"{tried} shapes: {ROW_STEP} to {ROW_LIMIT} rows in steps of {ROW_STEP}"


def _attention_products() -> tuple[bool, str]:
    """A batched product's bits for every batch count, as attention calls it."""
    counts, keys = (1, 2, 3, 5, 8, 13, 40, 128), Attention().kv_block
    for width in (32, 64, 128):
        a = _random(counts[-1], ROWS, width, dtype=torch.float32, seed=width)
        b = _random(counts[-1], width, keys, dtype=torch.float32, seed=width + 1)
        whole = torch.bmm(a, b)
        back = torch.bmm(whole, b.transpose(1, 2).contiguous())
        for count in counts:
            start = (counts[-1] - count) // 2
            part = slice(start, start + count)
            scores = torch.bmm(a[part].contiguous(), b[part].contiguous())
            out = torch.bmm(scores, b[part].transpose(1, 2).contiguous())
            if not (_same(scores, whole[part]) and _same(out, back[part])):
                return (
                    False,
                    f"{count} products of {ROWS} x {width} x {keys} differ from {counts[-1]}",
                )
    return True, f"batches of {counts[0]} to {counts[-1]} at head sizes 32, 64 and 128"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def tiny_model(recipe: str, seed: int = 0, device: str = "cpu") -> Decoder:
    """A random Decoder under a recipe, after an optimiser step and a refresh."""
    model = Decoder(TINY, resolve(load_recipe(recipe), linear_shapes(TINY)), device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.08
            parameter.copy_(1 + noise if "norm" in name else noise)
    model.refresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.tensor(sequences()[3]).to(model.device)
    layout = PackedLayout((Segment(0, len(ids)),), model.device)
    hidden = model(ids, layout, "train")
    logp, _ = model.log_prob(hidden[:-1], ids[1:], Transform(1.0, 0, 1.0))
    (-logp.mean()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.refresh()
    return model


def sequences() -> list[list[int]]:
    """The token ids that every check runs, one list for each of LENGTHS."""
    generator = torch.Generator().manual_seed(7)
    high = TINY.tokenizer_size
    return [torch.randint(0, high, (n,), generator=generator).tolist() for n in LENGTHS]


def _parity(recipe: str, device: str = "cpu") -> tuple[bool, str]:
    """batch of m = n, prefill = training forward, decode = prefill: bits of every log-prob."""
    model, own = tiny_model(recipe, device=device), sequences()
    packed = training_side(model, own, digests=False).logp_T
    alone = torch.cat([training_side(model, [s], digests=False).logp_T for s in own])
    prefill = rollout_side(model, own, chunk=max(LENGTHS), digests=False).logp_T
    decode = rollout_side(model, own, chunk=1, digests=False).logp_T
    pairs = {
        "batch of 4 = batch of 1": differing_tokens(packed, alone),
        "prefill = training forward": differing_tokens(prefill, packed),
        "decode = prefill": differing_tokens(decode, prefill),
    }
    missed = [f"{name}: {count} tokens differ" for name, count in pairs.items() if count]
    finite = bool(torch.isfinite(packed).all())
    tokens = sum(LENGTHS)
    good = f"0 of {tokens} tokens differ, after an optimiser step ({', '.join(pairs)})"
    return not missed and finite, "; ".join(missed) or (good if finite else "not finite")


def _mixed(recipe: str, device: str = "cpu") -> tuple[bool, str]:
    """A mixed recipe must show a mismatch, or the measurement is broken."""
    count, _, detail = _mismatch(recipe, device)
    return count > sum(LENGTHS) // 2, detail


def _library(recipe: str, device: str = "cpu") -> tuple[bool, str]:
    """The platform's own products promise no bits; some CPUs' keep them all the same."""
    _, gap, detail = _mismatch(recipe, device)
    return gap < load_recipe(recipe).logp_gap_limit, detail


def _mismatch(recipe: str, device: str) -> tuple[int, float, str]:
    """(tokens that differ, mean |dlogp|, both in words) between the two forwards."""
    model, own = tiny_model(recipe, device=device), sequences()
    trainer = training_side(model, own, digests=False).logp_T
    sampler = rollout_side(model, own, chunk=max(LENGTHS), digests=False).logp_T
    count, gap = differing_tokens(trainer, sampler), float((trainer - sampler).abs().mean())
    return count, gap, f"{count} of {sum(LENGTHS)} tokens differ, mean |dlogp| {gap:.2g}"
