"""Compile launchers for sm_90 without a GPU and print what the tests check, as JSON.

    python tests/kernels/compile_for_hopper.py PART PARTS [--all]      (src and the root on the path)

Run as a script: a process that interprets kernels cannot compile them. --all: every tile and head
count that is shipped, not one of each kind.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.code_report import report

Job = tuple[str, Callable[[], object]]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS = ((32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64))
"""(query heads, key/value heads, size): Qwen3-8B, Qwen3-0.6B, SmolLM2-135M, Qwen2.5-0.5B."""


class HopperTarget:
    """Stands in for a driver: enough to compile, nothing to launch with."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def gemm_jobs(every: bool) -> Iterator[Job]:
    """Every tile that the shipped table may choose, as its launcher specialises it."""
    from samebit.kernels import _gemm_plain as plain
    from samebit.kernels._gemm_fast import hopper_gemm
    from samebit.kernels._gemm_tuning import load_table

    table = load_table("tuning_h200.json")
    modes = {"fp8_block": plain.BLOCK, "fp8_wgrad": plain.BLOCK, "fp8_row": plain.ROW,
             "int8": plain.INT8, "bf16": plain.BF16}  # fmt: skip
    for operator, mode in modes.items():
        entry = table["operators"][operator]
        names = {
            name for pairs in (entry["default"], *entry["shapes"].values()) for _, name in pairs
        }
        names = sorted(names)
        if not every:
            names = [n for n in names if n[0] == "s"][:1] + [n for n in names if n[0] != "s"][-1:]
        for name in names:
            yield (
                f"gemm {operator} {name}",
                lambda o=operator, m=mode, n=name: gemm(
                    hopper_gemm, plain, o, m, table["tiles"][n]
                ),
            )


