"""What the draft's decoder gets as input in each architecture, and what it returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from distill_fakes import write_target
from fakes import ToyModel
from tiny_eagle import write_eagle

from engine.core.packing import SpanRows, pack_spans
from engine.draft.architectures import EagleArchitecture, Outputs, PlainArchitecture
from engine.errors import EngineError
from engine.model.load import LoadedDraft, load_draft
from engine.model.runner import ModelRunner

BLOCK = 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedDraft:
    target_folder = write_target(tmp_path_factory.mktemp("target"))
    folder: Path = write_eagle(target_folder, tmp_path_factory.mktemp("draft"))
    return load_draft(folder, target_folder, dtype=torch.float32)


def eagle(loaded: LoadedDraft) -> EagleArchitecture:
    assert loaded.head is not None
    caches = ModelRunner(loaded.decoder, num_blocks=4, block_size=BLOCK).caches
    return EagleArchitecture(loaded.head, loaded.decoder, caches)


def test_rows_are_selected_together() -> None:
    outputs = Outputs(torch.arange(6.0).view(3, 2), torch.arange(3.0).view(3, 1))
    assert outputs.select([0, 1, 2]) is outputs
    picked = outputs.select([2, 0])
    assert picked.logits.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert picked.previous_hidden is not None
    assert picked.previous_hidden.tolist() == [[2.0], [0.0]]
    assert Outputs(outputs.logits).select([1]).previous_hidden is None


def test_a_draft_model_needs_neither_features_nor_hidden_states() -> None:
    model = ToyModel(vocab_size=5, block_size=4)
    architecture = PlainArchitecture(model.forward)
    assert not architecture.reads_features
    first = architecture.compute_committed(pack_spans([SpanRows([1, 2], 0, [1], 1)], 4), None)
    assert torch.equal(first.logits, torch.from_numpy(model.logits_after([1, 2]))[None])
    second = architecture.compute_drafted(pack_spans([SpanRows([3], 2, [1], 1)], 4), first.previous_hidden)
    assert torch.equal(second.logits, torch.from_numpy(model.logits_after([1, 2, 3]))[None])


@torch.inference_mode()
def test_an_eagle_draft_combines_tokens_with_features_then_with_its_own_output(loaded: LoadedDraft) -> None:
    """The table of projected embeddings gives the same as projecting each token."""
    assert loaded.head is not None
    architecture, decoder = eagle(loaded), loaded.decoder
    assert architecture.reads_features
    plain = ModelRunner(decoder, num_blocks=4, block_size=BLOCK).caches
    features = torch.randn(2, loaded.head.feature_width)
    committed = pack_spans([SpanRows([5, 6], 0, [1], 1)], BLOCK)
    found = architecture.compute_committed(committed, features)
    tokens = loaded.head.project_tokens(F.embedding(torch.tensor([5, 6]), decoder.embedding))
    expected = decoder.forward(committed, plain, loaded.head.committed_inputs(tokens, features))
    assert expected.logits is not None
    assert expected.hidden is not None
    torch.testing.assert_close(found.logits, expected.logits)
    assert found.previous_hidden is not None
    torch.testing.assert_close(found.previous_hidden, expected.hidden[-1:])
    drafted = pack_spans([SpanRows([7], 2, [1], 1)], BLOCK)
    found = architecture.compute_drafted(drafted, expected.hidden[-1:])
    tokens = loaded.head.project_tokens(F.embedding(torch.tensor([7]), decoder.embedding))
    again = decoder.forward(drafted, plain, loaded.head.drafted_inputs(tokens, expected.hidden[-1:]))
    assert again.logits is not None
    torch.testing.assert_close(found.logits, again.logits)


def test_an_eagle_draft_refuses_missing_inputs(loaded: LoadedDraft) -> None:
    architecture = eagle(loaded)
    forward_input = pack_spans([SpanRows([5], 0, [1], 1)], BLOCK)
    with pytest.raises(EngineError, match="needs features for committed tokens"):
        architecture.compute_committed(forward_input, None)
    with pytest.raises(EngineError, match="needs its previous hidden state"):
        architecture.compute_drafted(forward_input, None)
