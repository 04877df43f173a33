"""The process of the draft: a small model with its own KV pool, answering orders until the target is gone.

Owns the draft's weights, its cache under the memory cap, and its end of the buffer. A plain class; `deployments` makes
it an actor. Bring-up: load() -> DraftInfo, connect(handle), run().
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import psutil
import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WeightFiles
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.step import ForwardInput
from engine.draft.architectures import Architecture, EagleArchitecture, PlainArchitecture
from engine.draft.messages import DraftInfo, DraftRequestRow
from engine.draft.proposer import DraftModel
from engine.draft_buffer.target_endpoint import BufferHandle, DraftEndpoint, gpu_uuid, open_draft_buffer
from engine.errors import ConfigError, EngineError, EngineUnavailable
from engine.metrics.counters import MetricCounters, MetricSnapshot
from engine.model.device import pick_device, pick_dtype, set_threads, with_device
from engine.model.load import LoadedDraft, load_draft
from engine.model.runner import ModelRunner, kv_bytes_per_token, num_kv_blocks
from engine.sampling.grammar import Grammars
from engine.sampling.row_sampling import RowSampling
from engine.sampling.vocabulary import load_tokenizer_info

_log = logging.getLogger(__name__)


class DraftWorker:
    """One draft for one target.

    Args:
        config: of the engine.
        folder: the draft's model folder.
        target_folder: the target's; a draft may share its embedding.
        node_id: of the machine.
    """

    def __init__(self, config: EngineConfig, folder: Path, target_folder: Path, *, node_id: str) -> None:
        self._config = config = with_device(config)
        self._folder = folder
        self._target_folder = target_folder
        self._node_id = node_id
        self._device = pick_device(config.device)
        self._stop = threading.Event()
        self._model: DraftModel | None = None
        self._own_threads = False
        self._endpoint: DraftEndpoint | None = None
        self._pool: BlockPool | None = None
        self._memory_bytes = self._cap_bytes = 0

    def load(self) -> DraftInfo:
        """Load weights and make the KV pool inside the cap.

        Raises:
            ConfigError: weights and one sequence do not fit under the cap, with the numbers.
        """
        set_threads(self._config)
        dtype = pick_dtype(self._config.dtype)
        draft = load_draft(
            self._folder,
            self._target_folder,
            dtype=dtype,
            device=self._device,
            kernel=self._config.forward_kernel,
        )
        self._own_threads = draft.decoder.own_threads
        config = draft.decoder.config
        target_vocab = ModelConfig.load(self._target_folder).vocab_size
        width = config.draft_vocab_size or min(config.vocab_size, target_vocab)
        num_blocks = self._num_blocks(config, dtype)
        architecture = _architecture(draft, width, num_blocks=num_blocks, block_size=self._config.kv_block_size)
        self._pool = pool = BlockPool(
            num_blocks,
            self._config.kv_block_size,
            prefix_cache=self._config.prefix_cache,
            ahead=1 if architecture.reads_features else 0,
        )
        self._memory_bytes += num_blocks * pool.block_size * kv_bytes_per_token(config, dtype=dtype)
        vocab = draft.decoder.draft_vocab
        feature_width = draft.head.feature_width if draft.head is not None else 0
        grammars = Grammars(lambda: load_tokenizer_info(self._target_folder, target_vocab))
        self._model = DraftModel(architecture, pool, vocab=vocab, max_model_len=config.max_model_len, grammars=grammars)
        warm_up(self._model, width, feature_width, dtype, self._device)
        return DraftInfo(width, tuple(vocab.tolist()) if vocab is not None else None, feature_width)

    def connect(self, handle: BufferHandle) -> None:
        """Open the buffer that the target made.

        Raises:
            ConfigError: it is on another node or GPU, or of another layout.
        """
        self._endpoint = open_draft_buffer(handle, node_id=self._node_id, gpu_uuid=gpu_uuid(self._device))

    def run(self) -> None:
        """Answer orders until `stop`, or until the target is gone."""
        if self._model is None or self._endpoint is None:
            raise EngineError("run before load and connect")
        set_threads(self._config, own_threads=self._own_threads)
        try:
            while not self._stop.is_set():
                order = self._endpoint.wait(0.5)
                if order is not None:
                    begin = time.perf_counter()
                    rows = self._model.answer(order.rows, order.released, self._endpoint.probs, self._endpoint.features)
                    self._endpoint.answer(rows, draft_s=time.perf_counter() - begin)
        except EngineUnavailable as error:
            _log.info("the draft ends: %s", error)
        finally:
            self._endpoint.close()

    def stop(self) -> None:
        """Make `run` return. Idempotent, any thread."""
        self._stop.set()

    def metrics(self) -> MetricSnapshot:
        """KV blocks, and memory against its cap. Any thread."""
        counters = MetricCounters()
        counters.set("paceline_draft_memory_bytes", self._memory_bytes)
        counters.set("paceline_draft_memory_cap_bytes", self._cap_bytes)
        if self._pool is not None:
            count_blocks(counters, self._pool, "draft")
        return counters.read()

    def _num_blocks(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Blocks of the draft's pool, scratch included: what the cap leaves after the weights."""
        fraction = self._config.speculative.memory_fraction
        total = self._total_memory()
        cap = int(total * fraction)
        weights = self._weight_bytes(config, dtype)
        self._memory_bytes, self._cap_bytes = weights, cap
        one = (config.max_model_len if self._config.max_model_len is None else self._config.max_model_len) + 1
        needed = kv_bytes_per_token(config, dtype=dtype) * min(one, 4096)
        if weights + needed > cap:
            raise ConfigError(
                f"speculative.memory_fraction: draft weights {weights >> 20} MiB + KV of one sequence "
                f"{needed >> 20} MiB exceed {fraction:.0%} of the device's {total >> 20} MiB = {cap >> 20} MiB; "
                "raise the fraction or take a smaller draft"
            )
        wanted = 2 * self._config.max_num_requests * min(one, 4096)  # more can never be used
        blocks = num_kv_blocks(
            config,
            block_size=self._config.kv_block_size,
            dtype=dtype,
            device=self._device,
            memory_bytes=min(cap - weights, wanted * kv_bytes_per_token(config, dtype=dtype)),
        )
        return blocks + 1

    def _weight_bytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        own = WeightFiles(self._folder).num_elements() * dtype.itemsize
        embedding = config.vocab_size * config.hidden_size * dtype.itemsize
        has_table = config.architecture == "eagle" and self._device.type == "cpu"
        return own + embedding * (int(config.shares_embedding) + int(has_table))

    def _total_memory(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        return int(psutil.virtual_memory().total)


def warm_up(
    model: DraftModel, width: int, feature_width: int, dtype: torch.dtype, device: torch.device, *, k: int = 2
) -> None:
    """Draft for two made-up requests, greedy and sampled, so that no request pays for what is loaded at first use.

    On a GPU the first forward loads kernels and makes library handles, which can take longer than a draft's deadline.

    Args:
        model: the draft.
        width: columns of its probabilities.
        feature_width: numbers per row that it reads of the target; 0 for none.
        dtype: of those.
        device: where it computes.
        k: tokens to draft.
    """
    probs = torch.empty(2, k, width, device=device)
    features = torch.zeros(1, feature_width, dtype=dtype, device=device) if feature_width > 0 else None
    places = (0,) * 3 if feature_width > 0 else ()
    rows = [
        DraftRequestRow(key, 0, (1,) * 3, k, RowSampling(temperature, 0.9, 0, 1, False), feature_rows=places)
        for key, temperature in enumerate((0.0, 1.0), start=1)
    ]
    model.answer(rows, [], probs, features)
    model.answer([], [row.key for row in rows], probs, features)


def _architecture(draft: LoadedDraft, width: int, *, num_blocks: int, block_size: int) -> Architecture:
    """The model over a new cache; columns from `width` on are padding and are never drafted."""
    runner = ModelRunner(draft.decoder, num_blocks=num_blocks, block_size=block_size)
    if draft.head is not None:
        return EagleArchitecture(draft.head, draft.decoder, runner.caches)

    def forward(forward_input: ForwardInput) -> torch.Tensor:
        logits = runner.forward(forward_input)
        if logits is None:
            raise EngineError("the draft got no logits")
        return logits[:, :width]

    return PlainArchitecture(forward)


def count_blocks(counters: MetricCounters, pool: BlockPool, cache: str) -> None:
    """What a KV pool says of itself, into a fresh ledger."""
    num_free = pool.num_free
    counters.set("paceline_kv_free_blocks", num_free, cache)
    counters.set("paceline_kv_used_blocks", pool.num_blocks - 1 - num_free, cache)
    counters.add("paceline_kv_evictions_total", pool.num_evicted, cache)
