"""The model's tokenizer as the HTTP layer needs it: chat template, encoding, decoding, EOS ids.

Owns one tokenizer. It is loaded from a folder, and no code of that folder runs. Every method may be called from several
threads at once. Does not know requests or limits; the state of a stream is in `detokenizer`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from deployments.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from deployments.text.logprobs import TokenName
from deployments.text.reasoning import END_THINK, THINK, has_thoughts
from deployments.text.tool_calls import MARKERS, ToolForm, detect_form
from engine.checkpoint.model_config import eos_token_ids
from engine.errors import ConfigError, InvalidRequest

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Tokens before the prefix, the suffix and the middle of a fill-in-the-middle prompt, by family of models."""
_TAIL = 16
"""Tokens at a prompt's end in which an opened thought is looked for."""


class TextCodec:
    """Text to token ids and back.

    Args:
        tokenizer: a `transformers` tokenizer that is backed by the `tokenizers` library.
        eos_token_ids: ids that end a generation; they are never shown.
        use_window: decode by the general window method even where the byte table would do (the slow twin).
        generic_tools: where the chat template has no tools, describe them in the system message.

    Raises:
        ConfigError: the tokenizer has no fast backend.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_token_ids: Iterable[int],
        use_window: bool = False,
        generic_tools: bool = False,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"model: its tokenizer {type(tokenizer).__name__} has no fast (tokenizer.json) form")
        # Changing truncation or padding later would race between threads, so both are switched off here.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._taken_names = frozenset(inspect.signature(type(tokenizer).apply_chat_template).parameters) | {"messages"}
        self._backend = backend
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._hidden = frozenset(self.eos_token_ids)
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._names: dict[int, TokenName] = {}
        template = _template(tokenizer)
        form = detect_form(template)
        self.tool_form: ToolForm | None = form or ("generic" if generic_tools and template else None)
        """How this model writes tool calls; None where its template defines none in a known form."""
        self.has_thoughts = has_thoughts(template)
        """Whether this model may write thoughts before its response."""
        self._template = template
        ids = {marker: backend.token_to_id(marker) for marker in (*MARKERS, THINK, END_THINK)}
        self._markers = {i: marker for marker, i in ids.items() if i is not None and i in self._special}
        is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._token_bytes = None if use_window or not is_byte_level else _token_bytes(backend, self._hidden)
        self._marked_bytes = self._token_bytes
        if self._token_bytes is not None and self._markers:
            self._marked_bytes = list(self._token_bytes)
            for token_id, marker in self._markers.items():
                self._marked_bytes[token_id] = marker.encode()

    @classmethod
    def from_folder(cls, folder: str | Path, *, use_window: bool = False, generic_tools: bool = False) -> TextCodec:
        """Load tokenizer and EOS ids from a model folder; no network, no code from the folder.

        Raises:
            ConfigError: no usable tokenizer there.
        """
        try:
            tokenizer = load_tokenizer(Path(folder))
            own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
            stop_token_ids = (*own, *eos_token_ids(Path(folder)))
        except Exception as error:  # the library raises anything for what is wrong
            raise ConfigError(f"model: no usable tokenizer in {folder}: {error}") from error
        return cls(tokenizer, eos_token_ids=stop_token_ids, use_window=use_window, generic_tools=generic_tools)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`.

        Args:
            add_special_tokens: add what the tokenizer puts around a text, such as a BOS.
        """
        # The batch call releases the interpreter lock while it works, the single one does not.
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
            messages: each with `role`, `content` and further fields that the template reads.
            tools: definitions that the template may show.
            begins_turn: end the prompt where the assistant's turn begins.
            continues_last: end the prompt inside the last message instead.
            options: further variables that the template may read.

        Raises:
            InvalidRequest: field `messages`: the template refuses them, or the model has no template. Field
                `chat_template_kwargs`: a name that has another meaning.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions", field="messages")
        taken = next((name for name in options or () if name in self._taken_names), None)
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
        """How a single token is spelt. Each token is decoded once."""
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
            # A token at the beginning may lose its leading space, so it is decoded after another one.
            anchor = self.encode("a", add_special_tokens=False)
            raw = self.decode([*anchor, token_id])[len(self.decode(anchor)) :].encode()
        return TokenName(raw.decode("utf-8", errors="replace"), raw)

    def detokenizer(self, *, shows_markers: bool = False) -> Detokenizer:
        """A fresh incremental decoder for one request.

        Args:
            shows_markers: show the special tokens around tool calls and thoughts, for their parsers.
        """
        table = self._marked_bytes if shows_markers else self._token_bytes
        if table is not None:
            return ByteDetokenizer(table)
        return WindowDetokenizer(self._decode_marked if shows_markers and self._markers else self.decode)

    def _decode_marked(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once, with the markers."""
        text, start = "", 0
        for index, token_id in enumerate(token_ids):
            if token_id in self._markers:
                text += self.decode(token_ids[start:index]) + self._markers[token_id]
                start = index + 1
        return text + self.decode(token_ids[start:])

    def reads_option(self, name: str) -> bool:
        """Whether the chat template mentions an option."""
        return name in self._template

    def opens_thoughts(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside thoughts, so that the response continues them."""
        return self._tail(prompt).endswith(THINK)

    def closes_thoughts(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends after its thoughts, so that the response has none."""
        return self._tail(prompt).endswith(END_THINK)

    def _tail(self, prompt: Sequence[int]) -> str:
        return self._decode_marked(prompt[-_TAIL:]).rstrip()

    def encode_infill(self, prefix: Sequence[int], suffix: str) -> tuple[int, ...] | None:
        """A fill-in-the-middle prompt (Bavarian et al. 2022), in the order prefix, suffix, middle.

        Args:
            prefix: token ids of the text before the gap, without special tokens.
            suffix: text after the gap.

        Returns:
            Token ids, or None where the tokenizer has no tokens for it.
        """
        for names in _INFILL_TOKENS:
            ids = [i for i in map(self._backend.token_to_id, names) if i is not None]
            if len(ids) == len(names):
                before, after, middle = ids
                return (
                    *self.encode(""),
                    before,
                    *prefix,
                    after,
                    *self.encode(suffix, add_special_tokens=False),
                    middle,
                )
        return None


def load_tokenizer(folder: Path) -> Any:
    """The `transformers` tokenizer of a model folder; no network, no code from the folder.

    tokenizer.json is read as it is, which imports no torch. Only a folder without one needs the model's own tokenizer
    class, which converts what is there.
    """
    from transformers import PreTrainedTokenizerFast  # takes a second, and `deployments.app` is imported without need

    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)


def _template(tokenizer: Any) -> str:
    """Source of the chat template for a conversation with tools; empty where there is none."""
    if not tokenizer.chat_template:
        return ""
    try:
        # A model may have a separate template for conversations with tools.
        return str(tokenizer.get_chat_template(tools=[{}]))
    except ValueError:
        return ""


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
