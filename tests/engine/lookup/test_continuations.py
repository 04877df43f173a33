"""The tree of continuations: every path is how a text went on, and the likeliest nodes come first."""

from __future__ import annotations

import random

import pytest

from engine.lookup.continuations import Role, join

SHARES: dict[Role, float] = {"alone": 0.9, "first": 0.6, "other": 0.2}


def expected(role: Role, depth: int) -> float:
    del depth
    return SHARES[role]


def tree_of(texts: list[str], k: int) -> tuple[str, tuple[int, ...], tuple[Role, ...]]:
    """The tree of texts, the latest first, as its tokens, parents and roles."""

    def token_at(position: int, ahead: int) -> int:
        return ord(texts[position][ahead]) if ahead < len(texts[position]) else -1

    found = join(range(len(texts)), token_at, k, expected)
    assert found.expected == tuple(SHARES[role] for role in found.roles)
    return "".join(map(chr, found.token_ids)), found.parents, found.roles


@pytest.mark.parametrize(
    ("texts", "k", "tokens", "parents", "roles"),
    [
        (["abc"], 2, "ab", (-1, 0), ("alone", "alone")),
        (["abc", "abd", "x"], 9, "abcxd", (-1, 0, 1, -1, 1), ("first", "alone", "first", "other", "other")),
        (["x", "abc", "abd"], 2, "ab", (-1, 0), ("first", "alone")),  # frequent before late
        (["x", "a"], 2, "xa", (-1, -1), ("first", "other")),  # late where equally frequent
        (["", "a"], 3, "a", (-1,), ("alone",)),
        (["", ""], 3, "", (), ()),
    ],
)
def test_common_prefixes_are_shared(
    texts: list[str], k: int, tokens: str, parents: tuple[int, ...], roles: tuple[Role, ...]
) -> None:
    assert tree_of(texts, k) == (tokens, parents, roles)


def test_every_path_is_how_some_text_went_on() -> None:
    rng = random.Random(2)
    for _ in range(200):
        texts = ["".join(rng.choices("ab", k=rng.randint(0, 6))) for _ in range(rng.randint(1, 5))]
        k = rng.randint(1, 12)
        tokens, parents, _ = tree_of(texts, k)
        paths: list[str] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((paths[parent] if parent >= 0 else "") + token)
        prefixes = {text[:end] for text in texts for end in range(1, len(text) + 1)}
        assert len(set(paths)) == len(paths) == min(k, len(prefixes))
        assert set(paths) <= prefixes
