"""The engine's mutable record of one request: its tokens, its KV blocks and its counters.

Only the scheduler moves a record between queues. Only the committer changes its tokens, only the block pool its blocks.
Knows token ids, never text.

    tokens          p p p p p p p | g g g g
                    0 ............ num_prompt ..... len(tokens)
    num_computed    ------------------------^ KV cache holds tokens[:num_computed]
    extend_len = len(tokens) - num_computed       1 for a decode, more for a prefill
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import FinishReason, Submit, TokenLogprobs
from engine.sampling.row_sampling import RowSampling

if TYPE_CHECKING:  # A type only. At run time this would import torch, which `autoscale` does without.
    from engine.sampling.logits_processor import LogitsProcessor


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request."""

    submit: Submit
    """The request as the client submitted it."""
    key: int
    """Number of the request within the engine; never reused. The draft knows the request by it."""
    stream_key: int
    """64-bit key of the request's random stream: its seed, or a random number drawn at arrival."""
    tokens: list[int]
    """Prompt, then generated tokens. Written by the committer only."""
    num_computed: int = 0
    """Tokens whose K and V the target holds. Written by the committer, and by the scheduler on admission and
    preemption."""
    block_ids: list[int] = field(default_factory=list)
    """KV blocks of the request, in order. Written by the block pool only."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache."""
    num_drafted: int = 0
    """Draft tokens verified so far."""
    num_accepted: int = 0
    """Draft tokens accepted so far."""
    num_draft_steps: int = 0
    """Steps that verified at least one draft token of the request."""
    num_steps: int = 0
    """Steps that yielded a token. Makes the draft's random draws of different steps independent."""
    finish_reason: FinishReason | None = None
    """Why the request ended; None while it runs or waits."""
    arrival_s: float = 0.0
    """Time of arrival in the engine, in seconds of the monotonic clock."""
    queue_s: float = 0.0
    """Seconds from arrival to the first step. Written once, by the scheduler."""
    logits_processor: LogitsProcessor | None = None
    """Penalties and grammar of the request; None if it has neither. Its state is that of a prefix of `tokens`."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Entries of the prompt tokens scored so far, from the second token on. Written by the committer only."""

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.submit.prompt)

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def extend_len(self) -> int:
        """Tokens whose K and V the target does not hold yet: 1 for a decode, more for a prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def adapter_number(self) -> int:
        """Number of the request's adapter; 0 for the base model."""
        adapter = self.submit.adapter
        return 0 if adapter is None else adapter.number

    @property
    def adapter_name(self) -> str:
        """Name of the request's adapter; empty for the base model."""
        adapter = self.submit.adapter
        return "" if adapter is None else adapter.name

    @property
    def cache_salt(self) -> bytes:
        """What the content of its KV blocks depends on besides its tokens: the adapter."""
        number = self.adapter_number
        return number.to_bytes(8, "little") if number else b""

    @property
    def row_sampling(self) -> RowSampling:
        """How logits become distributions in the request's next step. Requests with a seed use coupled sampling."""
        sampling = self.submit.sampling
        coupled = sampling.seed is not None
        return RowSampling(
            sampling.temperature,
            sampling.top_p,
            self.stream_key,
            0 if coupled else 1 + self.num_steps,
            coupled,
            sampling.top_k,
            sampling.min_p,
        )
