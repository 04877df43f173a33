"""A model's forward with a CUDA graph per bucket; the eager forward is its slow twin and computes everything else.

Owns the static memory of each recorded forward: inputs that one copy brings to the device, and the tensors that the
recording writes. None is ever allocated again. Rows that pad a bucket write to the scratch
block, and nothing reads what they compute. `Capture` is injected, so that tests replay without a GPU.

    host     fill the inputs (tokens, positions, slots, lengths, block tables)
    device   copy it | copy drafted ids | replay: gather ids, broadcast, layers, logits, arg max -> static results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.core.step import ForwardInput, ForwardResult
from engine.errors import ConfigError
from engine.graphs.buckets import Bucket, find_bucket
from engine.graphs.static_memory import StaticInputs, fill_spans, fill_trees
from engine.model.attention_varlen import PagedSpans, PagedTrees
from engine.model.decoder import Decoder, Inputs, LayerCache
from engine.model.runner import ModelRunner
from engine.sampling.staging import to_device, with_device_tokens


class Capture(Protocol):
    """Records what a function queues, after running it once."""

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What queues the same work again, on the same memory."""
        ...


class CudaCapture:
    """Records CUDA graphs that share one memory pool.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()  # Loads kernels and makes workspaces, which a recording must not.
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            compute()
        replay: Callable[[], None] = graph.replay
        return replay


@dataclass(frozen=True, slots=True)
class Embedding:
    """An input of the first layer that is not the embedding of the tokens alone."""

    width: int
    """Numbers per row that it takes besides the token."""
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """[N, hidden_size] from [N] int64 token ids and [N, width] in the model's dtype."""


