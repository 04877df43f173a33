"""Drafting by a model in another process: the target's side of the draft buffer.

Owns the number of committed tokens that the draft has received of each request. When the draft fails, every request
runs at k = 0, the reason is reported once, and the next draft receives all tokens again. Where the draft reads the
target's features, their log lives as long as the buffer. Knows nothing of the model in the other process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.core.drafter import empty_rows
from engine.core.request import Request
from engine.core.step import Batch, DeviceDrafts, Draft, DraftRow, KReason, Span, Verdict
from engine.draft.feature_log import FeatureLog
from engine.draft.messages import MAX_OPTIONS, DraftRequestRow, DraftResponse, DraftResponseRow, encode_options
from engine.errors import DraftDown
from engine.messages import Submit


class DraftLink(Protocol):
    """The target's endpoint of a draft buffer."""

    @property
    def probs(self) -> torch.Tensor:
        """[max_rows, max_k, draft_vocab] float32 draft probabilities, valid until the next `ask`."""
        ...

    @property
    def features(self) -> torch.Tensor | None:
        """[feature_rows, width] features that the draft reads during `ask`; None for a draft that reads none."""
        ...

    def drafted(self, num_rows: int) -> DeviceDrafts:
        """The drafts of the latest response's rows in device memory. The confidences and probabilities are valid until
        the next `ask`."""
        ...

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        """Send one draft request and wait for the response.

        Args:
            rows: one per request to draft for.
            released: keys of requests that have ended.
            deadline_s: seconds until a silent draft counts as hung.

        Raises:
            DraftDown: the draft is dead or hung.
        """
        ...

    def mark_step(self, *, runs: bool) -> None:
        """Tell the draft that a step begins, or has ended."""
        ...

    def close(self) -> None:
        """Release the endpoint. Nothing may be asked afterwards."""
        ...


