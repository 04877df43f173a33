"""Generation by the definitions: one request, one token at a time, no cache, no batch, no draft.

The reference implementation of the engine, written in float64 from the papers and the definitions of the options. It
shares only the random stream with the engine. A grammar is given as the set of all its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.messages import FinishReason, GrammarSpec, SamplingParams, TokenLogprobs
from engine.sampling.distribution import Purpose, gumbel, stream_seed

LogitsAfter = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Spelling:
    """How tokens spell texts.

    Args:
        of_token: text of each token; empty for a token without text.
        end_ids: stop tokens of requests that name none.
        texts: every text of each grammar.
    """

    of_token: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    texts: Mapping[GrammarSpec, frozenset[str]] = field(default_factory=dict)

    def possible(self, grammar: GrammarSpec, generated: Sequence[int], end_ids: Sequence[int]) -> set[int]:
        """Tokens that continue the generated text to a text of the grammar, or end a complete one."""
        text = "".join(self.of_token[token] for token in generated)
        texts = self.texts[grammar]
        possible = {
            token
            for token, spelt in enumerate(self.of_token)
            if spelt and token not in end_ids and any(complete.startswith(text + spelt) for complete in texts)
        }
        return possible | (set(end_ids) if text in texts else set())


@dataclass(frozen=True)
class Generated:
    """The result of one request."""

    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


def end_ids_of(sampling: SamplingParams, spelling: Spelling) -> tuple[int, ...]:
    """Tokens that end the request."""
    return sampling.stop_token_ids or (spelling.end_ids if sampling.grammar is not None else ())


def processed(
    logits: np.ndarray, prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams, spelling: Spelling
) -> np.ndarray | None:
    """Logits after bias, penalties and masks, [V] float64; None if no token is allowed."""
    out = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        out[token] += bias
    for token in set(prompt) | set(generated):
        out[token] = (
            out[token] / sampling.repetition_penalty if out[token] > 0 else out[token] * sampling.repetition_penalty
        )
    for token in set(generated):
        out[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(generated).count(token)
    end_ids = end_ids_of(sampling, spelling)
    possible = set(range(len(out)))
    if sampling.grammar is not None:
        possible = spelling.possible(sampling.grammar, generated, end_ids)
    if len(generated) < sampling.min_tokens and possible - set(end_ids):
        possible -= set(end_ids)
    if not possible:
        return None
    out[[token for token in range(len(out)) if token not in possible]] = -np.inf
    return out


def target_distribution(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """The distribution of the next token, from processed logits.

    Args:
        logits: [V].

    Returns:
        [V] float64, sums to 1.
    """
    if sampling.temperature == 0:
        distribution = np.zeros(len(logits))
        distribution[int(np.argmax(logits))] = 1.0
        return distribution
    scaled = logits.astype(np.float64) / sampling.temperature
    distribution = np.exp(scaled - scaled.max())
    distribution /= distribution.sum()
    if sampling.top_k:
        distribution[np.argsort(-distribution, kind="stable")[sampling.top_k :]] = 0.0
        distribution /= distribution.sum()
    distribution[distribution < sampling.min_p * distribution.max()] = 0.0
    distribution /= distribution.sum()
    mass, kept = 0.0, np.zeros(len(distribution), dtype=bool)
    for token in np.argsort(-distribution, kind="stable"):
        kept[token] = True
        mass += distribution[token]
        if mass >= sampling.top_p:
            break
    distribution = np.where(kept, distribution, 0.0)
    return distribution / distribution.sum()


def token_logprobs(logits: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one position under the model's distribution, before any option."""
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    top = np.argsort(-exact, kind="stable")[:num_top]
    return TokenLogprobs(logprob=float(exact[token]), top=tuple((int(t), float(exact[t])) for t in top))


def generate(
    logits_after: LogitsAfter,
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_model_len: int,
    spelling: Spelling | None = None,
) -> Generated:
    """The result of a greedy or seeded request."""
    spelling = spelling or Spelling()
    tokens, out, logprobs = list(prompt), [], []
    finish_reason: FinishReason = "length"
    while len(out) < sampling.max_tokens and len(tokens) < max_model_len:
        logits = logits_after(tokens)
        allowed = processed(logits, prompt, out, sampling, spelling)
        if allowed is None:
            finish_reason = "error"
            break
        distribution = target_distribution(allowed, sampling)
        if sampling.temperature == 0:
            token = int(np.argmax(distribution))
        else:
            assert sampling.seed is not None
            seed = stream_seed(sampling.seed, len(tokens), Purpose.TOKEN, 0)
            noise = gumbel([seed], torch.arange(len(distribution)))[0].numpy()
            with np.errstate(divide="ignore"):
                token = int(np.argmax(np.log(distribution) + noise))
        tokens.append(token)
        out.append(token)
        if sampling.num_logprobs is not None:
            logprobs.append(token_logprobs(logits, token, sampling.num_logprobs))
        if token in end_ids_of(sampling, spelling):
            finish_reason = "stop"
            break
    num = sampling.num_prompt_logprobs
    scored = (
        [] if num is None else [token_logprobs(logits_after(prompt[:i]), prompt[i], num) for i in range(1, len(prompt))]
    )
    return Generated(out, finish_reason, logprobs, scored)


def sequence_distribution(
    logits_after: LogitsAfter, prompt: Sequence[int], sampling: SamplingParams, spelling: Spelling | None = None
) -> dict[tuple[int, ...], float]:
    """Probability of each response of at most `max_tokens` tokens."""
    spelling = spelling or Spelling()
    end_ids = end_ids_of(sampling, spelling)
    distribution: dict[tuple[int, ...], float] = {}
    begun: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while begun:
        response, mass = begun.pop()
        if len(response) == sampling.max_tokens or (response and response[-1] in end_ids):
            distribution[response] = mass
            continue
        allowed = processed(logits_after([*prompt, *response]), prompt, response, sampling, spelling)
        assert allowed is not None
        probs = target_distribution(allowed, sampling)
        begun += [((*response, token), mass * prob) for token, prob in enumerate(probs) if prob > 0]
    return distribution


def equal_logprobs(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs], *, bound: float) -> bool:
    """Whether all log-probabilities agree within `bound`. Tokens of nearly equal probability may be in any order."""
    return len(got) == len(expected) and all(
        abs(a.logprob - b.logprob) < bound
        and len(a.top) == len(b.top)
        and all(abs(x[1] - y[1]) < bound for x, y in zip(a.top, b.top, strict=True))
        for a, b in zip(got, expected, strict=True)
    )
