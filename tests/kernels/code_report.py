"""What compiled code holds, counted: what the tests check of it."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

STACK_POINTER = re.compile(
    r"(?:LOP3|SHF)\S* R\d+, [^;]*\bR1\b|PRMT\S* R\d+, (?!R\d+, 0x7610, R1\b)[^;]*\bR1\b"
)
"""R1 where data belongs. A PRMT 0x7610 takes its low half from the other register: R1 fills the half
of a 16-bit value that nobody reads."""


def report(kernel) -> dict[str, object]:
    """What is in the code, counted."""
    ptx, llir = kernel.asm["ptx"], kernel.asm["llir"]
    written = kernel.asm.get("ttir") or kernel.asm.get("source") or kernel.asm["ttgir"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        run = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True)
    sass = run.stdout
    return {
        "written_fma": len(re.findall(r"\bmath\.fma\b|fma\.rn", str(written))),
        "ir_fma": ir_fma(llir),
        "ir_contract": len(re.findall(r" = f(?:mul|add|sub)[^\n]*\b(?:contract|fast)\b", llir)),
        "ptx_fma": len(re.findall(r"\b(?:fma|mad)\.[a-z.]*f32\b", ptx)),
        "ptx_exact": len(re.findall(r"\b(?:div|sqrt|rcp)\.rn", ptx)),
        "sass_fma": len(re.findall(r"\bFFMA2?\b", sass)),
        "ptx_add": len(re.findall(r"\b(?:add|sub)\.[a-z.]*f32\b", ptx)),
        "sass_add": len(re.findall(r"\bFADD\b", sass)),
        "wgmma": sorted(set(re.findall(r"wgmma\.mma_async\S*\.(m\d+n\d+k\d+)", ptx))),
        "mma_sync": len(re.findall(r"^\s*(?:@\S+\s+)?mma\.sync", ptx, re.MULTILINE)),
        "cp_async": len(re.findall(r"\bcp\.async\.c[ag]", ptx)),
        "pipelined": kernel.asm["ttgir"].count("ttg.async_wait"),
        "proxy_fences": len(re.findall(r"\bfence\.proxy\.async", ptx)),
        "float_atomics": len(re.findall(r"\b(?:atom|red)\.[^\n]*\.(?:f16|bf16|f32|f64)", ptx)),
        "stack_pointer_as_data": len(STACK_POINTER.findall(sass)),
        "fusion": bool(kernel.metadata.enable_fp_fusion),
        "shared": int(kernel.metadata.shared),
    }


def ir_fma(llir: str) -> int:
    """Fused multiply-adds that somebody wrote: calls of the intrinsic, by element, and assembly.

    The device library's variants that flush subnormals are there too, on a branch never taken.
    """
    calls = re.findall(r"call [^\n]*@llvm\.(?:nvvm\.fma\.rn\.f|fma\.(?:v(\d+))?f32)\(", llir)
    assembly = [line for line in llir.splitlines() if " asm " in line]
    written = sum(len(re.findall(r"fma\.r[nm]\.f32", line)) for line in assembly)
    return sum(int(width or 1) for width in calls) + written
