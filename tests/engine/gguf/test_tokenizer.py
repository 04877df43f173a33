"""Tokenizers out of GGUF files: the token ids that `transformers` gives for the same file; other kinds are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGUFWriter

from engine.errors import ConfigError
from engine.gguf.file import GGUFFile
from engine.gguf.tokenizer import write_tokenizer

TEXTS = ("abc ab", "  a  bb\n\nc", "it's 12345, ab!", "a\tb ab", "cab'LL  ")
_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_ALPHABET = [chr(code) for code in _BYTES] + [chr(0x100 + index) for index in range(256 - len(_BYTES))]


def byte_level(path: Path, pre: str, **values: Any) -> Path:
    words = [("a", "b"), ("Ġ", "a"), ("Ġa", "b"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ"), ("'", "s"), ("Ċ", "Ċ")]
    tokens = ["<|end|>", *_ALPHABET, *("".join(pair) for pair in words), "<tool>"]
    kinds = [3, *[1] * (len(tokens) - 2), 4]
    return written(path, "gpt2", tokens, kinds, pre=pre, merges=[" ".join(pair) for pair in words], **values)


def sentencepiece(path: Path, **values: Any) -> Path:
    words = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "▁▁", "bb", "ca", "abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(words))]
    return written(path, "llama", tokens, kinds, scores=scores, eos=2, **values)


def written(
    path: Path,
    model: str,
    tokens: list[str],
    kinds: list[int],
    *,
    pre: str = "",
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    eos: int = 0,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    template: str | None = None,
) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pre:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if add_eos is not None:
        writer.add_add_eos_token(add_eos)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ours(source: Path, folder: Path) -> transformers.PreTrainedTokenizerBase:
    folder.mkdir()
    with GGUFFile(source) as file:
        write_tokenizer(file, folder, max_len=64)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-r1-qwen", "gpt-2"])
def test_byte_level_ids_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    source = byte_level(tmp_path / "a.gguf", pre)
    architecture, values, _ = get_gguf_tokenizer(str(source))
    theirs = convert_gguf_tokenizer(architecture, values)[0]
    tokenizer = ours(source, tmp_path / "out")
    for text in (*TEXTS, "a<tool>b<|end|>"):
        assert tokenizer(text)["input_ids"] == theirs.encode(text).ids, text
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_rules_differ() -> None:
    """The test above can fail: three digits are one piece for Llama 3 and three for Qwen."""
    from engine.gguf.tokenizer import _SPLITS

    assert _SPLITS["llama-bpe"] != _SPLITS["qwen2"]


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    source = sentencepiece(tmp_path / "a.gguf", add_bos=False)
    architecture, values, _ = get_gguf_tokenizer(str(source))
    theirs = convert_gguf_tokenizer(architecture, values)[0]
    tokenizer = ours(source, tmp_path / "out")
    for text in ("ab abc", "a  bb", "cab é", "b"):
        assert tokenizer(text)["input_ids"] == theirs.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_file_says_whether_a_text_begins_with_bos(tmp_path: Path) -> None:
    for number, (given, expected) in enumerate(((None, True), (True, True), (False, False))):
        source = sentencepiece(tmp_path / f"{number}.gguf", add_bos=given)
        assert (ours(source, tmp_path / f"out{number}")("ab")["input_ids"][0] == 1) is expected


def test_the_file_says_whether_a_text_ends_with_eos(tmp_path: Path) -> None:
    for number, (given, expected) in enumerate(((None, False), (True, True), (False, False))):
        source = sentencepiece(tmp_path / f"{number}.gguf", add_eos=given)
        assert (ours(source, tmp_path / f"out{number}")("ab")["input_ids"][-1] == 2) is expected


def test_a_template_is_kept_and_may_be_missing(tmp_path: Path) -> None:
    assert ours(byte_level(tmp_path / "a.gguf", "qwen2"), tmp_path / "a").chat_template is None
    source = byte_level(tmp_path / "b.gguf", "qwen2", template="{{ messages }}")
    assert ours(source, tmp_path / "b").chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("gpt2", {"pre": "falcon", "merges": []}, r"tokenizer\.ggml\.pre = 'falcon'; allowed: llama-bpe"),
        ("gpt2", {"pre": "qwen2"}, r"tokenizer\.ggml\.merges"),
        ("t5", {}, r"tokenizer\.ggml\.model = 't5'; allowed: gpt2, llama"),
        ("llama", {"scores": [0.0]}, r"3 tokens, but 1 scores"),
        ("llama", {}, r"tokenizer\.ggml\.scores"),
        ("gpt2", {"pre": "qwen2", "merges": [], "eos": 7}, r"3 tokens, 3 token types, specials \{'eos': 7\}"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, model: str, values: dict[str, Any], message: str) -> None:
    source = written(tmp_path / "a.gguf", model, ["<unk>", "a", "b"], [2, 1, 1], **values)
    with pytest.raises(ConfigError, match=message):
        ours(source, tmp_path / "out")
