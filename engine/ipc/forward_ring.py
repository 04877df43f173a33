"""The forward ring in shared memory: layout of the slots, writing, and checked reading of forward inputs.

Owns the layout. Knows neither processes nor waiting (`engine.ipc.forward_broadcast`).

    words    0 .. 7 magic, version, capacities | 16 sent | 24, 32, ... read, one cache line per receiver
    slots    [num_slots] of: 16 words (seq, kind, step id, 4 counts, tokens from rank 0, moves, whether there is a
             tree), then the arrays as int32
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core.step import ForwardInput, TreeMask
from engine.errors import ConfigError, ShardDown

RING_VERSION = 3
_MAGIC = int.from_bytes(b"paceplan", "little")
_SENT, _READ, _LINE = 16, 24, 8
_KIND_FORWARD, _KIND_END = 1, 2
_SLOT_WORDS = 16


@dataclass(frozen=True, slots=True)
class ForwardRingSpec:
    """Capacities of the ring.

    Raises:
        ConfigError: a size below 1.
    """

    max_rows: int
    """Most rows of one forward."""
    max_spans: int
    """Most spans of one forward."""
    max_blocks_per_span: int
    """Most KV blocks of one span."""
    num_slots: int = 4
    """Steps that rank 0 may be ahead of the slowest rank."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ConfigError(f"forward ring {item.name}: {getattr(self, item.name)} given, allowed is 1 or more")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of the cache line."""
        # Per row: token, position, slot, logit row, ancestors of two words, and a move of two.
        num_values = 8 * self.max_rows + self.max_spans * (4 + self.max_blocks_per_span)
        return 8 * _SLOT_WORDS + -(-4 * num_values // 64) * 64


class ForwardRing:
    """The mapped memory: the words of sender and receivers, and the slots.

    Args:
        buffer: writable mapping of at least `ring_bytes(spec, num_receivers)` bytes.
        spec: capacities of the ring.
        num_receivers: number of ranks that read it.
    """

    def __init__(self, buffer: mmap.mmap, spec: ForwardRingSpec, num_receivers: int) -> None:
        self._spec = spec
        start = _header_bytes(num_receivers)
        self._words = memoryview(buffer)[:start].cast("q")
        self._fixed = [_MAGIC, RING_VERSION, spec.max_rows, spec.max_spans, spec.max_blocks_per_span, spec.num_slots]
        slots = [start + index * spec.slot_bytes for index in range(spec.num_slots)]
        self._slot_words = [memoryview(buffer)[at : at + 8 * _SLOT_WORDS].cast("q") for at in slots]
        self._values: list[npt.NDArray[np.int32]] = [
            np.frombuffer(buffer, np.int32, spec.slot_bytes // 4 - 2 * _SLOT_WORDS, at + 8 * _SLOT_WORDS)
            for at in slots
        ]

    def initialize(self) -> None:
        """Write the fixed words. The sender does this once, before a receiver maps the ring."""
        for index, word in enumerate(self._fixed):
            self._words[index] = word

    def has_expected_header(self) -> bool:
        """Whether magic, version and capacities are the ones of this process."""
        return self._words[: len(self._fixed)].tolist() == self._fixed

    @property
    def sent(self) -> int:
        """Sequence number of the latest slot that was sent."""
        return self._words[_SENT]

    def num_read(self, receiver: int) -> int:
        """Sequence number of the latest slot that a receiver has copied.

        Args:
            receiver: index of the receiver, from 0.
        """
        return self._words[_READ + receiver * _LINE]

    def mark_read(self, receiver: int, seq: int) -> None:
        """Record that a receiver has copied the slot of `seq`.

        Args:
            receiver: index of the receiver, from 0.
            seq: sequence number of the slot.
        """
        self._words[_READ + receiver * _LINE] = seq

    def check(self, forward_input: ForwardInput) -> None:
        """Check a forward input before it is sent.

        Raises:
            ValueError: it exceeds the capacities, its arrays do not fit each other, or a dtype is not int32.
        """
        spec = self._spec
        num_spans, width = forward_input.block_tables.shape
        for name, given, allowed in (
            ("rows", len(forward_input.token_ids), spec.max_rows),
            ("logit rows", len(forward_input.logit_rows), spec.max_rows),
            ("spans", num_spans, spec.max_spans),
            ("blocks per span", width, spec.max_blocks_per_span),
            ("moves", 0 if forward_input.moves is None else len(forward_input.moves), spec.max_rows),
        ):
            if given > allowed:
                raise ValueError(f"forward input {name}: {given} given, allowed are {allowed}")
        lengths = [part.size for part in _arrays(forward_input)]
        if lengths[:5] + lengths[7:8] != [len(forward_input.token_ids)] * 3 + [num_spans] * 3:
            raise ValueError(f"forward input: arrays of lengths {lengths} do not fit each other")
        tree = forward_input.tree
        if tree is not None and (len(tree.num_slots), len(tree.ancestors)) != (num_spans, len(forward_input.token_ids)):
            raise ValueError("forward input: the tree does not fit the spans and rows")
        if any(part.dtype != np.int32 for part in _arrays(forward_input)):
            raise ValueError("forward input: every array must be of dtype int32")

    def write(self, seq: int, step_id: int, forward_input: ForwardInput | None) -> None:
        """Fill the slot of `seq`, then store the sequence number. None marks the end: no step follows."""
        index = seq % self._spec.num_slots
        words = self._slot_words[index]
        counts: tuple[int, ...] = (0,) * 7
        if forward_input is not None:
            counts = _counts(forward_input)
            values, end = self._values[index], 0
            for part in _arrays(forward_input):
                start, end = end, end + part.size
                values[start:end] = part.reshape(-1)
        words[1], words[2] = _KIND_END if forward_input is None else _KIND_FORWARD, step_id
        for word, count in enumerate(counts, start=3):
            words[word] = count
        words[0] = seq
        # The sequence number is stored last, as one aligned 8-byte store, so that a receiver that sees it also sees the
        # slot (see `draft_buffer.control_block`).
        self._words[_SENT] = seq

    def read(self, seq: int) -> tuple[int, ForwardInput | None]:
        """Copy and check the slot of `seq`.

        Returns:
            The step id, and the forward input; None at the end.

        Raises:
            ShardDown: the slot is corrupt, or belongs to another sequence number or ring.
        """
        index = seq % self._spec.num_slots
        words = self._slot_words[index][:10].tolist()
        found, kind, step_id, num_spans, width, num_rows, num_logits, from_rank_0, num_moves, has_tree = words
        if not self.has_expected_header() or found != seq or kind not in (_KIND_FORWARD, _KIND_END):
            raise ShardDown(f"forward input {seq} is corrupt: its slot has number {found}, kind {kind}")
        if kind == _KIND_END:
            return step_id, None
        spec = self._spec
        rows = spec.max_rows
        bounds = (spec.max_spans, spec.max_blocks_per_span, rows, rows, 1, rows, 1)
        counts = (num_spans, width, num_rows, num_logits, from_rank_0, num_moves, has_tree)
        if not all(0 <= count <= bound for count, bound in zip(counts, bounds, strict=True)):
            raise ShardDown(f"forward input {seq} is corrupt: counts {counts}, allowed are up to {bounds}")
        sizes = [num_rows, num_rows, num_rows, num_spans, num_spans, num_spans * width, num_logits, num_spans]
        sizes += [has_tree * num_spans, has_tree * 2 * num_rows, 2 * num_moves]
        values = self._values[index][: sum(sizes)].copy()
        parts = np.split(values, np.cumsum(sizes)[:-1])
        parts[5] = parts[5].reshape(num_spans, width)
        token_ids, positions, slots, q_lens, kv_lens, block_tables, logit_rows, adapters, *of_trees = parts
        num_slots, ancestors, moves = of_trees
        return step_id, ForwardInput(
            *(token_ids, positions, slots, q_lens, kv_lens, block_tables, logit_rows),
            tokens_from_rank_0=bool(from_rank_0),
            adapters=adapters if adapters.any() else None,
            tree=TreeMask(num_slots, ancestors.copy().view(np.uint64)) if has_tree else None,
            moves=moves.reshape(num_moves, 2) if num_moves else None,
        )


def _header_bytes(num_receivers: int) -> int:
    return 8 * (_READ + _LINE * num_receivers)


def ring_bytes(spec: ForwardRingSpec, num_receivers: int) -> int:
    """Bytes of the memory that all ranks map."""
    return _header_bytes(num_receivers) + spec.num_slots * spec.slot_bytes


def _counts(forward_input: ForwardInput) -> tuple[int, ...]:
    """The words of a slot from the fourth on."""
    num_spans, width = forward_input.block_tables.shape
    return (
        *(num_spans, width, len(forward_input.token_ids), len(forward_input.logit_rows)),
        int(forward_input.tokens_from_rank_0),
        0 if forward_input.moves is None else len(forward_input.moves),
        int(forward_input.tree is not None),
    )


def _arrays(forward_input: ForwardInput) -> tuple[npt.NDArray[Any], ...]:
    """The arrays of a forward input, in their order in a slot; those of trees and moves only where it has any."""
    tree, moves = forward_input.tree, forward_input.moves
    return (
        forward_input.token_ids,
        forward_input.positions,
        forward_input.slots,
        forward_input.q_lens,
        forward_input.kv_lens,
        forward_input.block_tables,
        forward_input.logit_rows,
        np.zeros_like(forward_input.q_lens) if forward_input.adapters is None else forward_input.adapters,
        *(() if tree is None else (tree.num_slots, tree.ancestors.view(np.int32))),
        *(() if moves is None else (moves,)),
    )
