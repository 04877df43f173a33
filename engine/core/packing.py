"""Lays spans of different lengths side by side as the integers of one forward.

Owns the mapping from tokens and blocks to rows and slots, for target and draft alike. Knows no tensor and no model.

    spans    [c c c c c c] [c d d d] [c]        c committed, d drafted
    rows      0 1 2 3 4 5   6 7 8 9  10
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from engine.core.step import Batch, Draft, ForwardInput, ForwardResult, Span

Forward = Callable[[ForwardInput], ForwardResult]
"""One forward of a model over its KV cache."""


class SpanRows(Struct, frozen=True, gc=False):
    """One span of a forward, before it is packed with the others."""

    token_ids: Sequence[int]
    """Tokens of its rows."""
    start: int
    """Cell of the first in the span's blocks; its position too, unless `positions` are given."""
    block_ids: Sequence[int]
    num_logits: int
    """The last so many rows need logits."""
    positions: Sequence[int] | None = None
    """Of its rows, where cells and positions differ."""


def pack_spans(spans: Sequence[SpanRows], block_size: int) -> ForwardInput:
    """The integers of a forward over these spans."""
    q_lens = np.array([len(span.token_ids) for span in spans], dtype=np.int32)
    starts = np.array([span.start for span in spans], dtype=np.int32)
    tables = np.zeros((len(spans), max(len(span.block_ids) for span in spans)), dtype=np.int32)
    logit_rows: list[int] = []
    token_ids: list[int] = []
    for index, span in enumerate(spans):
        tables[index, : len(span.block_ids)] = span.block_ids
        token_ids += span.token_ids
        logit_rows += range(len(token_ids) - span.num_logits, len(token_ids))
    owner = np.repeat(np.arange(len(spans)), q_lens)  # [N] span of each row
    first_row = np.cumsum(q_lens) - q_lens
    cells = np.arange(len(token_ids)) - first_row[owner] + starts[owner]
    slots = tables[owner, cells // block_size] * block_size + cells % block_size
    positions = cells
    if any(span.positions is not None for span in spans):
        positions = np.concatenate([_positions(span) for span in spans])
    return ForwardInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=positions.astype(np.int32),
        slots=slots.astype(np.int32),
        q_lens=q_lens,
        kv_lens=starts + q_lens,
        block_tables=tables,
        logit_rows=np.array(logit_rows, dtype=np.int32),
    )


def _positions(span: SpanRows) -> Sequence[int]:
    return range(span.start, span.start + len(span.token_ids)) if span.positions is None else span.positions


def pack_step(batch: Batch, draft: Draft, block_size: int) -> ForwardInput:
    """The target's forward of one step: per span its committed rows, then its drafts.

    Logits are wanted of rows that score the prompt, then of those that yield tokens; together they end the span.
    """
    spans = []
    for span, row in zip(batch.spans, draft.rows, strict=True):
        committed = span.request.tokens[span.start : span.start + span.num_tokens]
        num_logits = len(prompt_rows(span)) + (len(row.token_ids) + 1 if span.samples else 0)
        spans.append(SpanRows([*committed, *row.token_ids], span.start, span.request.block_ids, num_logits))
    return pack_spans(spans, block_size)


def prompt_rows(span: Span) -> range:
    """Positions whose logits score the prompt's next token and have not been asked for before.

    They are the span's last rows, or stand right before the one that yields a token.
    """
    request = span.request
    if request.submit.sampling.num_prompt_logprobs is None:
        return range(0)
    first = max(span.start, len(request.prompt_logprobs))
    return range(first, max(first, min(span.start + span.num_tokens, request.num_prompt - 1)))
