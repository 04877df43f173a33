"""Token shards on disk: text that the target generated, with its hidden features and top logits at every position.

Owns the folder format (one folder of `.npy` files per shard, renamed into place when complete, so that a killed writer
leaves no partial shard), the order in which shards are read, and the cut into training rows. Knows nothing of models:
features are opaque bfloat16 bits.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ConfigError

U16 = npt.NDArray[np.uint16]
FIELDS = ("tokens", "written", "features", "top_ids", "top_logprobs", "doc_starts")


@dataclass(frozen=True)
class Document:
    """One finished conversation of n tokens."""

    kind: str
    """Kind of work, such as `chat` or `translation`. It is listed in the meta data of the shard."""
    tokens: U16
    """[n] token ids (vocabularies up to 65,536)."""
    written: npt.NDArray[np.uint8]
    """[n] 1 where the target generated the token, 0 where it was given."""
    features: U16
    """[n, F, H] bfloat16 bits of the outputs of the feature layers at each position."""
    top_ids: U16
    """[n, M] the M most likely next tokens after each position, best first."""
    top_logprobs: npt.NDArray[np.float16]
    """[n, M] log-probabilities of `top_ids` over the full vocabulary at temperature 1."""


class ShardWriter:
    """Collects documents and writes a shard for every `shard_tokens` tokens."""

    def __init__(self, folder: Path, stream: str, meta: dict[str, Any], *, shard_tokens: int = 65_536) -> None:
        self.folder, self.stream, self.meta, self.shard_tokens = folder, stream, meta, shard_tokens
        folder.mkdir(parents=True, exist_ok=True)
        self.next_index = len(list(folder.glob(f"{stream}-[0-9]*[0-9]")))
        self._docs: list[Document] = []
        self._num_tokens = 0

    def add(self, doc: Document) -> None:
        """Add one document; this may write a shard."""
        self._docs.append(doc)
        self._num_tokens += len(doc.tokens)
        if self._num_tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write the collected documents, however few."""
        if not self._docs:
            return
        target = self.folder / f"{self.stream}-{self.next_index:05d}"
        partial = self.folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        docs = self._docs
        lengths = [len(doc.tokens) for doc in docs]
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        np.save(partial / "doc_starts.npy", starts)
        for name in FIELDS[:-1]:
            np.save(partial / f"{name}.npy", np.concatenate([getattr(doc, name) for doc in docs]))
        kinds = [doc.kind for doc in docs]
        meta = {**self.meta, "num_tokens": self._num_tokens, "num_written": sum(int(d.written.sum()) for d in docs)}
        (partial / "meta.json").write_text(json.dumps({**meta, "kinds": kinds}))
        os.rename(partial, target)
        self.next_index += 1
        self._docs, self._num_tokens = [], 0


