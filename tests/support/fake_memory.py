"""The memory of a fake CUDA device, for what asks a real one. Use it inside `fake_cuda.fake_cuda()`."""

from __future__ import annotations

import gc

from fake_cuda import PeakMemory


class FakeMemory:
    """`engine.workers.device_memory.DeviceMemory` of fake tensors; they hold what they would on a device.

    Args:
        tensors: counts them; active.
        device_bytes: of the device.
        taken_bytes: what is neither free nor of PyTorch: contexts, communicators, other processes.
    """

    def __init__(self, tensors: PeakMemory, *, device_bytes: int, taken_bytes: int = 0) -> None:
        self._tensors = tensors
        self._total = device_bytes
        self._left = device_bytes - taken_bytes
        self._reserved = 0
        self.last_peak = 0
        """What `peak` returned last."""

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._left - self.reserved()

    def reserved(self) -> int:
        self._reserved = max(self._reserved, self._tensors.peak)
        return self._reserved

    def allocated(self) -> int:
        return self._tensors.live

    def peak(self) -> int:
        self.last_peak = self._tensors.peak
        return self.last_peak

    def reset_peak(self) -> None:
        self.reserved()
        self._tensors.peak = self._tensors.live

    def give_back(self) -> None:
        gc.collect()
        self._reserved = self._tensors.peak = self._tensors.live
