"""A draft with a different vocabulary than the target is refused at start, with the first difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deployments.cluster.drafts import check_draft_vocabulary
from engine.errors import ConfigError

WORDS = ["<eos>", "a", "b", "c", "d"]


def write_model(folder: Path, words: list[str] | None, vocab_size: int) -> Path:
    folder.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if words is not None:
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_model(tmp_path / "target", WORDS, 5)


@pytest.mark.parametrize(("words", "size"), [(WORDS, 5), (WORDS, 8), ([*WORDS, "<pad1>", "<pad2>"], 7), (None, 5)])
def test_equal_tokens_and_padding_are_accepted(
    target: Path, tmp_path: Path, words: list[str] | None, size: int
) -> None:
    check_draft_vocabulary(target, write_model(tmp_path / "draft", words, size))


def test_the_first_differing_token_is_named_with_both_sizes(target: Path, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", ["<eos>", "a", "x", "c", "d", "e"], 6)
    with pytest.raises(ConfigError, match=r"target 5 tokens, draft 6.*token 2 is 'b'.*'x'"):
        check_draft_vocabulary(target, draft)


def test_a_draft_that_lacks_tokens_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token 4 is 'd' in the target and None"):
        check_draft_vocabulary(target, write_model(tmp_path / "draft", WORDS[:4], 4))


def test_another_size_without_a_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"6 tokens, the target's has 5"):
        check_draft_vocabulary(target, write_model(tmp_path / "draft", None, 6))
