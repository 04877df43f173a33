"""Drafting K tokens per request as CUDA graphs: the choice of each token and the forward over it, without the host.

Owns the static memory of R rows that are drafted for, and the recordings. A recorded position chooses a token per row
from the static logits, writes it to the results, and computes the logits of the next position; a counter on the device
says which position it is. So one recording serves every position, and nothing of a chain happens on the host but the
replays. For few rows the whole chain of K positions is one recording besides. Rows that pad a size, or that need fewer
tokens than others, go on in the scratch block.

    host     fill the inputs: positions, KV slots, block tables, sampling parameters, seeds
    device   copy it | copy the logits of the first position | choose, forward | choose, forward | ... | choose

`engine.draft.chain` is the slow twin: it decides on the host what each position needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.graphs.chain_rows import KINDS, WHOLE_ROWS, ChainRows, ChoiceKind, fill_rows
from engine.graphs.forward import Capture, Embedding
from engine.graphs.static_memory import StaticInputs
from engine.model.attention_varlen import PagedSpans
from engine.model.decoder import Decoder, Inputs
from engine.model.runner import ModelRunner
from engine.sampling.distribution import WarpOptions, draw, gumbel_of_words, warp_together

Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`engine.kernels.choose.choose`."""


@dataclass(frozen=True, slots=True)
class ChainModel:
    """The forward over drafted tokens."""

    runner: ModelRunner
    """A decoder and its cache."""
    max_kv: int
    """Longest sequence in tokens."""
    embedding: Embedding | None = None
    """Input of the first layer from the token and the hidden state before it; None takes the token's embedding."""


@dataclass(frozen=True, slots=True)
class ChainResults:
    """What a chain writes: static memory, valid until the next chain."""

    token_ids: torch.Tensor
    """[R, max_k] int32 target token ids."""
    confidences: torch.Tensor
    """[R, max_k] float32 largest probability at each position, before the sampling parameters."""
    probs: torch.Tensor
    """[R, max_k, columns] float32 distribution of each token; not written by greedy chains."""


class RecordedChain:
    """The recordings of all sizes.

    Args:
        sizes: rows to record for.
        capture: records them.
        max_k: most tokens of a row.
        columns: logit columns that are tokens.
        vocab: [columns] int64 target token id of each column; None when column i is token i.
        device: of the logits.
        model: computes the next logits; None where they are known when the first are (`Ahead`).
        fused: whether one kernel of Paceline makes the choices that need no truncation.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        capture: Capture,
        *,
        max_k: int,
        columns: int,
        vocab: torch.Tensor | None,
        device: torch.device,
        model: ChainModel | None,
        fused: bool = False,
    ) -> None:
        rows = max(sizes)
        with torch.inference_mode():
            self.results = ChainResults(
                torch.zeros(rows, max_k, dtype=torch.int32, device=device),
                torch.zeros(rows, max_k, device=device),
                torch.zeros(rows, max_k, columns, device=device),
            )
            self.logits = torch.zeros(rows, columns, device=device)
            """[R, columns] float32, read by the choice."""
            embedding = None if model is None else model.embedding
            dtype = torch.float32 if model is None else model.runner.model.dtype
            self.hidden = torch.zeros(rows, 0 if embedding is None else embedding.width, dtype=dtype, device=device)
            """[R, hidden_size] that the next forward reads; no columns without `Embedding`."""
            chosen = torch.zeros(rows, dtype=torch.int64, device=device)
            ids = torch.arange(columns, device=device) if vocab is None else vocab
            shared = _Shared(
                self.results, self.logits, self.hidden, chosen, ids, vocab is not None, _chooser(fused=fused)
            )
            self.max_k = max_k
            self.has_model = model is not None
            self._sizes = {size: _Sized(size, shared, model, max_k=max_k) for size in sorted(sizes, reverse=True)}
            for sized in self._sizes.values():
                sized.record(capture)

    def fits(self, num_rows: int, k: int) -> bool:
        """Whether so many rows and positions are recorded."""
        return num_rows <= max(self._sizes) and k <= self.max_k

    @torch.inference_mode()
    def draft(self, rows: ChainRows, later: Callable[[int], None] | None = None) -> None:
        """Queue all positions, after `logits` and `hidden` have those of the first one.

        Args:
            rows: that `fits`.
            later: writes the logits of a position, 1 or later, to `logits`. Where there is no model.
        """
        sized = self._sizes[min(size for size in self._sizes if size >= len(rows.ks))]
        sized.fill(rows)
        kind, length = rows.kind, int(rows.ks.max())
        if later is None and length == self.max_k and kind in sized.whole:
            sized.whole[kind]()
            return
        for position in range(length):
            if later is not None and position > 0:
                later(position)
            if later is None and position + 1 < length:
                sized.advance[kind]()
            else:
                sized.choose[kind]()


@dataclass(frozen=True, slots=True)
class _Shared:
    """Static memory of all sizes; each uses the first rows."""

    results: ChainResults
    logits: torch.Tensor
    hidden: torch.Tensor
    chosen: torch.Tensor
    """[R] int64 token of each row at the latest position."""
    ids: torch.Tensor
    """[columns] int64 target token id of each column."""
    has_vocab: bool
    choose: Choose | None
    """The fused choice; None takes PyTorch's operators."""


