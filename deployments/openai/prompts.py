"""The token ids of a request's prompts, and whether this model can take them.

Owns what a request may ask for in tokens, and the way from texts and conversations to ids. Does not know sampling or
HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pydantic_core

from deployments.errors import ContextLengthExceeded
from deployments.openai.requests import (
    ChatBody,
    CompletionBody,
    ConversationBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)
from deployments.openai.responses import Detokenized, Tokenized
from deployments.text.tokenizer import TextCodec
from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """What a request may ask for."""

    max_model_len: int
    """Prompt + output, tokens."""
    vocab_size: int
    """Token ids that the target accepts are below it."""
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None
    """Longest prompt; None leaves it to the context."""
    inline_body_bytes: int = 4096
    """Longer bodies are parsed and tokenised in a thread, so that streams do not wait for them."""


def encode_conversation(body: ConversationBody, codec: TextCodec, *, with_tools: bool) -> tuple[int, ...]:
    """Token ids of a conversation.

    Args:
        with_tools: show the body's tools to the model.

    Raises:
        InvalidRequest: field `messages`, `tools` or `chat_template_kwargs`.
    """
    if with_tools and codec.tool_form is None:
        raise InvalidRequest(
            "tools cannot be used: this model's chat template defines no tools in a form that this server reads "
            "(Hermes or Llama 3); leave them out or set tool_choice to 'none'",
            field="tools",
        )
    index = next((i for i, turn in enumerate(body.messages) if turn.uses_tools), None)
    if index is not None and codec.tool_form is None:
        field = f"messages[{index}]." + ("role" if body.messages[index].role == "tool" else "tool_calls")
        raise InvalidRequest(f"{field} cannot be shown: this model's chat template defines no tools", field=field)
    return codec.encode_chat(
        [turn.for_template() for turn in body.messages],
        tools=[tool.for_template() for tool in body.tools or ()] if with_tools else None,
        begins_turn=body.begins_a_turn,
        continues_last=bool(body.continue_final_message),
        options=body.chat_template_kwargs,
    )


def encode_prompts(body: ChatBody | CompletionBody, codec: TextCodec, limits: ApiLimits) -> tuple[tuple[int, ...], ...]:
    """Token ids of each prompt, at least one.

    Raises:
        InvalidRequest: field `prompt`, or one of those of a conversation.
    """
    if isinstance(body, ChatBody):
        prompt = encode_conversation(body, codec, with_tools=body.may_call_tools)
        return (_checked(prompt, "messages", "messages", limits),)
    prompts = []
    for index, given in enumerate(body.prompt):
        name = f"prompt[{index}]" if len(body.prompt) > 1 else "prompt"
        prompt = codec.encode(given) if isinstance(given, str) else given
        prompts.append(_checked(prompt, name, "prompt", limits))
    return tuple(prompts)


def _checked(prompt: tuple[int, ...], name: str, field: str, limits: ApiLimits) -> tuple[int, ...]:
    """The prompt itself, if the model can take it. `name` says which one it is, `field` where it was given."""
    if not prompt:
        raise InvalidRequest(
            f"{name} must hold at least one token; it is empty, or the model's vocabulary has no token for it",
            field=field,
        )
    check_ids(prompt, name, field, limits)
    if limits.max_prompt_tokens is not None and len(prompt) > limits.max_prompt_tokens:
        raise ContextLengthExceeded(
            f"{name} has {len(prompt)} tokens; this server takes at most {limits.max_prompt_tokens}", field=field
        )
    if len(prompt) >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"The context holds {limits.max_model_len} tokens, but {name} has {len(prompt)}, "
            "which leaves no room for an answer; shorten it",
            field=field,
        )
    return prompt


def check_ids(token_ids: Sequence[int], name: str, field: str, limits: ApiLimits) -> None:
    """Refuse ids that the model does not have.

    Raises:
        InvalidRequest: field `field`.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < limits.vocab_size)
        given = token_ids[index]
        shown = given if abs(given) < 10**18 else "a very large number"
        raise InvalidRequest(
            f"{name}: token id {shown} at index {index} is outside 0 to {limits.vocab_size - 1}", field=field
        )


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
