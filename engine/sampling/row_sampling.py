"""The sampling parameters of one row of logits, as plain numbers.

Owns the value that target and draft exchange. Imports no torch, so that `autoscale` and the simulator can import it.
"""

from __future__ import annotations

from msgspec import Struct


class RowSampling(Struct, frozen=True, gc=False):
    """The sampling parameters of one row of logits."""

    temperature: float
    """Divides the logits. 0 selects the most likely token."""
    top_p: float
    """Mass of the nucleus. 1 keeps all tokens."""
    stream_key: int
    """64-bit key of the request's random stream."""
    attempt: int
    """Makes the draws of different steps independent. 0 for coupled rows."""
    coupled: bool
    """True: the token is a function of (distribution, stream key, position) alone. False: rejection sampling."""
    top_k: int = 0
    """Number of most likely tokens to keep. 0 keeps all tokens."""
    min_p: float = 0.0
    """Least probability to keep, as a fraction of the largest probability. 0 keeps all tokens."""

    @property
    def greedy(self) -> bool:
        """Whether the row selects the most likely token without a draw."""
        return self.temperature == 0.0
