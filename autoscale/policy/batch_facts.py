"""What the policy knows about a batch besides acceptance: limits of K, and how many tokens the draft has not read.

Owns the facts that change slowly and the mean lengths of prompts and responses. Knows no costs and chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoscale.policy.acceptance_rate import AcceptanceClasses
from engine.core.request import Request
from engine.core.stats import RowOutcome

CATCH_UP_STEPS = 64
"""Number of steps over which the cost of reading tokens that the draft has missed is spread."""
FIRST_RESPONSE_LEN = 128.0
"""Mean length of a response, in tokens, before the first one ends."""
LENGTH_RATE = 0.05
"""Weight of one request in the mean lengths of prompts and responses."""


@dataclass(frozen=True, slots=True)
class _Constants:
    """What does not change about a request while it runs."""

    workload: int
    """Its row in `AcceptanceClasses`."""
    max_k: int
    """The largest K that its client and the engine allow."""
    last_len: int
    """Number of tokens from which on no draft token is needed: only the target's own is left to come."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """The slow facts of one batch.

    Kept for as long as the batch stays the same, up to `depth_search.WIDE_SEARCH_CHOICES` choices, because building
    them takes as long as comparing two depths: about 12 us at 32 requests (one x86 core, best of 1,500).
    """

    requests: Sequence[Request]
    keys: Sequence[int]
    """[B] keys of the requests."""
    workload_indices: npt.NDArray[np.int64]
    """[B] row of each request in `AcceptanceClasses`, for indexing arrays."""
    workloads: Sequence[int]
    """[B] the values of `workload_indices` as plain integers, for indexing lists."""
    disallowed: npt.NDArray[np.bool_] | None
    """[B, max_k] positions past a request's own limit; None when no request has a limit below max_k."""
    num_unread: float
    """Tokens of these requests that the draft has not read and does not get with the next step."""


class BatchObserver:
    """Builds the facts of a batch, and learns from steps what they need.

    Args:
        max_k: upper bound of K.
        classes: gives the rows of requests.
    """

    def __init__(self, max_k: int, classes: AcceptanceClasses | None = None) -> None:
        self._max_k = max_k
        self._classes = classes or AcceptanceClasses()
        self._constants: dict[int, _Constants] = {}  # by key, of the batch that was passed to `refresh` last
        self._num_read: dict[int, int] = {}  # request key -> tokens the draft has read
        self._prompt_len, self._response_len = 0.0, FIRST_RESPONSE_LEN
        self.facts = BatchFacts((), (), np.zeros(0, dtype=np.int64), (), None, 0.0)
        """Facts of the batch that was passed to `refresh` last."""

    @property
    def num_tracked(self) -> int:
        """Number of requests of which something is remembered."""
        return len(self._num_read)

    def refresh(self, decodes: Sequence[Request], keys: Sequence[int]) -> None:
        """Build the facts of a batch. The lengths of requests that are new or have finished enter the means."""
        self._note_lengths(decodes)
        constants = [self._constants[key] for key in keys]
        self._constants = dict(zip(keys, constants, strict=True))
        workloads = [each.workload for each in constants]
        lengths = [len(request.tokens) for request in decodes]
        most = [each.max_k for each in constants]
        left = [each.last_len - length for each, length in zip(constants, lengths, strict=True)]
        is_limited = min(min(most), min(left)) < self._max_k
        num_read = self._num_read
        num_unread = sum(lengths) - sum([num_read.get(key, 0) for key in keys]) - len(keys)
        self.facts = BatchFacts(
            requests=decodes,
            keys=keys,
            workload_indices=np.array(workloads),
            workloads=workloads,
            disallowed=np.arange(self._max_k) >= np.minimum(most, left)[:, None] if is_limited else None,
            num_unread=float(max(0, num_unread)),
        )

    def num_unread(self, request: Request) -> int:
        """Tokens of a request that the draft has not read."""
        return len(request.tokens) - self._num_read.get(request.key, 0)

    def catch_up_tokens(self, tokens: float) -> float:
        """Committed tokens that the draft reads per step.

        The sum of what a step emits, its share of prompts, and the unread tokens spread over CATCH_UP_STEPS.

        Args:
            tokens: tokens that a step emits.
        """
        return tokens * (1 + self._prompt_len / self._response_len) + self.facts.num_unread / CATCH_UP_STEPS

    def observe(self, outcomes: Sequence[RowOutcome], ended: Sequence[int]) -> None:
        """Note what the draft has read, and forget the requests that ended.

        Args:
            outcomes: of rows that the drafting method drafted for.
            ended: keys of requests.
        """
        for outcome in outcomes:
            self._num_read[outcome.key] = outcome.num_tokens
        for key in ended:
            self._num_read.pop(key, None)

    def _note_lengths(self, decodes: Sequence[Request]) -> None:
        for request in decodes:
            if request.key not in self._constants:
                self._constants[request.key] = self._constants_of(request)
                rate = LENGTH_RATE if self._prompt_len else 1.0
                self._prompt_len += rate * (request.num_prompt - self._prompt_len)
        for request in self.facts.requests:
            if request.finish_reason is not None:
                self._response_len += LENGTH_RATE * (request.num_generated - self._response_len)

    def _constants_of(self, request: Request) -> _Constants:
        options, max_k = request.submit.speculative, self._max_k
        if options.max_k is not None:
            max_k = min(max_k, options.max_k)
        return _Constants(
            workload=self._classes.row_of(request),
            max_k=max_k if options.enabled else 0,
            # One token of the remaining ones comes from the target itself.
            last_len=request.num_prompt + request.submit.sampling.max_tokens - 1,
        )
