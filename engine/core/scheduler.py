"""Chooses what the next step computes: admits requests, cuts prefills into chunks, sets each decode's K, preempts.

Owns the waiting queue and the running list. Knows block counts and lengths, no tensors and no draft. The injected pacer
chooses K; the scheduler only lowers it to what the step's rows, memory, lengths and the client's limit allow.

Decodes take their rows first. A prefill gets the rows that remain, so a long prompt never delays a running request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.core.block_pool import BlockPool
from engine.core.pacing import Pacer, SpeculationPlan
from engine.core.request import Request
from engine.core.step import Batch, KReason, Span
from engine.core.waiting_queue import WaitingQueue
from engine.errors import ConfigError


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        pool: the target's KV blocks.
        pacer: chooses K.
        plan: returns the plan in force.
        max_num_requests: upper bound of the requests that run at once.
        max_step_tokens: upper bound of the rows of one step.
        max_model_len: longest prompt plus output, in tokens.

    Raises:
        ConfigError: the limits contradict each other.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        pacer: Pacer,
        plan: Callable[[], SpeculationPlan],
        max_num_requests: int,
        max_step_tokens: int,
        max_model_len: int,
    ) -> None:
        if max_step_tokens < max_num_requests:
            raise ConfigError(
                f"max_step_tokens: {max_step_tokens} is below max_num_requests {max_num_requests}; "
                "every running request needs one row"
            )
        if max_model_len > pool.capacity:
            raise ConfigError(f"max_model_len: {max_model_len} tokens do not fit in a KV pool of {pool.capacity}")
        self._pool = pool
        self._pacer = pacer
        self._plan = plan
        self._max_num_requests = max_num_requests
        self._max_step_tokens = max_step_tokens
        self._max_model_len = max_model_len
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._step_id = 0
        self.num_preempted = 0
        """Preemptions so far."""

    @property
    def num_waiting(self) -> int:
        """Number of requests in the waiting queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._running or len(self._waiting))

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._waiting.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request that finished or was aborted, and free its blocks."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.discard(request)
        self._pool.release(request)

    def requests(self) -> Iterable[Request]:
        """All requests that run or wait, running ones first."""
        yield from self._running
        yield from self._waiting

    def schedule(self) -> Batch:
        """The batch of the next step; without spans when there is nothing to compute."""
        self._step_id += 1
        budget = self._max_step_tokens
        spans: list[Span] = []
        decodes = [request for request in self._running if request.extend_len == 1]
        choices = self._pacer.choose(self._plan(), decodes, self._num_prefill_rows(budget - len(decodes)))
        rows_left = budget - len(decodes)
        for request, choice in zip(decodes, choices, strict=True):
            if request not in self._running:  # preempted for an earlier one
                continue
            max_k = max(choice.k, *(choice.k_by_match or (0,)))
            max_k, reason = self._cap(request, max_k, choice.reason, rows_left)
            max_k, reason = self._reserve_decode(request, max_k, reason)
            if request in self._running:
                k, reason = (choice.k, choice.reason) if choice.k <= max_k else (max_k, reason)
                k_by_match = choice.k_by_match
                if k_by_match is not None and max(k_by_match) > max_k:
                    k_by_match = tuple(min(lookup_k, max_k) for lookup_k in k_by_match)
                limits = (k_by_match, choice.exit_threshold, choice.least_acceptance, choice.node_price)
                spans.append(Span(request, request.num_computed, 1, k, True, reason, *limits))
                rows_left -= max_k
        budget = max(0, rows_left)
        for request in [r for r in self._running if r.extend_len > 1]:
            budget -= self._extend(request, budget, spans)
        while len(self._running) < self._max_num_requests and budget > 0:
            following = self._waiting.peek()
            if following is None or not self._admit(following):
                break
            self._waiting.pop()
            self._running.append(following)
            following.queue_s = following.queue_s or time.monotonic() - following.arrival_s
            budget -= self._extend(following, budget, spans)
        # A later request of the same step may have preempted one that already has a span; that span computes nothing.
        held = tuple(span for span in spans if span.request.block_ids)
        return Batch(self._step_id, held, len(self._waiting))

    def _num_prefill_rows(self, budget: int) -> int:
        """Rows that prefills will take, at most `budget`; prefix-cache hits are not known yet."""
        rows = sum(request.extend_len for request in self._running if request.extend_len > 1)
        following = self._waiting.peek()
        if following is not None and len(self._running) < self._max_num_requests:
            rows += following.extend_len
        return min(budget, rows)

    def _cap(self, request: Request, k: int, reason: KReason, rows_left: int) -> tuple[int, KReason]:
        """Lower the pacer's K to what the client, the lengths and the step's rows allow, with the reason."""
        options = request.submit.speculative
        client_k = 0 if not options.enabled else options.max_k
        if client_k is not None and client_k < k:
            k, reason = client_k, "per_request"
        # The verifier always adds one token, so k draft tokens can emit k + 1.
        length_k = min(
            request.submit.sampling.max_tokens - request.num_generated - 1,
            self._max_model_len - len(request.tokens) - 1,
        )
        if length_k < k:
            k, reason = max(0, length_k), "length"
        if rows_left < k:
            k, reason = max(0, rows_left), "batch"
        return k, reason

    def _reserve_decode(self, request: Request, k: int, reason: KReason) -> tuple[int, KReason]:
        """Reserve blocks for one decode and its drafts. Drafting is given up before a request is preempted."""
        if self._pool.reserve(request, len(request.tokens) + k):
            return k, reason
        while not self._pool.reserve(request, len(request.tokens)):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                break
        return 0, "memory"

    def _extend(self, request: Request, budget: int, spans: list[Span]) -> int:
        """Append a prefill chunk of at most `budget` rows to `spans`; returns its number of rows."""
        num_tokens = min(request.extend_len, budget)
        if num_tokens > 0 and not self._pool.reserve(request, request.num_computed + num_tokens):
            room = (self._pool.num_free + len(request.block_ids)) * self._pool.block_size - request.num_computed
            num_tokens = min(num_tokens, room)
            if num_tokens <= 0 and len(self._running) > 1 and self._running[-1] is request:
                self._preempt(request)
            if num_tokens <= 0 or not self._pool.reserve(request, request.num_computed + num_tokens):
                return 0
        if num_tokens > 0:
            samples = num_tokens == request.extend_len
            spans.append(Span(request, request.num_computed, num_tokens, 0, samples, "plan"))
        return num_tokens

    def _admit(self, request: Request) -> bool:
        """Attach the cached prefix; False if the pool has no room yet for the rest of the prompt."""
        # A prompt that is scored must be computed: cached blocks hold no logits.
        scored = request.submit.sampling.num_prompt_logprobs is not None
        request.num_computed = 0 if scored else self._pool.attach_prefix(request)
        if not self._running or self._pool.blocks_for(len(request.tokens) + 1) <= self._pool.num_free + len(
            request.block_ids
        ):
            request.num_cached = max(request.num_cached, min(request.num_computed, request.num_prompt))
            return True
        self._pool.release(request)
        request.num_computed = 0
        return False

    def _preempt(self, request: Request) -> None:
        """Free all blocks of a running request and queue it again; its tokens will be computed again."""
        self._pool.release(request)
        request.num_computed = 0
        self._running.remove(request)
        self._waiting.put_back(request)
        self.num_preempted += 1
