"""Lets this process run kernels on the CPU: Triton's interpreter, or the card itself where there is one.

The interpreter has to be chosen (TRITON_INTERPRET) before triton is imported and changes triton for the
whole process, so these tests have a process of their own: `pytest tests/kernels` is one, and in a run of
more than that test_interpreted.py starts them.
"""

import importlib.util
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _take_one_element_arrays() -> None:
    """Triton 3.6's interpreter calls int() on arrays of one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)
if DEVICE == "cpu":
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a process of its own: pytest tests/kernels", allow_module_level=True)
    _take_one_element_arrays()
