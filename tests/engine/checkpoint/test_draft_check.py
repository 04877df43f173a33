"""Whether a draft fits its target: every field of the fingerprint, and the sizes that both must share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.draft_check import check_draft, vocabulary_digest
from engine.checkpoint.model_config import SHARED_EMBEDDING
from engine.errors import ConfigError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 90,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
EAGLE: dict[str, Any] = {"architecture": "eagle", "feature_layers": [0, 2], "num_hidden_layers": 1}


def write(folder: Path, vocab: Any = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if vocab is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 8, "vocab_size": 50},  # a separate model may have other sizes
        EAGLE,
        EAGLE | {"target": {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 90, "note": "ignored"}},
        {"embed_tokens": SHARED_EMBEDDING},
    ],
)
def test_a_draft_that_fits_is_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    target = write(tmp_path / "target")
    config = check_draft(write(tmp_path / "draft", **changes), target)
    assert config.hidden_size == changes.get("hidden_size", 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (EAGLE | {"hidden_size": 32}, "draft: hidden_size: the draft was made for 32, the target has 16"),
        (EAGLE | {"vocab_size": 91}, "draft: vocab_size: the draft was made for 91, the target has 90"),
        (EAGLE | {"feature_layers": [0, 3]}, r"reads layers \[0, 3\], the target has 0 to 2"),
        ({"embed_tokens": SHARED_EMBEDDING, "hidden_size": 32}, "hidden_size: the draft was made for 32"),
        ({"target": {"hidden_size": 17}}, "target.hidden_size: the draft was made for 17, the target has 16"),
        ({"target": {"num_hidden_layers": 4}}, "target.num_hidden_layers: the draft was made for 4, the target has 3"),
        ({"target": {"vocab_size": 91}}, "target.vocab_size: the draft was made for 91, the target has 90"),
        ({"target": {"vocabulary_sha256": "x"}}, "target.vocabulary_sha256: the draft was made for 'x', the target"),
        ({"target": [1]}, r"target: \[1\] in .* is not an object"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    target = write(tmp_path / "target")
    with pytest.raises(ConfigError, match=message):
        check_draft(write(tmp_path / "draft", **changes), target)


def test_the_digest_depends_on_ids_and_tokens_only(tmp_path: Path) -> None:
    digests = [
        vocabulary_digest(write(tmp_path / str(number), vocab) / "tokenizer.json")
        for number, vocab in enumerate(
            ({"a": 0, "b": 1}, {"b": 1, "a": 0}, [["a", -1.0], ["b", -2.0]], {"a": 1, "b": 0})
        )
    ]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert vocabulary_digest(tmp_path / "none.json") == ""


def test_the_digest_counts_added_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "draft", {"a": 0}) / "tokenizer.json"
    before = vocabulary_digest(path)
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<end>"}]}))
    assert vocabulary_digest(path) != before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        vocabulary_digest(path)


MEDUSA: dict[str, Any] = {"medusa_num_heads": 3}


def test_medusa_heads_take_what_they_leave_out_from_their_target(tmp_path: Path) -> None:
    target, folder = write(tmp_path / "target", max_position_embeddings=77), tmp_path / "draft"
    folder.mkdir()
    for sizes in ({}, {"hidden_size": 16}, {"vocab_size": 90}):
        (folder / "config.json").write_text(json.dumps(MEDUSA | sizes))
        config = check_draft(folder, target)
        assert (config.hidden_size, config.vocab_size, config.feature_layers, config.max_model_len) == (
            16,
            90,
            (2,),
            77,
        )
    for name, given, expected in (("hidden_size", 17, 16), ("vocab_size", 89, 90)):
        (folder / "config.json").write_text(json.dumps(MEDUSA | {name: given}))
        with pytest.raises(
            ConfigError, match=f"draft: {name}: the draft was made for {given}, the target has {expected}"
        ):
            check_draft(folder, target)
    with pytest.raises(ConfigError, match="holds Medusa heads, which are a draft and no model"):
        check_draft(target, folder)


def test_an_eagle_3_head_reads_its_layers_and_serves_the_target_s_length(tmp_path: Path) -> None:
    target = write(tmp_path / "target", num_hidden_layers=8, max_position_embeddings=500)
    head = {"draft_vocab_size": 50, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    found = check_draft(write(tmp_path / "draft", max_position_embeddings=100, **head), target)
    assert (found.feature_layers, found.max_model_len) == ((1, 3, 4), 500)
    longer = write(tmp_path / "longer", max_position_embeddings=900, eagle_aux_hidden_state_layer_ids=[2, 8], **head)
    found = check_draft(longer, target)
    assert (found.feature_layers, found.max_model_len) == ((1, 7), 900)
    for changes, message in (
        ({"target_hidden_size": 17}, "target_hidden_size: the draft was made for 17, the target has 16"),
        ({"vocab_size": 91}, "vocab_size: the draft was made for 91, the target has 90"),
        ({"eagle_aux_hidden_state_layer_ids": [9]}, r"it reads layers \[8\], the target has 0 to 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_draft(write(tmp_path / "wrong", **head | changes), target)
