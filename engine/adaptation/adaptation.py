"""Adaptation of one draft in its process: collects, paces the trainer, swaps weights, and takes them back.

Owns the order of things between the thread that drafts and the thread that watches. The first one calls `before` and
`after` around each draft request, and gets new weights from `before`. The second one loads them while the target is
idle. Knows weights only as what `load` returns, and the trainer only by its messages.

    candidate (better on held-out requests) -> loaded -> swapped in -> watched on live requests -> kept or taken back
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch

from engine.adaptation.collector import Collector
from engine.adaptation.governor import QUIET_S, Governor
from engine.adaptation.live_acceptance import LiveAcceptance
from engine.adaptation.messages import Candidate, FromTrainer, Progress, Serving, ToTrainer
from engine.adaptation.trainer_process import TrainerProcess
from engine.adaptation.versions import Versions, damage
from engine.config import AdaptationConfig
from engine.draft.messages import DraftRequest, DraftResponseRow
from engine.errors import PacelineError
from engine.metrics.counters import MetricCounters

RUNNING_TICK_S, PAUSED_TICK_S = 0.02, 0.1
"""Seconds between two decisions, while the trainer runs and while it is paused."""
GLANCE_S = 0.002
"""Seconds between two looks at the target while the trainer runs: so late is it paused when a step begins before the
draft is asked, as the step of a prompt does."""
_log = logging.getLogger(__name__)

Weights = TypeVar("Weights")
StartTrainer = Callable[[Callable[[FromTrainer], None]], TrainerProcess]


class Adaptation(Generic[Weights]):
    """One draft's adaptation. Call `start`, then `before` and `after` around each draft request, then `close`.

    Args:
        config: of the adaptation.
        versions: the adapted weights on disk.
        shipped: folder of the draft as it was configured.
        serving: folder of the weights that serve now.
        load: loads the weights of a folder. Called in the thread that watches, while the target is idle.
        idle_s: seconds since the target's latest step; 0 during a step.
        start_trainer: starts the trainer, given what receives its messages.
    """

    def __init__(
        self,
        config: AdaptationConfig,
        *,
        versions: Versions,
        shipped: Path,
        serving: Path,
        load: Callable[[Path], Weights],
        idle_s: Callable[[], float],
        start_trainer: StartTrainer,
    ) -> None:
        self._versions = versions
        self._shipped = shipped
        self._serving = serving
        self._previous: Path | None = None
        self._load = load
        self._idle_s = idle_s
        self._start_trainer = start_trainer
        self._collector = Collector(config.buffer_mib << 20)
        self._governor = Governor(config.cpu_share)
        self._live = LiveAcceptance()
        self._trainer: TrainerProcess | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="adaptation", daemon=True)
        self._candidates: deque[Candidate] = deque(maxlen=1)
        self._ready: deque[tuple[Path, bool, Weights]] = deque(maxlen=1)  # folder, is_rollback, weights
        self._progress = Progress()
        self._num_swaps = self._num_rollbacks = 0
        self._is_changing = False  # a swap or a rollback is under way

    def start(self) -> None:
        """Start the trainer and the watch over it."""
        self._thread.start()

    def close(self) -> None:
        """End both. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def before(self, request: DraftRequest | None) -> Weights | None:
        """Called between two draft requests, with the next one, or None while none comes.

        Returns:
            Weights to draft with from this request on; None to keep those that serve.
        """
        if request is not None:
            if self._trainer is not None:
                self._trainer.pause()
            self._live.observe(request.rows, request.released)
        if not self._ready:
            return None
        folder, is_rollback, weights = self._ready.popleft()
        if is_rollback:
            self._live.rolled_back()
            self._previous = None
            self._num_rollbacks += 1
        else:
            self._live.swapped()
            self._previous = self._serving
            self._num_swaps += 1
        self._serving = folder
        self._is_changing = False
        self._send(Serving(folder=str(folder), is_rollback=is_rollback))
        return weights

    def after(
        self, request: DraftRequest, response: tuple[DraftResponseRow, ...], features: torch.Tensor | None
    ) -> None:
        """Called with each draft request before its response is sent, while its features may be read."""
        self._live.drafted(request.rows, response)
        if features is None:
            return
        documents = self._collector.release(request.released) if request.released else []
        documents += self._collector.observe(request.rows, features)
        for document in documents:
            self._send(document)

    def count(self, counters: MetricCounters) -> None:
        """Fill in the metrics. Thread-safe."""
        progress = self._progress
        for name, value in (
            ("steps", progress.num_steps),
            ("tokens", progress.num_tokens),
            ("documents", progress.num_documents),
            ("swaps", self._num_swaps),
            ("rollbacks", self._num_rollbacks),
            ("cpu_seconds", self._trainer.used_s if self._trainer is not None else 0.0),
        ):
            counters.add(f"paceline_draft_adaptation_{name}_total", value)
        counters.set("paceline_draft_adaptation_buffer_bytes", progress.buffer_bytes)
        counters.set("paceline_draft_adaptation_live_acceptance_ratio", self._live.rate)
        counters.set("paceline_draft_adaptation_held_out_tokens_per_step", progress.served, "serving")
        counters.set("paceline_draft_adaptation_held_out_tokens_per_step", progress.trained, "training")

    def _watch(self) -> None:
        try:
            self._trainer = trainer = self._start_trainer(self._on_message)
        except OSError as error:
            _log.warning("the draft does not learn: its trainer cannot be started: %s", error)
            return
        try:
            tick_s = PAUSED_TICK_S
            while not self._wait(trainer, tick_s):
                tick_s = self._tick(trainer)
                if not trainer.is_alive:
                    _log.warning("the draft learns no more: its trainer has ended")
                    break
        finally:
            trainer.close()
        while not self._stop.wait(PAUSED_TICK_S):  # Weights that serve are still watched.
            self._change()

    def _wait(self, trainer: TrainerProcess, seconds: float) -> bool:
        """Wait for the next decision, and pause the trainer at once when a step begins. Returns whether to end."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._stop.wait(left_s if trainer.is_paused else min(GLANCE_S, left_s)):
                return True
            if not trainer.is_paused and self._idle_s() < QUIET_S:
                trainer.pause()
        return self._stop.is_set()

    def _tick(self, trainer: TrainerProcess) -> float:
        """Let the trainer run or not, and bring weights. Returns the seconds to the next tick."""
        idle_s = self._idle_s()
        if self._governor.may_run(time.monotonic(), idle_s=idle_s, used_s=trainer.used_s):
            trainer.resume()
        else:
            trainer.pause()
        self._change()
        return PAUSED_TICK_S if trainer.is_paused else RUNNING_TICK_S

    def _change(self) -> None:
        """Begin a rollback or a swap, one at a time."""
        if self._is_changing:
            return
        if self._previous is not None and self._live.has_regressed:
            self._is_changing = True
            _log.warning("adapted draft %s is worse on live requests and is taken back", self._serving)
            self._versions.remove(self._serving)
            self._candidates.clear()
            self._bring(self._previous, is_rollback=True)
        elif self._candidates and self._idle_s() >= QUIET_S:
            self._is_changing = True
            candidate = self._candidates.popleft()
            _log.info(
                "adapted draft %s: %.3f tokens per step on %d held-out requests, %.3f before",
                *(candidate.folder, candidate.trained, candidate.num_documents, candidate.served),
            )
            self._bring(Path(candidate.folder), is_rollback=False)

    def _bring(self, folder: Path, *, is_rollback: bool) -> None:
        """Load the weights of a folder for the next draft request, or those of the shipped draft in a rollback."""
        for source in (folder, self._shipped) if is_rollback else (folder,):
            problem = None if source == self._shipped else damage(source)
            try:
                if problem is None:
                    self._ready.append((source, is_rollback, self._load(source)))
                    return
            except (PacelineError, OSError) as error:
                problem = str(error)
            _log.warning("adapted draft %s is refused: %s", source, problem)
        self._previous = None if is_rollback else self._previous
        self._is_changing = False

    def _on_message(self, message: FromTrainer) -> None:
        if isinstance(message, Candidate):
            self._candidates.append(message)
        else:
            self._progress = message

    def _send(self, message: ToTrainer) -> None:
        if self._trainer is not None:
            self._trainer.send(message)
