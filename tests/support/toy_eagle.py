"""A toy EAGLE draft of a toy target: its drafts are right if and only if it reads the right features.

The target's feature at a position identifies the text up to there: a hash of all tokens, then the last few tokens. The
head sees only this feature and one token. So a feature of another position, another request or a rejected draft changes
what it drafts, and a wrong KV slot fails an assertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fakes import LoopbackEndpoint, ToyModel, seen_slots, tokens_of_rows

from engine.core.block_pool import BlockPool
from engine.core.step import ForwardInput, ForwardResult
from engine.draft.architectures import Outputs
from engine.draft.proposer import Proposer
from engine.draft.remote import RemoteDrafter

_PRIME = 1_000_003  # float32 holds what is below exactly


def hashed(before: int, token: int) -> int:
    return (before * 31 + token + 1) % _PRIME


class FeaturedToy(ToyModel):
    """A toy target whose forward also yields features."""

    def features_after(self, tokens: Sequence[int]) -> list[int]:
        """[order] numbers: a hash of all tokens, then the last order - 1."""
        total = 0
        for token in tokens:
            total = hashed(total, token)
        padded = [*([self.vocab_size] * self._order), *tokens]
        return [total, *padded[len(padded) - self._order + 1 :]]

    def forward(self, forward_input: ForwardInput) -> ForwardResult:
        logits = super().forward(forward_input).logits
        rows = []
        for span, (q_len, kv_len) in enumerate(zip(forward_input.q_lens, forward_input.kv_lens, strict=True)):
            for slot in range(kv_len - q_len, kv_len):
                where = seen_slots(forward_input, span, len(rows), slot)
                slots = forward_input.block_tables[span, where // self.block_size] * self.block_size
                rows.append(self.features_after(self._cache[slots + where % self.block_size].tolist()))
        return ForwardResult(logits, torch.tensor(rows, dtype=torch.float32))


class ToyEagle:
    """An architecture that reads features and has the distribution of a toy model.

    Args:
        distribution: the toy model that computes the logits.
        num_blocks: blocks of the cache. A KV slot holds position, token and hash.
        block_size: KV slots per block.
    """

    reads_features = True
    positions_per_pass = 1
    block_rows = 0

    def __init__(self, distribution: ToyModel, *, num_blocks: int, block_size: int) -> None:
        self._distribution = distribution
        self._block_size = block_size
        self._kv_slots = np.full((num_blocks * block_size, 3), -1, dtype=np.int64)
        self.num_forwards = 0

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        del num_masked
        assert features is not None
        assert not features.isnan().any(), "features that were never written"
        return self._compute(forward_input, features)

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        assert previous_hidden is not None
        return self._compute(forward_input, previous_hidden)

    def _compute(self, forward_input: ForwardInput, known: torch.Tensor) -> Outputs:
        self.num_forwards += 1
        tokens = tokens_of_rows(forward_input)
        after = [
            [hashed(int(row[0]), token), *[int(x) for x in row[2:]], token]
            for row, token in zip(known.tolist(), tokens.tolist(), strict=True)
        ]
        hashes = [row[0] for row in after]
        self._kv_slots[forward_input.slots] = np.stack([forward_input.positions, tokens, hashes], axis=1)
        row = 0
        for span, (q_len, kv_len) in enumerate(zip(forward_input.q_lens, forward_input.kv_lens, strict=True)):
            for slot in range(kv_len - q_len, kv_len):
                self._check(forward_input.block_tables[span], seen_slots(forward_input, span, row, slot))
                row += 1
        logits = np.stack(
            [self._distribution.logits_after([int(known[row][1]), *after[row][1:]]) for row in forward_input.logit_rows]
            or [np.zeros(self._distribution.columns, np.float32)]
        )[: len(forward_input.logit_rows)]
        previous_hidden = torch.tensor([after[row] for row in forward_input.logit_rows], dtype=torch.float32)
        return Outputs(torch.from_numpy(logits.astype(np.float32)), previous_hidden)

    def _check(self, table: np.ndarray[Any, Any], where: np.ndarray[Any, Any]) -> None:
        kv_slots = self._kv_slots[table[where // self._block_size] * self._block_size + where % self._block_size]
        steps = np.diff(kv_slots[:, 0])
        assert kv_slots[0, 0] >= 1, "token 0 has no KV slot"
        assert (steps >= 1).all(), "positions of KV slots must ascend"
        for before, (_, token, total) in zip(kv_slots[:-1][steps == 1], kv_slots[1:][steps == 1], strict=True):
            assert total == hashed(int(before[2]), int(token)), "a KV slot of another text"


def toy_eagle(
    target: FeaturedToy,
    distribution: ToyModel,
    *,
    num_blocks: int = 64,
    vocab: torch.Tensor | None = None,
    max_request_tokens: int = 64,
    ring: int = 256,
    on_device: bool = False,
    width: int = 1,
) -> tuple[RemoteDrafter, LoopbackEndpoint]:
    """A drafter that reads the target's features, and the endpoint it is attached to."""
    architecture = ToyEagle(distribution, num_blocks=num_blocks, block_size=target.block_size)
    pool = BlockPool(num_blocks, target.block_size, prefix_cache=True, ahead=1)
    proposer = Proposer(architecture, pool, vocab=vocab, max_model_len=10_000)
    drafter = RemoteDrafter(
        max_request_tokens=max_request_tokens, max_released=64, deadline_s=1.0, on_down=print, width=width
    )
    drafter.set_vocab(vocab)
    width = len(target.features_after([]))
    features = torch.full((ring, width), float("nan"))
    columns = distribution.columns
    endpoint = LoopbackEndpoint(
        proposer, max_rows=64, max_k=16, draft_vocab=columns, features=features, on_device=on_device
    )
    drafter.attach(endpoint)
    return drafter, endpoint
