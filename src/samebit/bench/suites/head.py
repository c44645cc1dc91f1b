"""The head against the bare cuBLAS BF16 products of its shape, and sampling against the weight's read.

Two passes: log-prob forward, then a backward that makes the logits again (four products). One pass: the
sampler's log-sum-exp is given, so the backward's tiles also yield the log-probs (three products).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samebit.bench.api import Call, Case, Prepared, Target

GROUP = "kernels"
ABOUT = "head log-prob forward and backward, and sampling, at 151,936 x 4,096"

V, VOCAB, K, T = 151936, 151669, 4096, 8192
DRAWN = (1, 16, 64, 128, 256, 512)
TARGETS = (
    Target("head, one pass, forward + backward, over the bare cuBLAS products' time", "head",
           "one_pass", "over_bare_products", 1.25, 1.1, more=False),
    Target("head, two passes, forward + backward, over the bare cuBLAS products' time", "head",
           "two_passes", "over_bare_products", 1.25, 1.1, more=False),
    Target("head, extra memory over the FP32 logits", "head", "one_pass", "extra_memory", 0.05, 0.05,
           "%", more=False, reduce="worst"),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Training forms, then sampling by the number of tokens."""
    yield Case("one_pass", lambda: _training(True))
    yield Case("two_passes", lambda: _training(False))
    for tokens in DRAWN:
        yield Case(f"sample/{tokens}", lambda m=tokens: _sampling(m, {}))
    yield Case("sample_restricted/64", lambda: _sampling(64, {"top_k": 50, "top_p": 0.95}))


def _training(one_pass: bool) -> Prepared:
    import torch

    from samebit.bench.timing import normal
    from samebit.kernels.head import HeadParts, head_log_prob, inverse_temperature
    from samebit.kernels.head_backward import HeadGradient, head_log_prob_backward

    hidden, weight = normal(T, K), normal(V, K) * 0.02
    target = torch.randint(0, VOCAB, (T,), device="cuda")
    inverse = inverse_temperature(1.0, T, "cuda")
    logits = torch.empty((T, V), dtype=torch.bfloat16, device="cuda")
    gradient = HeadGradient(torch.randn(T, device="cuda"))
    dweight = torch.zeros((V, K), device="cuda")
    _, lse, _ = head_log_prob(hidden, weight, target, inverse, VOCAB)

    def bare() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    def ours() -> None:
        parts, held = None, lse
        if one_pass:
            parts = HeadParts.empty(V, T, False, hidden.device)
        else:
            _, held, _ = head_log_prob(hidden, weight, target, inverse, VOCAB)
        head_log_prob_backward(
            hidden, weight, target, inverse, held, gradient, VOCAB, dweight_VK=dweight, parts=parts
        )
        if parts is not None:
            parts.combine(False)

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours()
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - before) / (4.0 * T * V)

    def record(times: dict[str, float]) -> dict[str, Any]:
        work = 6.0 * T * V * K
        return {"over_bare_products": times["ours"] / times["cublas_bf16"], "extra_memory": extra,
                "tflops": work / times["ours"] / 1e6, "tokens": T, "vocabulary": V, "width": K,
                "roofline_us": times["cublas_bf16"]}  # fmt: skip

    # cuBLAS allocates its results and workspaces here: too much for two graphs to hold twice
    return Prepared({"ours": [ours], "cublas_bf16": [bare]}, record, eager=("ours", "cublas_bf16"))


def _sampling(tokens: int, restriction: dict[str, Any]) -> Prepared:
    import torch

    from samebit.bench.timing import normal
    from samebit.kernels.head import inverse_temperature
    from samebit.kernels.head_restrict import head_cut
    from samebit.kernels.sample import sample

    hidden, weights = normal(tokens, K), [normal(V, K) * 0.02 for _ in range(2)]
    keys = torch.zeros(tokens, 2, dtype=torch.int32, device="cuda")
    inverse = inverse_temperature(0.8, tokens, "cuda")

    def draw(weight: torch.Tensor) -> None:
        cut = head_cut(hidden, weight, inverse, VOCAB, **restriction) if restriction else None
        sample(hidden, weight, inverse, keys, VOCAB, cut=cut)

    def record(times: dict[str, float]) -> dict[str, Any]:
        from samebit.bench.ceilings import roofline_us

        floor = roofline_us(2.0 * tokens * V * K, "bf16", 2.0 * V * K)
        return {"roofline_us": floor, "share_of_roofline": floor / times["ours"],
                "over_cublas_logits": times["ours"] / times["cublas_logits"],
                "tokens": tokens, "vocabulary": V, "width": K}  # fmt: skip

    calls: dict[str, list[Call]] = {
        "ours": [lambda w=w: draw(w) for w in weights],
        "cublas_logits": [lambda w=w: hidden @ w.t() for w in weights],
    }
    return Prepared(calls, record, eager=("ours",) if restriction else ())
