"""The values that the phases of one step hand to each other: frozen, named, each filled by one phase.

msgspec structs, because a step makes hundreds of them: one takes a tenth of the time of a frozen dataclass, and the
garbage collector need not look at it (none is ever part of a cycle).

scheduler -> Batch -> drafter -> Draft -> verifier -> Verdict -> committer -> Delta... -> streams
                        Batch + Draft -> ForwardPlan -> model runner, on every shard
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from engine.core.request import Request
from engine.errors import EngineError
from engine.messages import EmittedKind, TokenLogprobs

if TYPE_CHECKING:  # only a type here, so that `autoscale` and the simulator do without it
    import torch

KReason = Literal[
    "plan",  # the policy's own choice
    "off",  # the policy says no drafting
    "batch",  # too many decoding requests
    "acceptance",  # the draft is not being believed
    "per_request",  # the client capped or disabled it
    "length",  # max_tokens or the context leaves no room
    "memory",  # no KV blocks, of target or draft, for more
    "catch_up",  # the draft is still reading committed tokens
    "draft_down",  # no living draft
    "probe",  # off, but looking whether that is still right
    "no_match",  # prompt lookup found nothing
    "options",  # the draft cannot honour the request's options, or not yet
]
"""Why a request's K in a step is what it is."""

DraftSource = Literal["method", "lookup", "grammar"]
"""Who drafted: the configured method, prompt lookup before it, or a grammar that leaves no choice."""


class Span(Struct, frozen=True, gc=False):
    """One request's share of a step: rows [start, start + num_tokens) of its tokens, then up to k draft tokens."""

    request: Request
    start: int
    """Position of the first row; equals request.num_computed."""
    num_tokens: int
    """Committed tokens to compute: 1 for a decode, a chunk for a prefill."""
    k: int
    """Draft tokens to ask for; 0 unless `samples`. Blocks for them are reserved."""
    samples: bool
    """Whether it reaches the end of the committed tokens, so that its last row yields a token."""
    reason: KReason
    k_by_match: tuple[int, ...] | None = None
    exit_threshold: float = 0.0
    """Both as in Choice."""

    @property
    def max_lookup_k(self) -> int:
        """Tokens that a draft may have which costs nothing but its rows."""
        return self.k if self.k_by_match is None else max(self.k_by_match)


class Batch(Struct, frozen=True, gc=False):
    """What one step computes. Filled by the scheduler."""

    step_id: int
    spans: tuple[Span, ...]
    num_waiting: int


class DraftRow(Struct, frozen=True, gc=False):
    """The draft for one span."""

    token_ids: tuple[int, ...] = ()
    """At most span.k target token ids, or span.most_free from another source than the method."""
    probs: torch.Tensor | None = None
    """[len(token_ids), draft_vocab] float32, the law each token was drawn from; None if each was certain (one-hot)."""
    confidences: tuple[float, ...] = ()
    """The draft's probability of its most likely token, per position; empty where a method has none."""
    reason: KReason = "plan"
    source: DraftSource = "method"
    match_len: int = 0
    """Tokens that had occurred before, where prompt lookup found them; counted up to MAX_MATCH_LEN."""


class Draft(Struct, frozen=True, gc=False):
    """Filled by the drafter; rows stand in the order of batch.spans."""

    rows: tuple[DraftRow, ...]
    vocab: torch.Tensor | None = None
    """[draft_vocab] int64: target id of each column of `probs`. None: column i is token i."""
    draft_s: float = 0.0
    """Seconds the draft computed."""
    handoff_s: float = 0.0
    """Seconds between the two processes, both ways."""
    num_caught_up: int = 0
    """Committed tokens the draft had to read before it could run ahead."""


class RowVerdict(Struct, frozen=True, gc=False):
    """What the target says to one span. Filled by the verifier."""

    token_ids: tuple[int, ...] = ()
    """Accepted draft tokens, then exactly one more; empty for a prefill chunk that does not sample."""
    num_accepted: int = 0
    last: EmittedKind | None = None
    """Origin of the final token: `recovered` after a rejection, `bonus` when all were accepted, `plain` at k = 0."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next prompt tokens in order, where they were asked for."""


class Features(Struct, frozen=True, gc=False):
    """Hidden states of the target that a draft reads: a few layers' outputs side by side, for every row of a step."""

    values: torch.Tensor
    """[N, len(feature_layers) * hidden_size] in the model's dtype, rows as in the step's `ForwardInput`."""
    q_lens: npt.NDArray[np.int32]
    """[S] rows of each span."""


class Verdict(Struct, frozen=True, gc=False):
    """Rows stand in the order of batch.spans."""

    rows: tuple[RowVerdict, ...]
    verify_s: float = 0.0
    """Seconds of the target's forward."""
    sample_s: float = 0.0
    features: Features | None = None
    """The target's features of this step; None where no layer is tapped."""


class ForwardInput(Struct, frozen=True, gc=False):
    """One forward of a model over S spans with N rows in all, as integers: what every shard needs and no more.

    The same for prefill, decode and verify: the rows of span s are the last q_lens[s] of its kv_lens[s] tokens.
    """

    token_ids: npt.NDArray[np.int32]
    """[N] row tokens, spans one after the other."""
    positions: npt.NDArray[np.int32]
    """[N] position of each row in its request."""
    slots: npt.NDArray[np.int32]
    """[N] where each row's K and V go: block_id * block_size + offset."""
    q_lens: npt.NDArray[np.int32]
    """[S] rows per span, all >= 1."""
    kv_lens: npt.NDArray[np.int32]
    """[S] tokens per span in the cache after this forward, the rows included."""
    block_tables: npt.NDArray[np.int32]
    """[S, W] block ids in order, padded with 0."""
    logit_rows: npt.NDArray[np.int32]
    """[R] rows whose logits are wanted, ascending."""


class ForwardResult(Struct, frozen=True, gc=False):
    """What one forward of a model yields on one shard."""

    logits: torch.Tensor | None
    """[R, vocab] float32 logits of `ForwardInput.logit_rows` on rank 0; None on other ranks."""
    hidden: torch.Tensor | None = None
    """[N, len(feature_layers) * hidden_size]: outputs of the tapped layers side by side; None where none is tapped."""

    def require_logits(self) -> torch.Tensor:
        """The logits of a forward on rank 0.

        Raises:
            EngineError: the forward ran on another rank.
        """
        if self.logits is None:
            raise EngineError("a forward yields logits on rank 0 only")
        return self.logits