def gemm(launch, plain, operator: str, mode: int, tile) -> None:
    M, N, K = 256, 512, 1024
    dtype = {plain.INT8: torch.int8, plain.BF16: BF16}.get(mode, E4M3)
    x, w = torch.zeros(M, K, dtype=dtype), torch.zeros(N, K, dtype=dtype)
    options = {}
    if mode == plain.BLOCK:
        gradient = operator == "fp8_wgrad"
        options = {"x_scale": torch.zeros(K // 128, M).T, "w_scale_rows": 1 if gradient else 128}
        columns = N if gradient else N // 128
        options["w_scale"] = torch.zeros(K // 128, columns).T
    elif mode != plain.BF16:
        options = {"x_scale": torch.zeros(M), "w_scale": torch.zeros(N)}
    if operator == "fp8_wgrad":
        out, options["add"] = torch.zeros(M, N), True
    else:
        out, options["bias_N"] = torch.zeros(M, N, dtype=BF16), torch.zeros(N, dtype=BF16)
    launch(x, w, out, mode, tile, promote=512 if mode == plain.ROW else 128, **options)


FORMS = ("packed", "prefill", "decode", "codes", "plain")
FEW = {
    (32, 8, 128): ("packed bf16", "decode fp8", "codes fp8"),
    (9, 3, 64): ("prefill fp8", "decode bf16", "plain bf16"),
}
"""What stands for all of them: every kernel once, both head sizes, both kinds of keys."""


def attention_jobs(every: bool) -> Iterator[Job]:
    """Packed, paged prefill and decode with BF16 and FP8 keys, and the backward."""
    for H, G, D in HEADS if every else FEW:
        for form in FORMS:
            for kind in ("bf16", "fp8"):
                if form == "codes" and D != 128:
                    continue
                if every or f"{form} {kind}" in FEW[H, G, D]:
                    yield (
                        f"attention {form} {H}/{G}x{D} {kind}",
                        (lambda a=(form, H, G, D, kind == "fp8"): attention(*a)),
                    )
        if every or D == 64:
            yield f"attention backward {H}/{G}x{D}", lambda a=(H, G, D): attention_gradient(*a)


def attention(form: str, H: int, G: int, D: int, fp8: bool) -> None:
    from samebit.kernels import attention as module
    from samebit.kernels.attention_layout import PackedLayout, PagedLayout

    dtype, T = (E4M3 if fp8 else BF16), 256
    q = torch.zeros(T, H, D, dtype=dtype)
    decode = form in ("decode", "codes")
    if decode or form == "prefill":
        k = torch.zeros(64, G, 128, D, dtype=dtype).transpose(1, 2)
        starts = None if decode else torch.arange(5, dtype=torch.int32) * 64
        table = torch.zeros(T if decode else 4, 32, dtype=torch.int32)
        context = torch.zeros(len(table), dtype=torch.int32)
        layout = PagedLayout(table, context, starts, 1 if decode else 64, 4096)
        scales = (torch.zeros(T, H), *(torch.zeros(64, G, 128).transpose(1, 2) for _ in "kv"))
    else:
        k = torch.zeros(T, G, D, dtype=dtype)
        layout = PackedLayout.build([(0, 100, 0, 0), (100, 156, 0, 100)], "cpu")
        scales = (torch.zeros(T, H), torch.zeros(T, G), torch.zeros(T, G))
    out, lse = torch.zeros(T, H, D, dtype=BF16), torch.zeros(T, H)
    if form == "plain":
        module._prefill(q, k, k, scales if fp8 else (None,) * 3, layout, 0.1, out, lse)
        return
    named = dict(zip(("q_scale_TH", "k_scale", "v_scale"), scales, strict=True)) if fp8 else {}
    if form == "codes":
        module.attention_codes(q, k, k, layout, 0.1, **named)
        return
    module.attention_forward(q, k, k, layout, 0.1, out=out, lse=lse, **named)


def attention_gradient(H: int, G: int, D: int) -> None:
    from samebit.kernels.attention import attention_backward
    from samebit.kernels.attention_layout import PackedLayout

    layout = PackedLayout.build([(0, 100, 0, 0), (100, 156, 0, 100)], "cpu")
    q, k = torch.zeros(256, H, D, dtype=BF16), torch.zeros(256, G, D, dtype=BF16)
    attention_backward(q, k, k, q, torch.zeros(256, H), q, layout, 0.1)


def head_jobs(every: bool) -> Iterator[Job]:
    from samebit.kernels import library_ops
    from samebit.kernels.head import head_log_prob, inverse_temperature, known_normaliser
    from samebit.kernels.head_backward import HeadGradient, head_log_prob_backward
    from samebit.kernels.head_restrict import HeadCut, scaled_logits
    from samebit.kernels.head_tile import head_tile
    from samebit.kernels.sample import draw_tile, sample
    from samebit.operand import allocate_weight
    from samebit.reference.sampling import Transform
    from samebit.spec import Precision

    weight = torch.zeros(512, 256, dtype=BF16)
    cut = HeadCut(torch.zeros(1024), torch.zeros(1024, dtype=torch.int32))

    def known_normaliser_of() -> None:
        x = torch.zeros(16)
        hidden = torch.zeros(16, 256, dtype=BF16)
        known_normaliser(hidden, weight, torch.zeros(16, dtype=torch.int64), x, x)

    def all_of(T: int, cut: HeadCut | None, backward: bool = False) -> None:
        # the tile of T tokens, on few of them
        tile, n = head_tile(T), 16
        hidden, target = torch.zeros(n, 256, dtype=BF16), torch.zeros(n, dtype=torch.int32)
        inverse = inverse_temperature(1.0, n, "cpu")
        if backward:
            gradient = HeadGradient(inverse, inverse, inverse)
            with contextlib.suppress(NotImplementedError):  # cuBLAS's part has no CPU form
                head_log_prob_backward(
                    hidden, weight, target, inverse, inverse, gradient, 500, cut=cut, tile=tile
                )
            return
        head_log_prob(hidden, weight, target, inverse, 500, entropy=True, cut=cut, tile=tile)
        keys = torch.zeros(n, 2, dtype=torch.int32)
        sample(hidden, weight, inverse, keys, 500, cut=cut, tile=draw_tile(T))
        if cut is not None:
            scaled_logits(hidden, weight, inverse, 500, tile=tile)

    def library_head() -> None:
        stored = allocate_weight((512,), 256, Precision("bf16"), torch.device("cpu"))
        hidden, target = torch.zeros(16, 256, dtype=BF16), torch.zeros(16, dtype=torch.int64)
        args, x = (hidden, stored, target, 500, Transform()), torch.zeros(16)
        *_, logits = library_ops.library_log_prob(*args)
        for dentropy in (None, x):
            with contextlib.suppress(NotImplementedError):  # cuBLAS's part has no CPU form
                library_ops.library_log_prob_backward(x, dentropy, *args, x, x, logits)

    for T in (16, 32, 512, 8192) if every else (16, 8192):
        if every or T == 16:
            yield f"head {T}", lambda T=T: all_of(T, None)
        if every or T > 16:
            yield f"head {T} restricted", lambda T=T: all_of(T, cut)
    yield "head known normaliser", known_normaliser_of
    yield "library head", library_head
    yield "head backward", lambda: all_of(8192, None, True)
    yield "head backward restricted", lambda: all_of(8192, cut, True)


def draw_jobs(every: bool) -> Iterator[Job]:
    """Drawing for more tokens than 64, by warp groups that take turns."""
    from samebit.kernels.head import inverse_temperature
    from samebit.kernels.head_restrict import HeadCut
    from samebit.kernels.sample import sample

    weight = torch.zeros(512, 256, dtype=BF16)

    def draw(restrict: bool) -> None:
        T = 128
        hidden, keys = torch.zeros(T, 256, dtype=BF16), torch.zeros(T, 2, dtype=torch.int32)
        cut = HeadCut(torch.zeros(T), torch.zeros(T, dtype=torch.int32)) if restrict else None
        sample(hidden, weight, inverse_temperature(1.0, T, "cpu"), keys, 500, cut=cut)

    yield "draw", lambda: draw(False)
    if every:
        yield "draw restricted", lambda: draw(True)


def pointwise_jobs(every: bool) -> Iterator[Job]:
    from samebit.formats import E4M3 as E4M3_FORMAT
    from samebit.formats import INT8
    from samebit.kernels import activation, embed, norm, norm_backward, rope, rope_backward
    from samebit.kernels.dequantize import dequantize
    from samebit.kernels.quantize_activation import quantize_activation
    from samebit.kernels.quantize_gradient import (
        quantize_gradient,
        quantize_silu_mul_gradient,
        token_group_table,
    )
    from samebit.kernels.quantize_row import quantize_rows
    from samebit.kernels.quantize_saved import requantize_tokens, rescale_tokens
    from samebit.kernels.quantize_weight import quantize_weight, transpose_codes

    positions = torch.zeros(256, dtype=torch.int32)
    groups = token_group_table([256], "cpu")
    for K in (1024, 576) if every else (1024,):
        x = torch.zeros(256, K, dtype=BF16)
        codes, scale = (
            torch.zeros(256, -(-K // 128) * 128, dtype=E4M3),
            torch.zeros(-(-K // 128), 256).T,
        )
        w = torch.zeros(512, K)
        yield f"quantise {K}", lambda x=x: quantize_activation(x.repeat(2, 1))
        yield f"quantise {K}, few", lambda x=x: quantize_activation(x)
        yield f"quantise gradient {K}", lambda x=x: quantize_gradient(x, groups)
        yield (
            f"quantise silu gradient {K}",
            lambda x=x: quantize_silu_mul_gradient(x, x, x, groups),
        )
        yield f"requantise {K}", lambda c=codes, s=scale, K=K: requantize_tokens(c, s, groups, K)
        yield f"rescale {K}", lambda c=codes, s=scale, K=K: rescale_tokens(c, s, groups, K)
        yield f"dequantise {K}", lambda c=codes, s=scale, K=K: dequantize(c, s, K, (1, 128))
        yield f"quantise weight {K}", lambda w=w: quantize_weight(w)
        yield (
            f"quantise weight and transpose {K}",
            lambda w=w, K=K: quantize_weight(
                w, transposed_codes=torch.empty(-(-K // 128) * 128, 512, dtype=E4M3)
            ),
        )
        yield (
            f"transpose {K}",
            lambda c=codes: transpose_codes(c, torch.empty_like(c.T.contiguous())),
        )
        for fmt in (E4M3_FORMAT, INT8):
            yield f"quantise rows {K} {fmt.name}", lambda x=x, f=fmt: quantize_rows(x, f)
            yield f"quantise weight rows {K} {fmt.name}", lambda w=w, f=fmt: quantize_rows(w, f)
            for residual in (None, x):
                yield f"norm and quantise {K} {fmt.name}{'' if residual is None else ' add'}", (
                    lambda x=x, f=fmt, r=residual: norm.rms_norm_quantize(
                        x, x[0], 1e-6, f, residual_TK=r, keep_output=True, per_row=f is INT8)
                )  # fmt: skip
        yield f"norm {K}", lambda x=x: norm.rms_norm(x, x[0], 1e-6)
        yield f"add and norm {K}", lambda x=x: norm.add_rms_norm(x, x, x[0], 1e-6)
        yield f"norm backward {K}", lambda x=x: norm_backward.rms_norm_backward(x, x, x[0], 1e-6)
        yield f"silu {K}", lambda x=x: activation.silu_mul(x, x)
        yield (
            f"silu and quantise {K}",
            lambda x=x: activation.silu_mul_quantize(x, x, E4M3_FORMAT, keep_output=True),
        )
        yield (
            f"silu and quantise {K}, few",
            lambda x=x: activation.silu_mul_quantize(x[:16], x[:16], E4M3_FORMAT),
        )
        yield f"silu backward {K}", lambda x=x: activation.silu_mul_backward(x, x, x)
        yield f"embed {K}", lambda x=x: embed.embed(positions.long(), x)
    x = torch.zeros(256, 1024, dtype=BF16)
    for D in (64, 128):
        table = rope.rotary_table(16, D, 1e4, "cpu")
        for fp8, T in itertools.product((False, True), (256, 512)):
            rows, store = x.repeat(2, 1)[:T], rope.KeyValueStore.packed(T, 2, D, fp8, x.device)
            at = positions.repeat(2)[:T]
            for norms in (None, (x[0, :D], x[1, :D])):
                yield f"rope {D} {fp8} {norms is not None} {T}", (
                    lambda t=table, s=store, n=norms, x=rows, at=at: rope.qk_norm_rope_store(
                        x, x, x, at, t, s, num_heads=4, norm_weights=n)
                )  # fmt: skip
        many, store = x.repeat(4, 1), rope.KeyValueStore.packed(1024, 2, D, True, x.device)
        yield (
            f"rope {D}, Q fetched ahead",
            lambda t=table, s=store, m=many: rope.qk_norm_rope_store(
                m, m, m, positions.repeat(4), t, s, num_heads=4
            ),
        )
        dy = torch.zeros(256, 4, D, dtype=BF16)
        yield (
            f"rope backward {D}",
            lambda t=table, d=dy, D=D: rope_backward.rope_backward(
                d, positions, t, x_TN=x, norm_weight=x[0, :D]
            ),
        )


def plain_jobs(every: bool) -> Iterator[Job]:
    """What stands in where the copy engine or a page size does not fit, and what tests compare with."""
    from samebit.kernels import _gemm_plain as plain
    from samebit.kernels import attention, attention_gradient
    from samebit.kernels.attention_layout import PackedLayout, PagedLayout
    from samebit.kernels.quantize_gradient import quantize_gradient, token_group_table

    def product(x, w, out, mode, tile, *, x_scale=None, w_scale=None, w_scale_rows=1, **options):
        plain.plain_gemm(
            x, w, out, mode, a_scale=x_scale, b_scale=w_scale, col_group=w_scale_rows, **options
        )

    modes = {"fp8_block": plain.BLOCK, "fp8_row": plain.ROW, "int8": plain.INT8, "bf16": plain.BF16}
    for name, kind in modes.items():
        yield f"plain gemm {name}", lambda n=name, k=kind: gemm(product, plain, n, k, None)
    q, k = torch.zeros(4, 6, 64, dtype=BF16), torch.zeros(40, 16, 2, 64, dtype=BF16)
    numbers = torch.zeros(4, dtype=torch.int32)
    pages = PagedLayout(torch.zeros(4, 8, dtype=torch.int32), numbers, None, 1, 128)
    yield "decode, small pages", lambda: attention.attention_forward(q, k, k, pages, 0.1)
    layout = PackedLayout.build([(0, 4, 0, 0)], "cpu")
    packed = (q, k[:, 0], k[:, 0].contiguous(), q, torch.zeros(4, 6), q)

    def backward() -> None:
        attention_gradient.on_card = lambda x: False
        attention_gradient.attention_backward(q, packed[2], packed[2], *packed[3:], layout, 0.1)
        attention_gradient.on_card = lambda x: True

    yield "attention backward, plain", backward
    groups = token_group_table([256], "cpu")
    x = torch.zeros(256, 256, dtype=BF16)
    yield "quantise gradient, plain", lambda: quantize_gradient(x, groups, plain=True)


def small_jobs(every: bool) -> Iterator[Job]:
    """Kernels of a few lines, and those of a decode step."""
    from samebit.kernels import embed, rotate
    from samebit.kernels.adamw_8bit import update_8bit
    from samebit.kernels.decode_step import advance, longest_first, prepare
    from samebit.kernels.head import known_normaliser

    x, ids = torch.zeros(256, 1024, dtype=BF16), torch.zeros(256, dtype=torch.int64)
    numbers, words = torch.zeros(256), torch.zeros(256, 20, dtype=torch.int32)
    yield "embed backward", lambda: embed.embed_backward(x, ids, torch.zeros(512, 1024))
    angles = torch.zeros(256, 64)
    yield "rotate", lambda: rotate.rotate(x.view(256, 8, 128), angles, angles, backward=False)
    yield "normaliser", lambda: known_normaliser(x, x, ids, numbers, numbers)
    two = words[:, :2].contiguous()
    yield "prepare", lambda: prepare(words, ids, ids, words[:, 0].contiguous(), two, 128)
    yield "longest first", lambda: longest_first(words[:, 0].contiguous())
    yield "advance", lambda: advance(ids, numbers, words, ids, two, 1000)
    n = 1024
    state = {f"exp_avg{kind}": torch.zeros(n, dtype=torch.uint8) for kind in ("", "_sq")}
    state |= {f"exp_avg{kind}_scale": torch.zeros(n // 256) for kind in ("", "_sq")}
    fields = {
        "key": 5,
        **dict.fromkeys(("beta1", "beta2", "epsilon", "decay", "size", "root"), 0.5),
    }
    update = SimpleNamespace(**fields)
    yield "adamw 8-bit", lambda: update_8bit(torch.zeros(n), torch.zeros(n), state, update)


def main() -> None:
    part, parts = int(sys.argv[1]), int(sys.argv[2])
    every = "--all" in sys.argv
    compiled: dict[str, dict[str, object]] = {}
    current = ""
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name = f"{self.__name__} ({current})"
        if name not in compiled:
            compiled[name] = report(kernel)
        return kernel

    driver.set_active(HopperTarget())
    JITFunction.run = compile_only
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    from samebit.kernels import attention, attention_decode_launch, attention_gradient, sample

    for module in (attention, attention_gradient, attention_decode_launch, sample):
        module.on_card = lambda x: True
    makers = (
        gemm_jobs, attention_jobs, head_jobs, draw_jobs, pointwise_jobs, plain_jobs, small_jobs,
    )  # fmt: skip
    jobs = [job for make in makers for job in make(every)]
    for current, job in jobs[part::parts]:  # noqa: B007
        job()
    print(json.dumps(compiled))  # noqa: T201


if __name__ == "__main__":
    main()
