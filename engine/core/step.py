"""The values that the phases of one step exchange. Each is frozen and filled by one phase.

    scheduler -> Batch -> drafter -> Draft -> verifier -> Verdict -> committer -> Delta
                           Batch + Draft -> ForwardInput -> model runner, on every shard

They are msgspec structs because a step creates hundreds of them. A struct takes a tenth of the time of a frozen
dataclass. None is part of a reference cycle, so the garbage collector does not track them.
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
    "plan",  # the policy's choice
    "off",  # the policy chose no drafting
    "batch",  # too many decoding requests
    "acceptance",  # the target accepts too few draft tokens
    "per_request",  # the client's limit
    "length",  # max_tokens or the model length allows no more tokens
    "memory",  # too few free KV blocks in target or draft
    "catch_up",  # the draft is still reading committed tokens
    "draft_down",  # no running draft
    "probe",  # drafting is off; this step measures whether it should be on
    "no_match",  # prompt lookup found no match
    "options",  # the draft does not support the request's options, or not yet
]
"""Why a request has its K in a step."""

DraftSource = Literal["method", "lookup", "merged", "grammar"]
"""What drafted: the configured method, prompt lookup ahead of it, both in one tree, or a grammar that allows one token
only."""


class Span(Struct, frozen=True, gc=False):
    """One request's part of a step: tokens [start, start + num_tokens) of the request, then up to k draft tokens."""

    request: Request
    """The request. Only the committer changes it."""
    start: int
    """Position of the first row; equals request.num_computed."""
    num_tokens: int
    """Committed tokens to compute: 1 for a decode, a chunk for a prefill."""
    k: int
    """Draft tokens to ask the method for; 0 unless `samples`. KV blocks for them are reserved."""
    samples: bool
    """Whether the span ends at the last committed token, so that its last row yields a new token."""
    reason: KReason
    """Why `k` has its value."""
    k_by_match: tuple[int, ...] | None = None
    """[NUM_MATCH_CLASSES] K of a draft by prompt lookup, by class of its match length; None: `k` for every class."""
    exit_threshold: float = 0.0
    """The draft stops before a position where the product of its confidences is below this; 0: it never stops early."""
    least_acceptance: float = 0.0
    """Least expected acceptance of a node of a tree, see `engine.core.pacing.KChoice`."""
    node_price: float = 0.0
    """Price of a node that the draft model is asked for, see `engine.core.pacing.KChoice`."""

    @property
    def max_lookup_k(self) -> int:
        """Upper bound of K for drafts that cost no draft pass: of prompt lookup and of a grammar."""
        return self.k if self.k_by_match is None else max(self.k_by_match)


class Batch(Struct, frozen=True, gc=False):
    """What one step computes. Filled by the scheduler."""

    step_id: int
    """Number of the step, from 1."""
    spans: tuple[Span, ...]
    """One per request that the step computes; decodes first."""
    num_waiting: int
    """Requests in the waiting queue after scheduling."""


class Trial(Struct, frozen=True, gc=False):
    """One attempt of rejection sampling to accept a node."""

    node: int
    """Index of the node."""
    q_row: int = -1
    """Row of `DraftRow.probs` with the distribution that its token was drawn from; -1: the token was certain, which is
    a distribution with one token."""


class DraftRow(Struct, frozen=True, gc=False):
    """The draft for one span."""

    token_ids: tuple[int, ...] = ()
    """Target token ids: at most span.k of them from the method, at most span.max_lookup_k from another source. Empty if
    only the device has them (`num_on_device`)."""
    probs: torch.Tensor | None = None
    """[len(token_ids), draft_vocab] float32, the distribution each token was drawn from; None: all are one-hot. The
    children of a node are drawn from one distribution without replacement, and the row of the first one has it."""
    confidences: tuple[float, ...] = ()
    """The draft's largest probability at each position; empty for methods without probabilities."""
    reason: KReason = "plan"
    """Why the draft has its length."""
    source: DraftSource = "method"
    """What drafted the tokens."""
    match_len: int = 0
    """Length in tokens of the match that prompt lookup found, counted up to MAX_MATCH_LEN; 0 for other sources."""
    parents: tuple[int, ...] = ()
    """Index of each node's parent among the tokens, -1 for the last committed token; see `engine.tree`. Empty for
    a chain."""
    trials: tuple[Trial, ...] = ()
    """The attempts to accept nodes, in their order, where a tree of several proposers meets the rejection rule; see
    `engine.proposals.merge`. Empty: each node is tried once, by the q of the first of its siblings."""
    num_on_device: int = 0
    """Draft tokens in row `device_row` of `Draft.on_device`, always a chain; 0 if `token_ids` has them."""
    device_row: int = 0
    """Row of this draft in `Draft.on_device`, where `num_on_device` is not 0."""

    @property
    def num_tokens(self) -> int:
        """Number of draft tokens, wherever they are."""
        return self.num_on_device or len(self.token_ids)


class DeviceDrafts(Struct, frozen=True, gc=False):
    """Drafts that the host has not seen: R rows of at most K tokens in device memory."""

    token_ids: torch.Tensor
    """[R, K] int64 target token ids; any valid id after the last token of a row."""
    confidences: torch.Tensor
    """[R, K] float32 the draft's largest probability at each position."""
    probs: torch.Tensor
    """[R, K, draft_vocab] float32 the distribution each token was drawn from, in rows whose `DraftRow.probs` is set."""


