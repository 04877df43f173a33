"""Edges of the cuts: masses that reach top_p exactly or never, and masks that leave nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fakes import FixedPacer, ToyEngine, ToyModel

from engine.core.drafter import NoDrafter
from engine.messages import SamplingParams, Submit
from engine.sampling.distribution import warp
from engine.sampling.logits_processor import BatchLogitsProcessor, Columns, LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

JUST_BELOW_ONE = 1 - 2**-24
HALVES = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
"""Logits whose probabilities are exact in float32."""


def cut(logits: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[list[float]]:
    row = RowSampling(1.0, top_p, 0, 0, False, top_k, min_p)
    probs: list[list[float]] = warp(logits.clone(), [row] * len(logits)).tolist()
    return probs


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.49, [1, 0, 0, 0]),
        (0.5, [1, 0, 0, 0]),
        (0.51, [2 / 3, 1 / 3, 0, 0]),
        (0.75, [2 / 3, 1 / 3, 0, 0]),
        (0.76, [0.5, 0.25, 0.125, 0.125]),
    ],
)
def test_the_token_that_reaches_top_p_exactly_is_the_last_one_kept(top_p: float, expected: list[float]) -> None:
    assert cut(HALVES, top_p=top_p)[0] == pytest.approx(expected, abs=1e-7)


def test_without_top_p_tokens_beyond_the_precision_of_a_sum_are_kept() -> None:
    """The first token has all of the float32 mass."""
    first, second = cut(torch.tensor([[30.0, 0.0]]))[0]
    assert first == 1.0
    assert second == pytest.approx(math.exp(-30), rel=1e-5, abs=0.0)


@pytest.mark.parametrize("num_tokens", [100, 2000])
def test_a_row_whose_mass_never_reaches_top_p_keeps_every_token(num_tokens: int) -> None:
    """Rounding leaves some rows of float32 probabilities with a sum below top_p. Their neighbours are not affected."""
    short = None
    for seed in range(1000):
        logits = torch.randn(1, num_tokens, generator=torch.Generator().manual_seed(seed)) * 2
        ordered = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True).values
        if float(ordered.cumsum(dim=-1)[0, -1]) < JUST_BELOW_ONE:
            short = logits
            break
    assert short is not None
    sharp = torch.zeros(1, num_tokens)
    sharp[0, 3] = 40.0
    kept, neighbour = cut(torch.cat([short, sharp]), top_p=JUST_BELOW_ONE)
    assert kept == pytest.approx(torch.softmax(short, dim=-1)[0].tolist(), rel=1e-5)
    assert all(prob > 0 for prob in kept)
    assert neighbour[3] == 1.0
    assert sum(neighbour) == 1.0


def test_a_nucleus_wider_than_the_head_has_the_fewest_tokens_that_reach_top_p() -> None:
    """1024 tokens in falling steps of equal ones: after 300 or 301 of them the mass is half."""
    weights = np.array([2.0] * 300 + [1.0] * 600 + [0.5] * 124)
    weights *= np.random.default_rng(0).uniform(0.999, 1.0, len(weights))
    weights = -np.sort(-weights)
    probs = weights / weights.sum()
    num_kept = int(np.searchsorted(np.cumsum(probs), 0.5)) + 1
    assert num_kept > 256
    (row,) = cut(torch.tensor(np.log(probs), dtype=torch.float32).unsqueeze(0), top_p=0.5)
    assert abs(sum(prob > 0 for prob in row) - num_kept) <= 1, "one token at the edge may differ by rounding"
    assert all(prob > 0 for prob in row[: num_kept - 1])
    assert sum(row) == pytest.approx(1.0, abs=1e-5)


def test_top_k_and_min_p_keep_what_they_name() -> None:
    assert cut(HALVES, top_k=2)[0] == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-7)
    assert cut(HALVES, top_k=3)[0] == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=1e-7), "equals are kept together"
    assert cut(HALVES, top_k=4)[0] == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=1e-7)
    assert cut(HALVES, min_p=0.5)[0] == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-7), "half of the largest is enough"
    assert cut(HALVES, min_p=0.51)[0] == [1, 0, 0, 0]
    assert cut(HALVES, min_p=0.25, top_p=0.6)[0] == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-7)


def test_each_row_is_cut_by_its_own_options() -> None:
    rows = [
        RowSampling(0.5, 1.0, 0, 0, False),
        RowSampling(1.0, 0.5, 0, 0, False),
        RowSampling(1.0, 1.0, 0, 0, False, 2),
    ]
    probs = warp(HALVES.repeat(3, 1), rows).tolist()
    assert probs[0] == pytest.approx([16 / 22, 4 / 22, 1 / 22, 1 / 22], abs=1e-6), "a temperature of 0.5 squares them"
    assert probs[1] == [1, 0, 0, 0]
    assert probs[2] == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-7)


def with_min_tokens(num_columns: int, stop_token_ids: tuple[int, ...], columns: Columns | None = None) -> list[float]:
    """Logits of one row, all 1, where min_tokens is still ahead."""
    options = TokenOptions.of(SamplingParams(min_tokens=2, stop_token_ids=stop_token_ids), 1)
    assert options is not None
    processor = LogitsProcessor(options)
    processor.follow([5])
    batch = BatchLogitsProcessor(columns)
    batch.add(0, processor)
    logits = torch.ones(1, num_columns)
    batch.apply(logits)
    row: list[float] = logits[0].tolist()
    return row


def test_min_tokens_forbids_stop_tokens_unless_there_are_no_others() -> None:
    assert with_min_tokens(4, (0, 2)) == [-math.inf, 1, -math.inf, 1]
    assert with_min_tokens(3, (0, 1)) == [-math.inf, -math.inf, 1]
    assert with_min_tokens(3, (0, 1, 2)) == [1, 1, 1], "every token stops: min_tokens gives way"
    assert with_min_tokens(3, (0, 9)) == [-math.inf, 1, 1], "a stop token beyond the vocabulary is no token"
    assert with_min_tokens(2, (0,), Columns(torch.tensor([4, 0]))) == [1, -math.inf]


def test_a_request_whose_every_token_stops_ends_with_its_first_one() -> None:
    engine = ToyEngine(ToyModel(vocab_size=3), NoDrafter(), FixedPacer(0))
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        sampling = SamplingParams(temperature=temperature, min_tokens=4, max_tokens=8, stop_token_ids=(0, 1, 2))
        (token,) = engine.run([Submit(request_id=name, prompt=(1,), sampling=sampling)])[name]
        assert 0 <= token < 3
        assert engine.deltas[name][-1].finish_reason == "stop"
