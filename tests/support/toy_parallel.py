"""A toy parallel draft of a toy target: one forward, masked rows, KV slots that tell committed rows from masked ones.

The distribution of a masked position depends on the last committed tokens and on the distance to them only, as in a
real parallel draft: not on what is drawn before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from fakes import LoopbackEndpoint, ToyModel, tokens_of_rows
from toy_eagle import FeaturedToy, ToyEagle, hashed

from engine.core.block_pool import BlockPool
from engine.core.step import ForwardInput
from engine.draft.architectures import Ahead, Outputs
from engine.draft.proposer import Proposer
from engine.draft.remote import RemoteDrafter

MASK = 0
"""Token that the distributions of later positions see in place of drafted ones."""


class ToyParallel(ToyEagle):
    """As `ToyEagle`, for up to `positions` tokens from one forward."""

    def __init__(self, distribution: ToyModel, *, num_blocks: int, block_size: int, positions: int) -> None:
        super().__init__(distribution, num_blocks=num_blocks, block_size=block_size)
        self.positions_per_pass = positions

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        assert features is not None
        self.num_forwards += 1
        known, tokens = iter(features.tolist()), tokens_of_rows(forward_input)
        logits: list[np.ndarray] = []
        firsts: list[int] = []
        ends = np.cumsum(forward_input.q_lens)
        wanted = set(forward_input.logit_rows.tolist())
        for span, (end, masked) in enumerate(zip(ends.tolist(), num_masked, strict=True)):
            rows = range(end - int(forward_input.q_lens[span]), end)
            committed = rows[: len(rows) - masked]
            assert (np.diff(forward_input.positions[rows[-masked - 1] : end]) == 1).all()
            text: list[int] = []
            for row in committed:
                digest, *before = next(known)
                text = [*[int(token) for token in before], int(tokens[row])]
                digest = hashed(int(digest), text[-1])
                self._kv_slots[forward_input.slots[row]] = (forward_input.positions[row], text[-1], digest)
            self._check(forward_input.block_tables[span], np.arange(int(forward_input.kv_lens[span]) - masked))
            self._kv_slots[forward_input.slots[rows[-masked:] if masked else []]] = -1  # Reading one fails `_check`.
            if committed[-1] in wanted:
                firsts.append(len(logits))
                logits += [self._distribution.logits_after([*text, *[MASK] * ahead]) for ahead in range(1 + masked)]
        stacked = torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, self._distribution.columns))
        first_rows = np.array(firsts, dtype=np.int64)
        return Outputs(stacked[first_rows], None, Ahead(stacked, first_rows + 1))

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        raise AssertionError("a parallel draft has one forward per draft request")


def toy_parallel(
    target: FeaturedToy,
    distribution: ToyModel,
    *,
    positions: int = 16,
    num_blocks: int = 64,
    on_device: bool = False,
    vocab: torch.Tensor | None = None,
) -> tuple[RemoteDrafter, LoopbackEndpoint, ToyParallel]:
    """A drafter of a toy target, the endpoint it is attached to, and the draft's model."""
    architecture = ToyParallel(distribution, num_blocks=num_blocks, block_size=target.block_size, positions=positions)
    pool = BlockPool(num_blocks, target.block_size, prefix_cache=True, ahead=1)
    proposer = Proposer(architecture, pool, vocab=vocab, max_model_len=10_000)
    drafter = RemoteDrafter(max_request_tokens=64, max_released=64, deadline_s=1.0, on_down=print)
    drafter.set_vocab(vocab)
    features = torch.full((256, len(target.features_after([]))), float("nan"))
    columns = distribution.columns
    endpoint = LoopbackEndpoint(
        proposer, max_rows=64, max_k=16, draft_vocab=columns, features=features, on_device=on_device
    )
    drafter.attach(endpoint)
    return drafter, endpoint, architecture
