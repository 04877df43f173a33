"""Promise: the codes of GGUF blocks stand for exactly the values that the package `gguf` gives, for any bits."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.quants import dequantize
from gguf_models import random_rows

from engine.gguf.codes import SPLITTERS, Codes, bytes_per_weight, split_blocks, stacked

KINDS = pytest.mark.parametrize("kind", SPLITTERS, ids=lambda kind: kind.name)


def signed_rows(kind: object, rows: int, seed: int = 0) -> np.ndarray:
    """Random rows of 512 columns, some of whose scales are negative."""
    raw = random_rows(kind.name, rows, 512, np.random.default_rng(seed))  # type: ignore[attr-defined]
    blocks = raw.reshape(-1, SPLITTERS[kind][1])  # type: ignore[index]
    place = 209 if kind.name == "Q6_K" else 1  # type: ignore[attr-defined]
    blocks[::3, place] ^= 0x80
    return raw


@KINDS
def test_values_are_those_of_the_reference(kind: object) -> None:
    raw = signed_rows(kind, 40)
    codes = split_blocks(raw, kind)  # type: ignore[arg-type]
    assert np.array_equal(codes.values(), dequantize(raw, kind))  # type: ignore[arg-type]


@KINDS
def test_the_stated_form_holds(kind: object) -> None:
    codes = split_blocks(signed_rows(kind, 40), kind)  # type: ignore[arg-type]
    low, high = (codes.offset, codes.offset + 15) if codes.bits == 4 else (-128, 127)
    assert low <= codes.codes.min() <= codes.codes.max() <= high
    grids = [grid for grid in (codes.scales, codes.minimums) if grid is not None]
    assert codes.is_half == all(np.array_equal(grid, grid.astype(np.float16)) for grid in grids)


def test_rows_of_different_types_have_one_form_with_the_same_values() -> None:
    parts = [split_blocks(signed_rows(kind, 3, seed), kind) for seed, kind in enumerate(SPLITTERS)]
    together = stacked(parts)
    assert (together.bits, together.block, together.is_half) == (8, 16, False)
    assert np.array_equal(together.values(), np.concatenate([part.values() for part in parts]))


def test_rows_of_one_type_keep_its_form() -> None:
    whole = split_blocks(signed_rows(next(iter(SPLITTERS)), 6), next(iter(SPLITTERS)))
    again = stacked([whole.rows(slice(0, 2)), whole.rows(np.array([2, 3, 4, 5]))])
    assert isinstance(again, Codes)
    assert (again.bits, again.offset, again.block, again.is_half) == (4, -8, 32, True)
    assert again.minimums is None
    assert np.array_equal(again.values(), whole.values())


def test_what_a_weight_takes_in_memory() -> None:
    """Codes of four or eight bits; one or two float16 per block of 32; two float32 in the super-blocks of Q4_K and
    Q5_K, and one per 16 weights in those of Q6_K."""
    assert {kind.name: bytes_per_weight(kind) for kind in SPLITTERS} == {
        "Q4_0": 0.5 + 2 / 32,
        "Q4_1": 0.5 + 4 / 32,
        "Q5_0": 1 + 2 / 32,
        "Q5_1": 1 + 4 / 32,
        "Q8_0": 1 + 2 / 32,
        "Q4_K": 0.5 + 8 / 32,
        "Q5_K": 1 + 8 / 32,
        "Q6_K": 1 + 4 / 16,
    }
