"""A draft in a process of its own, without Ray: it loads, opens the buffer of a target and serves until that is closed.

Owns the process. Knows nothing of the requests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from engine.config import MAX_K, EngineConfig
from engine.draft.messages import DraftInfo
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import BufferHandle, TargetEndpoint, create_draft_buffer
from engine.workers.draft_connection import MAX_RELEASED, MAX_REQUEST_TOKENS, FeatureShape
from engine.workers.draft_worker import DraftWorker
from engine.workers.target_shard import TargetShard

START_S = 120.0
"""Seconds for the draft to open the buffer."""


@contextlib.contextmanager
def draft_process(
    shard: TargetShard, draft_folder: Path, *, node_id: str
) -> Iterator[tuple[TargetEndpoint, DraftInfo]]:
    """Start a draft, and connect it to a buffer with room for every K.

    Args:
        shard: the target; taps what the draft reads.
        draft_folder: of the draft.
        node_id: name of this machine.

    Yields:
        The target's endpoint of the buffer, and what the draft said about itself.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=_serve, args=(there, shard.config, draft_folder, shard.folder, node_id), daemon=True
    )
    process.start()
    there.close()
    try:
        info: DraftInfo = here.recv()
        model = shard.runner.model
        width = len(shard.feature_layers) * model.config.hidden_size
        spec = BufferSpec(
            max_rows=shard.config.max_num_requests,
            max_k=MAX_K,
            max_request_tokens=MAX_REQUEST_TOKENS,
            max_released=MAX_RELEASED,
            draft_vocab=info.draft_vocab,
            target_vocab=model.config.vocab_size,
            feature_rows=FeatureShape(width, model.dtype.itemsize, shard.config.max_step_tokens).num_rows,
            feature_width=width,
            feature_itemsize=model.dtype.itemsize,
        )
        endpoint = create_draft_buffer(spec, device="cpu", node_id=node_id, epoch=1)
        try:
            here.send(endpoint.handle())
            endpoint.wait_open(START_S)
            yield endpoint, info
        finally:
            endpoint.close()
    finally:
        here.close()
        process.join(5.0)
        process.kill()


def _serve(pipe: Connection, config: EngineConfig, folder: Path, target_folder: Path, node_id: str) -> None:
    """A draft's process."""
    worker = DraftWorker(config, folder, target_folder, node_id=node_id)
    pipe.send(worker.load())
    handle: BufferHandle = pipe.recv()
    worker.connect(handle)
    worker.run()
