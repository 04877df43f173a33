"""OpenAI's response and chunk objects, as structs that encode to JSON in about a microsecond.

Owns names and order of fields, and the text deltas that responses are written from. `UNSET` fields are left out, `None`
is null. Does not know requests or the engine; `response_writer` fills these objects.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from deployments.text.logprobs import ChatLogprobs, CompletionLogprobs, TokenRecord
from deployments.text.tool_calls import ToolCallDelta
from engine.messages import EmittedKind

FinishReason = Literal["stop", "length", "tool_calls"]
Choice = TypeVar("Choice")


class TreeTrace(Struct, frozen=True):
    """The draft of a step that branched."""

    texts: tuple[str, ...]
    """Text of each node by itself; of a token that adds none, its name."""
    parents: tuple[int, ...]
    """Parent of each node, which comes before it; -1 for the token before the step."""
    path: tuple[int, ...]
    """The accepted nodes, from the root on."""


class StepTrace(Struct, frozen=True, omit_defaults=True):
    """Where the tokens of one chunk come from: those of one step, in order."""

    step: int
    """Steps of this choice so far, including this one."""
    accepted: int
    """Number of tokens at the front that are accepted draft tokens."""
    last: EmittedKind | None
    """Origin of the token after the accepted ones; null if the choice ended before it."""
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Text that each token made visible. Joined, they are the text of the chunk. A token that completes no character
    has an empty text."""
    tree: TreeTrace | None = None
    """Left out where the draft was a chain, or there was none."""


class TextDelta(Struct, frozen=True):
    """What one step (or one token) added to a choice, and totals of that choice so far."""

    text: str
    finish_reason: FinishReason | None
    num_completion: int
    """Tokens of the choice. The token that completes a stop string is counted, tokens after it are not."""
    num_cached: int
    num_drafted: int
    num_accepted: int
    index: int = 0
    """Index of the choice within the request."""
    reasoning: str = ""
    """Thoughts of the model, which precede the text."""
    num_reasoning: int = 0
    """Tokens of the thoughts so far."""
    records: tuple[TokenRecord, ...] = ()
    """One record per token if log-probabilities are requested."""
    calls: tuple[ToolCallDelta, ...] = ()
    trace: StepTrace | None = None
    """The trace, if it is requested."""

    @property
    def is_plain(self) -> bool:
        """Whether it holds text and nothing else."""
        return bool(self.text) and not (
            self.reasoning or self.records or self.calls or self.finish_reason or self.trace
        )

    @property
    def is_silent(self) -> bool:
        """Whether it holds nothing that a client sees."""
        return not (self.text or self.reasoning or self.records or self.calls or self.finish_reason or self.trace)


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0


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
    """A JSON object as text, as the model wrote it."""


class CompletedCall(Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionDelta(Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    """The next characters of a JSON object."""


class ToolCallChunk(Struct, frozen=True):
    """What a chunk adds to a tool call. The first one has the id, the type and the function's name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """Thoughts of the model, by the name that vLLM and its clients use."""
    tool_calls: tuple[CompletedCall, ...] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallChunk, ...] | UnsetType = UNSET


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
    """A choice of a completion. Responses and chunks have the same fields."""

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
    """Set in chunks if the request has `speculative.trace`."""


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    root: str
    """The same as `id`."""
    parent: str | None = None
    """The base model of an adapter; None for the base model."""
    object: str = "model"
    owned_by: str = "paceline"


class ModelList(Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: str = "list"


class HealthReport(Struct, frozen=True):
    status: str
    reason: str
    draft: str


class VersionReport(Struct, frozen=True):
    version: str


class Tokenized(Struct, frozen=True):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class Detokenized(Struct, frozen=True):
    prompt: str
