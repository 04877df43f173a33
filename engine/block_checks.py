"""Checks of what a peer process may have written into shared memory, and of what we are about to write.

Owns the error for the first. Knows no layout.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")


class CorruptBlock(Exception):
    """The block holds what no healthy peer writes, or belongs to another epoch."""


def check_capacity(what: str, given: int, allowed: int) -> None:
    """Raises ValueError: more than the block can hold."""
    if given > allowed:
        raise ValueError(f"{what}: {given} given, allowed are {allowed}")


def count(what: str, found: int, most: int) -> int:
    """A count that was read. Raises CorruptBlock: out of range."""
    if not 0 <= found <= most:
        raise CorruptBlock(f"{what}: {found} found, allowed are 0..{most}")
    return found


def expect(what: str, found: int, expected: int) -> None:
    """Raises CorruptBlock: another value was read."""
    if found != expected:
        raise CorruptBlock(f"{what} is {found}, expected {expected}")


def within(token_ids: npt.NDArray[np.integer], vocab: int) -> bool:
    """Whether all are ids of the vocabulary."""
    return token_ids.size == 0 or (int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab)


def split(flat: list[_T], lengths: list[int]) -> list[tuple[_T, ...]]:
    """Cut `flat` into consecutive parts; the lengths must be sane and use it up."""
    if any(length < 0 for length in lengths) or sum(lengths) != len(flat):
        raise CorruptBlock(f"rows claim {sum(lengths)} values of {len(flat)}")
    ends = list(accumulate(lengths))
    return [tuple(flat[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
