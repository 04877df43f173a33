"""The process of the draft: a small model with its own KV pool that serves draft requests until the target is gone.

Owns the draft's weights, its KV cache under the memory cap, and its endpoint of the draft buffer. A plain class;
`deployments` makes it an actor. Bring-up: load() -> DraftInfo, connect(handle), run().
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.adaptation.adaptation import Adaptation
from engine.adaptation.supported import check_adaptable
from engine.adaptation.trainer_process import TRAINER
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, WeightFiles
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.dflash.decoder import DFlashDecoder
from engine.dflash.load import load_dflash
from engine.draft.architectures import EagleArchitecture
from engine.draft.messages import DraftInfo, DraftRequest, DraftRequestRow, DraftResponseRow
from engine.draft.proposer import OnDevice, Proposer
from engine.draft_buffer.target_endpoint import BufferHandle, DraftEndpoint, gpu_uuid, open_draft_buffer
from engine.errors import ConfigError, EngineUnavailable
from engine.medusa.heads import load_heads
from engine.metrics.counters import MetricCounters, MetricSnapshot
from engine.model.device import pick_device, pick_dtype, release_freed_memory, set_threads, with_device
from engine.model.load import LoadedDraft, load_draft
from engine.model.runner import kv_bytes_per_token, num_kv_blocks
from engine.sampling.grammar import Grammars
from engine.sampling.row_sampling import RowSampling
from engine.sampling.staging import to_host
from engine.sampling.vocabulary import load_tokenizer_info
from engine.threads import threads_per_shard
from engine.workers.adapted_draft import AdaptedDraft
from engine.workers.loaded_draft import LoadedParts, heads_parts, make_architecture
from engine.workers.memory_plan import weight_bytes

_WAIT_PERIOD_S = 0.5
_SEQUENCE_LEN = 4096
"""Tokens of a sequence that the pool has room for; longer sequences are rare and run at k = 0 when the pool is full."""
_log = logging.getLogger(__name__)


class DraftWorker:
    """One draft for one target.

    Args:
        config: settings of the engine.
        folder: the draft's model folder.
        target_folder: the target's model folder; a draft may share the target's embedding.
        node_id: node that this process runs on.
        trainer: command that trains a draft that is adapted.
    """

    _proposer: Proposer
    _pool: BlockPool
    _endpoint: DraftEndpoint

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        target_folder: Path,
        *,
        node_id: str,
        trainer: Sequence[str] = TRAINER,
    ) -> None:
        self._config = config = with_device(config)
        self._folder = folder
        self._target_folder = target_folder
        self._node_id = node_id
        self._device = pick_device(config.device)
        self._stop = threading.Event()
        self._own_threads = False
        self._has_cache = True
        self._memory_bytes = self._cap_bytes = 0
        self._trainer = trainer
        self._adapted: AdaptedDraft | None = None
        self._adaptation: Adaptation[EagleArchitecture] | None = None

    def load(self) -> DraftInfo:
        """Load the weights and make the KV pool under the memory cap.

        Returns:
            What the target needs to know to make the buffer.

        Raises:
            ConfigError: the weights and one sequence do not fit under the cap; the message has the numbers.
        """
        set_threads(self._config)
        dtype = pick_dtype(self._config.dtype)
        target = ModelConfig.load(self._target_folder)
        checked = check_draft(self._folder, self._target_folder)
        check_adaptable(self._config, checked)
        draft = self._load_heads(dtype) if checked.medusa is not None else self._load_decoder(dtype, target, checked)
        config, vocab, width, self._pool = draft.config, draft.vocab, draft.width, draft.pool
        grammars = Grammars(lambda: load_tokenizer_info(self._target_folder, target.vocab_size, target.eos_token_ids))
        self._proposer = Proposer(
            *(draft.architecture, draft.pool),
            vocab=vocab,
            max_model_len=config.max_model_len,
            grammars=grammars,
            recorded=draft.recorded,
        )
        warm_up(self._proposer, width, draft.feature_width, dtype, self._device)
        release_freed_memory()  # of loading
        target_ids = tuple(vocab.tolist()) if vocab is not None else None
        return DraftInfo(width, target_ids, draft.feature_width, config.positions_per_pass)

    def _load_decoder(self, dtype: torch.dtype, target: ModelConfig, checked: ModelConfig) -> LoadedParts:
        """A draft with layers, and a KV cache in what its weights leave of the cap."""
        options: dict[str, Any] = {
            "dtype": dtype,
            "device": self._device,
            "kernel": self._config.draft_kernel,
            "max_model_len": self._config.max_model_len,
        }

        def load(folder: Path) -> LoadedDraft:
            # Weights that are swapped in are loaded in a thread for which PyTorch has another number of threads.
            threads, packed = threads_per_shard(self._config), self._config.packed == "auto"
            return load_draft(folder, self._target_folder, **options, packed=packed, num_threads=threads)

        if checked.dflash is not None:
            draft = LoadedDraft(load_dflash(self._folder, self._target_folder, **options), None)
        elif self._config.speculative.adaptation.enabled:
            folders = (self._folder, self._target_folder)
            self._adapted = AdaptedDraft(self._config, *folders, load=load, trainer=self._trainer)
            draft = self._adapted.first()
        else:
            draft = load(self._folder)
        self._own_threads = draft.decoder.own_threads
        config = draft.decoder.config
        width = config.draft_vocab_size or min(config.vocab_size, target.vocab_size)
        num_blocks = self._num_blocks(config, dtype)
        architecture, recorded = make_architecture(self._config, draft, width, num_blocks=num_blocks)
        pool = BlockPool(
            num_blocks,
            self._config.kv_block_size,
            prefix_cache=self._config.prefix_cache,
            ahead=1 if architecture.reads_features else 0,
        )
        self._memory_bytes += num_blocks * pool.block_size * kv_bytes_per_token(config, dtype=dtype)
        source = draft.decoder if isinstance(draft.decoder, DFlashDecoder) else draft.head
        feature_width = source.feature_width if source is not None else 0
        return LoadedParts(config, architecture, pool, draft.decoder.draft_vocab, width, feature_width, recorded)

    def _load_heads(self, dtype: torch.dtype) -> LoadedParts:
        """Medusa heads. They have no KV cache."""
        folders, kernel = (self._folder, self._target_folder), self._config.draft_kernel
        heads = load_heads(*folders, dtype=dtype, device=self._device, kernel=kernel)
        self._has_cache = False
        self._check_memory(heads.num_bytes, 0)
        return heads_parts(self._config, heads)

    def connect(self, handle: BufferHandle) -> None:
        """Open the buffer that the target made. After `load`.

        Raises:
            ConfigError: the buffer is on another node or GPU, or has another layout.
        """
        self._endpoint = open_draft_buffer(handle, node_id=self._node_id, gpu_uuid=gpu_uuid(self._device))
        if self._adapted is not None:
            self._adaptation = self._adapted.adaptation(self._proposer, lambda: self._endpoint.idle_s)

    def run(self) -> None:
        """Serve draft requests until `stop`, or until the target is gone. After `connect`."""
        set_threads(self._config, own_threads=self._own_threads)
        if self._adaptation is not None:
            self._adaptation.start()
        try:
            while not self._stop.is_set():
                request = self._endpoint.wait(_WAIT_PERIOD_S)
                begin = time.perf_counter()
                if self._adaptation is not None:
                    self._swap(self._adaptation.before(request))
                if request is not None:
                    rows = self._propose(request)
                    if self._adaptation is not None:
                        self._adaptation.after(request, rows, self._endpoint.features)
                    self._endpoint.respond(rows, draft_s=time.perf_counter() - begin)
        except EngineUnavailable as error:
            _log.info("the draft ends: %s", error)
        finally:
            if self._adaptation is not None:
                self._adaptation.close()
            self._endpoint.close()

    def _swap(self, architecture: EagleArchitecture | None) -> None:
        """Draft with other weights from the next request on."""
        if architecture is not None:
            self._proposer.replace_architecture(architecture)

    def _propose(self, request: DraftRequest) -> tuple[DraftResponseRow, ...]:
        endpoint, views = self._endpoint, self._endpoint.views
        on_device = None
        if endpoint.on_device:
            on_device = OnDevice(views.token_ids, views.confidences, views.new_tokens, endpoint.read)
        return self._proposer.propose(request.rows, request.released, views.probs, views.features, on_device)

    def stop(self) -> None:
        """Make `run` return. Idempotent. Thread-safe."""
        self._stop.set()

    def metrics(self) -> MetricSnapshot:
        """KV blocks, and the memory of the draft against its cap. After `load`. Thread-safe."""
        counters = MetricCounters()
        counters.set("paceline_draft_memory_bytes", self._memory_bytes)
        counters.set("paceline_draft_memory_cap_bytes", self._cap_bytes)
        if self._adaptation is not None:
            self._adaptation.count(counters)
        if not self._has_cache:
            return counters.read()
        blocks = self._pool.usage()
        counters.set("paceline_kv_free_blocks", blocks.num_free, "draft")
        counters.set("paceline_kv_used_blocks", blocks.num_used, "draft")
        counters.add("paceline_kv_evictions_total", blocks.num_evicted, "draft")
        return counters.read()

    def _num_blocks(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Blocks of the draft's pool, the scratch block included: as many as the cap leaves after the weights."""
        longest = (config.max_model_len if self._config.max_model_len is None else self._config.max_model_len) + 1
        sequence_len = min(longest, _SEQUENCE_LEN)
        weights = self._weight_bytes(config, dtype)
        cap = self._check_memory(weights, kv_bytes_per_token(config, dtype=dtype) * sequence_len)
        most_tokens = 2 * self._config.max_num_requests * sequence_len  # a larger pool would stay empty
        blocks = num_kv_blocks(
            config,
            block_size=self._config.kv_block_size,
            dtype=dtype,
            device=self._device,
            memory_bytes=min(cap - weights, most_tokens * kv_bytes_per_token(config, dtype=dtype)),
        )
        return blocks + 1

    def _check_memory(self, weights: int, needed: int) -> int:
        """Note the bytes of the weights, and return the cap.

        Raises:
            ConfigError: the weights and the `needed` bytes of KV do not fit under the cap.
        """
        fraction = self._config.speculative.memory_fraction
        total = self._total_memory()
        cap = int(total * fraction)
        self._memory_bytes, self._cap_bytes = weights, cap
        if weights + needed > cap:
            raise ConfigError(
                f"speculative.memory_fraction: draft weights {weights >> 20} MiB + KV of one sequence "
                f"{needed >> 20} MiB exceed {fraction:.0%} of the device's {total >> 20} MiB = {cap >> 20} MiB; "
                "raise the fraction or take a smaller draft"
            )
        return cap

    def _weight_bytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of the draft's own weights, and of the embedding tables that it makes from the target's."""
        files = WeightFiles(self._folder, config.quantization)
        if files.packing is None:
            in_files = files.num_elements() * dtype.itemsize
        else:  # A quantised draft is a whole model.
            in_files = weight_bytes(config, WHOLE, dtype)
        embedding = config.vocab_size * config.hidden_size * dtype.itemsize
        has_table = config.architecture == "eagle" and not config.is_published and self._device.type == "cpu"
        has_own_head = config.dflash is None or config.draft_vocab_size is not None
        return in_files + embedding * (int(config.shares_embedding) + int(has_table) + int(not has_own_head))

    def _total_memory(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        return int(psutil.virtual_memory().total)


def warm_up(
    proposer: Proposer, width: int, feature_width: int, dtype: torch.dtype, device: torch.device, *, k: int = 2
) -> None:
    """Draft for two made-up requests, greedy and sampled, so that no request pays for what is loaded at first use.

    On a GPU the first forward loads kernels and makes library handles, which can take longer than a draft's deadline.

    Args:
        proposer: the draft.
        width: columns of its probabilities.
        feature_width: numbers per row that it reads of the target; 0 for none.
        dtype: of those.
        device: where it computes.
        k: tokens to draft.
    """
    probs = torch.empty(2, k, width, device=device)
    features = torch.zeros(1, feature_width, dtype=dtype, device=device) if feature_width > 0 else None
    on_device = None
    if device.type == "cuda":
        ids = torch.ones(8, dtype=torch.int32, device=device)
        on_device = OnDevice(ids[:4].view(2, k), torch.empty(2, k, device=device), ids, to_host)
    places = (0,) * 3 if feature_width > 0 else ()
    rows = [
        DraftRequestRow(key, 0, (1,) * 3, k, RowSampling(temperature, 0.9, 0, 1, False), feature_rows=places)
        for key, temperature in enumerate((0.0, 1.0), start=1)
    ]
    proposer.propose(rows, [], probs, features, on_device)
    proposer.propose([], [row.key for row in rows], probs, features, on_device)
