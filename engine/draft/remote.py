"""Drafting by a model in another process: the target's side of the DraftBuffer.

Owns what the draft has been told so far, per request, and what happens when it falls silent: K = 0 for everybody, the
reason reported once, everything told anew to the next draft. Where the draft reads the target's features, their log
lives and ends with the buffer. Knows nothing of the model behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.core.drafter import empty_rows
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, KReason, Span
from engine.draft.feature_log import FeatureLog
from engine.draft.messages import MAX_OPTIONS, DraftRequestRow, DraftResponse, DraftResponseRow, encode_options
from engine.errors import DraftDown


class DraftLink(Protocol):
    """The target's end of a draft buffer."""

    @property
    def probs(self) -> torch.Tensor:
        """[max_rows, max_k, draft_vocab] float32, valid until the next `ask`."""
        ...

    @property
    def features(self) -> torch.Tensor | None:
        """[feature_rows, width] that the draft reads while it is asked; None where it reads none."""
        ...

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        """Raises DraftDown when the draft is dead or hung."""
        ...

    def close(self) -> None:
        """Ask no more."""
        ...


class RemoteDrafter:
    """Methods `draft_model` and `eagle`.

    Args:
        max_feed: committed tokens that one order may carry; longer ones are caught up over several steps.
        max_released: request keys that one order may carry.
        max_options: bytes of request options that one order may carry.
        deadline_s: a draft that has not answered by then counts as hung.
        on_down: told why, once, in the loop's thread.
    """

    def __init__(
        self,
        *,
        max_request_tokens: int,
        max_released: int,
        max_options: int = MAX_OPTIONS,
        deadline_s: float,
        on_down: Callable[[str], None],
    ) -> None:
        self._vocab: torch.Tensor | None = None
        self._max_request_tokens = max_request_tokens
        self._max_released = max_released
        self._max_options = max_options
        self._deadline_s = deadline_s
        self._on_down = on_down
        self._endpoint: DraftLink | None = None
        self._sent: dict[int, int] = {}  # request key -> committed tokens the draft knows
        self._refused: set[int] = set()  # requests the draft had no memory for, until something is freed
        self._unsupported: set[int] = set()  # requests whose options the draft cannot honour
        self._released: list[int] = []
        self._log: FeatureLog | None = None
        self._spans: Sequence[Span] = ()  # of the step whose features were written last
        self._drafts_now = True  # whether the last step with a decode had a draft in it

    @property
    def is_up(self) -> bool:
        """Whether there is a draft to ask."""
        return self._endpoint is not None

    def set_vocab(self, vocab: torch.Tensor | None) -> None:
        """Target ids of the draft's columns, [draft_vocab] int64, or None when they are the same. Before `attach`."""
        self._vocab = vocab

    def attach(self, end: DraftLink) -> None:
        """Draft through this end from the next step on. Call in the loop's thread."""
        self.detach()
        self._endpoint = end
        self._log = FeatureLog(end.features) if end.features is not None else None

    def detach(self) -> None:
        """Stop drafting and close the end. Call in the loop's thread."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = self._log = None
        self._sent.clear()
        self._refused.clear()
        self._unsupported.clear()
        self._released.clear()

    def write_features(self, features: torch.Tensor, q_lens: npt.NDArray[np.int32]) -> None:
        """Take what a forward of the target has left, as `FeatureLog.write`. In the loop's thread."""
        if self._log is not None:
            self._log.write(features, q_lens)

    def forget(self, keys: Sequence[int]) -> None:
        if self._log is not None:
            for key in keys:
                self._log.forget(key)
        self._released += [key for key in keys if self._sent.pop(key, None) is not None]
        self._refused.clear()
        self._unsupported.difference_update(keys)

    def draft(self, batch: Batch) -> Draft:
        if self._log is not None:
            self._log.settle(self._spans)
        self._spans = batch.spans
        rows = empty_rows(batch)
        asked = self._asked(batch.spans)
        if not asked:
            return Draft(tuple(rows))
        if self._endpoint is None:
            for index in asked:
                rows[index] = DraftRow(reason="draft_down")
            return Draft(tuple(rows))
        reasons = self._left_out([batch.spans[index].request for index in asked])
        for index, reason in zip(asked, reasons, strict=True):
            if reason is not None:
                rows[index] = DraftRow(reason=reason)
        asked = [index for index, reason in zip(asked, reasons, strict=True) if reason is None]
        if not asked:
            return Draft(tuple(rows))
        orders = self._orders([batch.spans[index] for index in asked])
        released = self._released[: self._max_released]
        try:
            answer = self._endpoint.ask(orders, released, deadline_s=self._deadline_s)
        except DraftDown as error:
            self.detach()
            self._on_down(str(error))
            for index in asked:
                rows[index] = DraftRow(reason="draft_down")
            return Draft(tuple(rows))
        del self._released[: len(released)]
        num_caught_up = sum(len(order.new_tokens) for order in orders)
        probs = self._endpoint.probs
        for place, (index, order, answered) in enumerate(zip(asked, orders, answer.rows, strict=True)):
            row = self._row(batch.spans[index], order, answered, probs[place])
            if batch.spans[index].k > 0:
                rows[index] = row
        return Draft(
            tuple(rows), self._vocab, draft_s=answer.draft_s, handoff_s=answer.handoff_s, num_caught_up=num_caught_up
        )

    def _asked(self, spans: Sequence[Span]) -> list[int]:
        """Spans to draft for, and prompts whose features must be read before they are overwritten."""
        asked = [index for index, span in enumerate(spans) if span.k > 0]
        if any(span.samples for span in spans):
            self._drafts_now = bool(asked)
        if self._log is None or not self._drafts_now:
            return asked
        return [index for index, span in enumerate(spans) if span.k > 0 or self._is_pressing(span, self._log)]

    def _is_pressing(self, span: Span, log: FeatureLog) -> bool:
        key = span.request.key
        return not span.samples and log.is_pressing(key) and self._sent.get(key, 0) <= span.start

    def _left_out(self, requests: Sequence[Request]) -> list[KReason | None]:
        """Why the draft is not asked for some of these in this step."""
        room = self._max_options
        reasons: list[KReason | None] = []
        for request in requests:
            reason: KReason | None = None
            if request.key in self._refused:
                reason = "memory"
            elif (
                request.key not in self._sent
                and request.key not in self._unsupported
                and request.logits_processor is not None
            ):
                needed = len(encode_options(request.logits_processor.options))
                if needed > self._max_options:
                    self._unsupported.add(request.key)
                elif needed > room:
                    reason = "catch_up"  # they go with the next order
                else:
                    room -= needed
            reasons.append("options" if request.key in self._unsupported else reason)
        return reasons

    def _orders(self, spans: Sequence[Span]) -> list[DraftRequestRow]:
        """What to tell the draft: the committed tokens it does not know yet, as many as fit in one order."""
        room = self._max_request_tokens
        orders = []
        for span in spans:
            request = span.request
            start = self._sent.get(request.key, 0)
            # Of a prompt that is still being computed, so much as there are features for.
            stop = len(request.tokens) if span.k > 0 else span.start + 1
            new_tokens = tuple(request.tokens[start : min(start + room, stop)])
            room -= len(new_tokens)
            caught_up = start + len(new_tokens) == len(request.tokens)
            orders.append(
                DraftRequestRow(
                    key=request.key,
                    start=start,
                    new_tokens=new_tokens,
                    k=span.k if caught_up else 0,
                    sampling=request.row_sampling,
                    exit_threshold=span.exit_threshold,
                    options=request.logits_processor.options
                    if request.logits_processor is not None and start == 0
                    else None,
                    feature_rows=self._log.rows(request.key, start, len(new_tokens)) if self._log is not None else (),
                )
            )
        return orders

    def _row(self, span: Span, order: DraftRequestRow, answered: DraftResponseRow, probs: torch.Tensor) -> DraftRow:
        key = span.request.key
        if answered.reason == "memory":
            self._refused.add(key)
            self._sent.pop(key, None)
            return DraftRow(reason="memory")
        if answered.reason == "options":
            self._unsupported.add(key)
            return DraftRow(reason="options")
        self._sent[key] = order.start + len(order.new_tokens)
        if self._log is not None:
            self._log.sent(key, self._sent[key])
        if order.k == 0:
            return DraftRow(reason="catch_up")
        drafted = len(answered.token_ids)
        return DraftRow(
            token_ids=answered.token_ids,
            probs=probs[:drafted] if answered.has_probs else None,
            confidences=answered.confidences,
            reason=span.reason if answered.reason == "plan" else answered.reason,
        )
