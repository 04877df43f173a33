"""The engine without Serve and HTTP under a closed loop: the prompts of the HTTP benchmark, sent to shard 0's socket.

Owns the process of the shard and the loop over its socket. The figures are those of `bench.load.client`, so that one
table can hold both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.load.client import Response, Run
from deployments.cluster.actors import device_env
from deployments.text.tokenizer import TextCodec
from engine.checkpoint.store import EMBEDDED, resolve_model
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable
from engine.ipc.wire import HEADER, StepDeltas, SubmitCommand, decode_event, encode_frame, frame_len
from engine.messages import Delta, SamplingParams, Submit
from engine.threads import threads_per_shard

STOP_TIMEOUT_S = 20.0


@contextlib.contextmanager
def bare_engine(draft: str, *, packed: str = "auto", model: str = EMBEDDED) -> Iterator[BareEngine]:
    """An engine in another process, with the environment that it has in a deployment.

    Args:
        draft: `none` or `ngram`; a draft model needs a deployment.
        packed: the setting `packed` of the engine.
        model: model to serve.

    Raises:
        EngineUnavailable: the engine does not start.
    """
    config = EngineConfig.parse({"model": model, "device": "cpu", "packed": packed, "speculative": {"method": draft}})
    command = [sys.executable, "-m", "bench.engine_only.bare_shard", config.model_dump_json()]
    env = os.environ | device_env(threads_per_shard(config))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
    if process.stdin is None or process.stdout is None:
        raise EngineUnavailable("the process has no pipes")
    try:
        path = process.stdout.readline().strip()
        if not path:
            raise EngineUnavailable(f"{' '.join(command[:3])} did not start; its output says why")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            codec = TextCodec.from_folder(resolve_model(model, progress=False))
            yield BareEngine(connection, codec, process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@dataclass(slots=True)
class _Running:
    """One request in flight."""

    prompt_index: int
    """Index of its prompt."""
    begin_s: float
    """Time at which it was sent."""
    first_s: float | None = None
    """Time of its first token; None before."""
    num_tokens: int = 0
    """Tokens received so far."""


class BareEngine:
    """A client of a shard's socket. Made by `bare_engine`.

    Args:
        connection: to the shard.
        codec: tokenizer of the shard's model.
        process_id: of the shard.
    """

    def __init__(self, connection: socket.socket, codec: TextCodec, process_id: int) -> None:
        self.process_id = process_id
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._codec = codec
        self._num_sent = 0

    def load(self, prompts: Sequence[str], *, streams: int, max_tokens: int) -> Run:
        """Send every prompt once, with greedy sampling.

        Args:
            prompts: user messages.
            streams: requests in flight at any time.
            max_tokens: tokens per request.

        Raises:
            EngineError: a request failed.
        """
        submits = [self._submit(prompt, max_tokens) for prompt in prompts]
        waiting = iter(enumerate(submits))
        running: dict[str, _Running] = {}
        responses: list[Response] = []
        begin_s = time.perf_counter()
        for _ in range(streams):
            self._send_next(waiting, running)
        while running:
            for delta in self._deltas():
                response = _note(running, delta)
                if response is not None:
                    responses.append(response)
                    self._send_next(waiting, running)
        return Run(streams, time.perf_counter() - begin_s, tuple(responses), ())

    def _submit(self, prompt: str, max_tokens: int) -> Submit:
        self._num_sent += 1
        return Submit(
            request_id=str(self._num_sent),
            prompt=self._codec.encode_chat([{"role": "user", "content": prompt}]),
            sampling=SamplingParams(
                max_tokens=max_tokens, temperature=0.0, stop_token_ids=tuple(self._codec.eos_token_ids)
            ),
        )

    def _send_next(self, waiting: Iterator[tuple[int, Submit]], running: dict[str, _Running]) -> None:
        following = next(waiting, None)
        if following is not None:
            index, submit = following
            running[submit.request_id] = _Running(index, time.perf_counter())
            self._connection.sendall(encode_frame(SubmitCommand(submit)))

    def _deltas(self) -> tuple[Delta, ...]:
        event = decode_event(self._stream.read(frame_len(self._stream.read(HEADER.size))))
        if not isinstance(event, StepDeltas):
            raise EngineError(f"the engine sent {event}")
        return event.deltas


def _note(running: dict[str, _Running], delta: Delta) -> Response | None:
    """Count a delta. Returns the finished response, or None while its request goes on."""
    if delta.error is not None:
        raise EngineError(delta.error)
    now, request = time.perf_counter(), running[delta.request_id]
    request.num_tokens += len(delta.token_ids)
    request.first_s = request.first_s or now
    if delta.finish_reason is None:
        return None
    del running[delta.request_id]
    return Response(
        ttft_s=request.first_s - request.begin_s,
        total_s=now - request.begin_s,
        num_tokens=request.num_tokens,
        num_drafted=delta.num_drafted,
        num_accepted=delta.num_accepted,
        prompt_index=request.prompt_index,
    )
