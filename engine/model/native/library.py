"""The native library: compiled once per machine with the system's compiler, and kept in the cache folder.

Owns the build, its cache key and the C structures. Knows nothing of models. A build takes a few seconds. Without a
compiler or AVX512-BF16 there is no library: `NativeUnavailable` gives the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from engine.checkpoint.store import cache_folder, locked

SOURCE = Path(__file__).with_name("decoder.cpp")
"""The source file. It includes the headers of the same folder."""
CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
_COMPILERS = ("g++", "clang++", "c++")
_BUILD_TIMEOUT_S = 120


class NativeUnavailable(Exception):
    """Native kernels do not support this machine or model. The message gives the reason."""


class Shape(ctypes.Structure):
    """Sizes of a model, and the number of threads."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        ("vocab", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


class LayerWeights(ctypes.Structure):
    """Addresses of one layer's packed matrices, float32 biases and float32 norms; null where absent."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("qkv", "o", "gate_up", "down"),
            *("qkv_bias", "o_bias", "gate_bias", "up_bias", "down_bias"),
            *("input_norm", "q_norm", "k_norm", "mlp_norm"),
        )
    ]


class NativeCodes(ctypes.Structure):
    """Addresses and form of a quantised weight, see `engine.gguf.codes.Codes`; minimums may be null."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "minimums")),
        *((name, ctypes.c_int32) for name in ("bits", "block", "offset", "is_half")),
    ]


class NativeLowRank(ctypes.Structure):
    """An adapter's part in one matrix: addresses of float32 A [rank, inputs] and B [rank, outputs]; rank 0 for none."""

    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int32)]


class LayerAdapter(ctypes.Structure):
    """An adapter's parts in one layer."""

    _fields_ = [(name, NativeLowRank) for name in ("q", "k", "v", "o", "gate", "up", "down")]


class NativeForward(ctypes.Structure):
    """Sizes and addresses of one forward: integers (int32), rotations (float32), caches and results.

    `tree_slots` and `ancestors` (uint64) are null where no draft branches, `adapters` where no row has one.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("num_rows", "num_spans", "table_width", "num_logits", "block_size", "num_features"),
                "is_int8",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("token_ids", "slots", "q_lens", "kv_lens", "block_tables", "logit_rows", "feature_layers"),
                *("tree_slots", "ancestors", "adapters"),
                *("cos", "sin", "keys", "values", "embedded", "logits", "features"),
            )
        ),
    ]


@cache
def load_library() -> ctypes.CDLL:
    """The library for this machine. It is compiled at the first call.

    Raises:
        NativeUnavailable: the CPU lacks an instruction set, or there is no working compiler.
    """
    check_machine()
    library = ctypes.CDLL(str(build()))
    library.matrix_pack.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.matrix_pack.restype = ctypes.c_void_p
    library.matrix_pack_codes.argtypes = [ctypes.POINTER(NativeCodes), ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.matrix_pack_codes.restype = ctypes.c_void_p
    library.matrix_bytes.argtypes = [ctypes.c_void_p]
    library.matrix_bytes.restype = ctypes.c_size_t
    library.matrix_multiply.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.matrix_multiply.restype = None
    library.matrix_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.matrix_read.restype = None
    library.matrix_free.argtypes = [ctypes.c_void_p]
    library.matrix_free.restype = None
    library.model_new.argtypes = [
        ctypes.POINTER(Shape),
        ctypes.POINTER(LayerWeights),
        *[ctypes.c_void_p] * 4,
    ]
    library.model_new.restype = ctypes.c_void_p
    library.model_forward.argtypes = [ctypes.c_void_p, ctypes.POINTER(NativeForward)]
    library.model_forward.restype = None
    library.model_move.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2]
    library.model_move.restype = None
    library.model_free.argtypes = [ctypes.c_void_p]
    library.model_free.restype = None
    return library


def check_machine() -> None:
    """Whether this machine can build and run the library, without building it.

    Raises:
        NativeUnavailable: the CPU lacks an instruction set, or there is no C++ compiler.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailable(f"it needs Linux on x86_64, this is {platform.system()} on {platform.machine()}")
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError as error:
        raise NativeUnavailable(f"the CPU flags cannot be read ({error})") from None
    missing = [flag for flag in CPU_FLAGS if flag not in flags]
    if missing:
        raise NativeUnavailable(f"the CPU lacks {', '.join(missing)}")
    _compiler()


def _compiler() -> str:
    compiler = os.environ.get("CXX") or next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (g++ or clang++; CXX names another)")
    return compiler


def build() -> Path:
    """The compiled file for these sources, compiler and CPU. Of several processes that need it, one compiles it.

    Raises:
        NativeUnavailable: there is no working compiler, or the cache folder cannot be written.
    """
    compiler = _compiler()
    key = hashlib.sha256()
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    for part in (*sources, _run(compiler, "--version"), " ".join(_OPTIONS).encode(), _cpu_name()):
        key.update(part + b"\0")
    folder = cache_folder() / "native"
    target = folder / f"decoder-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder) as scratch:
            if not target.exists():
                fresh = Path(scratch) / target.name
                _run(compiler, *_OPTIONS, str(SOURCE), "-o", str(fresh))
                fresh.replace(target)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache {folder} cannot be written ({error}); PACELINE_CACHE names another"
        ) from None
    return target


def _cpu_name() -> bytes:
    """CPU model and flags: `-march=native` compiles different code on another CPU."""
    lines = Path("/proc/cpuinfo").read_bytes().partition(b"\n\n")[0].splitlines()
    return b"\n".join(line for line in lines if line.startswith((b"model", b"cpu family", b"flags")))


def _run(*command: str) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailable(f"{command[0]} failed: {error.stderr.decode(errors='replace')[:500]}") from None
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"{command[0]} took over {_BUILD_TIMEOUT_S} s") from None
    return done.stdout
