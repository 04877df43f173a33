"""Where drafts dock at shard 0: a buffer made, handed over, opened by a draft, and drafted through from then on.

Owns the buffer's life over many drafts, one epoch each. Knows the drafter it serves and how to call into the step loop,
nothing of the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.draft.messages import DraftInfo, DraftRequestRow, DraftResponse
from engine.draft.remote import DraftLink, RemoteDrafter
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import BufferHandle, TargetEndpoint, create_draft_buffer
from engine.errors import ConfigError, DraftDown, EngineError
from engine.ipc.wire import DraftStatus

MAX_REQUEST_TOKENS = 4096
"""Committed tokens that one order to the draft may carry."""

MAX_RELEASED = 1024

FEATURE_BYTES = 128 << 20
"""Most memory for the features of the latest rows."""

MAX_FEATURE_ROWS = 16384


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """What the target's forwards leave per position."""

    width: int
    """Numbers; 0 where nothing is tapped."""
    itemsize: int
    """Bytes of each."""
    max_step_rows: int
    """Positions of one forward."""

    @property
    def num_rows(self) -> int:
        """Positions to remember: the memory's bound, but always two forwards."""
        if self.width == 0:
            return 0
        return max(2 * self.max_step_rows, min(MAX_FEATURE_ROWS, FEATURE_BYTES // (self.width * self.itemsize)))


class _SameEverywhere:
    """A draft that is asked before there is any request: whatever it is fed, it reads the buffer's first features."""

    def __init__(self, end: TargetEndpoint) -> None:
        self._endpoint = end
        self.probs = end.probs
        self.features = end.features

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        sent = [replace(row, feature_rows=(0,) * len(row.new_tokens)) for row in rows]
        return self._endpoint.ask(sent, released, deadline_s=deadline_s)

    def close(self) -> None:
        """The end belongs to the dock."""


class DraftConnection:
    """The docking place of one engine.

    Args:
        drafter: drafts through whatever is docked.
        max_rows, max_k: limits of one order.
        target_vocab: token ids the draft may answer with are below this.
        features: what the target can give a draft to read.
        device: where the target computes.
        node_id: of the machine.
        in_loop: runs something between two steps, in the loop's thread.
        report: told when a draft is up or down.
    """

    def __init__(
        self,
        drafter: RemoteDrafter,
        *,
        max_rows: int,
        max_k: int,
        target_vocab: int,
        features: FeatureShape,
        device: torch.device,
        node_id: str,
        in_loop: Callable[[Callable[[], None]], None],
        report: Callable[[DraftStatus], None],
    ) -> None:
        self._drafter = drafter
        self._max_rows = max_rows
        self._max_k = max_k
        self._target_vocab = target_vocab
        self._features = features
        self._device = device
        self._node_id = node_id
        self._in_loop = in_loop
        self._report = report
        self._endpoint: TargetEndpoint | None = None

    def open(self, info: DraftInfo, epoch: int) -> BufferHandle:
        """Make the buffer for a new draft. The draft before it must be dead already.

        Raises:
            ConfigError: it reads features of another width than the target gives.
        """
        if info.feature_width != self._features.width:
            raise ConfigError(
                f"draft: feature width: it reads {info.feature_width} numbers per position, the target gives "
                f"{self._features.width} (feature layers x hidden size)"
            )
        vocab = torch.tensor(info.vocab, device=self._device) if info.vocab is not None else None
        self._drafter.set_vocab(vocab)
        if self._endpoint is not None:
            self._endpoint = self._endpoint.renew(epoch=epoch)
            return self._endpoint.handle()
        spec = BufferSpec(
            max_rows=self._max_rows,
            max_k=self._max_k,
            max_request_tokens=MAX_REQUEST_TOKENS,
            max_released=MAX_RELEASED,
            draft_vocab=info.draft_vocab,
            target_vocab=self._target_vocab,
            feature_rows=self._features.num_rows,
            feature_width=self._features.width,
            feature_itemsize=self._features.itemsize,
        )
        self._endpoint = create_draft_buffer(spec, device=self._device, node_id=self._node_id, epoch=epoch)
        return self._endpoint.handle()

    def attach(self, timeout_s: float, first: Callable[[DraftLink], None] | None) -> None:
        """Draft through the buffer made last, from the next step on.

        Args:
            timeout_s: for the draft to open it.
            first: called with the draft before it drafts for anybody, in the loop's thread; may raise DraftDown.

        Raises:
            DraftDown: the draft has not opened it in time.
        """
        if self._endpoint is None:
            raise EngineError("attach before open")
        end = self._endpoint
        end.wait_open(timeout_s)
        self._in_loop(lambda: self._attach(end, first))

    def close(self) -> None:
        """Stop drafting and close the buffer. Idempotent."""
        self._drafter.detach()
        if self._endpoint is not None:
            self._endpoint.close()

    def _attach(self, end: TargetEndpoint, first: Callable[[DraftLink], None] | None) -> None:
        try:
            if first is not None:
                first(end if end.features is None else _SameEverywhere(end))
        except DraftDown as error:
            self._report(DraftStatus(up=False, reason=str(error)))
            return
        self._drafter.attach(end)
        self._report(DraftStatus(up=True, reason=""))
