"""Which kernels a model is loaded for, and what a loaded draft consists of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distill_fakes import write_target
from tiny_eagle import DRAFT_VOCAB, write_eagle
from tiny_models import write_model

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import ShardSpec, WeightFiles
from engine.errors import ConfigError
from engine.model.decoder import Decoder
from engine.model.device import Compute
from engine.model.load import LoadProgress, load_draft, load_model
from engine.model.shard_weights import Loader


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


def test_a_long_load_says_how_far_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = WeightFiles(write_model(tmp_path / "llama", "llama"))
    files.read_bytes = 2_500_000_000
    now = [0.0]
    progress = LoadProgress(files, 10, clock=lambda: now[0])
    with caplog.at_level("INFO"):
        for done, seconds in ((1, 2.0), (2, 6.0), (3, 8.0), (4, 12.0), (10, 30.0)):
            now[0] = seconds
            progress(done)
    assert [record.getMessage() for record in caplog.records] == [
        "loading: 2 of 10 layers, 2.5 GB read, about 24 s left",
        "loading: 4 of 10 layers, 2.5 GB read, about 18 s left",
    ]


def test_each_rank_reads_its_slices_only(tmp_path: Path) -> None:
    """The ranks together read each matrix once; embedding, norms and routers are read by every rank."""
    folder = write_model(tmp_path / "moe", "qwen3_moe", tie_word_embeddings=False)
    config, compute = ModelConfig.load(folder), Compute(torch.float32, torch.device("cpu"), "reference")

    def bytes_read(rank: int, size: int) -> int:
        files = WeightFiles(folder)
        Loader(config, files, compute, shard=ShardSpec(rank, size), linear="reference").decoder(None)
        return files.read_bytes

    whole = bytes_read(0, 1)
    size = (folder / "model.safetensors").stat().st_size
    assert 0.95 * size < whole < size
    embedding = config.vocab_size * config.hidden_size * 4
    norms = (3 * (2 * config.hidden_size + 2 * config.head_dim) + config.hidden_size) * 4
    routers = 2 * 6 * config.hidden_size * 4
    assert sum(bytes_read(rank, 3) for rank in range(3)) == whole + 2 * (embedding + norms + routers)
