"""The model's tokenizer as the HTTP layer needs it: chat template, encoding, decoding, EOS ids.

Owns one tokenizer, loaded from a folder without running code from it. Everything here may be called from several
threads at once. Does not know requests, limits or streams; the state of a stream is in `detokenizer`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from deployments.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from deployments.text.logprobs import TokenName
from deployments.text.tool_calls import OPEN, ToolForm, detect_form
from engine.checkpoint.model_config import eos_token_ids
from engine.errors import ConfigError, InvalidRequest

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_TEMPLATE_NAMES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
"""Names that a client may not give a meaning of its own."""


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
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._names: dict[int, TokenName] = {}
        self._tool_form = _tool_form(tokenizer)
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
            own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
            stop_token_ids = (*own, *eos_token_ids(Path(folder)))
        except Exception as error:  # the library raises anything for what is wrong
            raise ConfigError(f"model: no usable tokenizer in {folder}: {error}") from error
        return cls(tokenizer, eos_token_ids=stop_token_ids, use_window=use_window)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`, with the tokenizer's own prefix (a BOS, say) unless switched off."""
        # The batch call lets go of the interpreter lock while it works, the single one does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        begins_turn: bool = True,
        continues_last: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template.

        Text that spells a special token becomes that token, in messages as in the template itself.

        Args:
            messages: each with `role` and `content`, and what else the template knows.
            tools: definitions that the template may show.
            begins_turn: end where the assistant's turn begins.
            continues_last: end inside the last message instead.
            options: further names that the template may read.

        Raises:
            InvalidRequest: field `messages`; the template refuses them, or the model has none. Field
                `chat_template_kwargs`: a name that is taken.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions", field="messages")
        taken = next((name for name in options or () if name in _TEMPLATE_NAMES), None)
        if taken is not None:
            raise InvalidRequest(
                f"chat_template_kwargs must not hold {taken!r}, which has another meaning", field="chat_template_kwargs"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=begins_turn,
                continue_final_message=continues_last,
                **(options or {}),
            )
        except Exception as error:
            raise InvalidRequest(f"The model's chat template refuses messages: {error}", field="messages") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once, special tokens and EOS left out; bytes that are not UTF-8 become U+FFFD."""
        shown = [i for i in token_ids if i not in self._hidden]
        return self._backend.decode(shown, skip_special_tokens=True)

    def name_of(self, token_id: int) -> TokenName:
        """How a token is spelt by itself. Costs time once per token."""
        name = self._names.get(token_id)
        if name is None:
            name = self._names.setdefault(token_id, self._spell(token_id))
        return name

    def _spell(self, token_id: int) -> TokenName:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return TokenName(f"token_id:{token_id}", None)
        if token_id in self._hidden or token_id in self._special:
            return TokenName(token, None)
        if self._token_bytes is not None:
            raw = self._token_bytes[token_id]
        elif _BYTE_TOKEN.fullmatch(token):
            raw = bytes((int(token[3:5], 16),))
        else:
            # A token at the beginning may lose its leading space, so it is decoded after another.
            anchor = self.encode("a", add_special_tokens=False)
            raw = self.decode([*anchor, token_id])[len(self.decode(anchor)) :].encode()
        return TokenName(raw.decode("utf-8", errors="replace"), raw)

    @property
    def tool_form(self) -> ToolForm | None:
        """How this model writes calls of tools; None where its template defines none that is known."""
        return self._tool_form

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one request."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode)


def _tool_form(tokenizer: Any) -> ToolForm | None:
    if not tokenizer.chat_template:
        return None
    try:
        # A model may have a template of its own for conversations with tools.
        form = detect_form(tokenizer.get_chat_template(tools=[{}]))
    except ValueError:
        return None
    # Special tokens are not shown, so calls between them would never be found.
    hides_calls = any(token.special and token.content == OPEN for token in tokenizer.added_tokens_decoder.values())
    return None if form == "hermes" and hides_calls else form


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
