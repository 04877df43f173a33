"""The reduced vocabulary of a draft: target ids of its columns, stored as ids or as distances."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.draft_vocab import read_draft_vocab
from engine.checkpoint.weights import WeightFiles
from engine.errors import ConfigError


def read(folder: Path, values: torch.Tensor, *, size: int | None = None, are_offsets: bool = False) -> torch.Tensor:
    save_file({"map": values}, folder / "model.safetensors")
    return read_draft_vocab(
        WeightFiles(folder), "map", len(values) if size is None else size, vocab_size=10, are_offsets=are_offsets
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_and_distances(tmp_path: Path, dtype: torch.dtype) -> None:
    ids = read(tmp_path, torch.tensor([9, 0, 4], dtype=dtype))
    assert (ids.tolist(), ids.dtype) == ([9, 0, 4], torch.int64)
    offsets = read(tmp_path, torch.tensor([0, 3, 7], dtype=dtype), are_offsets=True)
    assert (offsets.tolist(), offsets.dtype) == ([0, 4, 9], torch.int64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([0, 10]), r"map must hold distinct token ids within \[0, 10\), given are 2 from 0 to 10"),
        (torch.tensor([-1, 3]), r"given are 2 from -1 to 3"),
        (torch.tensor([3, 3]), r"given are 2 from 3 to 3"),
        (torch.tensor([1.0, 2.0]), r"tensor map is of type torch\.float32; allowed: int64, int32"),
    ],
)
def test_what_is_no_vocabulary_is_refused(tmp_path: Path, values: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, values)


def test_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor map has shape \[2\]"):
        read(tmp_path, torch.tensor([0, 1]), size=3)
