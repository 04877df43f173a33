"""One shard of the target: its part of the weights, its KV cache, and its share of every forward.

Owns the model, the cache and the channels to the other shards. All ranks run the same class: a `Leader` drives rank 0,
the other ranks follow it. Knows no request. A plain class; `deployments` makes it an actor. `bring_up` makes the calls
in their order:

    rank 0                      ranks 1..                   purpose
    open_rendezvous() -> port                               the shards find each other
    load(port)                  load(port)                  weights
    measure() -> n              measure() -> n              how many KV blocks fit
    allocate(n)                 allocate(n)                 KV cache of the smallest n of all ranks
    forward_handle(rank)        follow(handle)              forward inputs travel through shared memory
    load_adapter(n, folder)     load_adapter(n, folder)     adapters, at the start and later
    Leader(shard).run()         run()                       until stop()
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from engine.config import EngineConfig
from engine.core.step import ForwardInput, ForwardResult
from engine.errors import ConfigError, ShardDown
from engine.graphs.buckets import make_buckets, row_sizes
from engine.graphs.forward import Capture, CudaCapture, GraphedForward
from engine.ipc.forward_broadcast import ForwardHandle, ForwardReceiver, ForwardRingSpec, ForwardSender
from engine.lora.adapter_files import read_adapter
from engine.lora.adapter_set import AdapterSet
from engine.model.collectives import Collectives, Group, Solo, open_store
from engine.model.device import pick_device, pick_dtype, pick_kv_dtype, set_threads, with_device
from engine.model.load import Model, load_model
from engine.model.runner import ModelRunner
from engine.sampling.readback import DeviceClock, Event, HostClock, Meanwhile, StepClock, timed_event
from engine.workers.device_memory import CudaMemory, DeviceMemory, estimated_plan, fitting_blocks, measured_blocks
from engine.workers.shard_ready import ShardReady

PEER_TIMEOUT_S = 30.0
"""Deadline for everything that another shard has to do in a step."""
MEASURE_TIMEOUT_S = 300.0
"""Deadline of the largest step, which may be longer than any step that is served."""
_RECEIVE_PERIOD_S = 0.5
_log = logging.getLogger(__name__)


class TargetShard:
    """Shard `rank` of `config.tensor_parallel_size`.

    Args:
        config: settings of the engine.
        folder: the target's model folder.
        rank: number of this shard.
        node_id: node that this process runs on; shared memory never crosses nodes.
        feature_layers: layers, ascending, whose outputs the draft reads. Rank 0 taps them, other ranks ignore them.
        device: device that computes; None takes the one of the settings.
    """

    runner: ModelRunner
    """The model and its KV cache. Set by `allocate`."""
    max_model_len: int
    """Longest prompt + output in tokens. Set by `allocate`."""
    _model: Model
    _receiver: ForwardReceiver

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        *,
        rank: int,
        node_id: str,
        feature_layers: tuple[int, ...] = (),
        device: torch.device | None = None,
    ) -> None:
        self.config = config = with_device(config)
        self.rank = rank
        self.folder = folder
        self.node_id = node_id
        self.feature_layers = feature_layers if rank == 0 else ()
        self.device = pick_device(config.device) if device is None else device
        self.stopping = threading.Event()
        """Set by `stop`; whatever runs this shard ends then."""
        self._store: TCPStore | None = None  # rank 0 of several
        self._sender: ForwardSender | None = None  # rank 0 of several
        self._collectives: Collectives = Solo()
        self._graphs: GraphedForward | None = None
        self._adapters: AdapterSet | None = None
        self._num_forwards = 0
        self._meanwhile = Meanwhile()

    def open_rendezvous(self) -> int:
        """Open the store in which the shards meet, on rank 0.

        Returns:
            Its TCP port.
        """
        self._store = store = open_store(size=self.config.tensor_parallel_size, master=True)
        return int(store.port)

    def load(self, rendezvous_port: int | None) -> ShardReady:
        """Meet the other shards and load this shard's weights.

        Args:
            rendezvous_port: port of rank 0's store; None for a target of one shard.

        Raises:
            ConfigError: the model cannot be loaded or cannot be cut into so many shards.
            ShardDown: another shard did not come.
        """
        config = self.config
        set_threads(config)
        if rendezvous_port is not None:
            self._collectives = self._meet(rendezvous_port)
        dtype = pick_dtype(config.dtype)
        if config.lora is not None:
            self._adapters = AdapterSet(dtype=dtype, device=self.device)
        self._model = model = load_model(
            self.folder,
            dtype=dtype,
            device=self.device,
            collectives=self._collectives,
            feature_layers=self.feature_layers,
            kernel=config.forward_kernel,
            max_model_len=config.max_model_len,
            packed=config.packed == "auto",
            adapt=None if self._adapters is None else self._adapters.wrap,
            fp8_cache=config.kv_cache_dtype == "fp8",
        )
        if self._adapters is not None:
            self._adapters.bind(model)
        plan = estimated_plan(config, model, CudaMemory(self.device)) if self.device.type == "cuda" else None
        num_blocks = fitting_blocks(config, model, plan)
        return ShardReady(num_blocks, model.config.vocab_size, model.config.max_model_len, str(self.device))

    def measure(self, memory: DeviceMemory | None = None, new_event: Callable[[], Event] = timed_event) -> int:
        """KV blocks that fit, the scratch block included. On all shards at once, after `load` of all of them. On a GPU
        they run the largest step that may be scheduled, and see what memory it takes.

        Args:
            memory: of the device; None asks CUDA.
            new_event: makes the events of a GPU's clock.

        Raises:
            ConfigError: there is no room for the cache, with the plan.
            ShardDown: another shard does not take part.
        """
        if self.device.type != "cuda":
            return fitting_blocks(self.config, self._model, None)
        memory = memory or CudaMemory(self.device)
        return measured_blocks(
            self.config, self._model, memory, self.step_clock(new_event, timeout_s=MEASURE_TIMEOUT_S)
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Make the KV cache. All shards take the same size.

        Args:
            num_blocks: blocks, the scratch block included.
            max_model_len: longest prompt + output in tokens.
        """
        self.runner = ModelRunner(
            self._model,
            num_blocks=num_blocks,
            block_size=self.config.kv_block_size,
            kv_dtype=pick_kv_dtype(self.config, self._model.dtype),
        )
        self.max_model_len = max_model_len
        if self.config.cuda_graphs == "on" and self.device.type == "cuda":
            self.record(CudaCapture(self.device))

    def load_adapter(self, number: int, folder: Path) -> None:
        """Read this shard's part of an adapter, on all shards before the leader serves it. In any thread.

        Args:
            number: of the adapter, at least 1; was never used before.
            folder: in the layout of `peft`.

        Raises:
            ConfigError: it cannot be read or does not fit the target, or the settings allow no adapters.
        """
        if self._adapters is None or self.config.lora is None:
            raise ConfigError("lora: this engine was started without engine.lora")
        spec = read_adapter(folder, self._model.config, max_rank=self.config.lora.max_lora_rank)
        self._adapters.load(number, spec)

    def drop_adapter(self, number: int) -> None:
        """Free an adapter that no request uses any more. Unknown numbers are ignored. In any thread."""
        if self._adapters is not None:
            self._adapters.drop(number)

    def record(self, capture: Capture) -> None:
        """Record forwards of decoding and verification, on all shards at once. After the KV cache is made.

        Args:
            capture: records them.
        """
        config = self.config
        requests, k = config.max_num_requests, config.speculative.k
        buckets = make_buckets(max_requests=requests, max_k=k, trees=config.tree_width > 1)
        max_ids = requests * max(1, k)
        self._graphs = GraphedForward(self.runner, buckets, capture, max_kv=self.max_model_len, max_ids=max_ids)

    @property
    def padded_rows(self) -> tuple[int, ...]:
        """Rows that forwards are padded to, ascending; empty where none is. After `allocate`."""
        return () if self._graphs is None else row_sizes(self._graphs.buckets)

    def forward_handle(self, rank: int) -> ForwardHandle:
        """Where shard `rank`, 1 or higher, receives forward inputs. On rank 0."""
        if self._sender is None:
            spec = ForwardRingSpec(
                max_rows=self.config.max_step_tokens,
                max_spans=self.config.max_num_requests,
                max_blocks_per_span=-(-self.max_model_len // self.config.kv_block_size) + 1,
            )
            self._sender = ForwardSender(spec, num_receivers=self.config.tensor_parallel_size - 1, node_id=self.node_id)
        return self._sender.handle(rank)

    def follow(self, handle: ForwardHandle) -> None:
        """Open the channel from rank 0. On ranks 1 and higher.

        Raises:
            ConfigError: rank 0 is on another node.
            ShardDown: rank 0 is gone.
        """
        self._receiver = ForwardReceiver.open(handle, node_id=self.node_id)

    def forward(self, forward_input: ForwardInput) -> ForwardResult:
        """Queue one forward on all shards. On rank 0, one thread at a time. On a GPU nothing waits for the result here:
        the clock of the step does.

        Raises:
            ShardDown: another shard does not answer.
        """
        if self._sender is not None:
            if self._num_forwards == 0:
                self._sender.wait_open(PEER_TIMEOUT_S)
            self._num_forwards += 1
            self._sender.send(self._num_forwards, forward_input, deadline_s=PEER_TIMEOUT_S)
        return self._compute(forward_input)

    @property
    def meanwhile(self) -> Meanwhile | None:
        """What the leader does while the device computes; None on a CPU, which computes in the same thread."""
        return self._meanwhile if self.device.type == "cuda" else None

    def step_clock(
        self, new_event: Callable[[], Event] = timed_event, *, timeout_s: float = PEER_TIMEOUT_S
    ) -> StepClock:
        """The clock of the forwards of this shard. After `load`.

        Args:
            new_event: makes the events of a GPU's clock.
            timeout_s: seconds until a step counts as hung.
        """
        if self.device.type != "cuda":
            return HostClock()
        abort, meanwhile = self._collectives.abort, self._meanwhile.run
        return DeviceClock(timeout_s=timeout_s, abort=abort, new_event=new_event, meanwhile=meanwhile)

    def timed_forward(self, forward_input: ForwardInput) -> float:
        """Seconds of one forward whose result is not used. On rank 0, between two steps.

        Raises:
            ShardDown: another shard does not answer.
        """
        clock = self.step_clock()
        clock.begin()
        self.forward(forward_input)
        clock.forwarded()
        clock.read([])
        return clock.times().forward_s

    def run(self) -> None:
        """Take part in every forward of rank 0 until `stop`, or until rank 0 ends. On ranks 1 and higher.

        Raises:
            ShardDown: rank 0 died.
        """
        set_threads(self.config, own_threads=self.runner.model.own_threads)
        clock = self.step_clock()
        try:
            while not self.stopping.is_set() and not self._receiver.closed:
                received = self._receiver.receive(_RECEIVE_PERIOD_S)
                if received is not None:
                    clock.begin()
                    self._compute(received[1])
                    clock.forwarded()
                    clock.read([])  # The next input comes after this forward anyway. A hung peer is noticed here.
        except ShardDown:
            if not self.stopping.is_set():  # while all shards stop, another one may be gone first
                raise
        finally:
            self._receiver.close()

    def stop(self) -> None:
        """End what runs this shard. Idempotent. Thread-safe."""
        self.stopping.set()

    def close(self) -> None:
        """Tell the followers that no forward comes any more, and leave the group. On rank 0."""
        if self._sender is not None:
            self._sender.close()
        self._collectives.close()

    def _compute(self, forward_input: ForwardInput) -> ForwardResult:
        if self._adapters is not None:
            self._adapters.choose(forward_input)
        return (self.runner if self._graphs is None else self._graphs).forward(forward_input)

    def _meet(self, port: int) -> Collectives:
        size = self.config.tensor_parallel_size
        store = self._store if self._store is not None else open_store(port=port, size=size, master=False)
        return Group.connect(rank=self.rank, size=size, store=store, device=self.device, timeout_s=PEER_TIMEOUT_S)
