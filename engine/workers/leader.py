"""The leader: rank 0 of the target with the step loop, the replica's socket and the connection of the draft.

Owns the engine, its KV block pool, the socket and the draft connection; all of them exist from the constructor to the
end of `run`. Does not know how the pacer chooses K, and knows no Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from engine.adaptation.consent import consents
from engine.config import DRAFT_METHODS
from engine.core.block_pool import BlockPool
from engine.core.committer import Committer
from engine.core.engine import Engine
from engine.core.pacing import Pacer, Prediction, SpeculationPlan
from engine.core.scheduler import Scheduler
from engine.core.stats import StepStats
from engine.core.verifier import Verifier
from engine.draft.messages import DraftInfo
from engine.draft.methods import make_drafter
from engine.draft.remote import DraftLink, RemoteDrafter
from engine.draft_buffer.target_endpoint import BufferHandle
from engine.errors import ConfigError
from engine.ipc.replica_socket import ShardSocket
from engine.ipc.wire import DraftStatus, EngineFailed, Event, StepDeltas
from engine.messages import AdapterRef
from engine.model.device import set_threads
from engine.sampling.grammar import Grammars
from engine.sampling.vocabulary import load_tokenizer_info
from engine.workers.draft_connection import MAX_RELEASED, MAX_REQUEST_TOKENS, DraftConnection, FeatureShape
from engine.workers.target_shard import TargetShard

_log = logging.getLogger(__name__)


class Leader:
    """Drives an allocated shard of rank 0.

    Args:
        shard: rank 0, after `bring_up`.
        pacer: chooses K.
        plan: returns the plan in force.
        observers: called with each step's statistics and the prediction for it, in the loop's thread.
    """

    def __init__(
        self,
        shard: TargetShard,
        *,
        pacer: Pacer,
        plan: Callable[[], SpeculationPlan],
        observers: Sequence[Callable[[StepStats, Prediction], None]] = (),
    ) -> None:
        self._shard = shard
        config = shard.config
        self.pool = BlockPool(shard.runner.num_blocks, config.kv_block_size, prefix_cache=config.prefix_cache)
        scheduler = Scheduler(
            self.pool,
            pacer=pacer,
            plan=plan,
            max_num_requests=config.max_num_requests,
            max_step_tokens=config.max_step_tokens,
            max_model_len=shard.max_model_len,
        )
        model_config = shard.runner.model.config
        vocab_size = model_config.vocab_size
        remote = self._remote_drafter() if config.speculative.method in DRAFT_METHODS else None
        self.engine = Engine(
            scheduler=scheduler,
            drafter=make_drafter(config.speculative, remote, vocab_size=vocab_size, branches=config.tree_width > 1),
            verifier=Verifier(shard.forward, block_size=config.kv_block_size, clock=shard.step_clock()),
            committer=Committer(self.pool, scheduler, max_model_len=shard.max_model_len),
            publish=lambda deltas: self._send(StepDeltas(deltas)),
            pacer=pacer,
            observers=observers,
            grammars=Grammars(lambda: load_tokenizer_info(shard.folder, vocab_size, model_config.eos_token_ids)),
            meanwhile=shard.meanwhile,
        )
        self._unused: set[int] = set()  # numbers of retired adapters that no request uses
        self._draft_connection = self._connection(remote) if remote is not None else None
        # Last, because its threads may call the engine.
        self._socket = ShardSocket(submit=self.engine.submit, abort=self.engine.abort, abandon=self.engine.abort_all)

    @property
    def path(self) -> str:
        """Path of the unix socket that the replica connects to."""
        return self._socket.path

    @property
    def positions_per_pass(self) -> int:
        """`DraftInfo.positions_per_pass` of the draft whose buffer was made last."""
        return self._draft().positions_per_pass

    def open_draft_buffer(self, info: DraftInfo, epoch: int) -> BufferHandle:
        """Make the buffer for a new draft, as `DraftConnection.open`."""
        return self._draft().open(info, epoch)

    def attach_draft(self, timeout_s: float, first: Callable[[DraftLink], None] | None = None) -> None:
        """Draft through the buffer made last, as `DraftConnection.attach`."""
        self._draft().attach(timeout_s, first)

    def serve_adapter(self, adapter: AdapterRef) -> None:
        """Accept requests for an adapter. Every shard has loaded it."""
        self.engine.serve_adapter(adapter)

    def retire_adapter(self, number: int) -> None:
        """Accept no more requests for an adapter. Those that use it go on; `is_unused` tells when they have ended."""
        self.engine.retire_adapter(number, lambda: self._unused.add(number))

    def is_unused(self, number: int) -> bool:
        """Whether an adapter is retired and no request uses it any more. Thread-safe."""
        return number in self._unused

    def run(self) -> None:
        """Run the step loop until the shard is stopped, then close everything that was opened.

        Raises:
            ShardDown: another shard is gone; nothing can be computed any more.
        """
        set_threads(self._shard.config, own_threads=self._shard.runner.model.own_threads)
        try:
            self.engine.run(self._shard.stopping)
            self._send(EngineFailed("the engine was stopped"))
        except BaseException as error:
            _log.exception("the step loop ends")
            self._send(EngineFailed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._close()

    def _remote_drafter(self) -> RemoteDrafter:
        return RemoteDrafter(
            max_request_tokens=MAX_REQUEST_TOKENS,
            max_released=MAX_RELEASED,
            deadline_s=self._shard.config.speculative.deadline_s,
            on_down=lambda reason: self._send(DraftStatus(up=False, reason=reason)),
            width=self._shard.config.tree_width,
            learns=lambda submit: consents(self._shard.config.speculative.adaptation, submit),
        )

    def _connection(self, remote: RemoteDrafter) -> DraftConnection:
        shard, model = self._shard, self._shard.runner.model
        width = len(shard.feature_layers) * model.config.hidden_size
        return DraftConnection(
            remote,
            max_rows=shard.config.max_num_requests,
            max_k=max(1, shard.config.speculative.k),
            target_vocab=model.config.vocab_size,
            features=FeatureShape(width, model.dtype.itemsize, shard.config.max_step_tokens),
            device=shard.device,
            node_id=shard.node_id,
            in_loop=self.engine.call,
            report=self._send,
            meanwhile=None if shard.meanwhile is None else shard.meanwhile.run,
        )

    def _draft(self) -> DraftConnection:
        if self._draft_connection is None:
            method = self._shard.config.speculative.method
            raise ConfigError(
                f"speculative.method: {method!r} has no draft process; allowed: {', '.join(DRAFT_METHODS)}"
            )
        return self._draft_connection

    def _send(self, event: Event) -> None:
        self._socket.send(event)

    def _close(self) -> None:
        if self._draft_connection is not None:
            self._draft_connection.close()
        self._socket.close()
        self._shard.close()
