"""The step loop: five phases in order, and the inbox that feeds them.

Owns the life of each request from submit to its last delta. Everything that differs between a test with ten tokens and
a sharded 70B model (forward, drafter, publisher, pacer) is injected. One thread runs the loop; other threads only use
the inbox.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from engine.core.committer import Committer
from engine.core.drafter import Drafter
from engine.core.pacing import Pacer, Prediction
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.stats import StepStats, step_stats
from engine.core.step import Batch
from engine.core.verifier import Verifier
from engine.errors import InvalidRequest
from engine.messages import AdapterRef, Delta, Submit
from engine.sampling.grammar import Grammars
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.sampling.readback import Meanwhile

_IDLE_WAIT_S = 0.2

_log = logging.getLogger(__name__)

Command = Callable[[], None]
Publish = Callable[[tuple[Delta, ...]], None]
"""Takes the deltas of one step, at least one. Called in the loop's thread; must not block."""


class Engine:
    """Continuous batching with speculative decoding.

    Args:
        scheduler, drafter, verifier, committer, publish: the five phases; they share one block pool.
        pacer: observes every step.
        observers: called with each step's statistics and the pacer's prediction for it, in the loop's thread.
        grammars: compiles the grammars of requests; None refuses requests that have one.
        meanwhile: what runs while a device computes the next step: publishing, and the observers. None: both run at
            once.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        drafter: Drafter,
        verifier: Verifier,
        committer: Committer,
        publish: Publish,
        pacer: Pacer,
        observers: Sequence[Callable[[StepStats, Prediction], None]] = (),
        grammars: Grammars | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.drafter = drafter
        self.verifier = verifier
        self.committer = committer
        self._publish = publish
        self._pacer = pacer
        self._observers = tuple(observers)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._by_id: dict[str, Request] = {}
        self._next_key = 1
        self._grammars = grammars
        self._meanwhile = meanwhile
        self._aborted: list[int] = []  # keys of requests aborted since the last step
        self._compiling: set[str] = set()  # ids of requests whose grammar is being compiled
        self._adapters: dict[int, AdapterRef] = {}  # that new requests may use, by number
        self._retired: dict[int, Command] = {}  # adapters that requests still use: what to call when none does
        self.num_turns = 0
        """Turns of the loop so far, with or without a step. It stands still only while the loop is stuck."""

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished. Call in the loop's thread."""
        return self.scheduler.has_work or bool(self._compiling)

    def submit(self, submit: Submit) -> None:
        """Queue a request. Its deltas are published by later steps. Thread-safe."""
        self._inbox.put(lambda: self._receive(submit))

    def abort(self, request_id: str) -> None:
        """End a request between two steps. Ids of unknown and of finished requests are ignored. Thread-safe."""
        self._inbox.put(lambda: self._abort(request_id))

    def abort_all(self) -> None:
        """End every request between two steps. Thread-safe."""
        self._inbox.put(self._abort_all)

    def call(self, command: Command) -> None:
        """Run a function between two steps, in the loop's thread. Thread-safe."""
        self._inbox.put(command)

    def serve_adapter(self, adapter: AdapterRef) -> None:
        """Accept requests for an adapter that every shard has loaded. Thread-safe."""
        self._inbox.put(lambda: self._adapters.update({adapter.number: adapter}))

    def retire_adapter(self, number: int, on_unused: Callable[[], None]) -> None:
        """Accept no more requests for an adapter; those that run or wait go on. Thread-safe.

        Args:
            number: of the adapter.
            on_unused: called once, in the loop's thread, when no request uses it any more.
        """
        self._inbox.put(lambda: self._retire(number, on_unused))

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set.

        Raises:
            ShardDown: a target shard is gone. Every request has been ended with a delta of reason `abort`.
        """
        try:
            while not stop.is_set():
                self.num_turns += 1
                self._drain(wait=not self.scheduler.has_work)
                if self.scheduler.has_work:
                    self.step()
        except BaseException as error:
            self._fail_all(error)
            raise

    def step(self) -> None:
        """One pass of the loop. Call from one thread only."""
        begin = time.perf_counter()
        batch = self.scheduler.schedule()
        if not batch.spans:
            self._finish()
            return
        scheduled = time.perf_counter()
        draft = self.drafter.draft(batch)
        verdict = self.verifier.verify(batch, draft)
        deltas = self.committer.commit(batch, draft, verdict)
        if deltas:
            self._later(lambda: self._publish(deltas))
        self.drafter.committed(batch, verdict)
        self._close(batch)
        schedule_s, step_s = scheduled - begin, time.perf_counter() - begin
        stats = step_stats(batch, draft, verdict, deltas, aborted=self._aborted, schedule_s=schedule_s, step_s=step_s)
        self._aborted.clear()
        prediction = self._pacer.observe(stats)
        self._later(lambda: self._report(stats, prediction))
        if not self.scheduler.has_work:
            self._finish()

    def _report(self, stats: StepStats, prediction: Prediction) -> None:
        for observe in self._observers:
            observe(stats, prediction)

    def _later(self, work: Command) -> None:
        """Do what the next step does not need while the device computes that step; at once where there is no device."""
        if self._meanwhile is None:
            work()
        else:
            self._meanwhile.add(work)

    def _finish(self) -> None:
        """Do what waits for the next step: none may follow soon, or something has to be published after it."""
        if self._meanwhile is not None:
            self._meanwhile.run()

    def drain(self) -> None:
        """Apply everything in the inbox without waiting. For callers that step the engine themselves."""
        self._drain(wait=False)

    def _drain(self, *, wait: bool) -> None:
        try:
            command = self._inbox.get(timeout=_IDLE_WAIT_S) if wait else self._inbox.get_nowait()
            while True:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _receive(self, submit: Submit) -> None:
        """Add a request at once, or once its grammar is compiled: compiling may take longer than a step."""
        grammar = submit.sampling.grammar
        if grammar is None or (self._grammars is not None and self._grammars.find(grammar) is not None):
            self._add(submit)
        elif self._grammars is None:
            self._refuse(submit, "grammar: this engine has no tokenizer to compile it with", field="grammar")
        else:
            self._compiling.add(submit.request_id)
            self._grammars.prepare(grammar, lambda error: self._inbox.put(lambda: self._after_compiling(submit, error)))

    def _after_compiling(self, submit: Submit, error: InvalidRequest | None) -> None:
        if submit.request_id not in self._compiling:
            return  # aborted in the meantime
        self._compiling.remove(submit.request_id)
        if error is None:
            self._add(submit)
        else:
            self._refuse(submit, str(error), field="grammar")

    def _refuse(self, submit: Submit, error: str, *, field: str | None) -> None:
        """End a request that was never added, because of a bad value in `field` of its sampling parameters."""
        refusal = Delta(
            request_id=submit.request_id,
            token_ids=(),
            finish_reason="error",
            error=error,
            error_kind="invalid_request",
            error_field=field,
        )
        self._publish((refusal,))

    def _retire(self, number: int, on_unused: Callable[[], None]) -> None:
        self._adapters.pop(number, None)
        self._retired[number] = on_unused
        self._report_unused()

    def _report_unused(self) -> None:
        """Tell of the retired adapters that no request uses any more."""
        used = {request.adapter_number for request in self._by_id.values()}
        for number in self._retired.keys() - used:
            self._retired.pop(number)()

    def _add(self, submit: Submit) -> None:
        adapter = submit.adapter
        if adapter is not None and adapter.number not in self._adapters:
            self._refuse(submit, f"model: the adapter {adapter.name!r} is not loaded any more", field="model")
            return
        try:
            options = TokenOptions.of(submit.sampling, len(submit.prompt))
            logits_processor = LogitsProcessor.make(options, self._grammars) if options is not None else None
        except (ValueError, InvalidRequest) as error:
            self._refuse(submit, str(error), field="grammar" if isinstance(error, InvalidRequest) else None)
            return
        seed = submit.sampling.seed
        request = Request(
            submit=submit,
            key=self._next_key,
            stream_key=secrets.randbits(64) if seed is None else seed & (2**64 - 1),
            tokens=[*submit.prompt, *submit.generated],
            arrival_s=time.monotonic(),
            logits_processor=logits_processor,
        )
        self._next_key += 1
        self._by_id[submit.request_id] = request
        self.scheduler.add(request)

    def _abort(self, request_id: str) -> None:
        if request_id in self._compiling:
            self._compiling.remove(request_id)
            self._publish((Delta(request_id=request_id, token_ids=(), finish_reason="abort"),))
        request = self._by_id.pop(request_id, None)
        if request is None:
            return
        request.finish_reason = "abort"
        self.scheduler.remove(request)
        self.drafter.forget([request.key])
        self._aborted.append(request.key)
        if self._retired:
            self._report_unused()
        self._finish()
        self._publish((_last_delta(request, None),))

    def _abort_all(self) -> None:
        for request_id in [*self._by_id, *self._compiling]:
            self._abort(request_id)

    def _close(self, batch: Batch) -> None:
        """Forget the requests that this step finished."""
        ended = [span.request for span in batch.spans if span.request.finish_reason is not None]
        for request in ended:
            del self._by_id[request.submit.request_id]
        if ended:
            self.drafter.forget([request.key for request in ended])
            if self._retired:
                self._report_unused()

    def _fail_all(self, error: BaseException) -> None:
        """End every request with one delta that carries the cause, so that no client waits for ever.

        The reason is `abort`, not `error`: the requests are valid, and another engine may continue them.
        """
        _log.error("the engine stops: %s", error)
        self._finish()
        self._drain(wait=False)
        for request in self._by_id.values():
            request.finish_reason = "abort"
            self.scheduler.remove(request)
        last = [_last_delta(request, "the engine stopped") for request in self._by_id.values()]
        last += [
            Delta(request_id=request_id, token_ids=(), finish_reason="abort", error="the engine stopped")
            for request_id in self._compiling
        ]
        self._by_id.clear()
        self._compiling.clear()
        if last:
            self._publish(tuple(last))


def _last_delta(request: Request, error: str | None) -> Delta:
    return Delta(
        request_id=request.submit.request_id,
        token_ids=(),
        finish_reason=request.finish_reason,
        error=error,
        num_cached=request.num_cached,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
        queue_s=request.queue_s,
    )
