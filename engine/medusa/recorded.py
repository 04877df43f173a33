"""The forward of Medusa heads as CUDA graphs, one per head and number of requests.

Owns the static memory. `MedusaHeads.logits` is the slow twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.graphs.forward import Capture
from engine.medusa.heads import MedusaHeads


class RecordedHeads:
    """The recordings.

    Args:
        heads: the weights.
        sizes: requests to record for.
        capture: records them.
    """

    def __init__(self, heads: MedusaHeads, sizes: Sequence[int], capture: Capture) -> None:
        self._heads = heads
        self._num_heads = len(heads.blocks)
        self.max_rows = max(sizes)
        """Most requests."""
        with torch.inference_mode():
            dtype, hidden = heads.norm.weight.dtype, heads.config.hidden_size
            self._hidden = torch.zeros(self.max_rows, hidden, dtype=dtype, device=heads.device)
            self._logits = torch.zeros(self.max_rows, self._num_heads, heads.num_columns, device=heads.device)
            self._replays: dict[int, list[Callable[[], None]]] = {
                size: [capture(partial(self._compute, size, head)) for head in range(self._num_heads)]
                for size in sorted(sizes, reverse=True)
            }

    @torch.inference_mode()
    def logits(self, features: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """Queue the first `num_heads` heads.

        Args:
            features: [n, hidden_size] of at most `max_rows` requests.
            num_heads: heads to compute for all of them.

        Returns:
            [R, V] float32, valid until the next call, and [n] the row of each request's first head. Those of its other
            heads follow it.
        """
        num = len(features)
        self._hidden[:num].copy_(features)
        size = min(size for size in self._replays if size >= num)
        for replay in self._replays[size][:num_heads]:
            replay()
        return self._logits.flatten(0, 1), np.arange(num, dtype=np.int64) * self._num_heads

    def _compute(self, size: int, head: int) -> None:
        self._logits[:size, head].copy_(self._heads.head_logits(self._hidden[:size], head))
