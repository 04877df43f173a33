"""The sizes for which a forward is recorded as a CUDA graph.

Owns the sizes and the choice among them. A forward is padded to the smallest bucket that holds it, so the sizes are
dense where padding is dear: the next one is at most 1.5 times as large. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.step import ForwardInput

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One recorded size."""

    rows: int
    """Rows of the forward, all with logits."""
    spans: int
    """Requests of the forward."""
    max_q: int
    """Most rows of one request: 1 for plain decoding, which attention computes faster."""
    trees: bool = False
    """Whether a draft branches. Every draft is then described as a tree, chains too."""


def make_buckets(*, max_requests: int, max_k: int, trees: bool = False) -> tuple[Bucket, ...]:
    """The buckets of an engine, largest first, so that the memory of later recordings fits into that of the first.

    Args:
        max_requests: requests that run at once.
        max_k: largest K of a request; 0 records plain decoding only.
        trees: whether drafts may branch.
    """
    plain = _sizes(max_requests)
    decode = [Bucket(size, size, 1) for size in plain]
    sizes = sorted({*plain, *_sizes(max_requests * (max_k + 1))})
    if max_k == 0:
        return tuple(reversed(decode))
    kinds = (False, True) if trees else (False,)
    verify = [Bucket(size, min(size, max_requests), max_k + 1, kind) for size in sizes for kind in kinds]
    return tuple(reversed(decode + verify))


def row_sizes(buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """The rows that forwards of these buckets are padded to, ascending. For a cost model."""
    return tuple(sorted({bucket.rows for bucket in buckets}))


def find_bucket(buckets: Sequence[Bucket], forward_input: ForwardInput, *, some_logits: bool = False) -> Bucket | None:
    """The smallest bucket that holds a forward; None if it is larger than all or has rows without logits.

    Every rank finds the same one, because it depends on sizes only.

    Args:
        buckets: to choose from.
        forward_input: what is computed.
        some_logits: whether rows may be without logits.
    """
    num_rows, num_spans = len(forward_input.token_ids), len(forward_input.q_lens)
    if num_rows == 0 or not (some_logits or len(forward_input.logit_rows) == num_rows):
        return None
    tree = forward_input.tree
    if tree is not None and (tree.num_slots > forward_input.q_lens).any():
        return None  # Nodes of an earlier forward: a draft's own.
    max_q = int(np.max(forward_input.q_lens))
    fitting = [
        bucket
        for bucket in buckets
        if bucket.rows >= num_rows and bucket.spans >= num_spans and bucket.max_q >= max_q
        if bucket.trees == (tree is not None)
        # A bucket of plain decoding has one row in every span, also in those that pad it.
        if bucket.max_q > 1 or num_rows == num_spans
    ]
    return min(fitting, key=lambda bucket: (bucket.rows, bucket.max_q), default=None)


def _sizes(most: int) -> list[int]:
    sizes = [size for size in SIZES if size < most]
    return [*sizes, most] if most <= SIZES[-1] else list(SIZES)
