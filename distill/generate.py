"""The target writes its own training data: batched decoding over fixed slots, everything it saw kept.

Owns the slot loop (static KV, one forward of all slots per step, a free slot is refilled at once) and the sampling of
the corpus. Knows nothing of where prompts come from: it takes jobs, gives documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from distill.data import Document
from distill.decoder import FrozenTarget


@dataclass(frozen=True)
class Segment:
    """One turn for the target to write."""

    temperature: float
    """0 is greedy; otherwise top-k 50 and top-p 0.95 apply."""
    max_tokens: int
    then: tuple[int, ...] = ()
    """Tokens given after the turn's stop token, before the next segment (the template's glue)."""


@dataclass(frozen=True)
class Job:
    """A conversation to write: a given prompt, then one or more turns."""

    kind: str
    prompt: tuple[int, ...]
    segments: tuple[Segment, ...]
    """Empty: the prompt is only read, for its features and laws."""
    own: bool = False
    """Whether the prompt is itself the target's earlier writing (it then counts as written)."""


@dataclass
class Slot:
    """A job in progress: tokens so far, which were chosen by the target, and what is still to be given."""

    job: Job
    tokens: list[int]
    written: list[int]
    segment: int = 0
    in_segment: int = 0
    given: deque[int] = field(default_factory=deque)
    done: bool = False

    def push(self, sampled: int, stop_token: int) -> None:
        """Append the next token: a given one if any is due, else the sampled one."""
        if self.given:
            self.tokens.append(self.given.popleft())
            self.written.append(0)
            return
        segment = self.job.segments[self.segment]
        self.in_segment += 1
        over = self.in_segment >= segment.max_tokens
        token = stop_token if over and segment.then else sampled
        self.tokens.append(token)
        self.written.append(int(token == sampled))
        if token == stop_token or over:
            self.given.extend(segment.then)
            self.segment += 1
            self.in_segment = 0
            self.done = self.segment == len(self.job.segments)


