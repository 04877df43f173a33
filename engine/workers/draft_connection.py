"""The connection between rank 0 and its draft: a buffer is made, handed over, opened by the draft, and drafted through.

Owns the draft buffer over the lives of many drafts, one epoch each. Knows the drafter that uses the buffer and how to
call into the step loop; knows nothing of the step itself.
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
"""Committed tokens that one draft request may carry."""

MAX_RELEASED = 1024
"""Keys of ended requests that one draft request may carry."""

FEATURE_BYTES = 128 << 20
"""Largest memory for the features of the latest rows, bytes."""

MAX_FEATURE_ROWS = 16384
"""Largest number of rows whose features are kept."""


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Size of the features that the target's forwards yield."""

    width: int
    """Numbers per row; 0 where no layer is tapped."""
    itemsize: int
    """Bytes per number."""
    max_step_rows: int
    """Largest number of rows of one forward."""

    @property
    def num_rows(self) -> int:
        """Rows to keep: as many as the memory bound allows, but at least those of two forwards."""
        if self.width == 0:
            return 0
        return max(2 * self.max_step_rows, min(MAX_FEATURE_ROWS, FEATURE_BYTES // (self.width * self.itemsize)))


class _FirstFeatures:
    """An endpoint for timing a draft before there is any request: every token reads the first row of features.

    Args:
        endpoint: of the draft to time.
    """

    def __init__(self, endpoint: TargetEndpoint) -> None:
        self._endpoint = endpoint
        self.probs = endpoint.probs
        self.features = endpoint.features
        self.drafted = endpoint.drafted
        self.mark_step = endpoint.mark_step

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        sent = [replace(row, feature_rows=(0,) * len(row.new_tokens)) for row in rows]
        return self._endpoint.ask(sent, released, deadline_s=deadline_s)

    def close(self) -> None:
        """Do nothing: the endpoint belongs to the connection."""


class DraftConnection:
    """The draft connection of one engine.

    Args:
        drafter: drafts through the buffer.
        max_rows: requests that one draft request may name.
        max_k: largest K of a request.
        target_vocab: size of the target's vocabulary; every drafted token id is below.
        features: size of the features that a draft may read.
        device: device of the target.
        node_id: node that this process runs on.
        in_loop: runs a function between two steps, in the loop's thread.
        report: called when a draft comes up or fails.
        meanwhile: called while a draft computes, before the wait for it.
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
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._drafter = drafter
        self._meanwhile = meanwhile
        self._max_rows = max_rows
        self._max_k = max_k
        self._target_vocab = target_vocab
        self._features = features
        self._device = device
        self._node_id = node_id
        self._in_loop = in_loop
        self._report = report
        self._endpoint: TargetEndpoint | None = None
        self.positions_per_pass = 1
        """`DraftInfo.positions_per_pass` of the draft whose buffer was made last."""

    def open(self, info: DraftInfo, epoch: int) -> BufferHandle:
        """Make the buffer for a new draft. The draft before it must be dead.

        Args:
            info: what the draft needs of the buffer.
            epoch: number of the draft, higher than that of the draft before it.

        Returns:
            The handle with which the draft opens the buffer.

        Raises:
            ConfigError: the draft reads features of another width than the target gives.
        """
        if info.feature_width != self._features.width:
            raise ConfigError(
                f"draft: feature width: it reads {info.feature_width} numbers per position, the target gives "
                f"{self._features.width} (feature layers x hidden size)"
            )
        vocab = torch.tensor(info.vocab, device=self._device) if info.vocab is not None else None
        self._drafter.set_vocab(vocab)
        self.positions_per_pass = info.positions_per_pass
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
            timeout_s: seconds for the draft to open the buffer.
            first: called with the draft before it drafts for a request, in the loop's thread; may raise DraftDown.

        Raises:
            DraftDown: the draft has not opened the buffer in time.
            EngineError: no buffer has been made.
        """
        if self._endpoint is None:
            raise EngineError("no draft buffer has been made for this draft")
        endpoint = self._endpoint
        endpoint.wait_open(timeout_s)
        self._in_loop(lambda: self._attach(endpoint, first))

    def close(self) -> None:
        """Stop drafting and close the buffer. Idempotent."""
        self._drafter.detach()
        if self._endpoint is not None:
            self._endpoint.close()

    def _attach(self, endpoint: TargetEndpoint, first: Callable[[DraftLink], None] | None) -> None:
        try:
            if first is not None:
                first(endpoint if endpoint.features is None else _FirstFeatures(endpoint))
        except DraftDown as error:
            self._report(DraftStatus(up=False, reason=str(error)))
            return
        if self._meanwhile is not None:
            endpoint.meanwhile = self._meanwhile
        self._drafter.attach(endpoint)
        self._report(DraftStatus(up=True, reason=""))
