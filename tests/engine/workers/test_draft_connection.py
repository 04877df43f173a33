"""The draft buffer over the lives of drafts: its capacities, what a draft must fit, and who learns of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.draft.messages import DraftInfo, DraftRequest, DraftRequestRow, DraftResponseRow
from engine.draft.remote import DraftLink, RemoteDrafter
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import BufferHandle, DraftEndpoint, open_draft_buffer
from engine.errors import ConfigError, DraftDown, EngineError, EngineUnavailable
from engine.ipc.wire import DraftStatus
from engine.sampling.row_sampling import RowSampling
from engine.workers.draft_connection import DraftConnection, FeatureShape


@pytest.mark.parametrize(
    ("width", "itemsize", "max_step_rows", "num_rows"),
    [
        (0, 2, 100, 0),
        (1, 2, 100, 16_384),  # the bound on rows
        (4096, 2, 100, 16_384),  # which the memory just holds
        (4097, 2, 100, 16_380),
        (8192, 4, 100, 4096),
        (8192, 4, 2048, 4096),
        (8192, 4, 2049, 4098),  # two forwards, whatever the memory
    ],
)
def test_features_are_kept_as_long_as_memory_allows(
    width: int, itemsize: int, max_step_rows: int, num_rows: int
) -> None:
    assert FeatureShape(width, itemsize, max_step_rows).num_rows == num_rows


@pytest.fixture
def reports() -> list[DraftStatus]:
    return []


class Noted(RemoteDrafter):
    """Notes the vocabularies that it is given, one after the other."""

    def __init__(self) -> None:
        super().__init__(max_request_tokens=8, max_released=2, deadline_s=1.0, on_down=lambda _: None)
        self.vocabs: list[list[int] | None] = []

    def set_vocab(self, vocab: torch.Tensor | None) -> None:
        self.vocabs.append(None if vocab is None else vocab.tolist())
        super().set_vocab(vocab)


@pytest.fixture
def drafter() -> Noted:
    return Noted()


@pytest.fixture
def connect(reports: list[DraftStatus], drafter: Noted) -> Iterator[Callable[[FeatureShape], DraftConnection]]:
    made: list[DraftConnection] = []

    def connected(features: FeatureShape) -> DraftConnection:
        connection = DraftConnection(
            drafter,
            max_rows=4,
            max_k=3,
            target_vocab=90,
            features=features,
            device=torch.device("cpu"),
            node_id="node",
            in_loop=lambda call: call(),
            report=reports.append,
        )
        made.append(connection)
        return connection

    yield connected
    for connection in made:
        connection.close()
        connection.close()


Connect = Callable[[FeatureShape], DraftConnection]
NONE = FeatureShape(0, 2, 10)


def test_the_buffer_has_room_for_the_engine_s_largest_request(connect: Connect) -> None:
    connection = connect(FeatureShape(6, 4, 9000))
    assert connection.positions_per_pass == 1
    handle = connection.open(DraftInfo(50, tuple(range(50)), feature_width=6, positions_per_pass=3), epoch=7)
    assert (handle.epoch, handle.node_id, connection.positions_per_pass) == (7, "node", 3)
    assert handle.spec == BufferSpec(
        max_rows=4,
        max_k=3,
        max_request_tokens=4096,
        max_released=1024,
        draft_vocab=50,
        target_vocab=90,
        feature_rows=18_000,
        feature_width=6,
        feature_itemsize=4,
    )


def test_the_next_draft_gets_the_same_buffer_in_another_epoch(connect: Connect) -> None:
    connection = connect(NONE)
    first = connection.open(DraftInfo(50, None), epoch=1)
    second = connection.open(DraftInfo(50, None, positions_per_pass=2), epoch=2)
    assert (first.epoch, second.epoch, second.spec) == (1, 2, first.spec)
    assert connection.positions_per_pass == 2


def test_a_draft_of_other_features_is_refused(connect: Connect) -> None:
    message = r"feature width: it reads 6 numbers per position, the target gives 0 \(feature layers x hidden size\)"
    with pytest.raises(ConfigError, match=message):
        connect(NONE).open(DraftInfo(50, None, feature_width=6), epoch=1)


def test_nothing_is_attached_before_a_buffer_is_made(connect: Connect, reports: list[DraftStatus]) -> None:
    with pytest.raises(EngineError, match="no draft buffer has been made for this draft"):
        connect(NONE).attach(1.0, None)
    assert reports == []


def test_a_draft_that_does_not_open_its_buffer_in_time_is_not_attached(
    connect: Connect, reports: list[DraftStatus], drafter: Noted
) -> None:
    connection = connect(NONE)
    connection.open(DraftInfo(50, None), epoch=1)
    with pytest.raises(DraftDown, match=r"has not connected within 0\.01 s"):
        connection.attach(0.01, None)
    assert (reports, drafter.is_up) == ([], False)


def test_the_drafter_gets_the_vocabulary_of_each_draft(connect: Connect, drafter: Noted) -> None:
    connection = connect(NONE)
    connection.open(DraftInfo(3, (7, 0, 4)), epoch=1)
    connection.open(DraftInfo(50, None), epoch=2)
    assert drafter.vocabs == [[7, 0, 4], None]


def opened(handle: BufferHandle) -> contextlib.closing[DraftEndpoint]:
    """The draft's endpoint, open during the block."""
    return contextlib.closing(open_draft_buffer(handle, node_id="node", gpu_uuid=None))


