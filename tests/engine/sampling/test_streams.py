"""The random stream: its bits are part of the promise that a seed gives the same response in every version."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.sampling.distribution import Purpose, draw, gumbel, most_likely, seed_words, stream_seed, uniform

WORD = 0xFFFFFFFF


def noise_by_definition(seed: int, token: int) -> float:
    """The hash in unsigned 32-bit arithmetic, and standard Gumbel noise from 23 of its bits."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & WORD
        x ^= x >> 15
        x = x * 0x846CA68B & WORD
        return x ^ x >> 16

    x = mix((token * 0x9E3779B9 & WORD) ^ (seed & WORD))
    x = mix((x + (seed >> 32)) & WORD)
    return -math.log(-math.log(((x >> 9) + 0.5) / 2**23))


def test_noise_is_the_hash_of_seed_and_token() -> None:
    tokens = [*range(300), 2**16, 2**31 - 1]
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    found = gumbel(seeds, torch.tensor(tokens))
    assert found.shape == (len(seeds), len(tokens))
    for seed, row in zip(seeds, found.tolist(), strict=True):
        assert row == pytest.approx([noise_by_definition(seed, token) for token in tokens], rel=1e-4, abs=1e-4)


def test_noise_has_these_bits() -> None:
    """Equal on every device and in every version."""
    bits = gumbel([0, 2**64 - 1], torch.tensor([0, 1, 1000])).view(torch.int32).tolist()
    assert bits == GOLDEN


GOLDEN = [[-1070337975, 1064650208, 1080909695], [1081238365, -1096185440, -1096580772]]


@pytest.mark.parametrize(
    ("draw_of", "seed"),
    [
        ((0, 0, Purpose.TOKEN, 0), 0xF54E69225051B725),
        ((1, 0, Purpose.TOKEN, 0), 0x5CC5B6EDD2360663),
        ((0, 1, Purpose.TOKEN, 0), 0x87B40D3F30C676B7),
        ((0, 0, Purpose.DRAFT, 0), 0x6D9B91D3AE70E21F),
        ((0, 0, Purpose.ACCEPT, 0), 0xD6EE81CE5C90FCF2),
        ((0, 0, Purpose.RECOVER, 0), 0xD31B3A9ADEA347F6),
        ((0, 0, Purpose.TOKEN, 1), 0x133AF91B8B0D3475),
        ((-1, 2**40, Purpose.RECOVER, 7), 0xC6D23B117BFAA5DB),
        ((2**64 - 1, 2**40, Purpose.RECOVER, 7), 0xC6D23B117BFAA5DB),
    ],
)
def test_the_seed_of_each_draw_is_fixed(draw_of: tuple[int, int, Purpose, int], seed: int) -> None:
    assert stream_seed(*draw_of) == seed


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 0.0), (2**11 - 1, 0.0), (2**11, 2.0**-53), (2**63, 0.5), (3 * 2**62, 0.75), (2**64 - 1, 1 - 2.0**-53)],
)
def test_a_uniform_number_is_made_of_the_upper_53_bits(seed: int, number: float) -> None:
    assert uniform(seed) == number


def test_the_words_of_a_seed_are_its_low_and_its_high_half() -> None:
    words = seed_words([0x0123456789ABCDEF, 2**64 - 1])
    assert words.dtype == np.int32
    assert words.view(np.uint32).tolist() == [[0x89ABCDEF, 0x01234567], [WORD, WORD]]


def test_a_draw_takes_the_largest_sum_of_log_weight_and_noise() -> None:
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [1.0, 8.0, 0.0]])
    noise = torch.tensor([[0.0, 1.0, 99.0], [0.0, 2.0, 99.0], [2.0, 0.0, 99.0]])
    assert draw(weights, noise).tolist() == [1, 0, 1]


def test_the_most_likely_token_is_the_first_of_equals() -> None:
    assert most_likely(torch.tensor([[0.0, 2.0, 2.0], [-1.0, -2.0, -3.0]])).tolist() == [1, 0]
