"""What clients get: OpenAI's response and chunk objects, as structs that encode to JSON in about a microsecond.

Owns field names and order, and what an answer is written from: text_deltas of text.
`UNSET` fields are left out, `None` ones are null. Does not know requests or the engine; `answers` fills these.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from deployments.text.logprobs import ChatLogprobs, CompletionLogprobs, TokenRecord
from deployments.text.tool_calls import FoundCall
from engine.messages import EmittedKind

FinishReason = Literal["stop", "length", "tool_calls"]
Choice = TypeVar("Choice")


class StepTrace(Struct, frozen=True):
    """Where the tokens of one chunk come from: those of one step, in order."""

    step: int
    """Steps of this answer so far, this one included."""
    accepted: int
    """So many from the front are accepted draft tokens."""
    last: EmittedKind | None
    """Origin of the token after them; null where the answer ended before it."""
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """What each token made visible; joined, the text of the chunk. A token that completes nothing has an empty one."""


class TextDelta(Struct, frozen=True):
    """What one step (or one token) added to an answer, and totals of that answer so far."""

    text: str
    finish_reason: FinishReason | None
    num_completion: int
    """Tokens of the answer, the one that completed a stop string included, those after it not."""
    num_cached: int
    num_drafted: int
    num_accepted: int
    index: int = 0
    """Of the answer within the request."""
    records: tuple[TokenRecord, ...] = ()
    """One per token where log-probabilities were asked for."""
    calls: tuple[FoundCall, ...] = ()
    trace: StepTrace | None = None
    """Where it was asked for."""

    @property
    def is_plain(self) -> bool:
        """Whether it is text and nothing else."""
        return bool(self.text) and not (self.records or self.calls or self.finish_reason or self.trace)

    @property
    def is_silent(self) -> bool:
        """Whether a client would learn nothing from it."""
        return not (self.text or self.records or self.calls or self.finish_reason or self.trace)


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class SpeculativeUsage(Struct, frozen=True):
    """Draft tokens verified for this request, and how many of them the target accepted."""

    drafted: int
    accepted: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    speculative: SpeculativeUsage


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str
    """A JSON object, as text."""


class CompletedCall(Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class CallDelta(Struct, frozen=True):
    """A call in a stream, all of it at once."""

    index: int
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: tuple[CompletedCall, ...] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: tuple[CallDelta, ...] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    message: ChatMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(Struct, frozen=True):
    delta: ChatDelta
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: ChatLogprobs | None = None


class CompletionChoice(Struct, frozen=True):
    """In a response and in a chunk alike."""

    text: str
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: CompletionLogprobs | None = None


class GenerationResponse(Struct, Generic[Choice], frozen=True, kw_only=True):
    """A response, or one chunk of a stream; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    paceline: StepTrace | UnsetType = UNSET
    """In chunks, where `speculative.trace` asks for it."""


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "paceline"


class ModelList(Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: str = "list"


class HealthReport(Struct, frozen=True):
    status: str
    reason: str
    draft: str


class Tokenized(Struct, frozen=True):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class Detokenized(Struct, frozen=True):
    prompt: str
