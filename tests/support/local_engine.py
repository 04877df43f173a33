"""An engine without Ray: shards, draft and socket of the real classes, each shard in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from autoscale.control.controller import initial_plan
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from engine.checkpoint.draft_check import check_draft
from engine.config import EngineConfig
from engine.core.pacing import Pacer
from engine.core.stats import StepStats
from engine.ipc.wire import (
    HEADER,
    AbortCommand,
    DraftStatus,
    StepDeltas,
    SubmitCommand,
    decode_event,
    encode_frame,
    frame_len,
)
from engine.messages import AdapterRef, Delta, Submit
from engine.workers.bring_up import bring_up_locally
from engine.workers.draft_worker import DraftWorker
from engine.workers.leader import Leader
from engine.workers.target_shard import TargetShard

NODE = "this-node"


class LocalEngine:
    """A context manager around one engine.

    Args:
        folder, draft_folder: model folders.
        pacer: chooses K; the default follows `speculative.policy`.
        trainer: command of the trainer of an adapted draft.
        settings: fields of `EngineConfig`; small defaults are filled in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        draft_folder: Path | None = None,
        pacer: Pacer | None = None,
        trainer: Sequence[str] = ("no trainer",),
        **settings: Any,
    ) -> None:
        speculative = settings.pop("speculative", {"method": "none"})
        draft = check_draft(draft_folder, folder) if draft_folder is not None else None
        if draft is not None:
            # All parts share this process: a busy machine must not look like a hung draft.
            method = draft.architecture
            speculative = {
                "method": method,
                "draft": str(draft_folder),
                "deadline_s": 60,
                "lookup": False,
            } | speculative
        speculative = {"policy": "fixed"} | speculative
        defaults = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_tokens": 16384}
        self.config = EngineConfig.parse(defaults | settings | {"speculative": speculative})
        size = self.config.tensor_parallel_size
        tapped = draft.feature_layers if draft is not None else ()
        self.shards = [
            TargetShard(self.config, folder, rank=rank, node_id=NODE, feature_layers=tapped) for rank in range(size)
        ]
        self.draft = (
            DraftWorker(self.config, draft_folder, folder, node_id=NODE, trainer=trainer) if draft_folder else None
        )
        self.stats: list[StepStats] = []
        self.last: dict[str, Delta] = {}
        self.joined: dict[str, Delta] = {}
        """All deltas of each request, joined into one."""
        chosen = self.config.speculative
        self._pacer = pacer or PolicyPacer(make_goodput(chosen.method, chosen.k))
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> LocalEngine:
        bring_up_locally(self.shards)
        plan = initial_plan(self.config.speculative)
        self.leader = leader = Leader(
            self.shards[0],
            pacer=self._pacer,
            plan=lambda: plan,
            observers=[lambda stats, prediction: self.stats.append(stats)],
        )
        self._start(leader.run, *(shard.run for shard in self.shards[1:]))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(leader.path)
        self._stream = self._socket.makefile("rb")
        if self.draft is not None:
            self.draft.connect(leader.open_draft_buffer(self.draft.load(), 1))
            self._start(self.draft.run)
            leader.attach_draft(10.0)
            assert isinstance(self._event(), DraftStatus)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in (*self.shards, *([self.draft] if self.draft else [])):
            part.stop()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} does not stop"
        self._stream.close()
        self._socket.close()

    def generate(self, submits: Sequence[Submit]) -> dict[str, list[int]]:
        """Submit all requests at once. Returns the generated tokens by request id."""
        out: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
        pending = set(out)
        self._hold_until(len(submits))
        self.submit(submits)
        while pending:
            for delta in self.deltas():
                assert delta.error is None, delta
                self.joined[delta.request_id] = _join(self.joined.get(delta.request_id), delta)
                out[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    pending.remove(delta.request_id)
                    self.last[delta.request_id] = delta
        return out

    def submit(self, submits: Sequence[Submit]) -> None:
        """Submit requests and return at once."""
        for submit in submits:
            self._socket.sendall(encode_frame(SubmitCommand(submit)))

    def deltas(self) -> tuple[Delta, ...]:
        """The deltas of the next step."""
        event = self._event()
        assert isinstance(event, StepDeltas), event
        return event.deltas

    def load_adapter(self, adapter: AdapterRef, folder: Path) -> None:
        """Load an adapter on all shards, then accept requests for it."""
        for shard in self.shards:
            shard.load_adapter(adapter.number, folder)
        self.leader.serve_adapter(adapter)

    @property
    def num_preempted(self) -> int:
        return self.leader.engine.scheduler.num_preempted

    def abort(self, request_id: str) -> None:
        self._socket.sendall(encode_frame(AbortCommand(request_id)))

    def _hold_until(self, num_commands: int) -> None:
        """Keep the engine from stepping until so many commands have arrived, so that they share a step in every run."""
        engine = self.leader.engine
        inbox, deadline = engine._inbox, time.monotonic() + 10

        def hold() -> None:
            while inbox.qsize() < num_commands and time.monotonic() < deadline:
                time.sleep(0.001)

        engine.call(hold)

    def _event(self) -> object:
        return decode_event(self._stream.read(frame_len(self._stream.read(HEADER.size))))

    def _start(self, *targets: Any) -> None:
        for target in targets:
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            self._threads.append(thread)


def _join(before: Delta | None, after: Delta) -> Delta:
    if before is None:
        return after
    return replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs,
    )
