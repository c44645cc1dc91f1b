"""A launch that skips Triton's own work says the same to the compiled kernel as one that does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from samebit.kernels import launch as short
from samebit.kernels.launch import Box, form, launch, rows_box

KERNELS = Path(short.__file__).parent
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
WORDS = torch.zeros(256)


def specialised(value: Any) -> Any:
    """What Triton compiles a kernel for, of one argument."""
    value = value.described() if isinstance(value, Box) else value
    return native_specialize_impl(type(BACKEND), value, False, True, True)


edges = [0, 1, 2, 15, 16, 17, -1, -16, 1 << 31, (1 << 31) - 1, (1 << 31) + 16, -(1 << 31)]
edges += [-(1 << 31) - 1, 1 << 40, (1 << 40) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 63) + 1]
numbers = st.one_of(st.sampled_from(edges), st.integers(-(1 << 63), (1 << 64) - 1))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
tensors = st.builds(lambda at, kind: WORDS[at : at + 64].view(kind), st.integers(0, 8), dtypes)
boxes = st.builds(
    lambda kind, rows, columns: rows_box(torch.zeros(64, 128, dtype=kind), rows, columns),
    st.sampled_from(
        [
            torch.bfloat16,
            torch.float16,
            torch.int16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.int8,
        ]
    ),
    st.sampled_from([32, 64]),
    st.sampled_from([64, 128]),
)
values = st.one_of(
    numbers, tensors, boxes, st.booleans(), st.none(), st.floats(allow_nan=False, width=32)
)


def require_alike(some: list[Any]) -> None:
    """Values of one kind are specialised alike."""
    found: dict[Any, Any] = {}
    for value in some:
        kind, ours = short.sort((value,))[1], specialised(value)
        assert found.setdefault(kind, ours) == ours, f"{value!r} is filed under {kind}"


@given(st.lists(values, min_size=10, max_size=40))
def test_values_of_one_kind_are_specialised_alike(some: list[Any]):
    require_alike(some)


def test_numbers_at_every_edge_are_specialised_alike():
    near = [
        sign * (1 << bits) + i for bits in range(64) for sign in (1, -1) for i in range(-17, 18)
    ]
    require_alike([n for n in near if -(1 << 63) <= n < 1 << 64])


def test_boxes_of_every_type_are_specialised_alike():
    kinds = [torch.bfloat16, torch.float16, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]
    all_boxes = [
        rows_box(torch.zeros(64, 128, dtype=kind), rows, columns)
        for kind in (*kinds, torch.int8, torch.float32)
        for rows, columns in ((32, 32), (32, 64), (64, 32), (64, 128))
    ]
    require_alike(all_boxes)


def test_memory_of_the_host_is_a_kind_of_its_own():
    """Triton's own launch, the first of a kind, says what is wrong with it."""

    class Card(torch.Tensor):
        is_cuda = True

    x = torch.zeros(16)
    assert short.sort((x,))[1] != short.sort((x.as_subclass(Card),))[1]


def test_not_every_number_is_a_kind_of_its_own():
    assert len({short.sort((n,))[1] for n in range(4096)}) == 3


def launched() -> dict[str, list[str]]:
    """Parameters of every kernel that `launch` is given, '!' before constexprs."""
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in sorted(KERNELS.glob("*.py"))]
    calls = [
        node.args[0].id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch"
        if isinstance(node.args[0], ast.Name)
    ]
    found = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in calls:
                marks = [
                    "constexpr" in ast.unparse(a.annotation or ast.Constant(0))
                    for a in node.args.args
                ]
                found[node.name] = [
                    "!" * m + a.arg for m, a in zip(marks, node.args.args, strict=True)
                ]
    return found


def test_kernels_take_their_constants_last():
    kernels = launched()
    assert len(kernels) > 35
    for name, parameters in kernels.items():
        constant = [p[0] == "!" for p in parameters]
        assert constant == sorted(constant), f"{name}: {parameters}"


def test_no_kernel_is_launched_another_way():
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                assert path.name == "launch.py", f"{path.name}:{node.lineno}"


