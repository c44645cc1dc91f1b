"""Quantisers, norms, activation, rotary and embedding against the copy rate.

Bytes are each input and output counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from samebit.bench.api import Call, Case, Prepared, Target

GROUP = "kernels"
ABOUT = "quantise, fused norm and activation, rotary, embedding: share of the copy rate"

MODELS = {"8B": (4096, 12288, 32, 8, 128), "0.6B": (1024, 3072, 16, 8, 128),
          "135M": (576, 1536, 9, 3, 64)}  # fmt: skip
"""(hidden, intermediate, query heads, key/value heads, head size)."""
SIZES = (("8B", 8192), ("8B", 64), ("0.6B", 8192), ("135M", 8192))
HELD = ("quantize_activation", "quantize_rows.int8", "quantize_rows.e4m3", "quantize_gradient",
        "rescale_tokens", "requantize_tokens", "quantize_weight", "norm+quantize",
        "add_norm+quantize", "add_norm+int8",
        "silu+quantize", "qk_norm+rope+store.fp8", "norm", "add_norm", "silu")  # fmt: skip
PLAIN = ("norm", "norm_backward", "silu", "silu_backward", "transpose_codes", "embed",
         "embed_backward")  # fmt: skip
"""Neither quantisers nor fused: no part of the geometric mean."""


def _targets() -> tuple[Target, ...]:
    """All that quantises or is fused as one number, then one by one what is held to the bound itself."""
    together = "|".join(f"{name}/8B/8192" for name in MAKERS if name not in PLAIN)
    what = "quantise and fused, 8B, 8,192 tokens: share of the copy rate"
    mean = Target(what, "pointwise", together, "share_of_copy", 0.85, 0.95, "%")
    each = (
        Target(f"{name}, 8B, 8,192 tokens: share of the copy rate", "pointwise", f"{name}/8B/8192",
               "share_of_copy", 0.85, 0.95, "%", reduce="worst")
        for name in HELD
    )  # fmt: skip
    return mean, *each


Calls = tuple[list[Call], float]
"""(calls over rotating inputs, bytes one of them moves)."""


def cases() -> Iterator[Case]:
    """operator/model/tokens."""
    for model, tokens in SIZES:
        for name, make in MAKERS.items():
            if tokens == 64 and name.startswith(
                ("quantize_weight", "transpose", "embed", "weight")
            ):
                continue
            yield Case(
                f"{name}/{model}/{tokens}",
                lambda n=name, f=make, m=model, t=tokens: _prepare(n, f, m, t),
            )


def _prepare(name: str, make: Callable[..., Calls], model: str, tokens: int) -> Prepared:
    calls, moved = make(name, tokens, *MODELS[model])

    def record(times: dict[str, float]) -> dict[str, Any]:
        from samebit.bench.ceilings import copy_rate

        rate = moved / times["ours"] * 1e6
        return {"bytes": moved, "terabytes_per_s": rate / 1e12, "copy_terabytes_per_s": copy_rate() / 1e12,
                "share_of_copy": rate / copy_rate(), "roofline_us": 1e6 * moved / copy_rate()}  # fmt: skip

    return Prepared({"ours": calls}, record, inner=4)


def _sets(bytes_each: float) -> int:
    return int(min(max(2, (400 << 20) / bytes_each), 8))


def _quantise(name: str, T: int, K: int, *_: int) -> Calls:
    from samebit.bench.timing import normal
    from samebit.formats import E4M3, INT8
    from samebit.kernels.quantize_activation import quantize_activation
    from samebit.kernels.quantize_gradient import quantize_gradient, token_group_table
    from samebit.kernels.quantize_row import quantize_rows
    from samebit.kernels.quantize_saved import requantize_tokens, rescale_tokens

    xs = [normal(T, K) for _ in range(_sets(2 * T * K))]
    n, scales, table = T * K, T * K / 128 * 4, token_group_table([T], "cuda")
    if name == "quantize_activation":
        return [lambda x=x: quantize_activation(x) for x in xs], 3 * n + scales
    if name == "quantize_gradient":
        return [lambda x=x: quantize_gradient(x, table) for x in xs], 4 * n + 2 * scales
    if name in ("rescale_tokens", "requantize_tokens"):
        bring = rescale_tokens if name == "rescale_tokens" else requantize_tokens
        coded = [quantize_activation(x) for x in xs]
        return [lambda c=c, s=s: bring(c, s, table, K) for c, s in coded], 2 * n + 2 * scales
    fmt = INT8 if name.endswith("int8") else E4M3
    return [lambda x=x: quantize_rows(x, fmt) for x in xs], 3 * n + 4 * T


def _weight(name: str, T: int, K: int, F: int, *_: int) -> Calls:
    import torch

    from samebit.bench.timing import normal
    from samebit.formats import E4M3, INT8
    from samebit.kernels.quantize_row import quantize_rows
    from samebit.kernels.quantize_weight import quantize_weight, transpose_codes

    N = 2 * F
    ws = [normal(N, K, dtype=torch.float32) for _ in range(2)]
    codes, scale = quantize_weight(ws[0])
    transposed = torch.empty((codes.shape[1], N), dtype=E4M3.dtype, device="cuda")
    n = N * K
    if name == "quantize_weight":
        return [lambda w=w: quantize_weight(w, codes, scale) for w in ws], 5 * n
    if name == "quantize_weight+transpose":
        return [lambda w=w: quantize_weight(w, codes, scale, transposed) for w in ws], 6 * n
    if name == "transpose_codes":
        return [lambda: transpose_codes(codes, transposed)], 2 * n
    eight = codes.view(torch.int8)
    return [lambda w=w: quantize_rows(w, INT8, eight) for w in ws], 5 * n


def _norm(name: str, T: int, K: int, *_: int) -> Calls:
    from samebit.bench.timing import normal
    from samebit.formats import E4M3, INT8
    from samebit.kernels import norm, norm_backward

    pairs = [(normal(T, K), normal(T, K)) for _ in range(_sets(4 * T * K))]
    weight, n = normal(K), T * K
    quantize = norm.rms_norm_quantize
    made: dict[str, tuple[Callable[[Any, Any], object], float]] = {
        "norm": (lambda x, r: norm.rms_norm(x, weight, 1e-6), 4 * n),
        "add_norm": (lambda x, r: norm.add_rms_norm(x, r, weight, 1e-6), 8 * n),
        "norm+quantize": (lambda x, r: quantize(x, weight, 1e-6, E4M3), 3 * n),
        "add_norm+quantize": (
            lambda x, r: quantize(x, weight, 1e-6, E4M3, residual_TK=r), 7 * n,
        ),
        "add_norm+int8": (
            lambda x, r: quantize(x, weight, 1e-6, INT8, residual_TK=r, per_row=True), 7 * n,
        ),
        "norm_backward": (lambda x, r: norm_backward.rms_norm_backward(x, r, weight, 1e-6), 6 * n),
    }  # fmt: skip
    call, moved = made[name]
    return [lambda x=x, r=r: call(x, r) for x, r in pairs], moved


def _activation(name: str, T: int, K: int, F: int, *_: int) -> Calls:
    from samebit.bench.timing import normal
    from samebit.formats import E4M3
    from samebit.kernels import activation
    from samebit.kernels.quantize_gradient import quantize_silu_mul_gradient, token_group_table

    fused = [normal(T, 2 * F) for _ in range(_sets(4 * T * F))]
    pairs = [(x[:, :F], x[:, F:]) for x in fused]
    dy, n, table = normal(T, F), T * F, token_group_table([T], "cuda")
    made: dict[str, tuple[Callable[[Any, Any], object], float]] = {
        "silu": (activation.silu_mul, 6 * n),
        "silu+quantize": (lambda g, u: activation.silu_mul_quantize(g, u, E4M3), 5 * n),
        "silu_backward": (lambda g, u: activation.silu_mul_backward(dy, g, u), 10 * n),
        "silu_backward+quantize": (
            lambda g, u: quantize_silu_mul_gradient(dy, g, u, table),
            10 * n + n / 8,
        ),
    }
    call, moved = made[name]
    return [lambda g=g, u=u: call(g, u) for g, u in pairs], moved


def _rope(name: str, T: int, K: int, F: int, H: int, G: int, D: int) -> Calls:
    import torch

    from samebit.bench.timing import normal
    from samebit.kernels import rope, rope_backward

    table = rope.rotary_table(T, D, 1e6, "cuda")
    positions = torch.arange(T, dtype=torch.int32, device="cuda")
    fused = [normal(T, (H + 2 * G) * D) for _ in range(4)]
    weights, n = (normal(D), normal(D)), T * (H + 2 * G) * D
    if name == "qk_norm+rope_backward":
        dy = normal(T, H, D)
        return [
            lambda x=x: rope_backward.rope_backward(
                dy, positions, table, x_TN=x, norm_weight=weights[0])
            for x in fused
        ], 6 * T * H * D  # fmt: skip
    fp8 = name.endswith("fp8")
    store = rope.KeyValueStore.packed(T, G, D, fp8, positions.device)
    return [
        lambda x=x: rope.qk_norm_rope_store(
            x, x[:, H * D:], x[:, (H + G) * D:], positions, table, store, num_heads=H,
            norm_weights=weights)
        for x in fused
    ], (3 if fp8 else 4) * n  # fmt: skip


def _embed(name: str, T: int, K: int, *_: int) -> Calls:
    import torch

    from samebit.bench.timing import normal
    from samebit.kernels import embed

    V = 151936
    weight = normal(V, K)
    # a power law, as in text: some ids occur hundreds of times
    ids = (torch.rand(T, device="cuda") ** 4 * V).long()
    if name == "embed":
        return [lambda: embed.embed(ids, weight)], 4 * T * K
    dy, dweight = normal(T, K), torch.zeros((V, K), device="cuda")
    moved = 2 * T * K + 8 * K * ids.unique().numel()
    return [lambda: embed.embed_backward(dy, ids, dweight)], moved


MAKERS: dict[str, Callable[..., Calls]] = {
    **dict.fromkeys(("quantize_activation", "quantize_gradient", "rescale_tokens",
                     "requantize_tokens",
                     "quantize_rows.int8", "quantize_rows.e4m3"), _quantise),
    **dict.fromkeys(("quantize_weight", "quantize_weight+transpose", "transpose_codes",
                     "weight_rows.int8"), _weight),
    **dict.fromkeys(("norm", "add_norm", "norm+quantize", "add_norm+quantize", "add_norm+int8",
                     "norm_backward"), _norm),
    **dict.fromkeys(("silu", "silu+quantize", "silu_backward", "silu_backward+quantize"), _activation),
    **dict.fromkeys(("qk_norm+rope+store.bf16", "qk_norm+rope+store.fp8", "qk_norm+rope_backward"),
                    _rope),
    **dict.fromkeys(("embed", "embed_backward"), _embed),
}  # fmt: skip

TARGETS = _targets()
