"""A vocabulary of all bytes and some words, the grammars over it, and random texts of a grammar."""

from __future__ import annotations

import codecs
import random
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


def walk(matcher: Matcher, rng: random.Random, most: int) -> str | None:
    """A text of random choices that are UTF-8; None when it is not complete after `most` tokens."""
    text = b""
    for _ in range(most):
        tokens = [token for token in allowed(matcher) if token == END or _is_utf8(text + BYTE_VOCAB[token])]
        if not tokens:
            return None
        # A text ends as soon as it may. Otherwise most texts of an open schema would never end.
        closing = [token for token in tokens if token == END or BYTE_VOCAB[token] in (b'"', b"}", b"]", b'"}')]
        token = rng.choice(closing if closing and rng.random() < 0.6 else tokens)
        assert matcher.push(token)
        if token == END:
            return text.decode()
        text += BYTE_VOCAB[token]
    return None


def _is_utf8(text: bytes) -> bool:
    """Whether it is the beginning of some text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    return True
