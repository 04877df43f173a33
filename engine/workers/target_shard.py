"""One shard of the target: it loads its part, then either leads the step loop (rank 0) or follows it.

Owns the order in which a shard comes up and everything that lives as long as its process: model, cache, sockets, loop.
A plain class; `deployments` makes it an actor. Bring-up is a few calls from outside, in this order:

    rank 0                      ranks 1..                   why
    open_rendezvous() -> port                               the shards find each other
    load(port)                  load(port)                  weights; says how many KV blocks fit
    allocate(n)                 allocate(n)                 the smallest n of all
    plan_handle(rank)           follow(handle)              step plans travel by shared memory
    listen(...) -> path                                     the replica connects
    run()                       run()                       until stop(); returning or raising is the sign of its end
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from engine.config import DRAFT_METHODS, EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.committer import Committer
from engine.core.engine import Engine, Streams
from engine.core.pacing import Pacer, SpeculationPlan
from engine.core.scheduler import Scheduler
from engine.core.stats import StepStats
from engine.core.step import ForwardInput
from engine.core.verifier import Verifier
from engine.draft.messages import DraftInfo
from engine.draft.methods import make_drafter
from engine.draft.remote import DraftLink, RemoteDrafter
from engine.draft_buffer.target_endpoint import BufferHandle
from engine.errors import EngineError, ShardDown
from engine.ipc.forward_broadcast import ForwardHandle, ForwardReceiver, ForwardRingSpec, ForwardSender
from engine.ipc.replica_socket import ShardSocket
from engine.ipc.wire import DraftStatus, EngineFailed, StepDeltas
from engine.model.collectives import Collectives, Group, Solo, open_store
from engine.model.device import pick_device, pick_dtype, set_threads, with_device
from engine.model.load import Model, load_model
from engine.model.runner import ModelRunner, num_kv_blocks
from engine.sampling.grammar import Grammars
from engine.sampling.vocabulary import load_tokenizer_info
from engine.workers.draft_connection import MAX_RELEASED, MAX_REQUEST_TOKENS, DraftConnection, FeatureShape
from engine.workers.memory_plan import gpu_kv_bytes

PEER_TIMEOUT_S = 30.0
"""Deadline for anything another shard has to do in a step."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardReady:
    """What a shard knows once its weights are loaded."""

    num_blocks: int
    vocab_size: int
    max_model_len: int
    """The model's own limit, or the configured one if that is smaller."""
    device: str


