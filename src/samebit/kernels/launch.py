"""Launch a Triton kernel; a launch like an earlier one skips what Triton would work out again.

An ordinary launch binds and specialises forty arguments, prints its options into a key and encodes every
tensor map anew, which takes longer than a small model's kernel runs. Here a launch is filed under
what Triton specialises on; the next one with the same key passes pointers to the compiled kernel directly.
Triton's own launch is taken for everything else: the first of a key, an interpreted or only compiled
kernel, a profiler's hooks, a Triton whose launcher is not the one that this file knows.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from samebit.kernels import TRITON

KNOWN = TRITON
"""The Triton whose launcher this file knows."""

LAUNCHER = "iiiKKppOOOOOO"
"""What that launcher takes before a kernel's own arguments."""

MOST_MAPS = 8192
"""Encoded tensor maps that are kept; one is 128 bytes, a key and a few numbers."""


class Form:
    """Block shape and shared-memory layout (None: the compiler's choice) of a box; one object each."""

    __slots__ = ("block", "layout")

    def __init__(self, block: tuple[int, ...], layout: NVMMASharedLayout | None):
        self.block, self.layout = block, layout


@functools.cache
def form(block: tuple[int, ...], swizzle: int | None, bits: int) -> Form:
    """The form of boxes of `block` elements of `bits` bits; swizzle: bytes, None for a plain box."""
    layout = None if swizzle is None else NVMMASharedLayout(swizzle, bits, len(block))
    return Form(block, layout)


class Box:
    """A tensor that a kernel reads or writes by the copy engine, in boxes of one form."""

    __slots__ = ("form", "shape", "strides", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        form: Form,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
    ):
        self.tensor, self.form = tensor, form
        self.shape = tensor.shape if shape is None else shape
        self.strides = tensor.stride() if strides is None else strides

    def described(self) -> HopperDescriptor | TensorDescriptor:
        """As Triton's own launch takes it. AssertionError where the copy engine cannot address it."""
        shape, strides, block = list(self.shape), list(self.strides), list(self.form.block)
        if self.form.layout is None:
            return TensorDescriptor(self.tensor, shape, strides, block)
        return HopperDescriptor(self.tensor, shape, strides, block, self.form.layout)


