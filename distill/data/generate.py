"""Generation of training data by the target: batched decoding over fixed slots, with features and top logits kept.

Owns the slot loop (one forward of all slots per step, prompts in chunks in the same forward, free slots refilled at
once) and the sampling. The forward is the one that serves, so the features are those that a draft reads in serving.
Takes jobs and returns documents; knows nothing of where prompts come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.data.likeliest import Likeliest, likeliest
from distill.data.shards import Document
from engine.config import CPU_BLOCK, CUDA_PAGE
from engine.core.step import ForwardInput
from engine.model.load import Model
from engine.model.runner import ModelRunner


@dataclass(frozen=True)
class Segment:
    """One turn that the target generates."""

    temperature: float
    """Temperature; 0 is greedy, otherwise top-k 50 and top-p 0.95 apply."""
    max_tokens: int
    then: tuple[int, ...] = ()
    """Tokens of the template between the stop token of this turn and the next segment."""


@dataclass(frozen=True)
class Job:
    """A conversation to generate: a given prompt, then one or more turns."""

    kind: str
    prompt: tuple[int, ...]
    segments: tuple[Segment, ...]
    """Turns to generate. Without any, the prompt is only read, for its features and distributions."""
    own: bool = False
    """Whether the target generated the prompt earlier; its tokens then count as generated."""


@dataclass
class Slot:
    """A job in progress: its tokens, which of them the target generated, and how many the target has read."""

    job: Job
    tokens: list[int]
    written: list[int]
    num_read: int = 0
    segment: int = 0
    in_segment: int = 0
    closed: bool = False
    """Whether no more token is added."""

    @property
    def num_due(self) -> int:
        """Number of tokens still to read. The last one of a closed slot is never read."""
        return len(self.tokens) - self.num_read - int(self.closed)

    def push(self, sampled: int, stop_token: int, max_len: int) -> None:
        """Append the sampled token, and the tokens that follow where a segment ends."""
        segment = self.job.segments[self.segment]
        self.in_segment += 1
        over = self.in_segment >= segment.max_tokens
        token = stop_token if over and segment.then else sampled
        self.tokens.append(token)
        self.written.append(int(token == sampled))
        if token == stop_token or over:
            self.segment += 1
            self.in_segment = 0
            self.closed = self.segment == len(self.job.segments)
            if not self.closed:
                self.tokens.extend(segment.then)
                self.written.extend([0] * len(segment.then))
        if len(self.tokens) >= max_len:
            del self.tokens[max_len:], self.written[max_len:]
            self.closed = True


@dataclass(frozen=True)
class Rows:
    """The rows of one forward: the next `counts[s]` tokens of each of S slots."""

    slots: tuple[Slot, ...]
    indices: npt.NDArray[np.int32]
    """[S]."""
    counts: npt.NDArray[np.int32]
    """[S]."""

    def plan(self, block_size: int, blocks_per_slot: int) -> ForwardInput:
        """KV blocks of the slots: consecutive ones per slot, from block 1 on."""
        reads = np.array([slot.num_read for slot in self.slots], np.int32)
        num_rows, ends = int(self.counts.sum()), np.cumsum(self.counts, dtype=np.int32)
        positions = np.arange(num_rows, dtype=np.int32) + np.repeat(reads - ends + self.counts, self.counts)
        first_blocks = 1 + self.indices * blocks_per_slot
        return ForwardInput(
            token_ids=np.array(
                [
                    token
                    for slot, count in zip(self.slots, self.counts.tolist(), strict=True)
                    for token in slot.tokens[slot.num_read : slot.num_read + count]
                ],
                np.int32,
            ),
            positions=positions,
            slots=(np.repeat(first_blocks * block_size, self.counts) + positions).astype(np.int32),
            q_lens=self.counts,
            kv_lens=reads + self.counts,
            block_tables=(first_blocks[:, None] + np.arange(blocks_per_slot)).astype(np.int32),
            logit_rows=np.arange(num_rows, dtype=np.int32),
        )


class Generator:
    """Runs jobs through the target, `num_slots` at a time.

    Args:
        model: the target, with the feature layers to keep.
        num_top: number of most likely tokens that are kept per position.
        max_len: length of the longest document in tokens; jobs whose prompt leaves fewer than 16 tokens are skipped.
        max_rows: tokens in one forward; prompts get the rows that decodes do not need.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_slots: int,
        max_len: int,
        stop_token: int,
        seed: int,
        num_top: int = 64,
        max_rows: int = 256,
    ) -> None:
        self.num_slots, self.max_len, self.stop_token = num_slots, max_len, stop_token
        self.num_top, self.max_rows = num_top, max_rows
        block_size = CUDA_PAGE if model.device.type == "cuda" else CPU_BLOCK
        self._blocks_per_slot = -(-max_len // block_size)
        self._runner = ModelRunner(model, num_blocks=1 + num_slots * self._blocks_per_slot, block_size=block_size)
        shape, device = (num_slots, max_len), model.device
        self._feature_shape = len(model.feature_layers), model.config.hidden_size
        self._features = torch.zeros((*shape, *self._feature_shape), dtype=torch.bfloat16, device=device)
        self._top_ids = torch.zeros((*shape, num_top), dtype=torch.int32, device=device)
        self._top_logprobs = torch.zeros((*shape, num_top), dtype=torch.float16, device=device)
        self._rng = torch.Generator(device=device).manual_seed(seed)
        self._slots: list[Slot | None] = [None] * num_slots

    def run(self, jobs: Iterator[Job]) -> Iterator[Document]:
        """Documents as they finish, until the jobs end and all slots are empty."""
        while True:
            for index, slot in enumerate(self._slots):
                if slot is None and (job := self._next_job(jobs)) is not None:
                    written = [int(job.own)] * len(job.prompt)
                    self._slots[index] = Slot(job, list(job.prompt), written, closed=not job.segments)
            if not any(self._slots):
                return
            if any(slot is not None and slot.num_due for slot in self._slots):
                self._step()
            for index, slot in enumerate(self._slots):
                if slot is not None and slot.num_due == 0:
                    self._slots[index] = None
                    yield self._document(index, slot)

    def _next_job(self, jobs: Iterator[Job]) -> Job | None:
        for job in jobs:
            if len(job.prompt) + (16 if job.segments else 0) <= self.max_len:
                return job
        return None

    def _rows(self) -> Rows:
        """Number of tokens per slot: decodes first, then prompts up to `max_rows`."""
        busy = [(index, slot) for index, slot in enumerate(self._slots) if slot is not None and slot.num_due]
        room, chosen = self.max_rows, []
        for index, slot in sorted(busy, key=lambda item: item[1].num_due):
            if count := min(slot.num_due, room):
                chosen.append((slot, index, count))
                room -= count
        slots, indices, counts = zip(*chosen, strict=True)
        return Rows(slots, np.array(indices, np.int32), np.array(counts, np.int32))

    @torch.inference_mode()
    def _step(self) -> None:
        """Run one forward; every slot that has read all its tokens gets its next one."""
        rows = self._rows()
        plan = rows.plan(self._runner.block_size, self._blocks_per_slot)
        result = self._runner.forward(plan)
        logits, features = result.logits, result.hidden
        if logits is None or features is None:
            raise RuntimeError(
                "the target yields no logits or no features; it must not be sharded and must yield features"
            )
        top = likeliest(logits, self.num_top)
        device = logits.device
        at = (
            torch.from_numpy(np.repeat(rows.indices, rows.counts).astype(np.int64)).to(device),
            torch.from_numpy(plan.positions.astype(np.int64)).to(device),
        )
        self._features[at] = features.view(-1, *self._feature_shape).to(torch.bfloat16)
        self._top_ids[at], self._top_logprobs[at] = top.ids.int(), top.logprobs.half()
        last_rows, ready = np.cumsum(rows.counts) - 1, []
        for slot, count, row in zip(rows.slots, rows.counts.tolist(), last_rows.tolist(), strict=True):
            slot.num_read += count
            if slot.num_due == 0 and not slot.closed:
                ready.append((slot, row))
        if not ready:
            return
        chosen = torch.tensor([row for _, row in ready], device=device)
        temperature = torch.tensor([slot.job.segments[slot.segment].temperature for slot, _ in ready], device=device)
        sampled = self._sample(Likeliest(top.logprobs[chosen], top.ids[chosen]), temperature).tolist()
        for (slot, _), token in zip(ready, sampled, strict=True):
            slot.push(token, self.stop_token, self.max_len)

    def _sample(self, top: Likeliest, temperature: Tensor) -> Tensor:
        """[N] One token per row at its temperature, with top-k 50, then top-p 0.95."""
        scaled = top.logprobs[:, :50] / temperature.clamp(min=1e-3)[:, None]
        probs = scaled.softmax(-1)
        probs = probs * (probs.cumsum(-1) - probs < 0.95)
        picked = torch.multinomial(probs, 1, generator=self._rng)[:, 0]
        picked = torch.where(temperature > 0, picked, 0)
        return top.ids.gather(1, picked[:, None])[:, 0]

    def _document(self, index: int, slot: Slot) -> Document:
        """The document of a slot. Its last token was never read, so it is dropped."""
        n = slot.num_read
        bits = self._features[index, :n].cpu().view(torch.uint16).numpy().copy()
        return Document(
            kind=slot.job.kind,
            tokens=np.array(slot.tokens[:n], np.uint16),
            written=np.array(slot.written[:n], np.uint8),
            features=bits,
            top_ids=self._top_ids[index, :n].cpu().numpy().astype(np.uint16),
            top_logprobs=self._top_logprobs[index, :n].cpu().numpy().copy(),
        )