def compiled_kernel(signature: list[str], forms: list[Any], **metadata: Any) -> CompiledKernel:
    """As Triton's, of a kernel that was never compiled."""
    fields = {
        "launch_cooperative_grid": True, "launch_pdl": False, "tensordesc_meta": forms,
        "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    kernel: Any = object.__new__(CompiledKernel)
    kernel.metadata = SimpleNamespace(**{**fields, **metadata})
    kernel.src = SimpleNamespace(signature=dict(enumerate(signature)))
    kernel.function, kernel.packed_metadata = 77, (4, 1)
    kernel._run = SimpleNamespace(launch=print)
    return kernel


class Kernel:
    """Compiles to what it is given, and counts Triton's own launches."""

    pre_run_hooks: tuple[Any, ...] = ()

    def __init__(self, compiled: Any, constants: int):
        self.compiled, self.own = compiled, 0
        runtime = len(compiled.src.signature) - constants if compiled else 0
        self.params = [
            SimpleNamespace(is_constexpr=i >= runtime) for i in range(runtime + constants)
        ]

    def with_hook(self):
        self.pre_run_hooks = (print,)
        return self

    def constants_first(self):
        self.params.reverse()
        return self

    def __getitem__(self, grid: Any):
        def run(*args: Any, **constants: Any):
            self.own += 1
            return self.compiled

        return run


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every launch that went past Triton."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(short, "is_known", lambda: True)
    monkeypatch.setattr(short, "_bare", lambda run: lambda *args: calls.append(args))
    monkeypatch.setattr(short, "_READY", {})
    monkeypatch.setattr(short, "_MAPS", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    utils = SimpleNamespace(fill_tma_descriptor=lambda *args: ("map", *map(str, args)))
    before = driver._active
    driver.set_active(SimpleNamespace(utils=utils))  # type: ignore[arg-type]
    yield calls
    driver._active = before


SIGNATURE = ["tensordesc<fp8[64,128],x>", "*fp32", "i32", "tensordesc<fp8[64,128],x>", "constexpr"]
FORMS = [
    {"swizzle": 3, "elem_size": 1, "elem_type": 1, "block_size": [64, 128], "fp4_padded": False},
    {"swizzle": 1, "elem_size": 1, "elem_type": 1, "block_size": [32, 128], "fp4_padded": False},
]


def test_a_launch_gives_the_launcher_what_triton_gives_it(direct: list[tuple[Any, ...]]):
    kernel = Kernel(compiled_kernel(SIGNATURE, FORMS), 1)
    for _ in range(3):  # new addresses, and once the same again
        x, y = (torch.zeros(rows, 128, dtype=torch.float8_e4m3fn) for rows in (64, 200))
        for _ in range(2):
            args = (rows_box(x, 64, 128), WORDS[:16], 7, rows_box(y, 32, 128, (100, 128, 256)))
            launch(kernel, (9, 2), *args, BLOCK=128, num_warps=4)
            if kernel.own == 1 and not direct:
                continue
            expected: list[Any] = []
            triton_own = nvidia.wrap_handle_tensordesc(
                lambda *got, to=expected: to.extend(got), dict(enumerate(SIGNATURE)), FORMS
            )
            described = [a.described() if isinstance(a, Box) else a for a in args]
            head = (9, 2, 1, 5, 77, True, False, None, None, (4, 1), None, None, None)
            triton_own(*head, *described, 128)
            got = list(direct[-1])
            assert isinstance(expected[13 + 5], torch.Tensor)
            expected[13 + 5] = expected[13 + 5].data_ptr()
            assert got[:-1] == expected[:-1]
            assert got[-1] is None  # a constexpr, which is compiled in
    assert kernel.own == 1
    assert len(direct) == 5


def test_another_kind_goes_through_triton_first(direct: list[tuple[Any, ...]]):
    kernel = Kernel(compiled_kernel(["*fp32", "i32", "constexpr"], []), 1)
    calls = [
        (WORDS[4:], 7, 128), (WORDS[8:], 9, 128), (WORDS[1:], 7, 128), (WORDS[4:], 16, 128),
        (WORDS[4:], 1, 128), (WORDS[4:].int(), 7, 128), (WORDS[4:], 7, 64), (WORDS[4:], 1 << 33, 64),
    ]  # fmt: skip
    for x, n, block in calls:
        launch(kernel, (1,), x, n, BLOCK=block)
    assert (kernel.own, len(direct)) == (7, 1)
    for x, n, block in calls:
        launch(kernel, (1,), x, n, BLOCK=block)
    assert (kernel.own, len(direct)) == (7, 9)


def test_first_launches_are_timed_and_others_not(
    direct: list[Any], monkeypatch: pytest.MonkeyPatch
):
    ticks = iter([10.0, 13.0, 20.0, 20.5])
    monkeypatch.setattr(short.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(short, "_FIRST", [0.0])
    kernel = Kernel(compiled_kernel(["i32"], []), 0)
    for n in (7, 9, 7, 16, 32):
        launch(kernel, (1,), n)
    assert (kernel.own, len(direct), short.first_launches_s()) == (2, 3, 3.5)


def test_a_grid_is_three_numbers(direct: list[tuple[Any, ...]]):
    kernel = Kernel(compiled_kernel(["i32"], []), 0)
    for grid in ((4,), (4,), (4, 5), (4, 5, 6)):
        launch(kernel, grid, 7)
    assert [call[:3] for call in direct] == [(4, 1, 1), (4, 5, 1), (4, 5, 6)]


def test_kernels_alike_in_everything_stay_apart(direct: list[tuple[Any, ...]]):
    """The same kinds of arguments, and a box at the same address, which the one's map cuts otherwise."""
    first = Kernel(compiled_kernel(SIGNATURE[:1], FORMS[:1]), 0)
    second = Kernel(compiled_kernel(SIGNATURE[:1], FORMS[1:]), 0)
    second.compiled.function = 78
    x = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    for _ in range(3):
        for kernel in (first, second):
            launch(kernel, (1,), rows_box(x, 64, 128))
    assert [call[4] for call in direct] == [77, 78] * 2
    maps = [call[13] for call in direct]
    assert maps[0] == maps[2] and maps[1] == maps[3] and maps[0] != maps[1]


def test_other_constants_are_another_kind(direct: list[tuple[Any, ...]]):
    kernel = Kernel(compiled_kernel(["i32", "constexpr", "constexpr"], []), 2)
    for _ in range(2):
        launch(kernel, (1,), 7, A=1, B=2)
        launch(kernel, (1,), 7, B=1, A=2)
        launch(kernel, (1,), 7, A=1, num_warps=2)
    assert (kernel.own, len(direct)) == (3, 3)


def test_each_device_has_its_own(direct: list[Any], monkeypatch: pytest.MonkeyPatch):
    kernel = Kernel(compiled_kernel(["i32"], []), 0)
    launch(kernel, (1,), 7)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    launch(kernel, (1,), 7)
    assert (kernel.own, len(direct)) == (2, 0)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_any_sort_are_seen(
    name: str, direct: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
):
    kernel = Kernel(compiled_kernel(["i32"], []), 0)
    launch(kernel, (1,), 7)
    monkeypatch.setattr(knobs.runtime, name, None)
    launch(kernel, (1,), 7)
    assert (kernel.own, len(direct)) == (1, 1)
    monkeypatch.setattr(knobs.runtime, name, lambda *_: None)
    launch(kernel, (1,), 7)
    assert (kernel.own, len(direct)) == (2, 1)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [(knobs.runtime, "debug", True), (knobs.compilation, "instrumentation_mode", "consan")],
)
def test_kernels_compiled_otherwise_are_tritons_own(
    where: Any, name: str, value: Any, direct: list[Any], monkeypatch: pytest.MonkeyPatch
):
    kernel = Kernel(compiled_kernel(["i32"], []), 0)
    launch(kernel, (1,), 7)
    with where.scope():
        setattr(where, name, value)
        launch(kernel, (1,), 7)
    assert (kernel.own, len(direct)) == (2, 0)
    launch(kernel, (1,), 7)
    assert (kernel.own, len(direct)) == (2, 1)


def test_numpy_floats_are_floats(direct: list[Any]):
    kernel = Kernel(compiled_kernel(["fp32"], []), 0)
    for value in (0.5, np.float64(0.25), np.float64(3.0)):
        launch(kernel, (1,), value)
    assert (kernel.own, len(direct), short.kinds_seen()) == (1, 2, 1)


def test_only_the_launcher_it_was_written_for_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    known = short.is_known.__wrapped__
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert known() and nvidia._BASE_ARGS_FORMAT == short.LAUNCHER
    for version in ("3.5.1", "3.60.0", "4.0.0", "3.7.0"):
        monkeypatch.setattr(triton, "__version__", version)
        assert not known()
    monkeypatch.setattr(triton, "__version__", "3.6.1")
    monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKOOOOO")
    assert not known()


def test_whoever_watches_launches_sees_them(direct: list[tuple[Any, ...]]):
    kernel = Kernel(compiled_kernel(["i32"], []), 0)
    launch(kernel, (1,), 7)
    launch(kernel, (1,), 7)
    assert (kernel.own, len(direct)) == (1, 1)

    def hook(*_: Any) -> None: ...

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(kernel, (1,), 7)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert (kernel.own, len(direct)) == (2, 1)


def test_a_replaced_run_is_called_and_nothing_kept(
    direct: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
):
    kernel = Kernel(compiled_kernel(["i32"], []), 0)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    launch(kernel, (1,), 7)
    launch(kernel, (1,), 7)
    assert (kernel.own, direct, short._READY) == (2, [], {})


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel(compiled_kernel(["i32"], [], global_scratch_size=64), 0),
        Kernel(compiled_kernel(["i32"], [], profile_scratch_size=64), 0),
        Kernel(compiled_kernel(["tensordesc<fp8[1],x>"], []), 0),
        Kernel(None, 0),
        Kernel(compiled_kernel(["i32"], []), 0).with_hook(),
        Kernel(compiled_kernel(["constexpr", "i32"], []), 1).constants_first(),
    ],
    ids=["scratch", "profile", "map made by the kernel", "interpreted", "hook", "constants first"],
)
def test_what_the_short_way_does_not_know_takes_tritons(kernel: Kernel, direct: list[Any]):
    launch(kernel, (1,), 7)
    launch(kernel, (1,), 7)
    assert (kernel.own, direct) == (2, [])


