"""Compile launchers for sm_90 without a GPU and print what the tests check, as JSON.

Run as a script: a process that interprets kernels cannot compile them.
"""

import json
import re
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from samebit.formats import E4M3

compiled = {}
_run = JITFunction.run


class HopperTarget:
    """Stands in for a driver: enough to compile, nothing to launch with."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(self, *args, grid, warmup, **options):
    kernel = _run(self, *args, grid=grid, warmup=True, **options)
    compiled[f"{self.__name__} {len(compiled)}"] = kernel
    return kernel


def launch_all():
    from samebit.kernels.activation import silu_mul_quantize
    from samebit.kernels.head import head_log_prob, inverse_temperature
    from samebit.kernels.norm import rms_norm_quantize
    from samebit.kernels.quantize_activation import quantize_activation
    from samebit.kernels.quantize_gradient import quantize_gradient, token_group_table
    from samebit.kernels.quantize_weight import quantize_weight
    from samebit.kernels.rope import KeyValueStore, qk_norm_rope_store, rotary_table
    from samebit.kernels.sample import sample

    x = torch.zeros(256, 1024, dtype=torch.bfloat16)
    quantize_activation(x)
    quantize_weight(x.float(), transposed_codes=torch.empty(1024, 256, dtype=E4M3.dtype))
    quantize_gradient(x, token_group_table([256], "cpu"))
    silu_mul_quantize(x, x, E4M3, keep_output=True)
    rms_norm_quantize(x, x[0], 1e-6, E4M3, residual_TK=x, keep_output=True)
    store = KeyValueStore.packed(256, 2, 128, True, x.device)
    positions = torch.zeros(256, dtype=torch.int32)
    table = rotary_table(16, 128, 1e4, "cpu")
    qk_norm_rope_store(x, x, x, positions, table, store, num_heads=8, norm_weights=(x[0], x[1]))
    inverse = inverse_temperature(1.0, 256, "cpu")
    head_log_prob(x, x, positions, inverse, 256, entropy=True)
    sample(x[:16], x, inverse[:16], torch.zeros(16, 2, dtype=torch.int32), 256)


def report(kernel):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = Path("kernel.cubin")
    path.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    ptx = kernel.asm["ptx"]
    return {
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        "wgmma": "wgmma.mma_async" in ptx,
        "mma_sync": "mma.sync" in ptx,
        "stack_pointer_as_data": len(re.findall(r"(?:LOP3|PRMT|SHF)\S* R\d+, [^;]*\bR1\b", text)),
    }


if __name__ == "__main__":
    driver.set_active(HopperTarget())
    JITFunction.run = compile_only
    launch_all()
    print(json.dumps({name: report(kernel) for name, kernel in compiled.items()}))  # noqa: T201
