"""The model's tokenizer as the HTTP layer needs it: chat template, encoding, decoding, EOS ids.

Owns one tokenizer, loaded from a folder without running code from it. Everything here may be called from several
threads at once. Does not know requests, limits or streams; the state of a stream is in `detokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer

from deployments.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from engine.errors import ConfigError, InvalidRequest


class TextCodec:
    """Text to token ids and back.

    Args:
        tokenizer: a `transformers` tokenizer that is backed by the `tokenizers` library.
        eos_token_ids: ids that end a generation; they are never shown.
        use_window: decode by the general window method even where the byte table would do (the slow twin).

    Raises:
        ConfigError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: Any, *, eos_token_ids: Iterable[int], use_window: bool = False) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"model: its tokenizer {type(tokenizer).__name__} has no fast (tokenizer.json) form")
        # Changing truncation or padding later would race between threads, so both are off for good.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._hidden = frozenset(self.eos_token_ids)
        is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._token_bytes = None if use_window or not is_byte_level else _token_bytes(backend, self._hidden)

    @classmethod
    def from_folder(cls, folder: str | Path, *, use_window: bool = False) -> TextCodec:
        """Load tokenizer and EOS ids from a model folder; no network, no code from the folder.

        Raises:
            ConfigError: no usable tokenizer there.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: no usable tokenizer in {folder}: {error}") from error
        return cls(tokenizer, eos_token_ids=_eos_token_ids(Path(folder), tokenizer), use_window=use_window)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`, with the tokenizer's own prefix (a BOS, say) unless switched off."""
        # The batch call lets go of the interpreter lock while it works, the single one does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn.

        Args:
            messages: each with `role` and `content`.

        Raises:
            InvalidRequest: field `messages`; the template refuses them, or the model has none.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions", field="messages")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The model's chat template refuses messages: {error}", field="messages") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once, special tokens and EOS left out; bytes that are not UTF-8 become U+FFFD."""
        shown = [i for i in token_ids if i not in self._hidden]
        return self._backend.decode(shown, skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one request."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode)


def _eos_token_ids(folder: Path, tokenizer: Any) -> set[int]:
    """EOS ids of generation_config.json (or config.json where that names none) and of the tokenizer."""
    eos_token_ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if given is not None:
            return eos_token_ids | set(given if isinstance(given, list) else [given])
    return eos_token_ids


def _token_bytes(backend: Tokenizer, hidden: frozenset[int]) -> list[bytes]:
    """Bytes of each token of a byte-level vocabulary; empty for special and hidden tokens and for gaps."""
    byte_of_char = _byte_of_char()
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(vocab.values(), default=-1))
    for token, token_id in vocab.items():
        if token_id in special or token_id in hidden:
            continue
        try:
            table[token_id] = bytes([byte_of_char[char] for char in token])
        except KeyError:  # An added token is kept as it is written.
            table[token_id] = token.encode()
    return table


def _byte_of_char() -> dict[str, int]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte, inverted.

    Printable Latin-1 bytes stand for themselves; the others are numbered from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table
