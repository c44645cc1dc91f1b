from triton import constexpr_function as constexpr_function
from triton import jit as jit
