"""Generation straight from the definitions: one request, one token at a time, no cache, no batch, no draft.

The slow twin of the whole engine. Written from the papers and the option definitions, sharing only the random stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.request import SamplingParams
from engine.sampling import Purpose, gumbel, stream_seed


def target_law(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """The law of the next token under the request's options.

    Args:
        logits: [V] float32.

    Returns:
        [V] float64, sums to 1.
    """
    if sampling.temperature == 0:
        law = np.zeros(len(logits))
        law[int(np.argmax(logits))] = 1.0
        return law
    scaled = logits.astype(np.float64) / sampling.temperature
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    order = np.argsort(-law, kind="stable")
    mass, kept = 0.0, np.zeros(len(law), dtype=bool)
    for token in order:
        kept[token] = True
        mass += law[token]
        if mass >= sampling.top_p:
            break
    law = np.where(kept, law, 0.0)
    return law / law.sum()


def generate(
    logits_after: Callable[[Sequence[int]], np.ndarray],
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_model_len: int,
) -> list[int]:
    """The tokens of a greedy or seeded request."""
    tokens = list(prompt)
    out: list[int] = []
    while len(out) < sampling.max_tokens and len(tokens) < max_model_len:
        law = target_law(logits_after(tokens), sampling)
        if sampling.temperature == 0:
            token = int(np.argmax(law))
        else:
            assert sampling.seed is not None
            seed = stream_seed(sampling.seed, len(tokens), Purpose.TOKEN, 0)
            noise = gumbel([seed], torch.arange(len(law)))[0].numpy()
            with np.errstate(divide="ignore"):
                token = int(np.argmax(np.log(law) + noise))
        tokens.append(token)
        out.append(token)
        if token in sampling.stop_token_ids:
            break
    return out
