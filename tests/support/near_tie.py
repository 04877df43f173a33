"""Where two greedy continuations diverge, and whether it is a near-tie, which sums in another order may flip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

BOUND = 1e-4


def assert_same_or_near_tie(
    model: Any, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], name: str, *, bound: float = BOUND
) -> bool:
    """Compare token by token.

    Args:
        model: of `transformers`, fp32; its logits give the gap.
        name: printed with a divergence.

    Returns:
        Whether both are identical.

    Raises:
        AssertionError: they diverge where the logits are not within `bound` of each other.
    """
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        if ours != theirs:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *expected[:index]]])).logits[0, -1]
            gap = abs(float(logits[ours] - logits[theirs]))
            print(f"{name}: near-tie at token {index}: {ours} against {theirs}, logit gap {gap:.2e}")
            assert gap < bound, f"{name}: token {index} is {ours}, expected {theirs}, logit gap {gap:.2e}"
            return False
    assert len(got) == len(expected), f"{name}: {len(got)} tokens, expected {len(expected)}"
    return True
