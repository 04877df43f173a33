"""The documents that a draft learns from, in bounded memory, with some of them held out.

Owns the bound and the division. Requests with the same prompt are on the same side, so a held-out request was never
trained on. The oldest documents are dropped first. Knows nothing of training.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distill.data.shards import Batch
from engine.adaptation.messages import Document

HELD_OUT = 6
"""One prompt in so many is held out."""


@dataclass(frozen=True, eq=False)
class Example:
    """One document as tensors."""

    tokens: Tensor
    """[n] int64."""
    features: Tensor
    """[n, F, H] bfloat16 after each position; zeros at the last one."""
    top_ids: Tensor
    """[n, M] most likely tokens for the next position, by the target."""
    top_logprobs: Tensor
    """[n, M] float32."""
    first_generated: int
    """Index of the first token that the target generated."""

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(value.nbytes for value in (self.tokens, self.features, self.top_ids, self.top_logprobs))


def read_document(document: Document, num_features: int) -> tuple[Tensor, Tensor]:
    """Tokens [n] int64, and features [n, F, H] bfloat16 with zeros at the last position."""
    tokens = torch.from_numpy(np.frombuffer(document.tokens, np.int32).astype(np.int64))
    dtype = torch.bfloat16 if document.itemsize == 2 else torch.float32
    flat = torch.frombuffer(bytearray(document.features), dtype=dtype).view(len(tokens) - 1, num_features, -1)
    features = torch.zeros(len(tokens), *flat.shape[1:], dtype=torch.bfloat16)
    features[:-1] = flat
    return tokens, features


class Replay:
    """The buffer.

    Args:
        max_bytes: bound of both sides together; held-out documents take at most 1 / HELD_OUT of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = (max_bytes - max_bytes // HELD_OUT, max_bytes // HELD_OUT)
        self._sides: tuple[deque[Example], deque[Example]] = (deque(), deque())
        self._num_bytes = [0, 0]

    @property
    def training(self) -> Sequence[Example]:
        """Documents to train on, oldest first."""
        return self._sides[0]

    @property
    def held_out(self) -> Sequence[Example]:
        """Documents to measure with, oldest first."""
        return self._sides[1]

    @property
    def num_bytes(self) -> int:
        """Memory of all documents."""
        return sum(self._num_bytes)

    def add(self, example: Example) -> None:
        """Keep a document, and drop the oldest ones that exceed the bound."""
        side = int(is_held_out(example.tokens[: example.first_generated]))
        kept, limit = self._sides[side], self._max_bytes[side]
        kept.append(example)
        self._num_bytes[side] += example.num_bytes
        while self._num_bytes[side] > limit:
            self._num_bytes[side] -= kept.popleft().num_bytes


def is_held_out(prompt: Tensor) -> bool:
    """Whether requests with this prompt, [n] int64, are held out: the same answer each time."""
    digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0


def collate(examples: Sequence[Example]) -> Batch:
    """Documents as one batch, padded on the right. Only positions whose next token was generated have weight."""
    width = max(len(example.tokens) for example in examples)
    first = examples[0]
    tokens = torch.zeros(len(examples), width, dtype=torch.int64)
    features = torch.zeros(len(examples), width, *first.features.shape[1:], dtype=torch.bfloat16)
    top_ids = torch.zeros(len(examples), width, first.top_ids.shape[1], dtype=torch.int64)
    top_logprobs = torch.full((len(examples), width, first.top_ids.shape[1]), -30.0)
    weight = torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        n = len(example.tokens)
        tokens[row, :n] = example.tokens
        features[row, :n] = example.features
        top_ids[row, :n] = example.top_ids
        top_logprobs[row, :n] = example.top_logprobs
        weight[row, example.first_generated - 1 : n - 1] = 1.0
    return Batch(tokens, features, top_ids, top_logprobs, weight)
