"""What clients may send: the OpenAI request bodies that this server understands, option by option.

Owns names, types and bounds of request fields. An option that is not known is refused; one that is known but not
supported yet is accepted only with a value that changes nothing. Does not know the tokenizer, the engine or HTTP.
Answers are in `responses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from engine.config import MAX_K

MAX_STOPS = 4
MAX_STOP_LEN = 1024
"""Characters of one stop string."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens in /v1/completions."""


def _error(message: str) -> PydanticCustomError:
    # Braces would be read as placeholders, and clients' own text may hold some.
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def _only(*neutral: Any) -> Callable[[Any], Any]:
    """Refuse every value that would have an effect; null never has one."""

    def check(value: Any) -> Any:
        for allowed in neutral:
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return value
        if value is None:
            return value
        hint = " or ".join(repr(allowed) for allowed in neutral)
        raise _error("is not supported yet; leave it out" + (f" or set it to {hint}" if hint else ""))

    return check


def _parse_content(value: Any) -> str:
    """Text of a message: a string, or text parts joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _error("must be a string or a list of text parts")
    if not value:
        raise _error("must have at least one part")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise _error(f'part {index} must be an object like {{"type": "text", "text": "..."}}')
        if part.get("type") != "text":
            raise _error(
                f"part {index} has type {part.get('type')!r}; only 'text' is supported yet (no images or audio)"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise _error(f"part {index} must have exactly the fields 'type' and 'text', and 'text' must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _parse_prompt(value: Any) -> str | tuple[int, ...]:
    """One prompt: text or token ids; a list that holds just one prompt is that prompt."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _error("must be a string or a list of token ids")
    if not value:
        raise _error("must not be empty")
    if any(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            raise _error(f"holds {len(value)} prompts; only one prompt per request is supported yet")
        return _parse_prompt(value[0])
    for index, item in enumerate(value):
        if type(item) is not int:
            raise _error(f"must hold token ids only; item {index} is {item!r}")
    return tuple(value)


def _parse_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _error("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _error(f"holds {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LEN:
            raise _error(f"string {index} has {len(stop)} characters; allowed are 1 to {MAX_STOP_LEN}")
    return tuple(dict.fromkeys(stops))


Content = Annotated[str, PlainValidator(_parse_content)]
Prompt = Annotated[str | tuple[int, ...], PlainValidator(_parse_prompt)]
Stop = Annotated[tuple[str, ...], PlainValidator(_parse_stop)]
Absent = Annotated[Any, AfterValidator(_only())]
"""Known to OpenAI, not to us yet: null only."""
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SpeculativeBody(_Body):
    """A client's say in drafting for its own request."""

    enabled: bool = True
    max_k: Annotated[int, Field(ge=0, le=MAX_K)] | None = None


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, AfterValidator(_only(False))] = None


class Message(_Body):
    """One turn. Fields of an answer that were null come back as null from clients that keep the object."""

    role: Literal["system", "user", "assistant"]
    content: Content
    name: Absent = None
    refusal: Absent = None
    audio: Absent = None
    annotations: Annotated[Any, AfterValidator(_only([]))] = None
    tool_calls: Annotated[Any, AfterValidator(_only([]))] = None
    function_call: Absent = None


class GenerationBody(_Body):
    """What both kinds of generation share."""

    model: str
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Stop = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """A label of the client's own; it has no effect on the output."""
    speculative: SpeculativeBody | None = None

    n: Annotated[Any, AfterValidator(_only(1))] = None
    presence_penalty: Annotated[Any, AfterValidator(_only(0))] = None
    frequency_penalty: Annotated[Any, AfterValidator(_only(0))] = None
    logit_bias: Annotated[Any, AfterValidator(_only({}))] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _field_error("stream_options", "is only allowed when 'stream' is true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None

    logprobs: Annotated[Any, AfterValidator(_only(False))] = None
    top_logprobs: Absent = None
    response_format: Annotated[Any, AfterValidator(_only({"type": "text"}))] = None
    modalities: Annotated[Any, AfterValidator(_only(["text"]))] = None
    tools: Annotated[Any, AfterValidator(_only([]))] = None
    tool_choice: Annotated[Any, AfterValidator(_only("none"))] = None
    parallel_tool_calls: Absent = None
    functions: Absent = None
    function_call: Absent = None
    audio: Absent = None
    prediction: Absent = None
    reasoning_effort: Absent = None
    verbosity: Absent = None
    web_search_options: Absent = None
    service_tier: Annotated[Any, AfterValidator(_only("auto", "default"))] = None
    metadata: Absent = None
    store: Annotated[Any, AfterValidator(_only(False))] = None
    safety_identifier: Absent = None
    prompt_cache_key: Absent = None

    @model_validator(mode="after")
    def _one_max_tokens(self) -> Self:
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            raise _field_error("max_tokens", f"is {both[1]}, but max_completion_tokens is {both[0]}; set one of them")
        return self

    @property
    def requested_max_tokens(self) -> int | None:
        """What the client asked for; None leaves it to the context."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"


class CompletionBody(GenerationBody):
    """/v1/completions."""

    prompt: Prompt

    best_of: Annotated[Any, AfterValidator(_only(1))] = None
    echo: Annotated[Any, AfterValidator(_only(False))] = None
    logprobs: Absent = None
    suffix: Absent = None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens"


def _field_error(field: str, message: str) -> PydanticCustomError:
    """An error of one field that only shows when several are seen together."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message, "field": field})
