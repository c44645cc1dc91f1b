"""Attention beside cuDNN and the memory's read rate.

Forward and backward count 4 and 10 operations per visible (query, key, channel); decode counts each
key, value and scale once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samebit.bench.api import Call, Case, Prepared, Target

GROUP = "kernels"
ABOUT = "attention: packed forward and backward, decode over pages, BF16 and FP8 keys"

HEADS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128), "135M": (9, 3, 64)}
PACKS = {
    "1x8192": [(0, 8192, 0, 0)],
    "1x32768": [(0, 32768, 0, 0)],
    "8x1024": [(i * 1024, 1024, 0, 0) for i in range(8)],
    "512+16x480": [(0, 512, 0, 0), *((512 + i * 480, 480, 0, 512) for i in range(16))],
}
"""Segments (start, length, prefix start, prefix length); the last is a prompt that 16 samples share."""
DECODES = ((128, 4096), (256, 1024), (32, 2048), (4, 32768), (1, 8192))
TARGETS = (
    Target("attention backward, head 128, 8,192 tokens", "attention", "backward/8B/1x8192", "tflops",
           300, 450, "TFLOP/s"),
    Target("attention prefill / training forward, head 128, 8,192 tokens", "attention",
           "forward.bf16/8B/1x8192", "tflops", 450, 600, "TFLOP/s"),
    Target("decode, BF16 KV, share of the read rate", "attention",
           "decode.bf16/8B/128x4096|decode.bf16/8B/256x1024", "share_of_read", 0.90, 0.97, "%",
           reduce="worst"),
    Target("decode, FP8 KV with scales: BF16 KV's time over its own", "attention",
           "decode.fp8/8B/128x4096|decode.fp8/8B/256x1024", "over_bf16_kv", 1.5, 1.85,
           reduce="worst"),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """form.keys/model/sizes."""
    for model in HEADS:
        for pack in PACKS:
            for form in ("forward.bf16", "forward.fp8", "backward"):
                yield Case(
                    f"{form}/{model}/{pack}", lambda f=form, m=model, p=pack: _packed(f, m, p)
                )
        for B, context in DECODES:
            for keys in ("bf16", "fp8"):
                yield Case(
                    f"decode.{keys}/{model}/{B}x{context}",
                    lambda k=keys, m=model, b=B, c=context: _decode(k, m, b, c),
                )


def _codes(x):
    """(e4m3 codes, FP32 scale per row and head)."""
    import torch

    scale = x.float().abs().amax(-1) / 448.0
    return (x.float() / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _packed(form: str, model: str, pack: str) -> Prepared:
    from samebit.bench.timing import normal
    from samebit.kernels.attention import attention_backward, attention_forward
    from samebit.kernels.attention_layout import PackedLayout

    H, G, D = HEADS[model]
    segments = PACKS[pack]
    layout = PackedLayout.build(segments, "cuda")
    T, factor = layout.num_tokens, D**-0.5
    work = sum(4.0 * H * D * (n * p + n * (n + 1) / 2) for _, n, _, p in segments)
    q, k, v, dout = normal(T, H, D), normal(T, G, D), normal(T, G, D), normal(T, H, D)
    out, lse = attention_forward(q, k, v, layout, factor)
    calls: dict[str, list[Call]] = {}
    if form == "backward":
        work *= 2.5
        calls["ours"] = [lambda: attention_backward(q, k, v, out, lse, dout, layout, factor)]
    elif form == "forward.fp8":
        (q8, qs), (k8, ks), (v8, vs) = _codes(q), _codes(k), _codes(v)
        named = {"q_scale_TH": qs, "k_scale": ks, "v_scale": vs, "out": out, "lse": lse}
        calls["ours"] = [lambda: attention_forward(q8, k8, v8, layout, factor, **named)]
    else:
        calls["ours"] = [lambda: attention_forward(q, k, v, layout, factor, out=out, lse=lse)]
    eager = ()
    if len(segments) == 1 and form != "forward.fp8":
        calls |= _cudnn(q, k, v, dout, form)
        eager = ("cudnn",) if form == "backward" else ()

    def record(times: dict[str, float]) -> dict[str, Any]:
        from samebit.bench.ceilings import product_rate

        rate, ceiling = work / times["ours"] / 1e6, product_rate("bf16") / 1e12
        fields = {
            "tflops": rate,
            "cublas_bf16_tflops": ceiling,
            "share_of_roofline": rate / ceiling,
        }
        if "cudnn" in times:
            fields["cudnn_tflops"] = work / times["cudnn"] / 1e6
        return fields

    return Prepared(calls, record, eager)


def _cudnn(q, k, v, dout, form: str) -> dict[str, list[Call]]:
    """cuDNN on the same problem, keys and values repeated per query head beforehand. Autograd's
    backward runs on the stream of its forward, which a capture cannot follow."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    group = q.shape[1] // k.shape[1]
    leaves = [
        x.transpose(0, 1)[None].contiguous().requires_grad_()
        for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    ]

    def forward(tensors):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*tensors, is_causal=True)

    if form != "backward":
        plain = [x.detach() for x in leaves]
        return {"cudnn": [lambda: forward(plain)]}
    out, grad = forward(leaves), dout.transpose(0, 1)[None].contiguous()
    return {"cudnn": [lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)]}


def _decode(keys: str, model: str, B: int, context: int) -> Prepared:
    """One step over pages of 128 in random order; FP8 rows time BF16 keys beside them."""
    import torch

    from samebit.kernels.attention import attention_forward
    from samebit.kernels.attention_layout import PagedLayout

    H, G, D = HEADS[model]
    pages = B * context // 128
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).reshape(B, -1)
    lengths = torch.full((B,), context, dtype=torch.int32, device="cuda")
    layout = PagedLayout(table, lengths, None, 1, context)
    out = torch.empty(B, H, D, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(B, H, device="cuda")

    def call(fp8: bool) -> Call:
        q, k, v, scales = _cache(B, H, G, D, pages, fp8)
        return lambda: attention_forward(q, k, v, layout, D**-0.5, out=out, lse=lse, **scales)

    def record(times: dict[str, float]) -> dict[str, Any]:
        from samebit.bench.ceilings import read_rate

        width = D + 4 if keys == "fp8" else 2 * D
        total = 2.0 * B * context * G * width
        rate = total / times["ours"] / 1e6
        fields = {"terabytes_per_s": rate, "read_terabytes_per_s": read_rate() / 1e12,
                  "share_of_read": rate * 1e12 / read_rate()}  # fmt: skip
        if keys == "fp8":
            fields["over_bf16_kv"] = times["bf16_kv"] / times["ours"]
        return fields

    calls = {"ours": [call(keys == "fp8")]}
    if keys == "fp8":
        calls["bf16_kv"] = [call(False)]
    return Prepared(calls, record, inner=4)


def _cache(B: int, H: int, G: int, D: int, pages: int, fp8: bool):
    """(q, k, v, scales by keyword) with the cache as the engine stores it: heads before rows."""
    import torch

    from samebit.bench.timing import normal

    q = normal(B, H, D)
    k, v = (normal(pages, G, 128, D) for _ in range(2))
    if not fp8:
        return q, k.transpose(1, 2), v.transpose(1, 2), {}
    q8, q_scale = _codes(q)
    k8, v8 = (x.to(torch.float8_e4m3fn).transpose(1, 2) for x in (k, v))
    k_scale, v_scale = (
        (torch.rand(pages, G, 128, device="cuda") + 0.5).transpose(1, 2) for _ in "kv"
    )
    return q8, k8, v8, {"q_scale_TH": q_scale, "k_scale": k_scale, "v_scale": v_scale}
