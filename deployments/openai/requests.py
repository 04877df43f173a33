"""The OpenAI request bodies that this server accepts, option by option.

Owns which fields each body has and which of them go together. An unknown option is refused unless it is null. An option
that is not supported is accepted only with a value that changes nothing. Does not know the tokenizer, the engine or
HTTP. Types of fields are in `fields`, turns and tools in `messages`, grammars in `structured`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from deployments.openai.fields import (
    MAX_CHOICES,
    Absent,
    Body,
    Ids,
    Label,
    MaxTokens,
    NumChoices,
    Only,
    PlainValue,
    Prompts,
    field_error,
)
from deployments.openai.generation_body import GenerationBody, ModelBody
from deployments.openai.messages import Message, ToolChoice, ToolChoiceField, Tools, check_tools
from deployments.openai.structured import ResponseFormat, response_grammar
from engine.messages import GrammarSpec

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens in /v1/completions."""
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_TEMPLATE_KWARGS = 16

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Metadata = Annotated[dict[str, PlainValue], Field(max_length=16)]


class ConversationBody(Body):
    """A conversation, and options of the chat template that makes a prompt of it."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, PlainValue], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = None
    enable_thinking: bool | None = None
    """Whether the model may write thoughts, for templates that can switch them."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model may think, for templates that read it or can switch thoughts."""

    @model_validator(mode="after")
    def _the_end_is_clear(self) -> Self:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise field_error("continue_final_message", "cannot be combined with add_generation_prompt")
            if self.messages[-1].role != "assistant" or not self.messages[-1].content:
                raise field_error("continue_final_message", "needs a last message of role 'assistant' with content")
        return self

    @property
    def begins_a_turn(self) -> bool:
        """Whether the prompt ends where a new turn of the assistant begins."""
        return not self.continue_final_message and self.add_generation_prompt is not False


class ChatBody(ConversationBody, GenerationBody):
    """/v1/chat/completions."""

    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None

    modalities: Annotated[Any, Only(["text"])] = None
    functions: Absent = None
    function_call: Absent = None
    audio: Absent = None
    prediction: Absent = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Absent = None
    moderation: Absent = None

    # Labels and storage options of OpenAI's. They change nothing in the response.
    service_tier: Label | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: Metadata | None = None
    prompt_cache_retention: Label | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            raise field_error("max_tokens", f"is {both[1]}, but max_completion_tokens is {both[0]}; set one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "is only allowed when 'logprobs' is true")
        check_tools(self.tools or [], self.tool_choice)
        if self.parallel_tool_calls is not None and not self.tools:
            raise field_error("parallel_tool_calls", "is only allowed when 'tools' are given")
        grammar_field = next((field for field, _ in self.grammars()), None)
        if self.may_call_tools and grammar_field is not None:
            raise field_error(grammar_field, "cannot be combined with tools, unless tool_choice is 'none'")
        return self

    def grammars(self) -> Iterator[tuple[str, GrammarSpec]]:
        grammar = response_grammar(self.response_format)
        if grammar is not None:
            yield "response_format", grammar
        yield from super().grammars()

    @property
    def needs_grammar(self) -> bool:
        return self.may_call_tools or super().needs_grammar

    @property
    def tool_mode(self) -> ToolChoice:
        """The effective choice. Its default is `auto` with tools and `none` without."""
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")

    @property
    def may_call_tools(self) -> bool:
        return self.tool_mode.mode != "none"

    @property
    def must_call_tools(self) -> bool:
        return self.tool_mode.mode in ("required", "named")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token. None reports no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def requested_max_tokens(self) -> int | None:
        """Most tokens that the client requests. None means as many as the context leaves."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"


class CompletionBody(GenerationBody):
    """/v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: NumChoices | None = None
    suffix: str | None = None
    """Text after the gap that the completion fills; for models with tokens for it."""

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise field_error(
                "best_of", f"is {self.best_of}, but n is {self.num_choices}; choosing among choices is not supported"
            )
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "may only be 0 together with 'echo'; set it to 1 or more")
        if self.suffix and self.echo:
            raise field_error("suffix", "cannot be combined with echo")
        if len(self.prompt) * self.num_choices > MAX_CHOICES:
            raise field_error(
                "n",
                f"is {self.n} for {len(self.prompt)} prompts; at most {MAX_CHOICES} choices per request are allowed",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens"


class TokenizeBody(ModelBody):
    """/tokenize of a text."""

    prompt: str
    add_special_tokens: bool | None = None


class TokenizeChatBody(ConversationBody, ModelBody):
    """/tokenize of a conversation."""


class DetokenizeBody(ModelBody):
    """/detokenize."""

    tokens: Ids