@dataclass(frozen=True)
class Shard:
    """A finished shard. Its arrays are memory-mapped; fields are those of `Document`, concatenated."""

    path: Path
    meta: dict[str, Any]
    tokens: U16
    written: npt.NDArray[np.uint8]
    features: U16
    top_ids: U16
    top_logprobs: npt.NDArray[np.float16]
    doc_starts: npt.NDArray[np.int64]

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Memory-map one shard folder."""
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in FIELDS}
        return cls(path, json.loads((path / "meta.json").read_text()), **arrays)


@dataclass(frozen=True)
class Batch:
    """Data of one training step: R rows of T positions, padded on the right."""

    tokens: Tensor
    """[R, T] int64 token ids."""
    features: Tensor
    """[R, T, F, H] bfloat16 features after each position."""
    top_ids: Tensor
    """[R, T, M] int64 most likely tokens for position t + 1, by the target."""
    top_logprobs: Tensor
    """[R, T, M] float32 log-probabilities of `top_ids`."""
    weight: Tensor
    """[R, T] float32 loss weight of the distribution of token t + 1; 0 on padding."""

    def to(self, device: torch.device) -> Batch:
        """This batch on another device."""
        return Batch(*(value.to(device) for value in vars(self).values()))


def shard_paths(folders: Sequence[Path]) -> list[Path]:
    """All finished shards of the folders in a fixed order."""
    return sorted(
        path.parent for folder in folders for path in folder.glob("*/meta.json") if path.parent.name[0] != "."
    )


def held_out(data: Path, count: int) -> list[Path]:
    """The first `count` shards of each stream, which are held out so that acceptance can be measured on them.

    Raises:
        ConfigError: no shard would be left for training.
    """
    paths = shard_paths([data])
    held = [path for path in paths if int(path.name.rsplit("-", 1)[1]) < count]
    if len(held) == len(paths):
        raise ConfigError(f"hold_out: {count} of each stream are all {len(paths)} shards; generate more")
    return held


def batches(
    folders: Sequence[Path],
    *,
    row_len: int,
    batch_tokens: int,
    seed: int,
    prompt_weight: float,
    start: int = 0,
    skip: frozenset[str] = frozenset(),
    group: int = 4,
) -> Iterator[tuple[int, Batch]]:
    """Endless training batches, each with the number of shards finished before it; pass it as `start` to resume.

    Shards that were read least come first, in seeded order, `group` at a time with their rows shuffled together. Rows
    of similar length share a batch of about `batch_tokens` positions. The folders are listed again for each group, so
    that shards of a running generator are read next.

    Raises:
        FileNotFoundError: no finished shard in any folder.
    """
    done = 0
    reads: dict[Path, int] = {}
    while True:
        before = min(reads.values(), default=1) - 1
        for path in shard_paths(folders):
            if path.name not in skip:
                reads.setdefault(path, before)
        if not reads:
            raise FileNotFoundError(f"no finished shards in {', '.join(map(str, folders))}")
        least = min(reads.values())
        rng = np.random.default_rng((seed, done))
        waiting = sorted(path for path, count in reads.items() if count == least)
        chosen = [waiting[i] for i in rng.permutation(len(waiting))[:group]]
        for path in chosen:
            reads[path] += 1
        if done + len(chosen) > start:
            spans = [(shard, *span) for shard in map(Shard.open, chosen) for span in row_spans(shard, row_len)]
            for rows in length_batches([stop - begin for _, begin, stop in spans], batch_tokens, rng):
                yield done, collate([spans[i] for i in rows], row_len, prompt_weight)
        done += len(chosen)


def length_batches(lengths: Sequence[int], batch_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Groups of indices in random order. Rows times the longest row stay within `batch_tokens`; one row always fits."""
    shuffled = rng.permutation(len(lengths))
    found: list[list[int]] = []
    for window in range(0, len(shuffled), 64):
        held: list[int] = []
        for index in sorted(shuffled[window : window + 64].tolist(), key=lambda i: lengths[i]):
            if held and (len(held) + 1) * lengths[index] > batch_tokens:
                found.append(held)
                held = []
            held.append(index)
        found.append(held)
    return [found[i] for i in rng.permutation(len(found))]


def row_spans(shard: Shard, row_len: int) -> list[tuple[int, int]]:
    """(start, stop) of training rows: documents cut at `row_len`. Rests of fewer than 16 tokens are dropped."""
    spans = []
    for start, stop in zip(shard.doc_starts[:-1].tolist(), shard.doc_starts[1:].tolist(), strict=True):
        for cut in range(start, stop, row_len):
            end = min(cut + row_len, stop)
            if end - cut >= 16:
                spans.append((cut, end))
    return spans


def collate(spans: Sequence[tuple[Shard, int, int]], row_len: int, prompt_weight: float) -> Batch:
    """Copy spans of shards into one padded batch. The copy is the only read of the memory map."""
    width = min(row_len, max(stop - start for _, start, stop in spans))
    shard = spans[0][0]
    num_features, hidden = shard.features.shape[1:]
    num_top = shard.top_ids.shape[1]
    tokens = np.zeros((len(spans), width), np.int64)
    features = np.zeros((len(spans), width, num_features, hidden), np.uint16)
    top_ids = np.zeros((len(spans), width, num_top), np.int64)
    top_logprobs = np.full((len(spans), width, num_top), -30.0, np.float32)
    weight = np.zeros((len(spans), width), np.float32)
    for row, (shard, start, stop) in enumerate(spans):
        n = stop - start
        tokens[row, :n] = shard.tokens[start:stop]
        features[row, :n] = shard.features[start:stop]
        top_ids[row, :n] = shard.top_ids[start:stop]
        top_logprobs[row, :n] = shard.top_logprobs[start:stop]
        # Position t teaches the distribution of token t + 1. It has full weight where the target generated token t + 1.
        written = np.asarray(shard.written[start:stop], np.float32)
        weight[row, : n - 1] = np.where(written[1:] > 0, 1.0, prompt_weight)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(features).view(torch.bfloat16),
        torch.from_numpy(top_ids),
        torch.from_numpy(top_logprobs),
        torch.from_numpy(weight),
    )


def token_mass(paths: Sequence[Path], vocab_size: int) -> Tensor:
    """[vocab_size] float64 probability mass of each token, summed over the generated positions of the shards.

    Probabilities are summed instead of tokens counted, so that rare tokens are ranked well on little data.
    """
    mass = np.zeros(vocab_size)
    for shard in map(Shard.open, paths):
        written = np.flatnonzero(np.asarray(shard.written[1:]))
        ids, probs = shard.top_ids[written], np.exp(shard.top_logprobs[written].astype(np.float32))
        mass += np.bincount(ids.ravel(), probs.ravel(), minlength=vocab_size)
    return torch.from_numpy(mass)
