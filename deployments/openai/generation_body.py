"""Options that both generation routes share, and the name of the model.

Owns these fields and which of them go together. `requests` adds the fields of each route.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from deployments.openai.fields import (
    Body,
    LogitBias,
    MinP,
    MinTokens,
    NumChoices,
    Only,
    Penalty,
    RepetitionPenalty,
    Seed,
    Stop,
    StopIds,
    Temperature,
    TopK,
    TopP,
    field_error,
)
from deployments.openai.structured import GuidedFields
from engine.config import MAX_K
from engine.messages import Priority

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400

ModelName = Annotated[str, Field(description="The name this server gives its model; see /v1/models.")]


class ModelBody(Body):
    """A body with the name of the model that it is for."""

    model: ModelName


def _parse_priority(value: Any) -> Any:
    """vLLM's neutral priority, the integer 0, means `normal`."""
    return "normal" if type(value) is int and value == 0 else value


RequestPriority = Annotated[
    Priority,
    BeforeValidator(_parse_priority),
    WithJsonSchema({"enum": ["high", "normal", "low", 0]}),
]


class SpeculativeBody(Body):
    """Options of drafting for this request."""

    enabled: bool = True
    max_k: Annotated[int, Field(ge=0, le=MAX_K)] | None = None
    learn: bool = True
    """Whether the draft may learn from this request, where the settings allow it."""
    trace: bool = False
    """Each chunk of a stream reports where its tokens come from, in an additional field `paceline`."""


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Each chunk holds the usage so far."""
    include_obfuscation: Annotated[Any, Only(False)] = None


class GenerationBody(ModelBody, GuidedFields):
    """Options of both generation routes."""

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
    """A label of the client. It changes nothing."""
    speculative: SpeculativeBody | None = None
    priority: RequestPriority | None = None
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    timeout: Annotated[float, Field(ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)] | None = None
    """Seconds that the whole response may take."""

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
        """Choices per prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def streams_tokens(self) -> bool:
        return self.stream_granularity == "token"

    @property
    def is_traced(self) -> bool:
        return self.speculative is not None and self.speculative.trace