class RemoteDrafter:
    """Methods `draft_model` and `eagle`. All methods run in the thread of the step loop.

    Args:
        max_request_tokens: committed tokens that one draft request may carry; more are sent over several steps.
        max_released: keys of ended requests that one draft request may carry.
        max_options: bytes of encoded sampling options that one draft request may carry.
        deadline_s: seconds until a silent draft counts as hung.
        on_down: called once with the reason when the draft fails.
        width: most children of a node of a draft tree; 1 asks for chains.
        learns: whether the draft may learn from a request; None lets it learn from none.
    """

    def __init__(
        self,
        *,
        max_request_tokens: int,
        max_released: int,
        max_options: int = MAX_OPTIONS,
        deadline_s: float,
        on_down: Callable[[str], None],
        width: int = 1,
        learns: Callable[[Submit], bool] | None = None,
    ) -> None:
        self._vocab: torch.Tensor | None = None
        self._max_request_tokens = max_request_tokens
        self._max_released = max_released
        self._max_options = max_options
        self._deadline_s = deadline_s
        self._on_down = on_down
        self._width = width
        self._learns = learns
        self._endpoint: DraftLink | None = None
        self._sent: dict[int, int] = {}  # request key -> committed tokens that the draft has received
        self._refused: set[int] = set()  # requests the draft had no memory for, until one of its requests ends
        self._unsupported: set[int] = set()  # requests whose sampling options the draft cannot apply
        self._released: list[int] = []  # ended requests that the draft has not heard of yet
        self._log: FeatureLog | None = None
        self._drafts_now = True  # whether the last step with a decode asked for a draft

    @property
    def is_up(self) -> bool:
        """Whether a draft is attached."""
        return self._endpoint is not None

    def set_vocab(self, vocab: torch.Tensor | None) -> None:
        """Set the target ids of the draft's columns. Call before `attach`.

        Args:
            vocab: [draft_vocab] int64; None where column i is token i.
        """
        self._vocab = vocab

    def attach(self, endpoint: DraftLink) -> None:
        """Draft through this endpoint from the next step on."""
        self.detach()
        self._endpoint = endpoint
        self._log = FeatureLog(endpoint.features) if endpoint.features is not None else None

    def detach(self) -> None:
        """Stop drafting and close the endpoint. Idempotent."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = self._log = None
        self._sent.clear()
        self._refused.clear()
        self._unsupported.clear()
        self._released.clear()

    def draft(self, batch: Batch) -> Draft:
        if self._endpoint is not None:
            self._endpoint.mark_step(runs=True)
        rows = empty_rows(batch)
        asked = self._asked(batch.spans)
        if not asked:
            return Draft(tuple(rows))
        if self._endpoint is None:
            return _without(rows, asked, "draft_down")
        reasons = self._left_out([batch.spans[index].request for index in asked])
        for index, reason in zip(asked, reasons, strict=True):
            if reason is not None:
                rows[index] = DraftRow(reason=reason)
        asked = [index for index, reason in zip(asked, reasons, strict=True) if reason is None]
        if not asked:
            return Draft(tuple(rows))
        sent = self._request_rows([batch.spans[index] for index in asked])
        released = self._released[: self._max_released]
        try:
            response = self._endpoint.ask(sent, released, deadline_s=self._deadline_s)
        except DraftDown as error:
            self.detach()
            self._on_down(str(error))
            return _without(rows, asked, "draft_down")
        del self._released[: len(released)]
        probs = self._endpoint.probs
        on_device = None
        if any(drafted.num_on_device for drafted in response.rows):
            on_device = self._endpoint.drafted(len(sent))
        for row_index, (index, request_row, drafted) in enumerate(zip(asked, sent, response.rows, strict=True)):
            row = self._row(batch.spans[index], request_row, drafted, probs[row_index], row_index)
            if batch.spans[index].k > 0:
                rows[index] = row
        return Draft(
            tuple(rows),
            self._vocab,
            draft_s=response.draft_s,
            handoff_s=response.handoff_s,
            num_caught_up=sum(len(request_row.new_tokens) for request_row in sent),
            on_device=on_device,
        )

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        """Keep the target's features of the step for a draft that reads them."""
        if self._endpoint is not None:
            self._endpoint.mark_step(runs=False)
        if self._log is not None and verdict.features is not None:
            self._log.add(verdict.features, batch.spans, verdict.rows)

    def forget(self, keys: Sequence[int]) -> None:
        if self._log is not None:
            for key in keys:
                self._log.forget(key)
        self._released += [key for key in keys if self._sent.pop(key, None) is not None]
        self._refused.clear()
        self._unsupported.difference_update(keys)

    def _asked(self, spans: Sequence[Span]) -> list[int]:
        """Indices of the spans to draft for, and of prompts whose features must be read before they are overwritten."""
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
        """Per request, why it is left out of this step's draft request; None for a request that takes part."""
        free_bytes = self._max_options
        reasons: list[KReason | None] = []
        for request in requests:
            key = request.key
            reason: KReason | None = None
            if key in self._refused:
                reason = "memory"
            elif key not in self._sent and key not in self._unsupported and request.logits_processor is not None:
                num_bytes = len(encode_options(request.logits_processor.options))
                if num_bytes > self._max_options:
                    self._unsupported.add(key)
                elif num_bytes > free_bytes:
                    reason = "catch_up"  # its options go with the next draft request
                else:
                    free_bytes -= num_bytes
            reasons.append("options" if key in self._unsupported else reason)
        return reasons

    def _request_rows(self, spans: Sequence[Span]) -> list[DraftRequestRow]:
        """The rows of a draft request: the committed tokens that the draft lacks, as many as fit in one request."""
        free_tokens = self._max_request_tokens
        rows = []
        for span in spans:
            request = span.request
            start = self._sent.get(request.key, 0)
            # Of a prompt that is still being computed, only the tokens before which there are features.
            stop = len(request.tokens) if span.k > 0 else span.start + 1
            new_tokens = tuple(request.tokens[start : min(start + free_tokens, stop)])
            free_tokens -= len(new_tokens)
            is_caught_up = start + len(new_tokens) == len(request.tokens)
            processor = request.logits_processor
            rows.append(
                DraftRequestRow(
                    key=request.key,
                    start=start,
                    new_tokens=new_tokens,
                    k=span.k if is_caught_up else 0,
                    sampling=request.row_sampling,
                    exit_threshold=span.exit_threshold,
                    width=self._width,
                    learn_from=request.num_prompt if self._learns is not None and self._learns(request.submit) else -1,
                    options=processor.options if processor is not None and start == 0 else None,
                    feature_rows=self._log.rows(request.key, start, len(new_tokens)) if self._log is not None else (),
                )
            )
        return rows

    def _row(
        self,
        span: Span,
        request_row: DraftRequestRow,
        drafted: DraftResponseRow,
        probs: torch.Tensor,
        row_index: int,
    ) -> DraftRow:
        """The draft of one span, and a note of what the draft has received.

        Args:
            probs: [max_k, draft_vocab] of this row.
            row_index: of this row in the draft request.
        """
        key = span.request.key
        if drafted.reason == "memory":
            self._refused.add(key)
            self._sent.pop(key, None)
            return DraftRow(reason="memory")
        if drafted.reason == "options":
            self._unsupported.add(key)
            return DraftRow(reason="options")
        self._sent[key] = request_row.start + len(request_row.new_tokens)
        if self._log is not None:
            self._log.sent(key, self._sent[key])
        if request_row.k == 0:
            return DraftRow(reason="catch_up")
        return DraftRow(
            token_ids=drafted.token_ids,
            probs=probs[: drafted.num_on_device or len(drafted.token_ids)] if drafted.has_probs else None,
            confidences=drafted.confidences,
            parents=drafted.parents,
            reason=span.reason if drafted.reason == "plan" else drafted.reason,
            num_on_device=drafted.num_on_device,
            device_row=row_index,
        )


def _without(rows: list[DraftRow], indices: Sequence[int], reason: KReason) -> Draft:
    """A draft without tokens for these spans; the other rows stay."""
    for index in indices:
        rows[index] = DraftRow(reason=reason)
    return Draft(tuple(rows))
