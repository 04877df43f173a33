"""Packs spans of different lengths into the integers of one forward.

Owns the mapping from tokens and blocks to rows and KV slots, for target and draft. Knows no model.

    spans    [c c c c c c] [c d d d] [c]        c committed, d drafted
    rows      0 1 2 3 4 5   6 7 8 9  10
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from engine.core.step import Batch, DeviceTokens, Draft, ForwardInput, ForwardResult, RowVerdict, Span, TreeMask
from engine.tree import ancestor_masks, branches, depths

if TYPE_CHECKING:  # only a type here, as in `engine.core.step`
    import torch

Forward = Callable[[ForwardInput], ForwardResult]
"""One forward of a model over its KV cache."""


class SpanRows(Struct, frozen=True, gc=False):
    """One span of a forward, before packing."""

    token_ids: Sequence[int]
    """Token of each row, at least one."""
    start: int
    """Index of the first row's KV slot within the span's blocks; also its position, unless `positions` is given."""
    block_ids: Sequence[int]
    """KV blocks of the span, in order; they have room for every row."""
    num_logits: int
    """Number of rows at the end of the span whose logits are returned."""
    positions: Sequence[int] | None = None
    """Position of each row; None if positions equal KV slot indices."""
    places: Sequence[int] | None = None
    """Place of each row's token among the ids on the device; -1 where `token_ids` has it. None: all are in
    `token_ids`."""
    num_tree_slots: int = 0
    """KV slots at the end of the span, after its last row included, that belong to a tree; 0 for a chain."""
    ancestors: Sequence[int] = ()
    """Bits of the ancestors of each of the last rows in the tree; rows before them are outside of it."""
    adapter: int = 0
    """Number of the span's adapter; 0 for the base model."""


def pack_spans(
    spans: Sequence[SpanRows],
    block_size: int,
    ids: torch.Tensor | None = None,
    moves: Sequence[tuple[int, int]] = (),
) -> ForwardInput:
    """Pack spans into one forward.

    Args:
        spans: at least one.
        block_size: tokens per KV block.
        ids: [M] int64 token ids on the device, which the spans' `places` count in; None if no span has any.
        moves: KV slots that move before the forward: from, to.
    """
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
    indices = np.arange(len(token_ids)) - first_row[owner] + starts[owner]  # [N] KV slot index within the span's blocks
    slots = tables[owner, indices // block_size] * block_size + indices % block_size
    positions = indices
    if any(span.positions is not None for span in spans):
        positions = np.concatenate([_positions(span) for span in spans])
    device_tokens = None
    if ids is not None:
        device_tokens = DeviceTokens(ids, np.concatenate([_places(span) for span in spans]))
    adapters = [span.adapter for span in spans]
    return ForwardInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=positions.astype(np.int32),
        slots=slots.astype(np.int32),
        q_lens=q_lens,
        kv_lens=starts + q_lens,
        block_tables=tables,
        logit_rows=np.array(logit_rows, dtype=np.int32),
        device_tokens=device_tokens,
        tokens_from_rank_0=device_tokens is not None,
        tree=_tree_mask(spans, q_lens) if any(span.num_tree_slots for span in spans) else None,
        moves=np.array(moves, dtype=np.int32) if moves else None,
        adapters=np.array(adapters, dtype=np.int32) if any(adapters) else None,
    )