class Generator:
    """Runs jobs through the target, `num_slots` at a time.

    Args:
        num_top: how many of the likeliest tokens are kept per position.
        max_len: longest document, tokens; jobs whose prompt leaves less than 16 tokens are skipped.
    """

    def __init__(
        self,
        target: FrozenTarget,
        *,
        num_slots: int,
        max_len: int,
        stop_token: int,
        seed: int,
        num_top: int = 64,
    ) -> None:
        self.target, self.num_slots, self.max_len, self.stop_token = target, num_slots, max_len, stop_token
        c, device = target.config, target.device
        self.num_top = num_top
        shape = (c.num_hidden_layers, num_slots, c.num_key_value_heads)
        # Keys lie transposed, [.., d, positions]: the batched product of one query row is twice as fast so on CPU.
        self._k = torch.zeros((*shape, c.head_dim, max_len), dtype=target.dtype, device=device)
        self._v = torch.zeros((*shape, max_len, c.head_dim), dtype=target.dtype, device=device)
        width = len(target.feature_layers), c.hidden_size
        self._features = torch.zeros((num_slots, max_len, *width), dtype=torch.bfloat16, device=device)
        self._top_ids = torch.zeros((num_slots, max_len, num_top), dtype=torch.int32, device=device)
        self._top_logprobs = torch.zeros((num_slots, max_len, num_top), dtype=torch.float16, device=device)
        self._rng = torch.Generator(device=device).manual_seed(seed)
        self._slots: list[Slot | None] = [None] * num_slots

    def run(self, jobs: Iterator[Job]) -> Iterator[Document]:
        """Documents as they finish; ends when the jobs end and the slots are empty."""
        while True:
            for index, slot in enumerate(self._slots):
                if slot is None and (job := self._next_job(jobs)) is not None:
                    self._start(index, job)
            if not any(self._slots):
                return
            if any(slot is not None and not slot.done for slot in self._slots):
                self._step()
            for index, slot in enumerate(self._slots):
                if slot is not None and (slot.done or len(slot.tokens) >= self.max_len):
                    self._slots[index] = None
                    yield self._document(index, slot)

    def _next_job(self, jobs: Iterator[Job]) -> Job | None:
        for job in jobs:
            if len(job.prompt) + (16 if job.segments else 0) <= self.max_len:
                return job
        return None

    def _start(self, index: int, job: Job) -> None:
        """Prefill all but the last prompt token; the next step takes it from there."""
        n = len(job.prompt) - 1
        # Lengths are rounded up: oneDNN keeps a compiled kernel per shape, and hundreds of them fill gigabytes.
        # What lies behind the prompt is invisible to it and overwritten by later steps.
        padded = min(-(-n // 32) * 32, self.max_len)
        ids = torch.tensor([[*job.prompt[:-1], *[0] * (padded - n)]], device=self.target.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            self._k[layer, index, ..., :padded], self._v[layer, index, :, :padded] = k[0].transpose(1, 2), v[0]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        with torch.inference_mode():
            hidden = self.target.forward(ids, torch.arange(padded, device=ids.device)[None], attend)
            top = self._top(self.target.logits(hidden.last[0]))
            self._features[index, :padded] = hidden.features[0].to(torch.bfloat16)
            self._top_ids[index, :padded] = top.indices.int()
            self._top_logprobs[index, :padded] = top.values.half()
        slot = Slot(job, list(job.prompt), [int(job.own)] * len(job.prompt))
        slot.done = not job.segments
        self._slots[index] = slot

    @torch.inference_mode()
    def _step(self) -> None:
        """One forward of every busy slot; each gets its next token."""
        busy = [(index, slot) for index, slot in enumerate(self._slots) if slot is not None and not slot.done]
        device = self.target.device
        rows = torch.tensor([index for index, _ in busy], device=device)
        at = torch.tensor([len(slot.tokens) - 1 for _, slot in busy], device=device)
        ids = torch.tensor([[slot.tokens[-1]] for _, slot in busy], device=device)
        span = min(-(-(int(at.max()) + 1) // 64) * 64, self.max_len)  # rounded up as in `_start`
        mask = torch.zeros((len(busy), 1, 1, span), device=device)
        mask.masked_fill_(torch.arange(span, device=device) > at[:, None, None, None], float("-inf"))
        whole, scale = len(busy) == self.num_slots, self.target.config.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._k[layer, rows, ..., at], self._v[layer, rows, :, at] = k[:, 0], v[:, 0]
            keys, values = self._k[layer, ..., :span], self._v[layer, :, :, :span]
            if not whole:
                keys, values = keys[rows], values[rows]
            # The query heads of one KV group are the rows of one product, so keys are read once.
            grouped = torch.unflatten(q[:, 0], 1, (keys.shape[1], -1))
            scores = torch.bmm(grouped.flatten(0, 1), keys.flatten(0, 1)).view(*grouped.shape[:3], span)
            weights = (scores.float() * scale + mask).softmax(-1).to(q.dtype)
            out = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))
            return out.view(grouped.shape).flatten(1, 2)[:, None]

        hidden = self.target.forward(ids, at[:, None], attend)
        top = self._top(self.target.logits(hidden.last[:, 0]))
        self._features[rows, at] = hidden.features[:, 0].to(torch.bfloat16)
        self._top_ids[rows, at], self._top_logprobs[rows, at] = top.indices.int(), top.values.half()
        temperature = torch.tensor([_temperature(slot) for _, slot in busy], device=device)
        sampled = self._sample(top, temperature).tolist()
        for (_, slot), token in zip(busy, sampled, strict=True):
            slot.push(token, self.stop_token)

    def _top(self, logits: Tensor) -> torch.return_types.topk:
        """logits [N, V] -> the likeliest tokens with log-probabilities over the full vocabulary, float32."""
        return logits.log_softmax(-1, dtype=torch.float32).topk(self.num_top, dim=-1)

    def _sample(self, top: torch.return_types.topk, temperature: Tensor) -> Tensor:
        """One token per row [N]; top-k 50, then top-p 0.95, at the row's temperature."""
        scaled = top.values[:, :50] / temperature.clamp(min=1e-3)[:, None]
        probs = scaled.softmax(-1)
        probs = probs * (probs.cumsum(-1) - probs < 0.95)
        picked = torch.multinomial(probs, 1, generator=self._rng)[:, 0]
        picked = torch.where(temperature > 0, picked, 0)
        return top.indices.gather(1, picked[:, None])[:, 0]

    def _document(self, index: int, slot: Slot) -> Document:
        """Copy the slot's record out; the last token was never fed, so it is dropped."""
        n = len(slot.tokens) - 1
        bits = self._features[index, :n].cpu().view(torch.uint16).numpy().copy()
        return Document(
            kind=slot.job.kind,
            tokens=np.array(slot.tokens[:n], np.uint16),
            written=np.array(slot.written[:n], np.uint8),
            features=bits,
            top_ids=self._top_ids[index, :n].cpu().numpy().astype(np.uint16),
            top_logprobs=self._top_logprobs[index, :n].cpu().numpy().copy(),
        )


def _temperature(slot: Slot) -> float:
    return slot.job.segments[min(slot.segment, len(slot.job.segments) - 1)].temperature
