"""What one request is: what it asks for, and what has been done for it so far.

Owns the values a client submits, the events it gets back, and the mutable record between the two. Only the scheduler
moves a record between queues, only the committer changes its tokens. Knows token ids, never text.

    tokens          p p p p p p p | g g g g
                    0 ............ num_prompt ..... len(tokens)
    num_computed    ------------------------^ KV cache holds tokens[:num_computed]
    extend_len = len(tokens) - num_computed       1 for a decode, more for a prefill
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Checked where they enter the process, in `deployments`."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_tokens: int = 16
    """Most tokens to generate."""
    seed: int | None = None
    """Same seed, same tokens, for any batch mix and any K schedule."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at the first of these; the token itself is emitted. Holds the model's EOS ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    """A client's say in drafting for its own request."""

    enabled: bool = True
    max_k: int | None = None
    """Upper bound of K for this request; None leaves it to the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request as it enters the engine."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: SamplingParams
    speculative: SpeculativeOptions = SpeculativeOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step did for one request. The last one carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...]
    """Tokens emitted in this step, in order; empty only when the request ends without one."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Set when finish_reason is `error`: what went wrong, for the client."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache, in total."""
    num_drafted: int = 0
    """Draft tokens verified for this request, in total so far."""
    num_accepted: int = 0
    """Draft tokens accepted for this request, in total so far."""


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request."""

    submit: Submit
    key: int
    """Number of this request within the engine, never reused; names it to the draft."""
    stream_key: int
    """64-bit key of its random stream: from the seed, or drawn at arrival."""
    tokens: list[int]
    """Prompt, then generated tokens. Written by the committer only."""
    num_computed: int = 0
    """Tokens whose KV the target holds. Written by the committer (and by the scheduler when it admits or preempts)."""
    block_ids: list[int] = field(default_factory=list)
    """KV blocks it holds, in order. Written by the block pool only."""
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_draft_steps: int = 0
    """Verdicts over at least one draft token."""
    num_steps: int = 0
    """Verdicts so far; makes draft draws of different steps independent."""
    finish_reason: FinishReason | None = None
    arrival_s: float = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def extend_len(self) -> int:
        return len(self.tokens) - self.num_computed