class TargetShard:
    """Shard `rank` of `config.tensor_parallel_size`.

    Args:
        config: of the engine.
        folder: the target's model folder.
        rank: of this shard.
        node_id: of the machine; buffers are only shared within it.
        feature_layers: layers, ascending, whose outputs the draft reads; tapped by rank 0.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, *, rank: int, node_id: str, feature_layers: tuple[int, ...] = ()
    ) -> None:
        self.config = config = with_device(config)
        self.rank = rank
        self.folder = folder
        self._node_id = node_id
        self._feature_layers = feature_layers if rank == 0 else ()
        self._features_to: RemoteDrafter | None = None
        self._device = pick_device(config.device)
        self._stop = threading.Event()
        self._store: TCPStore | None = None
        self._collectives: Collectives = Solo()
        self._model: Model | None = None
        self._runner: ModelRunner | None = None
        self._receiver: ForwardReceiver | None = None
        self._sender: ForwardSender | None = None
        self._socket: ShardSocket | None = None
        self.engine: Engine | None = None
        self.pool: BlockPool | None = None
        self._draft_connection: DraftConnection | None = None
        self._max_model_len = 0
        self._num_forwards = 0

    @property
    def num_blocks(self) -> int:
        """Of the KV cache, scratch included; 0 before `allocate`."""
        return self._runner.num_blocks if self._runner is not None else 0

    def open_rendezvous(self) -> int:
        """Port of the store in which the shards meet. Rank 0 only."""
        self._store = store = open_store(size=self.config.tensor_parallel_size, master=True)
        return int(store.port)

    def load(self, rendezvous_port: int | None) -> ShardReady:
        """Meet the other shards, if any, and load this one's weights.

        Raises:
            ConfigError: the model or the cut is not possible.
            ShardDown: a peer did not come.
        """
        config = self.config
        set_threads(config)
        if rendezvous_port is not None:
            size = config.tensor_parallel_size
            store = self._store
            if store is None:
                store = open_store(port=rendezvous_port, size=size, master=False)
            self._collectives = Group.connect(
                rank=self.rank, size=size, store=store, device=self._device, timeout_s=PEER_TIMEOUT_S
            )
        dtype = pick_dtype(config.dtype)
        self._model = model = load_model(
            self.folder,
            dtype=dtype,
            device=self._device,
            collectives=self._collectives,
            feature_layers=self._feature_layers,
            kernel=config.forward_kernel,
        )
        num_blocks = num_kv_blocks(
            model.config,
            block_size=config.kv_block_size,
            dtype=dtype,
            device=self._device,
            shard=model.shard,
            kv_cache_tokens=config.kv_cache_tokens,
            memory_bytes=gpu_kv_bytes(config, model, self._device),
        )
        max_model_len = min(config.max_model_len or model.config.max_model_len, model.config.max_model_len)
        return ShardReady(num_blocks + 1, model.config.vocab_size, max_model_len, str(self._device))

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Make the KV cache: `num_blocks` blocks, scratch included, on every shard."""
        if self._model is None:
            raise EngineError("allocate before load")
        self._runner = ModelRunner(self._model, num_blocks=num_blocks, block_size=self.config.kv_block_size)
        self._max_model_len = max_model_len

    def plan_handle(self, rank: int) -> ForwardHandle:
        """Where shard `rank` reads the step plans. Rank 0 only."""
        if self._sender is None:
            spec = ForwardRingSpec(
                max_rows=self.config.max_step_tokens,
                max_spans=self.config.max_num_requests,
                max_blocks_per_span=-(-self._max_model_len // self.config.kv_block_size) + 1,
            )
            receivers = self.config.tensor_parallel_size - 1
            self._sender = ForwardSender(spec, num_receivers=receivers, node_id=self._node_id)
        return self._sender.handle(rank)

    def follow(self, handle: ForwardHandle) -> None:
        """Read step plans from here. Ranks 1.. only."""
        self._receiver = ForwardReceiver.open(handle, node_id=self._node_id)

    def listen(self, pacer: Pacer, plan: Callable[[], SpeculationPlan], observe: Callable[[StepStats], None]) -> str:
        """Build the loop and its socket. Rank 0 only.

        Args:
            pacer: chooses K.
            plan: the plan in force.
            observe: called with each step's stats, in the loop's thread.

        Returns:
            Path of the unix socket the replica connects to.
        """
        config, runner = self.config, self._allocated()
        self.pool = pool = BlockPool(runner.num_blocks, config.kv_block_size, prefix_cache=config.prefix_cache)
        scheduler = Scheduler(
            pool,
            pacer=pacer,
            plan=plan,
            max_num_requests=config.max_num_requests,
            max_step_tokens=config.max_step_tokens,
            max_model_len=self._max_model_len,
        )
        vocab_size = runner.model.config.vocab_size
        remote = self._make_remote()
        grammars = Grammars(lambda: load_tokenizer_info(self.folder, vocab_size))
        self.engine = engine = Engine(
            scheduler=scheduler,
            drafter=make_drafter(config.speculative, remote, vocab_size=vocab_size),
            verifier=Verifier(self.forward, block_size=config.kv_block_size),
            committer=Committer(pool, scheduler, max_model_len=self._max_model_len),
            streams=Streams(lambda deltas: self._send(StepDeltas(deltas))),
            pacer=pacer,
            observers=[observe],
            grammars=grammars,
        )
        if remote is not None:
            self._features_to = remote if self._feature_layers else None
            self._draft_connection = DraftConnection(
                remote,
                max_rows=config.max_num_requests,
                max_k=max(1, config.speculative.k),
                target_vocab=vocab_size,
                features=self._feature_shape(runner.model),
                device=self._device,
                node_id=self._node_id,
                in_loop=engine.call,
                report=self._send,
            )
        self._socket = ShardSocket(submit=engine.submit, abort=engine.abort, abandon=engine.abort_all)
        return self._socket.path

    def open_draft_buffer(self, info: DraftInfo, epoch: int) -> BufferHandle:
        """Make a buffer for a new draft; hand the handle to it, then call `attach_draft`. Rank 0 only."""
        return self._draft_dock().open(info, epoch)

    def attach_draft(self, timeout_s: float, first: Callable[[DraftLink], None] | None = None) -> None:
        """See `DraftConnection.attach`. Rank 0 only."""
        self._draft_dock().attach(timeout_s, first)

    def run(self) -> None:
        """Lead or follow until `stop`.

        Raises:
            ShardDown: a peer is gone; nothing can be computed any more.
        """
        set_threads(self.config, own_threads=self._allocated().model.own_threads)
        if self.rank > 0:
            self._follow()
            return
        if self.engine is None:
            raise EngineError("run before listen")
        try:
            self.engine.run(self._stop)
            self._send(EngineFailed("the engine was stopped"))
        except BaseException as error:
            _log.exception("the step loop ends")
            self._send(EngineFailed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._close()

    def stop(self) -> None:
        """Make `run` return. Idempotent, any thread."""
        self._stop.set()

    def _follow(self) -> None:
        runner = self._allocated()
        if self._receiver is None:
            raise EngineError("run before follow")
        try:
            while not self._stop.is_set() and not self._receiver.closed:
                received = self._receiver.receive(0.5)
                if received is not None:
                    runner.forward(received[1])
        except ShardDown:
            if not self._stop.is_set():  # told to stop, it may find that the others were faster
                raise
        finally:
            self._receiver.close()

    def forward(self, plan: ForwardInput) -> torch.Tensor:
        """Run a plan on all shards; logits [R, vocab] float32. Rank 0 only, one thread at a time.

        Raises:
            ShardDown: a shard does not answer.
        """
        runner = self._allocated()
        if self._sender is not None:
            if self._num_forwards == 0:
                self._sender.wait_open(PEER_TIMEOUT_S)
            self._num_forwards += 1
            self._sender.send(self._num_forwards, plan, deadline_s=PEER_TIMEOUT_S)
        logits = runner.forward(plan)
        if self._device.type == "cuda":  # the host needs them next anyway, and the time of a forward is its own
            torch.cuda.current_stream().synchronize()
        if logits is None:
            raise ShardDown("rank 0 got no logits")
        if self._features_to is not None and runner.features is not None:
            self._features_to.write_features(runner.features, plan.q_lens)
        return logits

    def _allocated(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("this shard has no KV cache yet; allocate comes first")
        return self._runner

    def _feature_shape(self, model: Model) -> FeatureShape:
        width = len(self._feature_layers) * model.config.hidden_size
        return FeatureShape(width, model.dtype.itemsize, self.config.max_step_tokens)

    def _make_remote(self) -> RemoteDrafter | None:
        """The way to the model of another process, where the method has one."""
        speculative = self.config.speculative
        if speculative.method not in DRAFT_METHODS:
            return None
        return RemoteDrafter(
            max_request_tokens=MAX_REQUEST_TOKENS,
            max_released=MAX_RELEASED,
            deadline_s=speculative.deadline_s,
            on_down=lambda reason: self._send(DraftStatus(up=False, reason=reason)),
        )

    def _draft_dock(self) -> DraftConnection:
        if self._draft_connection is None:
            raise EngineError("no draft docks here: another drafting method, another rank, or before listen")
        return self._draft_connection

    def _send(self, event: StepDeltas | DraftStatus | EngineFailed) -> None:
        if self._socket is not None:
            self._socket.send(event)

    def _close(self) -> None:
        for part in (self._draft_connection, self._sender, self._socket):
            if part is not None:
                part.close()
        self._collectives.close()
