"""What the host knows of the rows of a recorded draft chain, and how it is written to the chain's static inputs.

Owns the kinds of choices that are recorded. Knows no tensors (`engine.graphs.chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.graphs.static_memory import Arrays
from engine.sampling.distribution import seed_words
from engine.sampling.row_sampling import RowSampling

WHOLE_ROWS = 8
"""Most rows for which the whole chain is one recording besides. With more, a position takes longer than its launch."""

ChoiceKind = Literal["greedy", "sampled", "truncated"]
KINDS: tuple[ChoiceKind, ...] = ("greedy", "sampled", "truncated")
"""What the rows of a chain need: the most likely token; a draw; a draw after top-k, min-p or top-p."""


@dataclass(frozen=True, slots=True)
class ChainRows:
    """What the host knows of n rows before they are drafted for. m is the largest k."""

    ks: npt.NDArray[np.int64]
    """[n] tokens to draft, at least 1."""
    samplings: Sequence[RowSampling]
    seeds: Sequence[Sequence[int]]
    """[n][k] 64-bit seed of each draw."""
    positions: npt.NDArray[np.int64]
    """[n] position of the first drafted token."""
    kv_lens: npt.NDArray[np.int32]
    """[n] KV slots before it."""
    slots: npt.NDArray[np.int64]
    """[m, n] KV slot of each drafted token; 0 for those that need none. The last one of a row needs none."""
    block_tables: npt.NDArray[np.int32]
    """[n, W] block ids."""

    @property
    def kind(self) -> ChoiceKind:
        """What the rows need."""
        sampled = [sampling for sampling in self.samplings if not sampling.greedy]
        if any(sampling.top_k > 0 or sampling.min_p > 0 or sampling.top_p < 1 for sampling in sampled):
            return "truncated"
        return "sampled" if sampled else "greedy"


def fill_rows(arrays: Arrays, rows: ChainRows, *, num_columns: int) -> None:
    """Write the static inputs. A padding row is greedy, and attends to KV slot 0, which it also writes."""
    num, steps = len(rows.ks), len(rows.slots)
    defaults = {"kv_lens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": num_columns, "greedy": True}
    for name, array in arrays.items():
        array[:] = defaults.get(name, 0)
    arrays["positions"][:num] = rows.positions
    arrays["slots"][:steps, :num] = rows.slots
    arrays["kv_lens"][:num] = rows.kv_lens
    arrays["num_computed"][:num] = rows.ks - 1
    width = min(rows.block_tables.shape[1], arrays["block_tables"].shape[1])
    arrays["block_tables"][:num, :width] = rows.block_tables[:, :width]
    for index, (sampling, seeds) in enumerate(zip(rows.samplings, rows.seeds, strict=True)):
        if sampling.greedy:
            continue
        arrays["greedy"][index] = False
        arrays["temperature"][index], arrays["top_p"][index] = sampling.temperature, sampling.top_p
        arrays["top_k"][index] = min(sampling.top_k or num_columns, num_columns)
        arrays["min_p"][index], arrays["cuts"][index] = sampling.min_p, sampling.top_k > 0 or sampling.min_p > 0
        arrays["words"][: len(seeds), index] = seed_words(seeds)
