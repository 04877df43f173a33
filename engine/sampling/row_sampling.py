"""How one row of logits becomes a distribution, as plain numbers.

Owns the value that target and draft share. Imports no torch, so that `autoscale` and the simulator may use it.
"""

from __future__ import annotations

from msgspec import Struct


class RowSampling(Struct, frozen=True, gc=False):
    """How one row of logits becomes a distribution.

    `coupled` rows choose their token as a function of (law, stream, position) alone; the others use rejection sampling.
    """

    temperature: float
    top_p: float
    stream_key: int
    attempt: int
    coupled: bool
    top_k: int = 0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0.0
