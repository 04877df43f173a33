"""Capacities of a draft buffer, and the places of its arrays."""

from __future__ import annotations

import dataclasses
import mmap
from typing import get_args

import pytest
import torch
from buffer_children import NODE, SPEC

from engine.draft_buffer.layout import NUM_WORDS, BufferSpec, CorruptBlock, Section, block_bytes, map_arrays, split
from engine.draft_buffer.payload import Views
from engine.draft_buffer.target_endpoint import create_draft_buffer
from engine.errors import ConfigError


def test_bad_capacities_are_refused() -> None:
    for name in (
        "max_rows",
        "max_k",
        "max_request_tokens",
        "max_released",
        "max_options",
        "draft_vocab",
        "target_vocab",
    ):
        with pytest.raises(ConfigError, match=f"{name}: 0 given, allowed is 1 or more"):
            dataclasses.replace(SPEC, **{name: 0})
    with pytest.raises(ConfigError, match="epoch"):
        create_draft_buffer(SPEC, device="cpu", node_id=NODE, epoch=0)


@pytest.mark.parametrize("change", [{"feature_rows": 3}, {"feature_width": 3}, {"feature_itemsize": 3}])
def test_an_impossible_feature_shape_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="buffer features"):
        dataclasses.replace(SPEC, **change)


def test_the_spec_knows_the_size_of_the_payload() -> None:
    spec = BufferSpec(max_rows=64, max_k=5, max_request_tokens=512, max_released=64, draft_vocab=49152)
    assert spec.probs_bytes == 64 * 5 * 49152 * 4
    assert spec.payload_bytes == spec.probs_bytes + 2 * 64 * 5 * 4 + 512 * 4
    assert spec.vocab == 49152


@pytest.mark.parametrize("feature_rows", [0, 9])
def test_arrays_have_their_capacity_and_do_not_overlap(feature_rows: int) -> None:
    spec = dataclasses.replace(SPEC, feature_rows=feature_rows, feature_width=min(feature_rows, 1))
    memory = mmap.mmap(-1, block_bytes(spec))
    arrays = map_arrays(memory, spec)
    lengths = [len(getattr(arrays, field.name)) for field in dataclasses.fields(arrays)]
    assert lengths == [4, 64, 8, 2048, 64 if feature_rows else 0, 4, 20, 20, 20]
    for number, field in enumerate(dataclasses.fields(arrays), start=1):
        array = getattr(arrays, field.name)
        array.view("u1")[:] = number
    for number, field in enumerate(dataclasses.fields(arrays), start=1):
        assert (getattr(arrays, field.name).view("u1") == number).all()
    assert not any(memory[: 8 * NUM_WORDS]), "the words are before all arrays"
    last = arrays.parents
    assert memory[-last.nbytes :] == last.tobytes()


def test_flat_values_are_cut_into_rows() -> None:
    assert split([1, 2, 3], [2, 0, 1]) == [(1, 2), (), (3,)]
    assert split([], []) == []
    for lengths in ([2], [4], [4, -1], [-1, 4]):
        with pytest.raises(CorruptBlock, match="values of 3"):
            split([1, 2, 3], lengths)


def test_the_vocabulary_is_the_targets() -> None:
    assert SPEC.vocab == 1000
    assert dataclasses.replace(SPEC, target_vocab=None).vocab == SPEC.draft_vocab


@pytest.mark.parametrize("itemsize", [2, 4])
def test_sections_of_the_payload_are_on_cache_lines_and_do_not_overlap(itemsize: int) -> None:
    spec = dataclasses.replace(SPEC, max_rows=1, max_k=1, feature_rows=3, feature_width=5, feature_itemsize=itemsize)
    found = [spec.section(name) for name in get_args(Section)]
    assert found == [(0, 1200), (1216, 4), (1280, 4), (1344, 256), (1600, 15 * itemsize)]
    assert spec.payload_bytes == 1600 + 15 * itemsize
    views = Views.of(torch.zeros(spec.payload_bytes, dtype=torch.uint8), spec)
    assert views.probs.shape == (1, 1, 300)
    assert views.token_ids.shape == views.confidences.shape == (1, 1)
    assert views.new_tokens.shape == (64,)
    assert views.features is not None
    assert views.features.shape == (3, 5)