class _Sized:
    """The static inputs and the recordings of one number of rows."""

    def __init__(self, size: int, shared: _Shared, model: ChainModel | None, *, max_k: int) -> None:
        self._size, self._max_k, self._shared, self._model = size, max_k, shared, model
        block_size = 1 if model is None else model.runner.block_size
        width = 1 if model is None else -(-model.max_kv // block_size)
        self._max_kv = width * block_size
        layout: dict[str, tuple[tuple[int, ...], str]] = {
            "depth": ((1,), "int64"),
            "positions": ((size,), "int64"),
            "slots": ((max_k, size), "int64"),
            "words": ((max_k, size, 2), "int32"),
            "block_tables": ((size, width), "int32"),
            **dict.fromkeys(("kv_lens", "num_computed"), ((size,), "int32")),
            **dict.fromkeys(("temperature", "min_p", "top_p"), ((size, 1), "float32")),
            "top_k": ((size, 1), "int64"),
            **dict.fromkeys(("cuts", "greedy"), ((size, 1), "bool")),
        }
        device = shared.logits.device
        self._static = StaticInputs(layout, device)
        self._tensors = self._static.tensors
        self._cu_q = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._cu_kv = torch.zeros(size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(size, device=device)
        self.choose: dict[ChoiceKind, Callable[[], None]] = {}
        """Chooses the tokens of a position."""
        self.advance: dict[ChoiceKind, Callable[[], None]] = {}
        """Chooses the tokens of a position and computes the logits of the next one."""
        self.whole: dict[ChoiceKind, Callable[[], None]] = {}
        """All `max_k` positions."""

    def record(self, capture: Capture) -> None:
        """Record with padding only."""
        nothing = np.zeros(0, dtype=np.int64)
        empty = ChainRows(
            *(nothing, (), (), nothing, nothing.astype(np.int32), np.zeros((0, 0), dtype=np.int64)),
            np.zeros((0, 0), dtype=np.int32),
        )
        for kind in KINDS:

            def choose(kind: ChoiceKind = kind) -> None:
                self._choose(kind)
                self._tensors["depth"].add_(1)

            def advance(kind: ChoiceKind = kind) -> None:
                self._choose(kind)
                self._forward()
                self._tensors["depth"].add_(1)

            def whole(kind: ChoiceKind = kind) -> None:
                for _ in range(self._max_k - 1):
                    advance(kind)
                choose(kind)

            bodies = [(self.choose, choose)]
            if self._model is not None and self._max_k > 1:
                bodies.append((self.advance, advance))
                bodies += [(self.whole, whole)] if self._size <= WHOLE_ROWS else []
            for recordings, body in bodies:
                self.fill(empty)
                recordings[kind] = capture(body)

    def fill(self, rows: ChainRows) -> None:
        """Write the rows and their padding, and queue the copy to the device."""
        fill_rows(self._static.arrays, rows, num_columns=self._shared.logits.shape[1])
        self._static.upload()

    def _choose(self, kind: ChoiceKind) -> None:
        """Choose from the logits and write the results of the position. Nothing is read or comes from the host."""
        shared, size, depth = self._shared, self._size, self._tensors["depth"]
        logits, results = shared.logits[:size], shared.results
        if shared.choose is not None and kind != "truncated":
            words = self._tensors["words"]
            words = words.index_select(0, depth)[0] if kind == "sampled" else words[0]
            options = (self._tensors["temperature"], self._tensors["greedy"], words, shared.ids, depth)
            columns, confidences = shared.choose(logits, *options, results.probs[:size], kind == "sampled")
        else:
            columns, confidences = self._chosen(kind, logits, depth)
        tokens = shared.ids[columns] if shared.has_vocab else columns
        shared.chosen[:size].copy_(tokens)
        results.token_ids[:size].index_copy_(1, depth, tokens.to(torch.int32).unsqueeze(1))
        results.confidences[:size].index_copy_(1, depth, confidences.unsqueeze(1))

    def _chosen(self, kind: ChoiceKind, logits: torch.Tensor, depth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] columns and [R] confidences with PyTorch's operators."""
        columns, confidences = logits.argmax(dim=-1), logits.softmax(dim=-1).amax(dim=-1)
        if kind != "greedy":
            options = WarpOptions(*(self._tensors[name] for name in ("temperature", "cuts", "top_k", "min_p", "top_p")))
            probs = warp_together(logits, options, truncates=kind == "truncated")
            self._shared.results.probs[: self._size].index_copy_(1, depth, probs.unsqueeze(1))
            words = self._tensors["words"].index_select(0, depth)[0]
            drawn = draw(probs, gumbel_of_words(words, self._shared.ids))
            columns = torch.where(self._tensors["greedy"].squeeze(1), columns, drawn)
        return columns, confidences

    def _forward(self) -> None:
        """Compute the logits of the next position from the tokens chosen last."""
        if self._model is None:
            return
        shared, size, depth, tensors = self._shared, self._size, self._tensors["depth"], self._tensors
        model, embedding = self._model.runner.model, self._model.embedding
        if not isinstance(model, Decoder):
            raise TypeError("only PyTorch's decoder can be recorded")
        kv_lens = tensors["kv_lens"] + torch.minimum((depth + 1).to(torch.int32), tensors["num_computed"])
        self._cu_kv[1:].copy_(kv_lens.cumsum(0, dtype=torch.int32))
        spans = PagedSpans(self._cu_q, self._cu_kv, kv_lens, tensors["block_tables"], max_q=1, max_kv=self._max_kv)
        tokens = shared.chosen[:size]
        inputs = Inputs(
            token_ids=tokens,
            positions=tensors["positions"] + depth,
            slots=tensors["slots"].index_select(0, depth)[0],
            logit_rows=self._rows,
            attention=dict.fromkeys(model.config.windows or (0,), spans),
        )
        first = None if embedding is None else embedding.compute(tokens, shared.hidden[:size])
        result = model.compute(inputs, self._model.runner.caches, first)
        shared.logits[:size].copy_(result.require_logits()[:, : shared.logits.shape[1]])
        if embedding is not None and result.hidden is not None:
            shared.hidden[:size].copy_(result.hidden)


def _chooser(*, fused: bool) -> Choose | None:
    if not fused:
        return None
    from engine.kernels.choose import choose  # Triton is not installed everywhere.

    return choose
