"""The engine's mutable record of one request: its tokens, its KV blocks and its counters.

Only the scheduler moves a record between queues. Only the committer changes its tokens. Knows token ids, never text.

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
    """Monotonic time."""
    queue_s: float = 0.0
    """Seconds from arrival to the first step. Written by the scheduler only, once."""
    logits_processor: LogitsProcessor | None = None
    """Penalties and grammar; None where all are neutral. Follows `tokens`, never leads them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of prompt tokens 1.. as far as they have been computed, where asked for. Written by the committer only."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def extend_len(self) -> int:
        """Tokens whose K and V are still to be computed: 1 in decode, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def row_sampling(self) -> RowSampling:
        """How the logits of its next step become distributions. Seeded requests are coupled."""
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
