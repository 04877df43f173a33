"""Log-probabilities in OpenAI's two formats: one for chat, an older one for completions.

Owns both formats and how a token is spelt in them. Numbers come from the engine, spellings from the tokenizer. There is
one entry per token that usage counts, including the token that ended the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from engine.messages import TokenLogprobs

LOWEST = -9999.0
"""Lowest log-probability that is reported: JSON has no minus infinity."""


@dataclass(frozen=True, slots=True)
class TokenName:
    """How a single token is shown."""

    text: str
    """Text of the token; U+FFFD where its bytes are not valid UTF-8."""
    raw: bytes | None
    """Bytes that the token adds to the text; None for tokens that add nothing, such as EOS."""


NameOf = Callable[[int], TokenName]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One token with its log-probabilities."""

    token_id: int
    offset: int
    """Characters of the response before the token, including those of a stop string."""
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which has no token before it."""


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Lists of equal length, with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def chat_logprobs(records: Sequence[TokenRecord], name_of: NameOf, num_top: int) -> ChatLogprobs:
    """Log-probabilities of tokens of a response, without those of a prompt.

    Args:
        num_top: alternatives to show with each token.
    """
    content = []
    for record in records:
        if record.logprobs is None:
            continue
        top = [TopLogprob(*_entry(i, logprob, name_of)) for i, logprob in record.logprobs.top[:num_top]]
        content.append(ChatTokenLogprob(*_entry(record.token_id, record.logprobs.logprob, name_of), top))
    return ChatLogprobs(content)


def completion_logprobs(records: Sequence[TokenRecord], name_of: NameOf, num_top: int) -> CompletionLogprobs:
    """Log-probabilities of tokens of a response, and of an echoed prompt before them.

    Each `top_logprobs` entry also holds the token itself, so it may have one more than `num_top`.
    """
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for record in records:
        if record.logprobs is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(max(record.logprobs.logprob, LOWEST))
        top: dict[str, float] = {}
        for token_id, logprob in (*record.logprobs.top[:num_top], (record.token_id, record.logprobs.logprob)):
            top.setdefault(spell(name_of(token_id)), max(logprob, LOWEST))
        tops.append(top)
    return CompletionLogprobs(
        tokens=[spell(name_of(record.token_id)) for record in records],
        token_logprobs=values,
        top_logprobs=tops if num_top else None,
        text_offset=[record.offset for record in records],
    )


def spell(name: TokenName) -> str:
    """A token's text, or `bytes:\\x..` where its bytes are not valid UTF-8."""
    if name.raw is None or name.raw == name.text.encode():
        return name.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name.raw)


def _entry(token_id: int, logprob: float, name_of: NameOf) -> tuple[str, float, list[int] | None]:
    name = name_of(token_id)
    return name.text, max(logprob, LOWEST), None if name.raw is None else list(name.raw)
