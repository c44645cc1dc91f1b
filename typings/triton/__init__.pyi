"""What of Triton a type checker is to see otherwise than in Triton's own files.

Triton declares its language for the program that compiles it: a number may not stand where a constexpr
is declared, static_range cannot be iterated, and calling a jitted function never returns, which hides
what follows from the checker too. Here the language's types are Any and a jitted function keeps its
signature, so kernels are checked for names, arguments and tuples' lengths, and launchers for everything.
Modules without a file here, and layouts that launchers make, are Triton's own.
"""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import triton.knobs as knobs
from triton.runtime.jit import JITFunction

__all__ = ["JITFunction", "Kernel", "constexpr_function", "jit", "knobs"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

__version__: str

class Kernel(JITFunction[Callable[..., Any]], Generic[P, R]):
    """A jitted function: launched over a grid, and called by other kernels as the function it is."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

@overload
def jit(fn: Callable[P, R]) -> Kernel[P, R]: ...
@overload
def jit(*, do_not_specialize: list[str]) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
def constexpr_function(fn: F) -> F: ...
