"""The token ids of a request's prompts, and whether they fit the model.

Owns the limits of a request in tokens, and the way from texts and conversations to ids. Does not know sampling or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core

from deployments.errors import ContextLengthExceeded
from deployments.openai.generic_tools import plain_turns
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
    """Limits of a request."""

    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Token ids that the target accepts are below it."""
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt. None allows what the context holds."""
    inline_body_bytes: int = 4096
    """Longer bodies are parsed and tokenized in a thread, so that streams do not wait for them."""
    strict_max_tokens: bool = False
    """Refuse `max_tokens` above what the context leaves. Otherwise it is lowered to that."""


def encode_conversation(body: ConversationBody, codec: TextCodec, *, with_tools: bool) -> tuple[int, ...]:
    """Token ids of a conversation.

    Args:
        with_tools: show the body's tools to the model.

    Raises:
        InvalidRequest: field `messages`, `tools` or `chat_template_kwargs`.
    """
    if with_tools and codec.tool_form is None:
        raise InvalidRequest(
            "tools cannot be used: this model's chat template defines no tools in a known form; leave them out, set "
            "tool_choice to 'none', or set generic_tools on the server",
            field="tools",
        )
    index = next((i for i, turn in enumerate(body.messages) if turn.uses_tools), None)
    if index is not None and codec.tool_form is None:
        field = f"messages[{index}]." + ("role" if body.messages[index].role == "tool" else "tool_calls")
        raise InvalidRequest(f"{field} cannot be shown: this model's chat template defines no tools", field=field)
    turns = [turn.for_template() for turn in body.messages]
    tools = [tool.for_template() for tool in body.tools or ()] if with_tools else None
    if codec.tool_form == "generic":
        turns, tools = plain_turns(turns, tools), None
    return codec.encode_chat(
        turns,
        tools=tools,
        begins_turn=body.begins_a_turn,
        continues_last=bool(body.continue_final_message),
        options=_template_options(body, codec),
    )


def _template_options(body: ConversationBody, codec: TextCodec) -> dict[str, Any]:
    """Variables of the chat template. `enable_thinking` and `reasoning_effort` become what this template reads.

    Raises:
        InvalidRequest: the template cannot do what is requested.
    """
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    effort, thinks = body.reasoning_effort, body.enable_thinking
    if effort is not None:
        if codec.reads_option("reasoning_effort"):
            options["reasoning_effort"] = effort
        elif codec.reads_option("enable_thinking"):
            options["enable_thinking"] = effort not in ("none", "minimal")
        elif codec.has_thoughts or effort != "none":
            raise InvalidRequest(
                f"reasoning_effort {effort!r} is not supported: this model's chat template cannot change how much it "
                "thinks; leave it out",
                field="reasoning_effort",
            )
    if thinks is not None:
        if codec.reads_option("enable_thinking"):
            options["enable_thinking"] = thinks
        elif thinks != codec.has_thoughts:
            raise InvalidRequest(
                f"enable_thinking {str(thinks).lower()} is not supported: this model's chat template cannot switch "
                "thoughts; leave it out",
                field="enable_thinking",
            )
    return options


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
        if body.suffix:
            prompt = _encode_infill(given, body.suffix, codec)
        else:
            prompt = codec.encode(given) if isinstance(given, str) else given
        prompts.append(_checked(prompt, name, "prompt", limits))
    return tuple(prompts)


def _encode_infill(given: str | tuple[int, ...], suffix: str, codec: TextCodec) -> tuple[int, ...]:
    prefix = codec.encode(given, add_special_tokens=False) if isinstance(given, str) else given
    prompt = codec.encode_infill(prefix, suffix)
    if prompt is None:
        raise InvalidRequest(
            "suffix is not supported: this model's tokenizer has no fill-in-the-middle tokens; leave it out",
            field="suffix",
        )
    return prompt


def _checked(prompt: tuple[int, ...], name: str, field: str, limits: ApiLimits) -> tuple[int, ...]:
    """The prompt itself, if it fits the model.

    Args:
        name: which prompt it is, for messages.
        field: the field that holds it.
    """
    if not prompt:
        raise InvalidRequest(
            f"{name} must hold at least one token; it is empty, or the model's vocabulary has no token for it",
            field=field,
        )
    check_ids(prompt, name, field, limits)
    if limits.max_prompt_tokens is not None and len(prompt) > limits.max_prompt_tokens:
        raise ContextLengthExceeded(
            f"{context_length(limits)} This server accepts prompts of at most {limits.max_prompt_tokens} tokens, but "
            f"{name} has {len(prompt)}; shorten it",
            field=field,
        )
    if len(prompt) >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"{context_length(limits)} {name} has {len(prompt)}, which leaves no room for a response; shorten it",
            field=field,
        )
    return prompt


def context_length(limits: ApiLimits) -> str:
    """The sentence by which clients and gateways recognize that a request does not fit the context."""
    return f"This model's maximum context length is {limits.max_model_len} tokens."


def check_ids(token_ids: Sequence[int], name: str, field: str, limits: ApiLimits) -> None:
    """Refuse ids outside the model's vocabulary.

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
    """Whether a body holds a conversation. False if it is not a JSON object."""
    try:
        value = pydantic_core.from_json(raw)
    except ValueError:
        return False
    return isinstance(value, dict) and "messages" in value


def tokenize(body: TokenizeBody | TokenizeChatBody, codec: TextCodec, limits: ApiLimits) -> Tokenized:
    """Token ids as a generation would use them. There may be none, or more than fit the context.

    Raises:
        InvalidRequest: naming the field.
    """
    if isinstance(body, TokenizeChatBody):
        tokens = encode_conversation(body, codec, with_tools=bool(body.tools))
    else:
        tokens = codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return Tokenized(tokens=tokens, count=len(tokens), max_model_len=limits.max_model_len)


def detokenize(body: DetokenizeBody, codec: TextCodec, limits: ApiLimits) -> Detokenized:
    """Text of token ids, without special tokens. Bytes that are not valid UTF-8 become U+FFFD.

    Raises:
        InvalidRequest: field `tokens`; an id is outside the vocabulary.
    """
    check_ids(body.tokens, "tokens", "tokens", limits)
    return Detokenized(codec.decode(body.tokens))
