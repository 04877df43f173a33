"""A CUDA device that exists only as shapes: fake tensors with device "cuda" on a machine without a GPU.

Owns the no-op device guard that lets a CPU build of PyTorch dispatch CUDA tensors, and `Recorder`, which counts what a
real device would do: kernel launches, transfers, and reads for which the host waits. Values do not exist: a read
returns zeros. Shapes, element types and devices are those of the real run.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoint.store import cache_folder

CUDA = torch.device("cuda", 0)

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void install() {
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (slot.load() == nullptr) slot.store(&guard);
}
"""

_NO_LAUNCH = frozenset(
    (
        *("view", "slice", "unsqueeze", "select", "transpose", "expand", "_unsafe_view", "alias", "detach", "squeeze"),
        *("as_strided", "t", "permute", "split", "reshape", "unbind", "lift_fresh", "device", "size", "unfold"),
        *("split_with_sizes", "empty", "empty_strided", "empty_like", "new_empty", "is_same_size", "reshape_as"),
        *("resolve_conj", "resolve_neg", "_to_copy", "is_pinned", "pin_memory", "_pin_memory", "set_", "numel", "dim"),
        *("sym_size", "sym_numel", "sym_stride", "stride", "_conj", "flatten", "view_as", "is_contiguous"),
    )
)
_LAUNCHES = {"paged_attention": 2}
"""Of Paceline's operator that launches more than one kernel."""
_COPIES = frozenset(("to", "_to_copy", "copy_", "cpu", "cuda", "contiguous", "float", "double", "long"))
_READS = frozenset(("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique2"))


def install_guard() -> None:
    """Register the no-op guard; compiled once per PyTorch version."""
    folder = Path(torch.__file__).parent
    tag = hashlib.sha256((_GUARD + torch.__version__).encode()).hexdigest()[:16]
    library = cache_folder() / "tests" / f"cuda-guard-{tag}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            source, built = Path(scratch) / "guard.cpp", Path(scratch) / "guard.so"
            source.write_text(_GUARD)
            command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{folder / 'include'}", str(source)]
            subprocess.run([*command, f"-L{folder / 'lib'}", "-lc10", "-o", str(built)], check=True)
            built.chmod(0o755)
            temporary = library.with_suffix(f".{id(library)}")
            temporary.write_bytes(built.read_bytes())
            temporary.replace(library)
    ctypes.CDLL(str(library)).install()


class Recorder(TorchDispatchMode):
    """Counts the operations on fake CUDA tensors while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: collections.Counter[str] = collections.Counter()
        self.reads: collections.Counter[str] = collections.Counter()
        """Operations after which the host waits for the device."""
        self.uploads = 0
        """Transfers from host to device."""
        self.downloads = 0
        """Transfers from device to host that the host does not wait for."""

    def event(self) -> FakeEvent:
        """A CUDA event; waiting for it counts as a read."""
        return FakeEvent(self)

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())

    @property
    def num_reads(self) -> int:
        return sum(self.reads.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        inputs = [arg for arg in _flat(args) if isinstance(arg, torch.Tensor)]
        on_cuda = any(tensor.device.type == "cuda" for tensor in inputs)
        if on_cuda and (name in _READS or _indexes_by_mask(name, args)):
            self.reads[name] += 1
            if name in ("_local_scalar_dense", "item", "is_nonzero"):
                return {torch.bool: False}.get(inputs[0].dtype, 0.5 if inputs[0].dtype.is_floating_point else 0)
            if _indexes_by_mask(name, args):
                return args[0][:0]
        out = func(*args, **(kwargs or {}))
        self._count(name, inputs, out, on_cuda, args, kwargs or {})
        return out

    def _count(
        self, name: str, inputs: list[torch.Tensor], out: Any, on_cuda: bool, args: Any, kwargs: dict[str, Any]
    ) -> None:
        result = next((value for value in _flat([out]) if isinstance(value, torch.Tensor)), None)
        source = inputs[0].device.type if inputs else "none"
        target = result.device.type if result is not None else "none"
        if name in _COPIES and inputs:
            origin = inputs[-1].device.type if name == "copy_" else source
            if origin == "cpu" and target == "cuda":
                self.uploads += 1
            elif origin == "cuda" and target == "cpu":
                if name == "copy_" and _is_non_blocking(args, kwargs):
                    self.downloads += 1
                else:
                    self.reads[name] += 1
            elif target == "cuda" and (name == "copy_" or result is not inputs[0]):
                self.launches[name] += 1
        elif name not in _NO_LAUNCH and (on_cuda or target == "cuda"):
            self.launches[name] += _LAUNCHES.get(name, 1)


class FakeEvent:
    """A CUDA event that the device has always reached."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self._recorder.reads["event"] += 1
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def _is_non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _indexes_by_mask(name: str, args: Any) -> bool:
    """Whether this indexing has a result of unknown size, so that the host must wait for it."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    masks = [index for index in args[1] if isinstance(index, torch.Tensor) and index.dtype is torch.bool]
    return bool(masks)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


@contextmanager
def fake_cuda() -> Iterator[Recorder]:
    """Inside, tensors are fake and device "cuda" works; yields a recorder that is active from the start."""
    install_guard()
    with _no_constants(), FakeTensorMode(), torch.inference_mode():
        recorder = Recorder()
        with _readable(recorder), recorder:
            yield recorder


@contextmanager
def _no_constants() -> Iterator[None]:
    """Fake tensors keep no values, so that every read of one is seen."""
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


@contextmanager
def _readable(recorder: Recorder) -> Iterator[None]:
    """`tolist` and `numpy` of fake tensors return zeros; those of CUDA tensors count as reads."""
    names = ("tolist", "numpy")
    kept = {name: FakeTensor.__dict__.get(name) for name in names}

    def numpy(self: FakeTensor) -> Any:
        import numpy as np

        if self.device.type == "cuda":
            raise TypeError("a CUDA tensor has no NumPy form; copy it to the host first")
        return np.zeros(tuple(self.shape), dtype=str(self.dtype).removeprefix("torch."))

    def tolist(self: FakeTensor) -> Any:
        import numpy as np

        if self.device.type == "cuda":
            recorder.reads["tolist"] += 1
        return np.zeros(tuple(self.shape), dtype=str(self.dtype).removeprefix("torch.")).tolist()

    FakeTensor.numpy, FakeTensor.tolist = numpy, tolist
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                delattr(FakeTensor, name)
            else:
                setattr(FakeTensor, name, value)


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes of fake CUDA tensors that live at once, of those made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.live = 0
        """Bytes now."""
        self._holders: dict[int, tuple[int, int]] = {}
        """By storage: bytes, and tensors that hold it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _flat([out]):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self._hold(tensor)
        return out

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size, holders = self._holders.get(key, (storage.nbytes(), 0))
        if holders == 0:
            self.live += size
            self.peak = max(self.peak, self.live)
        self._holders[key] = (size, holders + 1)
        weakref.finalize(tensor, self._release, key)

    def _release(self, key: int) -> None:
        size, holders = self._holders.pop(key)
        if holders > 1:
            self._holders[key] = (size, holders - 1)
        else:
            self.live -= size
