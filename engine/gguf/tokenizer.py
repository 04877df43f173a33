"""Writes the tokenizer of a GGUF file as Hugging Face files: tokenizer.json and tokenizer_config.json.

Owns the two kinds of vocabularies: byte-level BPE (`gpt2`), which splits text by the rule that `tokenizer.ggml.pre`
names, and SentencePiece BPE with byte fallback (`llama`), whose merges follow from the scores of its tokens. A kind or
a rule that is not known is refused, because another one would give other token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError
from engine.gguf.file import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
"""Token types of the GGUF token list."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
"""Regular expressions of the pieces of a text, by `tokenizer.ggml.pre`. Those of llama.cpp's list."""
PRE_TOKENIZERS = (*_SPLITS, "smollm", "gpt-2")
_SPECIALS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_tokenizer(file: GGUFFile, folder: Path, *, max_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        file: the GGUF file.
        folder: existing folder for the files.
        max_len: longest context, in tokens.

    Raises:
        ConfigError: the vocabulary is damaged, or its kind is not supported.
    """
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list)
    specials = special_ids(file)
    if len(kinds) != len(tokens) or not all(0 <= token < len(tokens) for token in specials.values()):
        raise ConfigError(f"model: {file.path} has {len(tokens)} tokens, {len(kinds)} token types, specials {specials}")
    model = file.get("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"model: {file.path} has tokenizer.ggml.model = {model!r}; allowed: gpt2, llama")
    try:
        tokenizer = _byte_level(file, tokens) if model == "gpt2" else _sentencepiece(file, tokens, specials)
        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [token for token, given in zip(tokens, kinds, strict=True) if given == kind]
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
        _add_ends(file, tokenizer, tokens, specials, default=model == "llama")
        tokenizer.save(str(folder / "tokenizer.json"))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  The library raises bare exceptions for a bad vocabulary or bad merges.
        raise ConfigError(f"model: {file.path} holds no usable tokenizer: {error}") from None
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {f"{name}_token": tokens[token] for name, token in specials.items()}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": max_len}
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.get("tokenizer.chat_template", str)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def special_ids(file: GGUFFile) -> dict[str, int]:
    """Ids of the special tokens that the file names: bos, eos, unk, pad.

    Raises:
        ConfigError: one is no whole number.
    """
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in _SPECIALS.items()}
    return {name: file.get(key, int) for name, key in keys.items() if key in file.metadata}


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"model: {file.path} has tokenizer.ggml.pre = {pre!r}; allowed: {', '.join(PRE_TOKENIZERS)}; use the "
            "Hugging Face folder of this model"
        )
    merges = [str(merge).partition(" ")[::2] for merge in file.get("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    if pre in _SPLITS:
        splits = [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        splits = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if pre == "smollm":
            splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], specials: dict[str, int]) -> Tokenizer:
    scores = file.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise ConfigError(f"model: {file.path} has {len(tokens)} tokens, but {len(scores)} scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[specials["unk"]] if "unk" in specials else None
    model = models.BPE(vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", bool) if _has(file, "add_space_prefix") else True
    steps: list[Any] = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that form a token, best score first. SentencePiece merges the pair with the best result."""
    found = [
        (-scores[index], vocab[token[:cut]], vocab[token[cut:]])
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokens = list(vocab)
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def _add_ends(
    file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], specials: dict[str, int], *, default: bool
) -> None:
    """Let an encoded text begin and end with the tokens that the file asks for."""
    ends = {}
    for name, missing in (("bos", default), ("eos", False)):
        wanted = file.get(f"tokenizer.ggml.add_{name}_token", bool) if _has(file, f"add_{name}_token") else missing
        if wanted and name in specials:
            ends[name] = tokens[specials[name]]
    if ends:
        around = f"{ends.get('bos', '')} $A {ends.get('eos', '')}".strip()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[(token, specials[name]) for name, token in ends.items()]
        )


def _has(file: GGUFFile, key: str) -> bool:
    return f"tokenizer.ggml.{key}" in file.metadata
