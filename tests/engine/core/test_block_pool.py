"""The block pool as a state machine: after any sequence of calls its invariants hold and no content is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.block_pool import BlockPool
from engine.errors import ConfigError

NUM_BLOCKS, BLOCK_SIZE = 12, 2


@dataclass(eq=False)
class Owner:
    key: int
    tokens: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    cache_salt: bytes = b""


def test_owners_of_different_salts_share_no_block() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True)
    salts = [b"", b"one", b"two", b"one"]
    found = []
    for key, salt in enumerate(salts):
        owner = Owner(key, [1, 1, 1, 1, 1], cache_salt=salt)
        owner.num_computed = pool.attach_prefix(owner)
        found.append(owner.num_computed)
        assert pool.reserve(owner, 5)
        owner.num_computed = 4
        pool.register(owner)
        pool.release(owner)
        pool.check()
    assert found == [0, 0, 0, 4]


class PoolMachine(RuleBasedStateMachine):
    """Owners arrive, compute, roll back and leave. `content` is what a KV cache would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True)
        self.owners: list[Owner] = []
        self.content: dict[tuple[int, int], int] = {}
        self.next_key = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def arrive(self, tokens: list[int]) -> None:
        owner = Owner(self.next_key, tokens)
        self.next_key += 1
        owner.num_computed = self.pool.attach_prefix(owner)
        assert owner.num_computed < len(tokens), "the last token is always left to compute"
        for position in range(owner.num_computed):
            assert self._content_of(owner, position) == tokens[position], "a cached block holds other tokens"
        self.owners.append(owner)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), extra=st.integers(0, 3), accepted=st.integers(0, 3))
    def compute(self, data: st.DataObject, extra: int, accepted: int) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        length = len(owner.tokens)
        before = list(owner.block_ids)
        if not self.pool.reserve(owner, length + extra):
            assert owner.block_ids == before
            return
        drafted = [7] * extra  # written to the cache, then partly rejected
        for position in range(owner.num_computed, length + extra):
            self._write(owner, position, [*owner.tokens, *drafted][position])
        kept = min(accepted, extra)
        owner.tokens += [7] * kept
        owner.num_computed = length + kept
        self.pool.register(owner)
        owner.tokens.append(1)
        self.pool.trim(owner, len(owner.tokens))
        for position in range(owner.num_computed):
            assert self._content_of(owner, position) == owner.tokens[position]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.pool.release(owner)
        assert owner.block_ids == []
        self.owners.remove(owner)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()

    def teardown(self) -> None:
        for owner in self.owners:
            self.pool.release(owner)
        assert self.pool.num_free == NUM_BLOCKS - 1

    def _content_of(self, owner: Owner, position: int) -> int | None:
        return self.content.get((owner.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE))

    def _write(self, owner: Owner, position: int, token: int) -> None:
        block = owner.block_ids[position // BLOCK_SIZE]
        users = [o for o in self.owners if block in o.block_ids]
        assert users == [owner], "no owner writes into a shared block"
        self.content[block, position % BLOCK_SIZE] = token


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_full_pool_refuses_without_changing_anything() -> None:
    pool = BlockPool(3, 4, prefix_cache=False)
    owner = Owner(0, [1] * 20)
    assert not pool.reserve(owner, 9)
    assert owner.block_ids == []
    assert pool.reserve(owner, 8)
    assert pool.num_free == 0


def test_evictions_are_counted_and_the_oldest_goes_first() -> None:
    pool = BlockPool(4, 1, prefix_cache=True)
    for key, token in enumerate((5, 6, 7)):
        owner = Owner(key, [token, 0])
        assert pool.reserve(owner, 1)
        owner.num_computed = 1
        pool.register(owner)
        pool.release(owner)
    assert pool.num_evicted == 0
    newcomer = Owner(9, [8, 0])
    assert pool.reserve(newcomer, 1)
    assert pool.num_evicted == 1
    assert pool.attach_prefix(Owner(10, [5, 0])) == 0
    assert pool.attach_prefix(Owner(11, [7, 0])) == 1


def test_blocks_without_cached_content_are_taken_before_those_with_it() -> None:
    pool = BlockPool(3, 1, prefix_cache=True)
    cached, other = Owner(0, [5, 0]), Owner(1, [6, 0])
    for owner in (cached, other):
        assert pool.reserve(owner, 1)
        owner.num_computed = 1
        if owner is cached:
            pool.register(owner)
        pool.release(owner)
    assert pool.reserve(Owner(2, [7, 0]), 1)
    assert pool.num_evicted == 0
    assert pool.attach_prefix(Owner(3, [5, 0])) == 1


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(1, 4, prefix_cache=True)


def test_a_prefix_ends_where_a_block_of_it_is_missing() -> None:
    """Two owners compute the same first block at once; the one that was cached is evicted, the second block stays."""
    pool = BlockPool(6, 1, prefix_cache=True)
    first, second = Owner(0, [5, 6, 0]), Owner(1, [5, 6, 0])
    for owner, num_computed in ((first, 1), (second, 2)):
        assert pool.reserve(owner, num_computed)
        owner.num_computed = num_computed
    for owner in (first, second):
        pool.register(owner)
    pool.release(first)
    found = Owner(2, [5, 6, 0])
    assert pool.attach_prefix(found) == 2
    pool.release(found)
    assert pool.reserve(Owner(3, [9] * 4), 3)
    assert pool.num_evicted == 1
    missed = Owner(4, [5, 6, 0])
    assert pool.attach_prefix(missed) == 0
    assert missed.block_ids == []
    pool.check()
