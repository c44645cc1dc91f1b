"""Compiles two attention kernels for sm_90a and prints what is in their PTX, as JSON."""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from samebit.kernels.attention_decode_hopper import attention_decode_hopper_kernel
from samebit.kernels.attention_hopper import attention_hopper_kernel


def build(kernel, fp8, options, **constants):
    bits = 8 if fp8 else 16
    shared = NVMMASharedLayout(128, bits, 2)
    kind = "fp8e4nv" if fp8 else "bf16"

    def kind_of(name):
        if name in constants:
            return "constexpr"
        if name.endswith("_desc"):
            return f"tensordesc<{kind}[{64 if name == 'q_desc' else 128}, 128],{shared!r}>"
        if name in ("q_ptr", "k_ptr", "v_ptr"):
            return "*" + kind
        if name == "out_ptr":
            return "*bf16"
        if name.endswith("_ptr"):
            return "*fp32"
        if name in ("segments", "block_table", "context_lens"):
            return "*i32"
        return "fp32" if name == "factor" else "i32"

    names = kernel.arg_names
    signature = {name: kind_of(name) for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("k_row", "v_row")
    }
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        attrs=aligned,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    built = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": False, **options},
    )
    ptx = built.asm["ptx"]
    shapes = re.findall(r"wgmma.mma_async.sync.aligned.(m\d+n\d+k\d+)", ptx)
    return {
        "wgmma": sorted(set(shapes)),
        "mma_sync": ptx.count("mma.sync"),
        "shared": built.metadata.shared,
    }


sizes = {"H": 32, "G": 8, "D": 128, "KB": 128, "SPLIT_BLOCKS": 8}
sys.stdout.write(
    json.dumps(
        [
            build(
                attention_hopper_kernel,
                False,
                {},
                **sizes,
                STAGES=2,
                CONSUMER_REGS=232,
                PRODUCER_REGS=40,
            ),
            build(
                attention_decode_hopper_kernel,
                True,
                {"maxnreg": 128},
                **sizes,
                SPLITS=4,
                PAGE=128,
                SLOTS=4,
                FP8=True,
                FEEDER_REGS=88,
            ),
        ]
    )
)