def test_a_closed_connection_drafts_no_more(connect: Connect, drafter: Noted) -> None:
    connection = connect(NONE)
    with opened(connection.open(DraftInfo(50, None), epoch=1)):
        connection.attach(5.0, None)
        assert drafter.is_up
        connection.close()
        assert not drafter.is_up


def test_a_buffer_without_a_draft_is_closed_with_its_connection(connect: Connect) -> None:
    connection = connect(NONE)
    handle = connection.open(DraftInfo(50, None), epoch=1)
    connection.close()
    with pytest.raises(EngineUnavailable):
        opened(handle)


@pytest.mark.parametrize(("width", "feature_rows"), [(0, ()), (6, (0, 0, 0))])
def test_the_first_draft_reads_no_features_but_the_first_row(
    connect: Connect, reports: list[DraftStatus], drafter: Noted, width: int, feature_rows: tuple[int, ...]
) -> None:
    connection = connect(FeatureShape(width, 4, 10))
    asked: list[DraftRequest | None] = []

    def respond() -> None:
        asked.append(draft.wait(10))
        draft.respond([DraftResponseRow()], draft_s=0.0)

    def first(link: DraftLink) -> None:
        assert not drafter.is_up
        row = DraftRequestRow(1, 0, (1, 2, 3), 2, RowSampling(0.0, 1.0, 1, 1, False))
        assert link.ask([row], deadline_s=10.0).rows == (DraftResponseRow(),)

    with opened(connection.open(DraftInfo(50, None, feature_width=width), epoch=1)) as draft:
        thread = threading.Thread(target=respond)
        thread.start()
        connection.attach(5.0, first)
        thread.join()
    assert asked[0] is not None
    assert asked[0].rows[0].feature_rows == feature_rows
    assert (reports, drafter.is_up) == ([DraftStatus(up=True, reason="")], True)


def test_a_draft_that_fails_at_once_is_reported_and_not_attached(
    connect: Connect, reports: list[DraftStatus], drafter: Noted
) -> None:
    def first(link: DraftLink) -> None:
        raise DraftDown("too slow")

    connection = connect(NONE)
    with opened(connection.open(DraftInfo(50, None), epoch=1)):
        connection.attach(5.0, first)
    assert (reports, drafter.is_up) == ([DraftStatus(up=False, reason="too slow")], False)
