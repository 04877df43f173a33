"""Parallel drafting: the forward over committed tokens also yields the distributions of the tokens after the first.

Owns the masked rows at the end of a span, and the architecture that computes them, after P-EAGLE (Hui et al. 2026).
Tokens are drawn from these distributions independently of each other, and each distribution is reported for its token,
so the output stays exact. Knows nothing of requests or sampling.

    span        c c c c | m m m       c committed, m masked: K = 4
    logits            0   1 2 3       of the K drafted tokens, all from one forward
    KV slots    kept    | not kept    the next forward of the sequence overwrites those of masked rows
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from engine.core.packing import SpanRows
from engine.core.step import DeviceTokens, ForwardInput, ForwardResult
from engine.draft.architectures import Ahead, EagleArchitecture, Outputs
from engine.errors import EngineError
from engine.graphs.forward import Embedding
from engine.model.decoder import LayerCache
from engine.model.eagle_head import Eagle3Head, EagleHead
from engine.model.load import Model
from engine.sampling.staging import to_device


def with_masked(span: SpanRows, count: int, num_logits: int | None = None) -> SpanRows:
    """The span with masked rows after its last one. Its blocks have room for them.

    Args:
        span: its committed rows.
        count: masked rows to add.
        num_logits: rows at the end of the span with logits; None adds the masked rows to those of the span.
    """
    last = (span.positions or (span.start + len(span.token_ids) - 1,))[-1]
    positions = span.positions or range(span.start, last + 1)
    return SpanRows(
        [*span.token_ids, *(0,) * count],
        span.start,
        span.block_ids,
        span.num_logits + count if num_logits is None else num_logits,
        [*positions, *range(last + 1, last + 1 + count)],
        None if span.places is None else [*span.places, *(-1,) * count],
    )


class ParallelEagleArchitecture(EagleArchitecture):
    """An EAGLE draft with masked rows.

    Args:
        head: computes the input of the decoder; it has a mask.
        decoder: see `EagleArchitecture`.
        caches: KV cache of each decoder layer.
        positions_per_pass: number of tokens that the draft was trained to draft with one forward.
    """

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        decoder: Model,
        caches: list[LayerCache],
        *,
        positions_per_pass: int,
    ) -> None:
        super().__init__(head, decoder, caches)
        self.positions_per_pass = positions_per_pass

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        if not any(num_masked) and self._recorded_committed is None:
            return super().compute_committed(forward_input, features)
        if features is None:
            raise EngineError("an eagle draft needs features for committed tokens")
        counts = np.array(num_masked or np.zeros(len(forward_input.q_lens)), dtype=np.int64)
        ends = np.cumsum(forward_input.q_lens, dtype=np.int64)
        masked = (
            np.repeat(ends - counts, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        )
        is_masked = np.zeros(int(ends[-1]), dtype=np.bool_)
        is_masked[masked] = True
        committed = np.flatnonzero(~is_masked)
        spans = np.flatnonzero(counts)
        lasts = np.cumsum(forward_input.q_lens - counts)[spans] - 1  # the last committed row of each span with a mask
        order = np.empty(len(is_masked), dtype=np.int64)
        order[committed] = np.arange(len(committed))
        order[masked] = len(committed) + np.repeat(np.arange(len(spans)), counts[spans])
        firsts = np.flatnonzero(~is_masked[forward_input.logit_rows])
        if self._recorded_committed is not None:
            base = np.arange(len(is_masked))
            base[masked] = np.repeat(committed[lasts], counts[spans])
            result = self._replayed(forward_input, features, is_masked, base)
            if result is not None:
                logits = result.require_logits()
                (first_rows,) = to_device([firsts], logits.device)
                return Outputs(logits.index_select(0, first_rows), None, Ahead(logits, firsts + 1))
        arrays = to_device([committed, lasts, order, firsts], self._decoder.device)
        inputs = self._head.committed_inputs(self._tokens(forward_input).index_select(0, arrays[0]), features)
        inputs = torch.cat((inputs, self._head.masked_inputs(inputs.index_select(0, arrays[1]))))
        result = self._decoder.forward(forward_input, self._caches, inputs.index_select(0, arrays[2]))
        logits = result.require_logits()
        return Outputs(logits.index_select(0, arrays[3]), None, Ahead(logits, firsts + 1))

    def _replayed(
        self,
        forward_input: ForwardInput,
        features: torch.Tensor,
        is_masked: npt.NDArray[np.bool_],
        base: npt.NDArray[np.int64],
    ) -> ForwardResult | None:
        """The recorded forward; None if none holds it.

        Args:
            forward_input: N rows.
            features: of the committed rows.
            is_masked: [N].
            base: [N] the row itself, or the committed row before a masked one, whose token and features it gets.
        """
        if self._recorded_committed is None:
            return None
        place = np.cumsum(~is_masked) - 1  # of each committed row among these
        index, flags = to_device([place[base], is_masked.astype(np.float32)], features.device)
        extra = torch.cat((features.index_select(0, index), flags.unsqueeze(1).to(features.dtype)), dim=1)
        known = forward_input.device_tokens
        same_tokens = structs.replace(
            forward_input,
            token_ids=forward_input.token_ids[base],
            device_tokens=None if known is None else DeviceTokens(known.ids, known.places[base]),
        )
        return self._recorded_committed.embedded(same_tokens, extra)

    def _committed_embedding(self) -> Embedding:
        """As that of `EagleArchitecture`. The last number of a row says whether it is masked."""

        def compute(ids: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
            inputs = self._head.committed_inputs(self._projected(ids), extra[:, :-1].contiguous())
            return torch.where(extra[:, -1:] > 0, self._head.masked_inputs(inputs), inputs)

        return Embedding(self._head.feature_width + 1, compute)

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        del forward_input, previous_hidden
        raise EngineError("a parallel draft has no forward over drafted tokens")
