"""Compiles every kernel for a GPU that is not there: `python kernel_compile.py ARCH`, for example 90.

Prints one JSON object: by kernel, bytes of shared memory, and registers and bytes of spills as `ptxas` reports them. A
process of its own, because the interpreter, if chosen, replaces the compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import linear as of_linear
from engine.kernels.choose import COLUMNS, choose_kernel
from engine.kernels.elementwise import add_rms_norm_kernel, silu_mul_kernel
from engine.kernels.linear import linear_kernel
from engine.kernels.paged_attention import FP8_KEYS, KEYS, attend_split_kernel, combine_kernel, num_stages, num_warps
from engine.kernels.rope_cache import rope_cache_kernel

BF16, F32, I32, I64, U8 = "*bf16", "*fp32", "*i32", "*i64", "*u8"
CACHES = {"": (0, KEYS, [BF16] * 4), ", FP8": (132, FP8_KEYS, [U8, U8, F32, F32])}
"""Size of a record, keys of a step, and types of the keys, the values and their scales."""
TILE = (of_linear.ROWS, of_linear.COLUMNS, of_linear.INNER)
ROWS = tuple((group, rows, trees) for group, rows in ((4, 16), (4, 32), (4, 64), (8, 64)) for trees in (False, True))
"""Query heads per KV head, rows x heads, and whether drafts branch."""
_ROPE = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK": 128}
_ATTEND = {"KV_HEADS": 8, "DIM": 128, "PAGE": 256, "SPLITS": 8}

KERNELS: dict[str, tuple[Any, list[str], dict[str, Any], int]] = {
    "add_rms_norm": (add_rms_norm_kernel, [BF16] * 4 + ["i32", "fp32"], {"BLOCK": 8192}, 8),
    "silu_mul": (silu_mul_kernel, [BF16, BF16, "i32"], {"BLOCK": 1024}, 4),
    "combine": (combine_kernel, [F32, F32, F32, BF16], {"DIM": 128, "SPLITS": 8, "WIDTH": 8}, 4),
    **{
        f"linear, {size} -> {columns}": (
            linear_kernel,
            [BF16] * 4 + ["i32"],
            {"IN": size, "OUT": columns, "HAS_BIAS": False, "ROWS": TILE[0], "COLUMNS": TILE[1], "INNER": TILE[2]},
            4,
        )
        for size, columns in ((4096, 6144), (14_336, 4096), (4096, 128_256))
    },
    **{
        f"choose, draws {draws}": (
            choose_kernel,
            [F32, F32, "*u8", I32, I64, I64, F32, I64, F32, "i32", "i32"],
            {"BLOCK": COLUMNS, "DRAWS": draws},
            8,
        )
        for draws in (False, True)
    },
    **{
        f"rope_cache, norm {norm}{cache}": (
            rope_cache_kernel,
            [BF16, BF16, BF16, I64, BF16, BF16, *types, "fp32"],
            _ROPE | {"HAS_NORM": norm, "RECORD": record},
            1,
        )
        for norm in (False, True)
        for cache, (record, _, types) in CACHES.items()
    },
    **{
        f"attend_split, {rows} rows, groups of {group}, trees {trees}{cache}": (
            attend_split_kernel,
            [BF16, *types, I32, I32, I32, I32, I64, F32, F32, F32, "fp32", "i32", "i32"],
            _ATTEND | {"GROUP": group, "ROWS": rows, "BLOCK": keys, "TREES": trees, "RECORD": record},
            num_warps(rows),
        )
        for cache, (record, keys, types) in CACHES.items()
        for group, rows, trees in ROWS
    },
}
"""Kernel, types of its arguments, its constants for Llama 3.1 shapes, and warps."""
ALIGNED = ("query_stride",)
"""Numbers that are multiples of 16, as addresses of PyTorch's tensors are. A launch compiles for such ones apart."""


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of the stack that a thread spills to."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main(arch: int) -> None:
    report = {}
    for name, (kernel, types, constants, warps) in KERNELS.items():
        names = [arg for arg in kernel.arg_names if arg not in constants]
        signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
        aligned = [place for place, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*" or arg in ALIGNED]
        attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": warps, "num_stages": num_stages(trees=constants.get("TREES", False))}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        report[name] = resources(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared}
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
