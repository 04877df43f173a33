"""Which kernels a model is loaded for, and what a loaded draft consists of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distill_fakes import write_target
from tiny_eagle import DRAFT_VOCAB, write_eagle
from tiny_models import write_model

from engine.errors import ConfigError
from engine.model.decoder import Decoder
from engine.model.load import load_draft, load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_float32_is_computed_by_pytorch_and_native_kernels_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    model = load_model(folder, dtype=torch.float32)
    assert isinstance(model, Decoder)
    assert not model.own_threads
    with pytest.raises(ConfigError, match="kernel: native given, but it needs one bfloat16 shard on cpu"):
        load_model(folder, dtype=torch.float32, kernel="native")


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_feature_layer_just_out_of_range_is_refused(tmp_path: Path, layer: int) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    assert load_model(folder, dtype=torch.float32, feature_layers=(0, 2)).feature_layers == (0, 2)
    with pytest.raises(ConfigError, match=r"feature_layers: .* is not within \[0, 3\)"):
        load_model(folder, dtype=torch.float32, feature_layers=(layer,))


def test_a_draft_model_has_no_head(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    draft = load_draft(folder, folder, dtype=torch.float32)
    assert draft.head is None
    assert draft.decoder.feature_layers == ()


def test_an_eagle_draft_has_a_head_and_returns_its_last_layer(tmp_path: Path) -> None:
    target_folder = write_target(tmp_path / "target")
    folder = write_eagle(target_folder, tmp_path / "draft", num_layers=2)
    draft = load_draft(folder, target_folder, dtype=torch.float32)
    assert draft.head is not None
    assert draft.head.feature_width == len(draft.decoder.config.feature_layers) * draft.decoder.config.hidden_size
    assert draft.decoder.feature_layers == (1,)
    assert draft.decoder.draft_vocab is not None
    assert torch.equal(draft.decoder.draft_vocab, DRAFT_VOCAB)
    assert draft.decoder.logit_width == len(DRAFT_VOCAB)
