"""Logit bias and the three penalties of one request, as sparse changes of single logits.

Owns the token counts of one request. Knows no probabilities, no batch and no grammar. A token is pushed when it is
committed or drafted, and popped when a drafted token is rolled back.

    logit + bias, then divided (or multiplied) by the repetition penalty (Keskar et al. 2019),
    then minus presence and frequency penalties
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from engine.messages import GrammarSpec, SamplingParams

LARGEST = 1e6
"""Largest magnitude of a penalty or bias. Far above any logit; products with token counts still fit in float32."""
SMALLEST_REPETITION = 1e-6
"""Smallest repetition penalty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """The options that depend on earlier tokens or name single tokens. `SamplingParams` documents them.

    Raises:
        ValueError: a value is not finite, out of range, or not a token id.
    """

    num_prompt: int
    """Number of prompt tokens. All later tokens count as generated."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        values = (*penalties, *(bias for _, bias in self.logit_bias))
        if not all(math.isfinite(value) and abs(value) <= LARGEST for value in values):
            raise ValueError(
                f"options: penalties {penalties} and every bias must be finite and within {LARGEST:g} of 0"
            )
        if self.repetition_penalty < SMALLEST_REPETITION:
            raise ValueError(
                f"options: repetition_penalty {self.repetition_penalty} given, allowed is {SMALLEST_REPETITION} or more"
            )
        token_ids = (*self.stop_token_ids, *(token for token, _ in self.logit_bias))
        if min((self.num_prompt, *token_ids)) < 0 or max(token_ids, default=0) >= 2**31:
            raise ValueError("options: num_prompt or a token id is out of range")

    @classmethod
    def of(cls, sampling: SamplingParams, num_prompt: int) -> Self | None:
        """The options of a request; None if all have their neutral value, so that the request needs no state."""
        min_tokens = sampling.min_tokens if sampling.stop_token_ids or sampling.grammar is not None else 0
        neutral = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)
        if neutral and not sampling.logit_bias and min_tokens == 0 and sampling.grammar is None:
            return None
        return cls(
            num_prompt=num_prompt,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            min_tokens=min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            grammar=sampling.grammar,
        )


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """New values of n logits of one row: (logit + bias, divided or multiplied by divisor) - offset. Arrays are [n]."""

    token_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    divisor: npt.NDArray[np.float32]
    offset: npt.NDArray[np.float32]


class Penalties:
    """Token counts of one request, and the logit edits that follow from them."""

    def __init__(self, options: TokenOptions) -> None:
        self._options = options
        self._counts_prompt = options.repetition_penalty != 1.0
        self._counts = self._counts_prompt or options.presence_penalty != 0.0 or options.frequency_penalty != 0.0
        self._slots: dict[int, int] = {}
        self._token_ids = np.zeros(16, dtype=np.int64)
        self._bias = np.zeros(16, dtype=np.float32)
        self._generated = np.zeros(16, dtype=np.int64)
        self._total = np.zeros(16, dtype=np.int64)
        for token, bias in options.logit_bias:
            slot = self._slot(token)  # first: it may replace the array
            self._bias[slot] += bias

    def push(self, token: int, *, generated: bool) -> None:
        """Count one more occurrence of a token."""
        self._count(token, 1, generated)

    def pop(self, token: int, *, generated: bool) -> None:
        """Undo a push."""
        self._count(token, -1, generated)

    def edits(self) -> LogitEdits | None:
        """The edits of the next position, given all pushed tokens; None if there are none."""
        num = len(self._slots)
        if num == 0:
            return None
        options = self._options
        generated, total = self._generated[:num], self._total[:num]
        offset = options.presence_penalty * (generated > 0) + options.frequency_penalty * generated
        divisor = np.where(total > 0, options.repetition_penalty, 1.0)
        return LogitEdits(
            self._token_ids[:num].copy(), self._bias[:num].copy(), divisor.astype(np.float32), offset.astype(np.float32)
        )

    def _count(self, token: int, change: int, generated: bool) -> None:
        if self._counts and (generated or self._counts_prompt):
            slot = self._slot(token)
            self._total[slot] += change
            self._generated[slot] += change * generated

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._token_ids):
                self._token_ids, self._bias = _doubled(self._token_ids), _doubled(self._bias)
                self._generated, self._total = _doubled(self._generated), _doubled(self._total)
            self._token_ids[slot] = token
        return slot


def _doubled(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([values, np.zeros_like(values)])