def test_the_launcher_is_found_under_its_wrapper():
    wrapped = nvidia.wrap_handle_tensordesc(print, {0: "tensordesc<fp8[64],x>"}, FORMS[:1])
    assert wrapped is not print
    assert short._bare(wrapped) is print
    assert short._bare(print) is print
    assert short._bare(lambda: None) is None


def test_a_kept_map_is_of_this_address_shape_and_stride(direct: list[tuple[Any, ...]]):
    kernel = Kernel(compiled_kernel(SIGNATURE[:1], FORMS[:1]), 0)
    x = torch.zeros(4, 64, 128, dtype=torch.float8_e4m3fn)
    views = [None, (63, 128, 128), (64, 112, 128), (32, 128, 256), (64, 128, 64)]
    for _ in range(2):
        for at in range(3):
            for view in views:
                launch(kernel, (1,), rows_box(x[at], 64, 128, view))
    seen = [call[13] for call in direct]
    assert seen[0] == seen[len(seen) - 14]
    assert len(set(seen)) == 15
    assert len(short._MAPS) == 15


def test_no_more_maps_are_kept_than_said(
    direct: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(short, "MOST_MAPS", 5)
    kernel = Kernel(compiled_kernel(SIGNATURE[:1], FORMS[:1]), 0)
    x = torch.zeros(20, 64, 128, dtype=torch.float8_e4m3fn)
    for part in x:
        launch(kernel, (1,), rows_box(part, 64, 128))
    assert 0 < len(short._MAPS) <= 5
    short.forget_maps()
    launch(kernel, (1,), rows_box(x[0], 64, 128))
    assert len(short._MAPS) == 1


def test_a_box_the_copy_engine_cannot_address_is_refused(direct: list[tuple[Any, ...]]):
    kernel = Kernel(compiled_kernel(SIGNATURE[:1], FORMS[:1]), 0)
    x = torch.zeros(64 * 128 + 8, dtype=torch.float8_e4m3fn)
    launch(kernel, (1,), rows_box(x[: 64 * 128].view(64, 128), 64, 128))
    launch(kernel, (1,), rows_box(x[: 64 * 128].view(64, 128), 64, 128))
    assert len(direct) == 1
    with pytest.raises(AssertionError, match="16-byte aligned"):
        launch(kernel, (1,), rows_box(x[8:].view(64, 128), 64, 128))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 127, 128, 129, 4097])
def test_host_arithmetic(n: int):
    assert short.cdiv(n, 128) == (n + 127) // 128
    assert short.next_power_of_2(n) == 2 ** max(0, (n - 1).bit_length())
    assert short.next_power_of_2(n) >= n > short.next_power_of_2(n) // 2


def test_forms_are_made_once():
    assert form((64, 128), 128, 8) is form((64, 128), 128, 8)
    assert form((64, 128), None, 8).layout is None
    assert form((64, 128), 64, 16).layout != form((64, 128), 128, 16).layout