class Draft(Struct, frozen=True, gc=False):
    """The drafts of one step. Filled by the drafter."""

    rows: tuple[DraftRow, ...]
    """One per span, in the order of batch.spans."""
    vocab: torch.Tensor | None = None
    """[draft_vocab] int64: target id of each column of `probs`. None: column i is token i."""
    draft_s: float = 0.0
    """Seconds of computation in the draft."""
    handoff_s: float = 0.0
    """Seconds of transfer between target and draft, both ways."""
    num_caught_up: int = 0
    """Committed tokens that the draft read before it drafted."""
    on_device: DeviceDrafts | None = None
    """The draft tokens of rows with `num_on_device`."""


class RowVerdict(Struct, frozen=True, gc=False):
    """The target's result for one span. Filled by the verifier."""

    token_ids: tuple[int, ...] = ()
    """Accepted draft tokens, then one more token; empty for a prefill chunk that does not sample."""
    num_accepted: int = 0
    """Number of accepted draft tokens."""
    last: EmittedKind | None = None
    """Origin of the final token: `recovered` after a rejection, `bonus` after a fully accepted draft, `plain` without a
    draft; None if the span does not sample."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token if the request asked for them, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Entries of the prompt tokens that this step scored, in order; empty if the request did not ask for them."""
    confidences: tuple[float, ...] = ()
    """The draft's confidences of a draft on the device, which the host sees with the result; else empty."""
    path: tuple[int, ...] = ()
    """[num_accepted] the accepted nodes of a draft with branches, from the root on; empty for a chain."""


class Features(Struct, frozen=True, gc=False):
    """Hidden states of the target that a draft reads: a few layers' outputs side by side, for every row of a step."""

    values: torch.Tensor
    """[N, len(feature_layers) * hidden_size] in the model's dtype, rows as in the step's `ForwardInput`."""
    q_lens: npt.NDArray[np.int32]
    """[S] rows of each span."""


class Verdict(Struct, frozen=True, gc=False):
    """The target's results of one step. Filled by the verifier."""

    rows: tuple[RowVerdict, ...]
    """One per span, in the order of batch.spans."""
    verify_s: float = 0.0
    """Seconds of the target's forward."""
    sample_s: float = 0.0
    """Seconds of logits processing, sampling and acceptance."""
    features: Features | None = None
    """The target's hidden states of this step; None if no draft reads them."""


class DeviceTokens(Struct, frozen=True, gc=False):
    """Tokens of a forward that are in device memory, because the host does not know them."""

    ids: torch.Tensor
    """[M] int64 token ids on the device of rank 0."""
    places: npt.NDArray[np.int64]
    """[N] index into `ids` of each row's token; -1 where `ForwardInput.token_ids` has the token."""


class TreeMask(Struct, frozen=True, gc=False):
    """Which rows attend to which KV slots, where drafts branch. The tree of span s is its last num_slots[s] KV slots.

    A row in a tree attends to all slots before the tree, and to slot j of the tree if bit j of its word is set. A row
    before the tree attends to the slots up to its own, as without a tree.
    """

    num_slots: npt.NDArray[np.int32]
    """[S] KV slots of each span's tree, at most 64; 0 for a span without one."""
    ancestors: npt.NDArray[np.uint64]
    """[N] the bits of each row's ancestors in its span's tree and of the row itself; 0 for a row outside of trees."""


class ForwardInput(Struct, frozen=True, gc=False):
    """The integers of one forward over S spans with N rows in all.

    Prefill, decode and verification have the same form: the rows of span s are the last q_lens[s] of its kv_lens[s]
    KV slots.
    """

    token_ids: npt.NDArray[np.int32]
    """[N] token of each row, span after span."""
    positions: npt.NDArray[np.int32]
    """[N] position of each row in its request. In a tree it grows with the depth."""
    slots: npt.NDArray[np.int32]
    """[N] KV slot that each row writes: block_id * block_size + offset."""
    q_lens: npt.NDArray[np.int32]
    """[S] rows per span, all >= 1."""
    kv_lens: npt.NDArray[np.int32]
    """[S] tokens per span in the cache after this forward, including its rows."""
    block_tables: npt.NDArray[np.int32]
    """[S, W] block ids of each span in order, padded with 0."""
    logit_rows: npt.NDArray[np.int32]
    """[R] rows whose logits are returned, ascending."""
    device_tokens: DeviceTokens | None = None
    """Tokens that only the device knows. On rank 0; it does not travel to other ranks."""
    tokens_from_rank_0: bool = False
    """Whether rank 0 sends the token ids to the other ranks on the device, because `token_ids` lacks some."""
    tree: TreeMask | None = None
    """Who attends to whom in drafts that branch; None where every span is a chain."""
    moves: npt.NDArray[np.int32] | None = None
    """[M, 2] KV slots whose content moves before anything is written: from, to. The moves of one request are in
    ascending order and never overwrite a slot that a later one reads. None for no move."""
    adapters: npt.NDArray[np.int32] | None = None
    """[S] number of each span's adapter, 0 for the base model; None where all spans are of the base model."""


class ForwardResult(Struct, frozen=True, gc=False):
    """What one forward of a model yields on one shard."""

    logits: torch.Tensor | None
    """[R, vocab] float32 logits of `ForwardInput.logit_rows` on rank 0; None on other ranks."""
    hidden: torch.Tensor | None = None
    """[N, len(feature_layers) * hidden_size]: outputs of the tapped layers side by side; None where none is tapped."""
    most_likely: torch.Tensor | None = None
    """[R] int64 column of the largest logit of each row, where the forward has found it; else None."""

    def require_logits(self) -> torch.Tensor:
        """The logits of a forward on rank 0.

        Raises:
            EngineError: the forward ran on another rank.
        """
        if self.logits is None:
            raise EngineError("a forward yields logits on rank 0 only")
        return self.logits
