"""Drafting K positions on the device without a read in between: the fast twin of the loop in `engine.draft.proposer`.

Owns the order of operations. Every row drafts all of its K positions; the host then reads tokens and confidences once
and cuts each row where the loop would have stopped it. Later positions see the penalties of the committed tokens only,
and no grammar: a mask depends on the token before, which the host does not know. Such a token is drafted from the
distribution that is reported for it, so the output stays exact; it is only accepted less often.

    position      0                  1                  2
    logits        committed forward  forward of t0      forward of t1
    grammar       masked             not masked         not masked
    device        t0, confidence     t1, confidence     t2, confidence      one read of all of them

For a parallel draft the committed forward has computed the logits of all positions, and no other forward follows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.packing import SpanRows, pack_spans
from engine.draft.architectures import Architecture, Outputs
from engine.draft.sequence import Drafting
from engine.graphs.chain import RecordedChain
from engine.graphs.chain_rows import ChainRows
from engine.sampling.distribution import Purpose, draw, gumbel, most_likely, stream_seed, warp
from engine.sampling.logits_processor import BatchLogitsProcessor, Columns
from engine.sampling.staging import to_device

Read = Callable[[Sequence[torch.Tensor]], list[npt.NDArray[Any]]]
"""Copies int32, int64 and float32 tensors to the host. The host waits once."""


class Chooser:
    """Chooses one token per row from logits, and keeps what the target needs to verify it.

    Args:
        vocab: [draft_vocab] int64 target token id of each column; None when column i is token i.
    """

    def __init__(self, vocab: torch.Tensor | None) -> None:
        self._vocab = vocab

    def choose(
        self, rows: Sequence[Drafting], logits: torch.Tensor, probs: torch.Tensor, *, depth: int, num_ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the tokens. Sampled rows write their distribution to `probs`.

        Args:
            rows: what is drafted for.
            logits: [len(rows), draft_vocab] float32.
            probs: [max_rows, max_k, draft_vocab] of the draft buffer.
            depth: number of tokens drafted before this one.
            num_ahead: number of those that the sequences do not have yet.

        Returns:
            [len(rows)] int64 target token ids, and [len(rows)] float32 confidences.
        """
        columns = most_likely(logits)
        confidences = logits.softmax(dim=-1).amax(dim=-1)
        sampled = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if sampled:
            told = [place for place, each in enumerate(sampled) if rows[each].samples_from_q]
            places = [rows[sampled[place]].row_index for place in told]
            index, told_index, told_places = to_device(
                [np.array(values, dtype=np.int64) for values in (sampled, told, places)], logits.device
            )
            q = warp(logits.index_select(0, index), [rows[each].sampling for each in sampled])
            if told:
                probs[:, depth].index_copy_(0, told_places, q.index_select(0, told_index))
            ids = self._vocab if self._vocab is not None else torch.arange(logits.shape[-1], device=logits.device)
            drawn = draw(q, gumbel([_draw_seed(rows[each], num_ahead) for each in sampled], ids))
            columns = columns.index_copy(0, index, drawn)
        return columns if self._vocab is None else self._vocab[columns], confidences

    def candidates(
        self, rows: Sequence[Drafting], logits: torch.Tensor, probs: torch.Tensor, *, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest next tokens of greedy rows; for other rows, tokens drawn without replacement.

        The largest Gumbel-perturbed log-probabilities are such a draw (Kool et al. 2019). The first one is the token
        that `choose` draws.

        Args:
            rows: what is drafted for; a row may occur several times.
            logits: [len(rows), draft_vocab] float32.
            probs: as in `choose`. Rows of the rejection rule occur once.
            depth: number of tokens drafted before these.
            width: W, tokens per row.

        Returns:
            [len(rows), W] int64 target token ids, and [len(rows), W] float32 confidences: of greedy rows each token's
            probability, of other rows the largest probability; 0 for a token that q excludes.
        """
        if width == 1:
            tokens, certain = self.choose(rows, logits, probs, depth=depth, num_ahead=depth)
            return tokens.unsqueeze(1), certain.unsqueeze(1)
        own = logits.softmax(dim=-1)
        confidences, columns = own.topk(min(width, own.shape[1]), dim=-1)
        sampled = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if sampled:
            (index,) = to_device([np.array(sampled, dtype=np.int64)], logits.device)
            q = warp(logits.index_select(0, index), [rows[each].sampling for each in sampled])
            for place, each in enumerate(sampled):
                if rows[each].samples_from_q:
                    probs[rows[each].row_index, depth] = q[place]
            ids = self._vocab if self._vocab is not None else torch.arange(logits.shape[-1], device=logits.device)
            noise = gumbel([_draw_seed(rows[each], depth) for each in sampled], ids)
            scores, drawn = q.log().add_(noise).topk(confidences.shape[1], dim=-1)
            columns = columns.index_copy(0, index, drawn)
            largest = confidences.index_select(0, index)[:, :1] * scores.isfinite()
            confidences = confidences.index_copy(0, index, largest)
        return columns if self._vocab is None else self._vocab[columns], confidences


def _draw_seed(row: Drafting, num_ahead: int) -> int:
    purpose = Purpose.TOKEN if row.sampling.coupled else Purpose.DRAFT
    position = len(row.sequence.tokens) + num_ahead
    return stream_seed(row.sampling.stream_key, position, purpose, row.sampling.attempt)


def draft_chain(
    architecture: Architecture,
    chooser: Chooser,
    rows: Sequence[Drafting],
    outputs: Outputs,
    probs: torch.Tensor,
    token_ids: torch.Tensor,
    confidences: torch.Tensor,
    *,
    columns: Columns | None,
    block_size: int,
    recorded: RecordedChain | None = None,
) -> None:
    """Queue the whole chain. Nothing is read.

    Args:
        architecture: the draft's model.
        chooser: draws the tokens.
        rows: with k > 0, in the order of `outputs`; their KV slots are reserved.
        outputs: of the committed forward.
        probs: [max_rows, max_k, draft_vocab], written at [row_index, position].
        token_ids: [max_rows, max_k] int32, written likewise.
        confidences: [max_rows, max_k] float32, written likewise; NaN where no column is allowed.
        columns: mapping of a reduced vocabulary, for logits processors.
        block_size: tokens per KV block.
        recorded: replays the chain if no row has a logits processor.
    """
    is_plain = all(row.sequence.logits_processor is None for row in rows)
    if recorded is not None and is_plain and recorded.fits(len(rows), max(row.k for row in rows)):
        _replay(recorded, rows, outputs, probs, token_ids, confidences, block_size)
        return
    live, places = list(rows), _buffer_rows(rows, outputs.logits.device)
    for depth in range(max(row.k for row in rows)):
        _process(live, outputs.logits, columns, depth)
        chosen, certain = chooser.choose(live, outputs.logits, probs, depth=depth, num_ahead=depth)
        token_ids[:, depth].index_copy_(0, places, chosen.to(token_ids.dtype))
        confidences[:, depth].index_copy_(0, places, certain)
        following = [index for index, row in enumerate(live) if row.k > depth + 1]
        if not following:
            return
        outputs = outputs.select(following)
        if len(following) < len(live):
            live = [live[index] for index in following]
            places = _buffer_rows(live, places.device)
        ahead = outputs.following()
        if ahead is None:
            spans = [_next_span(row, depth, place) for row, place in zip(live, following, strict=True)]
            ahead = architecture.compute_drafted(pack_spans(spans, block_size, chosen), outputs.previous_hidden)
        outputs = ahead


def _replay(
    recorded: RecordedChain,
    rows: Sequence[Drafting],
    outputs: Outputs,
    probs: torch.Tensor,
    token_ids: torch.Tensor,
    confidences: torch.Tensor,
    block_size: int,
) -> None:
    """`draft_chain` as replays. Arguments are those of `draft_chain`."""
    num, device, results = len(rows), outputs.logits.device, recorded.results
    longest, ahead = max(row.k for row in rows), outputs.ahead
    chain_rows = _chain_rows(rows, block_size, is_computed=ahead is None)
    recorded.logits[:num].copy_(outputs.logits)
    if outputs.previous_hidden is not None and recorded.hidden.shape[1] > 0:
        recorded.hidden[:num].copy_(outputs.previous_hidden)
    if ahead is None:
        recorded.draft(chain_rows)
    else:
        later = np.minimum(ahead.rows + np.arange(longest - 1)[:, None], len(ahead.logits) - 1)
        (index,) = to_device([later], device)
        known = ahead.logits

        def next_logits(position: int) -> None:
            torch.index_select(known, 0, index[position - 1], out=recorded.logits[:num])

        recorded.draft(chain_rows, next_logits)
    from_q = [place for place, row in enumerate(rows) if row.samples_from_q]
    places, sources, targets = to_device(
        [
            np.array(values, dtype=np.int64)
            for values in ([row.row_index for row in rows], from_q, [rows[place].row_index for place in from_q])
        ],
        device,
    )
    token_ids[:, :longest].index_copy_(0, places, results.token_ids[:num, :longest])
    confidences[:, :longest].index_copy_(0, places, results.confidences[:num, :longest])
    if from_q:
        probs[:, :longest].index_copy_(0, targets, results.probs[:, :longest].index_select(0, sources))


def _chain_rows(rows: Sequence[Drafting], block_size: int, *, is_computed: bool) -> ChainRows:
    """What a recorded chain needs of the rows.

    Args:
        rows: what is drafted for.
        block_size: tokens per KV block.
        is_computed: whether there is a forward over drafted tokens; their sequences then get its KV slots.
    """
    ks = np.array([row.k for row in rows], dtype=np.int64)
    kv_lens = np.array([len(row.sequence.positions) for row in rows], dtype=np.int32)
    tables = np.zeros((len(rows), max(len(row.sequence.block_ids) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.sequence.block_ids)] = row.sequence.block_ids
        first = len(row.sequence.tokens)
        row.sequence.positions += range(first, first + row.k - 1) if is_computed else ()
    depth = np.arange(int(ks.max()))[:, None]
    has_slot = (depth < ks - 1) & is_computed
    slots = np.where(has_slot, kv_lens + depth, 0)
    blocks = tables[np.arange(len(rows)), slots // block_size].astype(np.int64)
    return ChainRows(
        ks=ks,
        samplings=[row.sampling for row in rows],
        seeds=[[] if row.sampling.greedy else [_draw_seed(row, place) for place in range(row.k)] for row in rows],
        positions=np.array([len(row.sequence.tokens) for row in rows], dtype=np.int64),
        kv_lens=kv_lens,
        slots=np.where(has_slot, blocks * block_size + slots % block_size, 0),
        block_tables=tables,
    )


def _buffer_rows(rows: Sequence[Drafting], device: torch.device) -> torch.Tensor:
    """[len(rows)] int64 row of each in the draft buffer."""
    (places,) = to_device([np.array([row.row_index for row in rows], dtype=np.int64)], device)
    return places


def _process(rows: Sequence[Drafting], logits: torch.Tensor, columns: Columns | None, depth: int) -> None:
    batch_processor = BatchLogitsProcessor(columns)
    for index, row in enumerate(rows):
        processor = row.sequence.logits_processor
        if processor is not None and depth == 0:
            batch_processor.add(index, processor)
        elif processor is not None:
            batch_processor.add_ahead(index, processor, depth)
    batch_processor.apply(logits)


def _next_span(row: Drafting, depth: int, place: int) -> SpanRows:
    """The row of a forward over the token drafted last, which only the device knows."""
    sequence = row.sequence
    start = len(sequence.positions)
    position = len(sequence.tokens) + depth
    sequence.positions.append(position)
    return SpanRows((0,), start, sequence.block_ids, 1, (position,), places=(place,))


def settle(row: Drafting, token_ids: Sequence[int], confidences: Sequence[float]) -> None:
    """Give a row the tokens that the chain drafted for it, up to where the loop would have stopped.

    Args:
        row: its sequence ends with the committed tokens; its KV slots are those of the chain.
        token_ids: at least k target token ids.
        confidences: of those; NaN where no column was allowed.
    """
    for token, confidence in zip(token_ids[: row.k], confidences[: row.k], strict=True):
        if math.isnan(confidence):
            break
        row.append(token, confidence)
        if not row.continues:
            break
    sequence = row.sequence
    del sequence.positions[bisect_left(sequence.positions, len(sequence.tokens)) :]