class GraphedForward:
    """The forward of one shard.

    Args:
        runner: the model and its cache; also computes what no bucket holds.
        buckets: sizes to record.
        capture: records them.
        max_kv: longest sequence in tokens.
        max_ids: most token ids of `ForwardInput.device_tokens`.
        embedding: input of the first layer; None takes the embeddings of the tokens.
        some_logits: whether to replay forwards of which not all rows have logits. Those of all rows are computed.

    Raises:
        ConfigError: the model has experts, which a graph cannot choose.
    """

    def __init__(
        self,
        runner: ModelRunner,
        buckets: Sequence[Bucket],
        capture: Capture,
        *,
        max_kv: int,
        max_ids: int,
        embedding: Embedding | None = None,
        some_logits: bool = False,
    ) -> None:
        if not isinstance(runner.model, Decoder):
            raise TypeError("only PyTorch's decoder can be recorded")
        if runner.model.config.experts is not None:
            raise ConfigError("engine.cuda_graphs: a model with experts cannot be recorded; allowed: off")
        self._runner = runner
        self._some_logits = some_logits
        # Trees in layers with a window are computed eagerly.
        self.buckets = tuple(bucket for bucket in buckets if not (bucket.trees and any(runner.model.config.windows)))
        model, rows = runner.model, max(bucket.rows for bucket in buckets)
        width = len(model.feature_layers) * model.config.hidden_size
        with torch.inference_mode():
            leads = model.shard.rank == 0
            shared = _Shared(
                ids=torch.zeros(max_ids, dtype=torch.int64, device=model.device),
                logits=torch.zeros(rows, model.logit_width, device=model.device) if leads else None,
                most_likely=torch.zeros(rows, dtype=torch.int64, device=model.device) if leads else None,
                hidden=torch.zeros(rows, width, dtype=model.dtype, device=model.device) if width else None,
                extra=torch.zeros(rows, embedding.width, dtype=model.dtype, device=model.device) if embedding else None,
                embedding=embedding,
            )
            self._recorded = {
                bucket: _Recorded(model, runner.caches, bucket, shared, max_kv=max_kv) for bucket in self.buckets
            }
            for bucket in self.buckets:
                self._recorded[bucket].record(capture)

    @torch.inference_mode()
    def forward(self, forward_input: ForwardInput) -> ForwardResult:
        """As `ModelRunner.forward`. The results hold until the next call."""
        bucket = find_bucket(self.buckets, forward_input, some_logits=self._some_logits)
        if bucket is None:
            return self._runner.forward(forward_input)
        self._runner.move(forward_input)
        return self._of_logit_rows(forward_input, self._recorded[bucket].replay(forward_input))

    @torch.inference_mode()
    def embedded(self, forward_input: ForwardInput, extra: torch.Tensor) -> ForwardResult | None:
        """`forward` with the input of the first layer made from the tokens and [N, width] `extra`.

        Returns:
            None if no bucket holds the forward.
        """
        bucket = find_bucket(self.buckets, forward_input, some_logits=self._some_logits)
        if bucket is None:
            return None
        return self._of_logit_rows(forward_input, self._recorded[bucket].replay(forward_input, extra))

    def _of_logit_rows(self, forward_input: ForwardInput, result: ForwardResult) -> ForwardResult:
        """The result with the logits of the rows that are asked for."""
        rows = forward_input.logit_rows
        if result.logits is None or len(rows) == len(forward_input.token_ids):
            return result
        (index,) = to_device([rows.astype(np.int64)], result.logits.device)
        most_likely = None if result.most_likely is None else result.most_likely.index_select(0, index)
        return ForwardResult(result.logits.index_select(0, index), result.hidden, most_likely)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Static memory of all recordings; each uses the first rows."""

    ids: torch.Tensor
    """[max_ids] int64 ids that the host does not know."""
    logits: torch.Tensor | None
    """[rows, vocab] float32 result on rank 0."""
    most_likely: torch.Tensor | None
    """[rows] int64 result on rank 0."""
    hidden: torch.Tensor | None
    """[rows, feature width] result."""
    extra: torch.Tensor | None
    """[rows, width] input of `embedding`."""
    embedding: Embedding | None


class _Recorded:
    """The static memory and the recording of one bucket."""

    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        bucket: Bucket,
        shared: _Shared,
        *,
        max_kv: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._bucket = bucket
        self._shared = shared
        block_size = caches[0].keys.shape[1]
        width = -(-max_kv // block_size)
        sizes: dict[str, tuple[tuple[int, ...], str]] = {
            **dict.fromkeys(("token_ids", "places", "positions", "slots"), ((bucket.rows,), "int64")),
            **dict.fromkeys(("cu_q", "cu_kv"), ((bucket.spans + 1,), "int32")),
            "kv_lens": ((bucket.spans,), "int32"),
            "block_tables": ((bucket.spans, width), "int32"),
        }
        masks_trees = bucket.trees and model.masks_trees(bucket.max_q)
        if masks_trees:
            sizes |= {"num_tree_slots": ((bucket.spans,), "int32"), "ancestors": ((bucket.rows,), "int64")}
        elif bucket.trees:
            sizes |= {"paths": ((bucket.rows, bucket.max_q), "int64")}
            sizes |= {"hidden": ((bucket.rows, 1 + bucket.max_q), "bool")}
        self._static = StaticInputs(sizes, model.device)
        tensors = self._static.tensors
        self._token_ids, self._places = tensors["token_ids"], tensors["places"]
        spans = PagedSpans(
            *(tensors["cu_q"], tensors["cu_kv"], tensors["kv_lens"], tensors["block_tables"]),
            max_q=bucket.max_q,
            max_kv=width * block_size,
            num_tree_slots=tensors.get("num_tree_slots"),
            ancestors=tensors.get("ancestors"),
        )
        prepared: PagedSpans | PagedTrees = spans
        if bucket.trees and not masks_trees:
            prepared = PagedTrees(None, spans, None, tensors["paths"], tensors["hidden"])
        self._block_size = block_size
        self._inputs = Inputs(
            token_ids=self._token_ids,
            positions=tensors["positions"],
            slots=tensors["slots"],
            logit_rows=torch.arange(bucket.rows, device=model.device),
            attention=dict.fromkeys(model.config.windows or (0,), prepared),
        )
        self._replay: Callable[[], None] = lambda: None

    def record(self, capture: Capture) -> None:
        """Record the forward, with padding only."""
        empty = np.zeros(0, dtype=np.int32)
        nothing = ForwardInput(*(empty,) * 5, np.zeros((0, 0), dtype=np.int32), empty)
        self._fill(nothing)
        self._static.upload()
        self._replay = capture(self._compute)

    def replay(self, forward_input: ForwardInput, extra: torch.Tensor | None = None) -> ForwardResult:
        num_rows, shared = len(forward_input.token_ids), self._shared
        self._fill(forward_input)
        self._static.upload()
        known = forward_input.device_tokens
        if known is not None:
            shared.ids[: len(known.ids)].copy_(known.ids)
        if extra is not None and shared.extra is not None:
            shared.extra[:num_rows].copy_(extra)
        self._replay()
        return ForwardResult(
            logits=None if shared.logits is None else shared.logits[:num_rows],
            hidden=None if shared.hidden is None else shared.hidden[:num_rows],
            most_likely=None if shared.most_likely is None else shared.most_likely[:num_rows],
        )

    def _fill(self, forward_input: ForwardInput) -> None:
        fill_spans(self._static.arrays, forward_input, self._bucket)
        if self._bucket.trees:
            fill_trees(self._static.arrays, forward_input.tree, self._block_size)

    def _compute(self) -> None:
        """What is recorded: no branch depends on a value, no memory is copied from the host."""
        rows, shared = self._bucket.rows, self._shared
        self._token_ids.copy_(with_device_tokens(self._token_ids, shared.ids, self._places))
        self._model.share_tokens(self._token_ids)
        first = None
        if shared.embedding is not None and shared.extra is not None:
            first = shared.embedding.compute(self._token_ids, shared.extra[:rows])
        result = self._model.compute(self._inputs, self._caches, first)
        if shared.logits is not None and shared.most_likely is not None and result.logits is not None:
            shared.logits[:rows].copy_(result.logits)
            shared.most_likely[:rows].copy_(result.logits.argmax(dim=-1))
        if shared.hidden is not None and result.hidden is not None:
            shared.hidden[:rows].copy_(result.hidden)
