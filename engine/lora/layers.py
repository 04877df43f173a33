"""The linear layers of a target with adapters: W x + scale * B A x for the rows of each adapter.

Owns which rows of a forward belong to which adapter, and the two small products that each adapter adds (Hu et al.
2021). The result of a row never depends on its neighbours' adapters: elementwise operations are not fused with the
product, for rows without an adapter neither. Knows no files and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model.layers import Linear

MIN_ROWS = 4
"""Rows of a product, at least. Fewer are padded, since matrix libraries compute them in another order of summation."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one adapter in a forward."""

    number: int
    """The adapter's number."""
    rows: torch.Tensor | None
    """[n] int64 row indices, ascending; None: all rows."""


class ActiveRows:
    """The adapters of the present forward. One object per model; the forward's thread writes it before it computes."""

    def __init__(self) -> None:
        self.groups: Sequence[RowGroup] = ()
        """One per adapter that has rows."""


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part of a layer's outputs with one matrix B."""

    b: torch.Tensor
    """[outputs of the part, rank] B times the scale."""
    columns: slice
    """The part's outputs among those of the layer."""
    ranks: slice
    """The rows of the layer's A that it reads."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One shard's part of an adapter in one layer. A layer of fused projections has several parts.

    The matrices may have another dtype than the layer: float32 on a CPU, where small products in bfloat16 take five
    times as long.
    """

    a: torch.Tensor
    """[sum of ranks, in]."""
    parts: tuple[OutputPart, ...]

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Add the adapter's product to some rows of y, in place.

        Args:
            y: [N, out] in the dtype of the layer.
            x: [N, in] in the dtype of the layer.
            rows: [n] row indices; None: all rows.
        """
        chosen = x if rows is None else x.index_select(0, rows)
        count = chosen.shape[0]
        if count < MIN_ROWS:
            chosen = F.pad(chosen, (0, 0, 0, MIN_ROWS - count))
        inner = F.linear(chosen.to(self.a.dtype), self.a)  # [n, sum of ranks]
        for part in self.parts:
            delta = F.linear(inner[:, part.ranks], part.b)[:count].to(y.dtype)
            out = y[:, part.columns]
            if rows is None:
                out.add_(delta)
            else:
                out.index_add_(0, rows, delta)


class AdaptedLinear:
    """A linear layer with adapters. Implements `engine.model.layers.Linear`.

    Args:
        base: the layer without adapters.
        active: the adapters of the present forward.
    """

    def __init__(self, base: Linear, active: ActiveRows) -> None:
        self.base = base
        """The layer without adapters."""
        self._active = active
        self.adapters: dict[int, LowRank] = {}
        """By number. An adapter that leaves this layer as it is has no entry."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._add(self.base(x), x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self(x), approximate="tanh")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)

    def _add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for group in self._active.groups:
            low_rank = self.adapters.get(group.number)
            if low_rank is not None:
                low_rank.add_to(y, x, group.rows)
        return y
