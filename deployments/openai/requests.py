"""What clients may send: the OpenAI request bodies that this server understands, option by option.

Owns which fields each body has and which of them go together. An option that is not known is refused; one that is
known but not supported is accepted only with a value that changes nothing. Does not know the tokenizer, the engine or
HTTP. Types of fields are in `fields`, turns and tools in `messages`, grammars in `structured`; answers in `responses`.
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
    LogitBias,
    MaxTokens,
    MinP,
    MinTokens,
    NumChoices,
    Only,
    Penalty,
    PlainValue,
    Prompts,
    RepetitionPenalty,
    Seed,
    Stop,
    StopIds,
    Temperature,
    TopK,
    TopP,
    field_error,
)
from deployments.openai.messages import Message, ToolChoice, ToolChoiceField, Tools, check_tools
from deployments.openai.structured import GuidedFields, ResponseFormat, response_grammar
from engine.config import MAX_K
from engine.messages import GrammarSpec, Priority

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens in /v1/completions."""
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_TEMPLATE_KWARGS = 16
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400

ModelName = Annotated[str, Field(description="The name this server gives its model; see /v1/models.")]


class ModelBody(Body):
    """Any body: it says which model it is for."""

    model: ModelName


class SpeculativeBody(Body):
    """A client's say in drafting for its own request."""

    enabled: bool = True
    max_k: Annotated[int, Field(ge=0, le=MAX_K)] | None = None
    trace: bool = False
    """Each chunk of a stream says where its tokens come from, in a field `paceline` beside OpenAI's own."""


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Only(False)] = None


class GenerationBody(ModelBody, GuidedFields):
    """What both kinds of generation share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias = ()
    seed: Seed | None = None
    min_tokens: MinTokens | None = None
    stop: Stop = ()
    stop_token_ids: StopIds = ()
    ignore_eos: bool | None = None
    n: NumChoices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_granularity: Literal["step", "token"] | None = None
    user: str | None = None
    """A label of the client's own; it has no effect on the output."""
    speculative: SpeculativeBody | None = None
    priority: Priority | None = None
    timeout: Annotated[float, Field(ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)] | None = None
    """Seconds the whole answer may take."""

    @model_validator(mode="after")
    def _shared_fields_go_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "is only allowed when 'stream' is true")
        if self.stream_granularity == "token" and not self.stream:
            raise field_error("stream_granularity", "is only allowed when 'stream' is true")
        if self.is_traced and not self.stream:
            raise field_error("speculative.trace", "is only allowed when 'stream' is true")
        if self.is_traced and self.streams_tokens:
            raise field_error(
                "speculative.trace", "shows whole steps; it cannot be combined with stream_granularity 'token'"
            )
        asked = [field for field, _ in self.grammars()]
        if len(asked) > 1:
            raise field_error(asked[1], f"cannot be combined with {asked[0]}; use one of them")
        return self

    @property
    def needs_grammar(self) -> bool:
        return next(self.grammars(), None) is not None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def streams_tokens(self) -> bool:
        return self.stream_granularity == "token"

    @property
    def is_traced(self) -> bool:
        return self.speculative is not None and self.speculative.trace


class ConversationBody(Body):
    """A conversation and how the model's template turns it into a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, PlainValue], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = None

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
        """Whether the prompt ends where the assistant's turn begins."""
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
    reasoning_effort: Absent = None
    verbosity: Absent = None
    web_search_options: Absent = None
    moderation: Absent = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    metadata: Absent = None
    store: Annotated[Any, Only(False)] = None
    safety_identifier: Absent = None
    prompt_cache_key: Absent = None
    prompt_cache_options: Absent = None
    prompt_cache_retention: Absent = None

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
        return self.tool_mode.mode in ("required", "named") or super().needs_grammar

    @property
    def tool_mode(self) -> ToolChoice:
        """The choice in force: `auto` where tools are given and nothing is said."""
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")

    @property
    def may_call_tools(self) -> bool:
        return self.tool_mode.mode != "none"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def requested_max_tokens(self) -> int | None:
        """What the client asked for; None leaves it to the context."""
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
    suffix: Absent = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise field_error(
                "best_of", f"is {self.best_of}, but n is {self.num_choices}; choosing among answers is not supported"
            )
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "may only be 0 together with 'echo'; set it to 1 or more")
        if len(self.prompt) * self.num_choices > MAX_CHOICES:
            raise field_error(
                "n",
                f"is {self.n} for {len(self.prompt)} prompts; at most {MAX_CHOICES} answers per request are allowed",
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