def rows_box(
    x: torch.Tensor, rows: int, columns: int, view: tuple[int, int, int] | None = None
) -> Box:
    """Boxes of `rows` x `columns` of a matrix, swizzled; view: (rows, columns, row stride) to see in `x`."""
    size = x.element_size()
    swizzled = form((rows, columns), min(128, columns * size), 8 * size)
    if view is None:
        return Box(x, swizzled)
    return Box(x, swizzled, view[:2], (view[2], 1))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up (Triton's own, made for kernels too, takes as long as a launch's other half)."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def processors(x: torch.Tensor) -> int:
    """Multiprocessors of the tensor's device."""
    return _processors(x.device.index or 0)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants): args are its run-time parameters in order, a `Box` each descriptor.

    constants: its constexprs and the compiler's options, hashable.
    """
    if not is_known() or _watched():
        _ordinary(kernel, grid, args, constants)
        return
    device = torch._C._cuda_getDevice()
    values, kinds = sort(args)
    key = (id(kernel), device, kinds, tuple(constants), tuple(constants.values()))
    ready = _READY.get(key, _UNKNOWN)
    if ready is _UNKNOWN:
        begun = time.perf_counter()
        compiled = _ordinary(kernel, grid, args, constants)
        _READY.setdefault(key, Ready.of(kernel, compiled))
        _FIRST[0] += time.perf_counter() - begun
    elif ready is None:
        _ordinary(kernel, grid, args, constants)
    else:
        ready(grid, torch._C._cuda_getCurrentRawStream(device), values)


def sort(args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """(what the launcher takes, what Triton specialises on), an entry an argument.

    Two kinds never agree where Triton's own keys differ: its rules are a pointer's alignment to 16 bytes, an
    integer's width and whether it is 1 or a multiple of 16, a descriptor's type, block and layout.
    """
    values, kinds = list(args), []
    for i, arg in enumerate(args):
        cls = type(arg)
        if cls is int:
            kind: Any = 1 if arg == 1 else _width(arg) + (arg & 15 == 0)
        elif cls is Box:
            kind = (arg.form, arg.tensor.dtype)
        elif isinstance(arg, torch.Tensor):
            values[i] = pointer = arg.data_ptr()
            kind = (pointer & 15 == 0, arg.dtype, arg.is_cuda)
        else:
            kind = float if isinstance(arg, float) else (cls, arg)
        kinds.append(kind)
    return values, tuple(kinds)


def _width(value: int) -> int:
    """2, 4 or 6, for what fits into 32 bits, 64 bits, and 64 bits without a sign."""
    if -0x80000000 <= value <= 0x7FFFFFFF:
        return 2
    return 4 if value < 1 << 63 else 6


class Ready:
    """A compiled kernel, and what its launcher takes beside the arguments."""

    def __init__(self, kernel: Any, compiled: CompiledKernel, run: Callable[..., None]):
        self.kernel = kernel  # held, so that its id stays its own
        self.run, self.function, self.packed = run, compiled.function, compiled.packed_metadata
        metadata: Any = compiled.metadata
        self.flags = (metadata.launch_cooperative_grid, metadata.launch_pdl, None, None)
        self.key = id(self)  # for ever: it is kept
        self.forms = list(metadata.tensordesc_meta or ())
        signature = list(compiled.src.signature.values())
        # last first: a box becomes several values
        boxes = [i for i, kind in enumerate(signature) if str(kind).startswith("tensordesc")]
        self.boxes = list(zip(boxes, range(len(boxes)), strict=True))[::-1]
        constants = sum(p.is_constexpr for p in kernel.params)
        self.constants = (None,) * constants  # compiled in; the launcher skips over them

    @classmethod
    def of(cls, kernel: Any, compiled: Any) -> Ready | None:
        """None where Triton's own launch is to be taken always."""
        if not isinstance(compiled, CompiledKernel):
            return None
        metadata: Any = compiled.metadata
        constant = [p.is_constexpr for p in kernel.params]
        if constant != sorted(constant) or kernel.pre_run_hooks:
            return None
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            return None
        launcher = compiled.run
        assert launcher is not None  # Triton loads it when it is asked for
        run = _bare(launcher.launch)
        made = None if run is None else cls(kernel, compiled, run)
        return made if made is None or len(made.forms) == len(made.boxes) else None

    def __call__(self, grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        """Launch on a stream; values as from `sort`."""
        for at, number in self.boxes:
            box = values[at]
            where = (self.key, number, box.tensor.data_ptr(), box.shape, box.strides)
            values[at : at + 1] = _MAPS.get(where) or self._encode(where, box)
        x, y, z = (*grid, 1, 1)[:3]
        self.run(
            x, y, z, stream, self.function, *self.flags, self.packed, None, None, None,
            *values, *self.constants,
        )  # fmt: skip

    def _encode(self, where: tuple[Any, ...], box: Box) -> list[Any]:
        """A map names an address, a shape and strides and nothing else: it never goes stale."""
        if len(_MAPS) >= MOST_MAPS:
            _MAPS.clear()
        made = nvidia.make_tensordesc_arg(box.described(), self.forms[where[1]])
        _MAPS[where] = made
        return made


_UNKNOWN: Any = object()
_READY: dict[tuple[Any, ...], Ready | None] = {}
_MAPS: dict[tuple[Any, ...], list[Any]] = {}
_FIRST = [0.0]


def kinds_seen() -> int:
    """Kinds of launches so far: each went Triton's own way once, and was perhaps compiled."""
    return len(_READY)


def first_launches_s() -> float:
    """Seconds that the first launches of all kinds took so far: compiling, or loading from the disk."""
    return _FIRST[0]


def forget_maps() -> None:
    """Let the kept tensor maps go; they are encoded again where they are wanted."""
    _MAPS.clear()


def _ordinary(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Any) -> Any:
    if isinstance(kernel, JITFunction):
        wanted = [p.name for p in kernel.params if not p.is_constexpr]
        assert len(args) == len(wanted), f"{kernel.__name__} takes {wanted} by position"
    described = [arg.described() if type(arg) is Box else arg for arg in args]
    return kernel[grid](*described, **constants)


def _bare(run: Any) -> Callable[..., None] | None:
    """The launcher under the function that Triton wraps around it for a kernel with descriptors."""
    if inspect.isbuiltin(run):
        return run
    inner = inspect.getclosurevars(run).nonlocals.get("launcher")
    return inner if inspect.isbuiltin(inner) else None


def _watched() -> bool:
    """Whether somebody sees launches, or wants kernels other than the usual."""
    runtime = knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return (
        any(getattr(hook, "calls", hook) for hook in hooks)
        or JITFunction.run.__module__ != JITFunction.__module__
        or bool(runtime.debug or knobs.compilation.instrumentation_mode)
    )


@functools.cache
def is_known() -> bool:
    """Whether this is a Triton, and a machine, for the short launch."""
    launcher = getattr(nvidia, "_BASE_ARGS_FORMAT", "")
    known = triton.__version__.startswith(KNOWN) and launcher == LAUNCHER
    return known and torch.cuda.is_available()
