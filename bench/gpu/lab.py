"""What every part of `paceline bench gpu` works with: the device, its clock, and the time that is left.

Owns the difference between a run on a GPU and a dry run. A dry run goes through the same code on a CPU with tiny
shapes: attention is a loop over spans, a CUDA graph is a function that is called again, and CUDA IPC is shared host
memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config import CUDA_PAGE
from engine.graphs.forward import Capture, CudaCapture
from engine.model.attention import Attention, make_attention
from engine.model.attention_varlen import PagedSpans, VarlenAttention
from engine.sampling.readback import DeviceClock, HostClock, StepClock

HUNG_S = 60.0
"""Seconds after which the device counts as hung."""
_COPY_BYTES, _DRY_COPY_BYTES = 2 << 30, 1 << 20


class CheckFailed(Exception):
    """A result is wrong. The message has the numbers."""


@dataclass(frozen=True, slots=True)
class Lab:
    """The device and the sizes of one run."""

    device: torch.device
    dry: bool
    until_s: float
    """Point of the monotonic clock at which no further measurement begins."""
    bandwidth: float = field(default=0.0, compare=False)
    """Measured bytes per second that the device reads and writes."""

    @property
    def left_s(self) -> float:
        """Seconds until no further measurement begins."""
        return self.until_s - time.monotonic()

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return CUDA_PAGE

    def pick(self, real: Any, dry: Any) -> Any:
        """`dry` in a dry run, else `real`."""
        return dry if self.dry else real

    def clock(self) -> StepClock:
        """Measures one piece of work at a time."""
        if self.device.type != "cuda":
            return HostClock()
        return DeviceClock(timeout_s=HUNG_S, abort=lambda: None)

    def seconds(self, work: Callable[[], object], *, repeats: int = 20) -> float:
        """Median seconds of `work` on the device, after it ran twice."""
        clock, times = self.clock(), []
        for turn in range(2 + self.pick(repeats, 1)):
            clock.begin()
            work()
            clock.forwarded()
            clock.read([])
            if turn >= 2:
                times.append(clock.times().forward_s)
        return statistics.median(times)

    def attention(self, group_size: int, dtype: torch.dtype) -> Attention:
        """The attention that the GPU path uses, or its slow twin."""
        if self.dry:
            return SpanAttention(device=self.device)
        return make_attention("auto", group_size=group_size, dtype=dtype, device=self.device)

    def capture(self) -> Capture:
        """Records CUDA graphs, or functions."""
        return record_function if self.dry else CudaCapture(self.device)

    def measured_bandwidth(self) -> float:
        """Bytes per second of a copy, read and written."""
        size: int = self.pick(_COPY_BYTES, _DRY_COPY_BYTES)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / max(self.seconds(lambda: target.copy_(source)), 1e-9)


def record_function(compute: Callable[[], None]) -> Callable[[], None]:
    """In place of a CUDA graph: calls the function again."""
    compute()
    return compute


class SpanAttention(VarlenAttention):
    """Flash attention in a loop over spans, on any device."""

    def flash(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        spans: PagedSpans,
        limits: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = query.shape[1] // k_cache.shape[2]
        out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        starts, kv_lens = spans.cu_q.tolist(), spans.kv_lens.tolist()
        for span, kv_len in enumerate(kv_lens):
            first, last = starts[span], starts[span + 1]
            if first == last:
                continue
            blocks = spans.block_tables[span, : -(-kv_len // k_cache.shape[1])].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[:kv_len].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
            )
            seen = torch.ones(last - first, kv_len, dtype=torch.bool, device=query.device)
            seen = seen.tril(kv_len - (last - first)) if limits[1] == 0 else seen
            scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys) * query.shape[2] ** -0.5
            scores = scores.masked_fill(~seen, float("-inf"))
            out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
            lse[:, first:last] = scores.logsumexp(-1)
        return out, lse