def cut_spans(forward_input: ForwardInput, max_q: int) -> ForwardInput:
    """The same rows in spans of at most `max_q` rows.

    A piece sees the KV slots up to its last row. That holds in trees too, because nodes come after their ancestors.
    """
    q_lens, kv_lens = forward_input.q_lens, forward_input.kv_lens
    num_pieces = -(-q_lens // max_q)
    if int(num_pieces.max()) == 1:
        return forward_input
    span = np.repeat(np.arange(len(q_lens)), num_pieces)
    piece = np.arange(len(span)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    rows = np.minimum(q_lens[span] - piece * max_q, max_q)
    after = q_lens[span] - piece * max_q - rows
    tree = forward_input.tree
    if tree is not None:
        tree = TreeMask(np.maximum(tree.num_slots[span] - after, 0), tree.ancestors)
    return replace(
        forward_input,
        q_lens=rows,
        kv_lens=kv_lens[span] - after,
        block_tables=forward_input.block_tables[span],
        tree=tree,
    )


def _tree_mask(spans: Sequence[SpanRows], q_lens: npt.NDArray[np.int32]) -> TreeMask:
    ancestors = np.zeros(int(q_lens.sum()), dtype=np.uint64)
    for span, stop in zip(spans, np.cumsum(q_lens).tolist(), strict=True):
        if span.ancestors:
            ancestors[stop - len(span.ancestors) : stop] = span.ancestors
    return TreeMask(np.array([span.num_tree_slots for span in spans], dtype=np.int32), ancestors)


def _places(span: SpanRows) -> npt.NDArray[np.int64]:
    if span.places is None:
        return np.full(len(span.token_ids), -1, dtype=np.int64)
    return np.array(span.places, dtype=np.int64)


def _positions(span: SpanRows) -> Sequence[int]:
    return range(span.start, span.start + len(span.token_ids)) if span.positions is None else span.positions


def pack_step(batch: Batch, draft: Draft, block_size: int, moves: Sequence[tuple[int, int]] = ()) -> ForwardInput:
    """Pack the target's forward of one step: for each span its committed tokens, then its draft tokens.

    The rows with logits end the span: first those that score prompt tokens, then those that yield tokens.

    Args:
        batch: its spans.
        draft: their drafts.
        block_size: tokens per KV block.
        moves: KV slots that move before the forward: from, to.
    """
    spans = []
    on_device = draft.on_device
    for span, row in zip(batch.spans, draft.rows, strict=True):
        committed = span.request.tokens[span.start : span.start + span.num_tokens]
        num_logits = len(prompt_rows(span)) + (row.num_tokens + 1 if span.samples else 0)
        places = None
        drafted = row.token_ids
        if on_device is not None and row.num_on_device > 0:
            first = row.device_row * on_device.token_ids.shape[1]
            places = (*((-1,) * len(committed)), *range(first, first + row.num_on_device))
            drafted = (0,) * row.num_on_device
        request = span.request
        rows = SpanRows(
            *([*committed, *drafted], span.start, request.block_ids, num_logits),
            places=places,
            adapter=request.adapter_number,
        )
        if branches(row.parents):
            rows = replace(
                rows,
                positions=[
                    *range(span.start, span.start + span.num_tokens),
                    *(span.start + span.num_tokens + depth for depth in depths(row.parents)),
                ],
                num_tree_slots=row.num_tokens,
                ancestors=ancestor_masks(row.parents),
            )
        spans.append(rows)
    return pack_spans(spans, block_size, None if on_device is None else on_device.token_ids.view(-1), moves)


def prompt_rows(span: Span) -> range:
    """Positions of the span whose logits score the next prompt token and were not scored before.

    They are the last committed rows of the span, or the rows right before the one that yields a token.
    """
    request = span.request
    if request.submit.sampling.num_prompt_logprobs is None:
        return range(0)
    first = max(span.start, len(request.prompt_logprobs))
    return range(first, max(first, min(span.start + span.num_tokens, request.num_prompt - 1)))


def path_moves(spans: Sequence[Span], rows: Sequence[RowVerdict], block_size: int) -> list[tuple[int, int]]:
    """From and to of the KV slots that the accepted paths leave in the wrong place."""
    moves = []
    for span, row in zip(spans, rows, strict=True):
        root, block_ids = span.start + span.num_tokens, span.request.block_ids
        for depth, node in enumerate(row.path):
            if node != depth:
                source, target = root + node, root + depth
                moves.append(
                    (
                        block_ids[source // block_size] * block_size + source % block_size,
                        block_ids[target // block_size] * block_size + target % block_size,
                    )
                )
    return moves
