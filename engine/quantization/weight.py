"""A quantised weight that stays in the files until it is used, as codes or dequantised.

Owns nothing but the rows that belong to it: reading is in `engine.checkpoint.weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.gguf.codes import Codes, stacked


class QuantisedFiles(Protocol):
    """Reads rows of a quantised weight."""

    def read_codes(self, name: str, shape: tuple[int, int], rows: slice) -> Codes:
        """As they are."""
        ...

    def read_float(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Dequantised."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor of a checkpoint."""

    files: QuantisedFiles
    name: str
    shape: tuple[int, int]
    """Of the whole tensor."""
    rows: slice
    """With start and stop."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows of one or more quantised tensors with equally many columns, one below the other."""

    parts: tuple[Rows, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return sum(part.rows.stop - part.rows.start for part in self.parts), self.parts[0].shape[1]

    def codes(self) -> Codes:
        """The weight as it is.

        Raises:
            ConfigError: a tensor is damaged.
        """
        return stacked([part.files.read_codes(part.name, part.shape, part.rows) for part in self.parts])

    def dequantised(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weight, dequantised and rounded.

        Raises:
            ConfigError: a tensor is damaged.
        """
        return torch.cat(
            [part.files.read_float(part.name, part.shape, rows=part.rows, dtype=dtype).to(dtype) for part in self.parts]
        )


Weight = torch.Tensor | Quantised


def stacked_rows(weights: list[Weight]) -> Weight:
    """The rows of several matrices as one. Only if all are quantised, the result is."""
    quantised = [weight for weight in weights if isinstance(weight, Quantised)]
    if len(quantised) == len(weights):
        return Quantised(tuple(part for weight in quantised for part in weight.parts))
    return torch.cat([weight.dequantised() if isinstance(weight, Quantised) else weight for weight in weights])
