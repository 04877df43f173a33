"""The forward ring: what a slot holds is returned, and every stale, foreign or oversized slot is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap

import numpy as np
import pytest
from buffer_children import NODE, forward_inputs_equal, random_forward_input
from msgspec import structs

from engine.core.step import ForwardInput, TreeMask
from engine.errors import ConfigError, ShardDown
from engine.ipc.forward_broadcast import ForwardReceiver, ForwardSender
from engine.ipc.forward_ring import RING_VERSION, ForwardRing, ForwardRingSpec, ring_bytes

SPEC = ForwardRingSpec(max_rows=5, max_spans=3, max_blocks_per_span=2, num_slots=4)
HEADER = ("magic", "version", "max_rows", "max_spans", "max_blocks_per_span", "num_slots")
SENT = 16
SLOT_WORDS = (
    *("seq", "kind", "step_id", "num_spans", "blocks_per_span", "num_rows", "num_logits", "from_rank_0"),
    *("num_moves", "has_tree"),
)


def make_ring(spec: ForwardRingSpec = SPEC) -> ForwardRing:
    ring = ForwardRing(mmap.mmap(-1, ring_bytes(spec, 1)), spec, 1)
    ring.initialize()
    return ring


def forward_input_of(num_rows: int, num_spans: int, blocks_per_span: int, num_logits: int) -> ForwardInput:
    """A forward input whose values are all different."""
    sizes = (*[num_rows] * 3, *[num_spans] * 2, num_spans * blocks_per_span, num_logits)
    values = np.split(np.arange(sum(sizes), dtype=np.int32), np.cumsum(sizes)[:-1])
    values[5] = values[5].reshape(num_spans, blocks_per_span)
    return ForwardInput(*values)


LARGEST = forward_input_of(num_rows=5, num_spans=3, blocks_per_span=2, num_logits=5)


BRANCHING = structs.replace(
    LARGEST,
    tree=TreeMask(np.array([0, 3, 0], np.int32), np.array([0, 1, 3, 5, 2**63 + 1], np.uint64)),
    moves=np.arange(10, dtype=np.int32).reshape(5, 2),
)
"""The largest forward input with a tree and with as many moves as rows."""


def set_slot(ring: ForwardRing, seq: int, name: str, value: int) -> None:
    ring._slot_words[seq % SPEC.num_slots][SLOT_WORDS.index(name)] = value


@pytest.mark.parametrize(
    "forward_input", [LARGEST, BRANCHING, forward_input_of(0, 0, 0, 0), forward_input_of(1, 1, 2, 0)]
)
def test_a_forward_input_is_returned_as_it_was_written(forward_input: ForwardInput) -> None:
    ring = make_ring()
    ring.check(forward_input)
    ring.write(1, 70, forward_input)
    assert ring.sent == 1
    step_id, found = ring.read(1)
    assert step_id == 70
    assert found is not None
    assert forward_inputs_equal(found, forward_input)


def test_every_slot_of_several_laps_is_returned() -> None:
    ring = make_ring()
    for seq in range(1, 3 * SPEC.num_slots):
        ring.write(seq, 100 + seq, random_forward_input(seq, SPEC))
        step_id, found = ring.read(seq)
        assert step_id == 100 + seq
        assert found is not None
        assert forward_inputs_equal(found, random_forward_input(seq, SPEC))


def test_the_end_has_no_forward_input() -> None:
    ring = make_ring()
    ring.write(1, -1, None)
    assert ring.read(1) == (-1, None)


@pytest.mark.parametrize("found", [0, 4, 6, 5 - SPEC.num_slots, 5 + SPEC.num_slots, -5])
def test_a_slot_with_another_sequence_number_is_refused(found: int) -> None:
    ring = make_ring()
    ring.write(5, 70, LARGEST)
    set_slot(ring, 5, "seq", found)
    with pytest.raises(ShardDown, match=f"forward input 5 is corrupt: its slot has number {found}, kind 1"):
        ring.read(5)


@pytest.mark.parametrize("forward_input", [LARGEST, None], ids=["forward", "end"])
def test_a_slot_of_an_earlier_lap_is_refused(forward_input: ForwardInput | None) -> None:
    """The sequence number was announced, but the slot was never filled again: its content is one lap old."""
    ring = make_ring()
    ring.write(2, 70, forward_input)
    ring._words[SENT] = 2 + SPEC.num_slots
    with pytest.raises(ShardDown, match="forward input 6 is corrupt: its slot has number 2"):
        ring.read(2 + SPEC.num_slots)


def test_a_slot_that_was_never_written_is_refused() -> None:
    with pytest.raises(ShardDown, match="forward input 1 is corrupt: its slot has number 0, kind 0"):
        make_ring().read(1)


@pytest.mark.parametrize("kind", [-1, 0, 3])
def test_a_slot_of_an_unknown_kind_is_refused(kind: int) -> None:
    ring = make_ring()
    ring.write(1, 70, LARGEST)
    set_slot(ring, 1, "kind", kind)
    with pytest.raises(ShardDown, match=f"its slot has number 1, kind {kind}"):
        ring.read(1)


@pytest.mark.parametrize("name", HEADER)
def test_a_slot_of_another_ring_is_refused(name: str) -> None:
    """Another magic, version or capacity: the bytes in the slot mean something else."""
    ring = make_ring()
    ring.write(1, 70, LARGEST)
    ring._words[HEADER.index(name)] += 1
    assert not ring.has_expected_header()
    with pytest.raises(ShardDown, match="forward input 1 is corrupt"):
        ring.read(1)


@pytest.mark.parametrize(
    ("name", "largest"),
    [("num_rows", 5), ("num_spans", 3), ("blocks_per_span", 2), ("num_logits", 5), ("num_moves", 5), ("has_tree", 1)],
)
def test_a_count_just_out_of_range_is_refused_by_the_reader(name: str, largest: int) -> None:
    ring = make_ring()
    ring.write(1, 70, BRANCHING)
    assert ring.read(1)[1] is not None
    bounds = r"allowed are up to \(3, 2, 5, 5, 1, 5, 1\)"
    for wrong in (largest + 1, -1):
        set_slot(ring, 1, name, wrong)
        with pytest.raises(ShardDown, match=rf"forward input 1 is corrupt: counts .*, {bounds}"):
            ring.read(1)
    set_slot(ring, 1, name, 0)
    assert ring.read(1)[1] is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict.fromkeys(("token_ids", "positions", "slots"), 6), "rows: 6 given, allowed are 5"),
        ({"logit_rows": 6}, "logit rows: 6 given, allowed are 5"),
        ({"positions": 4}, "do not fit each other"),
        ({"slots": 4}, "do not fit each other"),
        ({"token_ids": 4}, "do not fit each other"),
        ({"q_lens": 2}, "do not fit each other"),
        ({"kv_lens": 2}, "do not fit each other"),
    ],
)
def test_a_length_just_out_of_range_is_refused_by_the_writer(changes: dict[str, int], message: str) -> None:
    ring = make_ring()
    ring.check(LARGEST)
    arrays = {name: np.zeros(length, np.int32) for name, length in changes.items()}
    with pytest.raises(ValueError, match=message):
        ring.check(structs.replace(LARGEST, **arrays))


@pytest.mark.parametrize(
    ("shape", "message"), [((4, 2), "spans: 4 given, allowed are 3"), ((3, 3), "blocks per span: 3 given")]
)
def test_a_block_table_just_out_of_range_is_refused_by_the_writer(shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_ring().check(structs.replace(LARGEST, block_tables=np.zeros(shape, np.int32)))


def test_moves_and_trees_are_checked_by_the_writer() -> None:
    ring = make_ring()
    ring.check(BRANCHING)
    too_many = np.zeros((6, 2), np.int32)
    short = TreeMask(np.zeros(2, np.int32), np.zeros(5, np.uint64))
    for changes, message in (
        ({"moves": too_many}, "moves: 6 given, allowed are 5"),
        ({"moves": too_many[:2].astype(np.int64)}, "int32"),
        ({"tree": short}, "the tree does not fit"),
        ({"tree": TreeMask(np.zeros(3, np.int32), np.zeros(4, np.uint64))}, "the tree does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            ring.check(structs.replace(BRANCHING, **changes))


@pytest.mark.parametrize("name", ForwardInput.__struct_fields__[:7])
def test_every_array_must_be_int32(name: str) -> None:
    wrong = {name: getattr(LARGEST, name).astype(np.int64)}
    with pytest.raises(ValueError, match="int32"):
        make_ring().check(structs.replace(LARGEST, **wrong))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ForwardRingSpec)])
def test_a_capacity_below_one_is_refused(name: str) -> None:
    assert getattr(dataclasses.replace(SPEC, **{name: 1}), name) == 1
    with pytest.raises(ConfigError, match=f"{name}: 0 given, allowed is 1 or more"):
        dataclasses.replace(SPEC, **{name: 0})


def test_receivers_have_a_word_each() -> None:
    ring = ForwardRing(mmap.mmap(-1, ring_bytes(SPEC, 3)), SPEC, 3)
    ring.initialize()
    for receiver in range(3):
        ring.mark_read(receiver, 10 + receiver)
    assert [ring.num_read(receiver) for receiver in range(3)] == [10, 11, 12]
    assert ring.has_expected_header()
    assert ring.sent == 0


def test_a_receiver_refuses_a_stale_slot_and_a_jump_of_the_counter() -> None:
    """Through both endpoints: the same slots, announced by a sender that has not filled them."""
    with contextlib.closing(ForwardSender(SPEC, num_receivers=1, node_id=NODE)) as sender:
        receiver = ForwardReceiver.open(sender.handle(1), node_id=NODE)
        with contextlib.closing(receiver):
            sender.wait_open(5)
            for step_id in range(SPEC.num_slots):  # the receiver may lag by all slots
                sender.send(step_id, LARGEST, deadline_s=1)
            for step_id in range(SPEC.num_slots):
                message = receiver.receive(1)
                assert message is not None
                assert message[0] == step_id
            sender._ring._words[SENT] = SPEC.num_slots + 1
            with pytest.raises(ShardDown, match="forward input 5 is corrupt: its slot has number 1"):
                receiver.receive(1)
            sender._ring._words[SENT] = 2 * SPEC.num_slots + 1
            with pytest.raises(ShardDown, match="forward ring is corrupt: 9 steps sent, 4 read"):
                receiver.receive(1)


def test_another_ring_version_is_refused_before_anything_is_mapped() -> None:
    with contextlib.closing(ForwardSender(SPEC, num_receivers=1, node_id=NODE)) as sender:
        handle = sender.handle(1)
        newer = dataclasses.replace(handle.rendezvous, version=RING_VERSION + 1)
        with pytest.raises(ConfigError, match="version"):
            ForwardReceiver.open(dataclasses.replace(handle, rendezvous=newer), node_id=NODE)
