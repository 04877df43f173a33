"""A vocabulary of all bytes and some words, and the grammars over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import xgrammar

from engine.sampling.grammar import Grammars, Matcher

WORDS = ['{"', '":', '", "', '"}', "name", "12", ", ", "true", "null", '\\"', "\\u00", "é", "[]", "{}", '"a']
BYTE_VOCAB = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS] + [b""]
END = len(BYTE_VOCAB) - 1


def byte_grammars(**options: Any) -> Grammars:
    """Grammars over the byte vocabulary."""
    return Grammars(lambda: xgrammar.TokenizerInfo(BYTE_VOCAB, vocab_size=END + 1, stop_token_ids=[END]), **options)


def allowed(matcher: Matcher, *, forbid_stop: bool = False) -> list[int]:
    """Token ids that the grammar allows next."""
    mask = np.zeros((1, matcher.num_words), dtype=np.int32)
    matcher.fill(mask, 0, forbid_stop=forbid_stop)
    tokens: list[int] = ((mask[0, :, None] >> np.arange(32)) & 1).reshape(-1).nonzero()[0].tolist()
    return tokens
