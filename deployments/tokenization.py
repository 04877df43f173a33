"""/tokenize and /detokenize: what a text or a conversation is to the model, and back.

Owns what these two answer. Does not know HTTP.
"""

from __future__ import annotations

import pydantic_core

from deployments.prompts import ApiLimits, check_ids, encode_conversation
from deployments.protocol import DetokenizeBody, TokenizeBody, TokenizeChatBody
from deployments.responses import Detokenized, Tokenized
from deployments.text import TextCodec


def has_messages(raw: bytes) -> bool:
    """Whether a body is about a conversation; False also for what is no JSON object."""
    try:
        value = pydantic_core.from_json(raw)
    except ValueError:
        return False
    return isinstance(value, dict) and "messages" in value


def tokenize(body: TokenizeBody | TokenizeChatBody, codec: TextCodec, limits: ApiLimits) -> Tokenized:
    """Token ids as a generation would see them; they may be none, and more than fit the context.

    Raises:
        InvalidRequest: naming the field.
    """
    if isinstance(body, TokenizeChatBody):
        tokens = encode_conversation(body, codec, with_tools=bool(body.tools))
    else:
        tokens = codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return Tokenized(tokens=tokens, count=len(tokens), max_model_len=limits.max_model_len)


def detokenize(body: DetokenizeBody, codec: TextCodec, limits: ApiLimits) -> Detokenized:
    """Text of token ids, without special tokens.

    Raises:
        InvalidRequest: field `tokens`; an id is outside the vocabulary.
    """
    check_ids(body.tokens, "tokens", "tokens", limits)
    detokenizer = codec.detokenizer()
    return Detokenized(detokenizer.push(body.tokens) + detokenizer.finish())
