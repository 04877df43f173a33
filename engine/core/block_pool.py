"""KV blocks as plain integers: which are free, which are held, and which hold a known prefix.

Owns the free list, reference counts, the hash-based prefix cache and its evictions. Knows no tensor. Only this class
changes an owner's `block_ids`.

    block 0 is scratch: padding points to it, no owner holds it
    free    oldest ... newest      a freed block keeps its hash until it is allocated again
    held    block id -> number of references
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.errors import ConfigError

SCRATCH_BLOCK = 0
"""Id of the block that padding points to."""


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks of a pool at one moment, the scratch block excluded."""

    num_free: int
    """Blocks that can be handed out; blocks of cached prefixes are among them."""
    num_used: int
    """Blocks that requests hold."""
    num_evicted: int
    """Cached blocks overwritten so far because space was needed."""


class BlockOwner(Protocol):
    """What holds blocks: a request of the target, or a sequence of the draft."""

    key: int
    """Unique among the owners of the pool."""
    tokens: list[int]
    """Tokens in order; token i belongs to KV slot i of the blocks."""
    block_ids: list[int]
    """Blocks in order. Written by the pool only."""

    @property
    def cache_salt(self) -> bytes:
        """What the content of the blocks depends on besides the tokens. Owners with different salts share no block."""
        ...

    @property
    def num_computed(self) -> int:
        """KV slots that are filled, counted from the first."""
        ...


class BlockPool:
    """Allocates KV blocks to owners.

    Args:
        num_blocks: blocks of the cache, including the scratch block.
        block_size: tokens per block.
        prefix_cache: whether owners share blocks with equal prefixes.
        ahead: tokens after its own that the content of a KV slot depends on. 1 for an EAGLE draft, else 0.

    Raises:
        ConfigError: there is no block besides the scratch block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool, ahead: int = 0) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks: {num_blocks} leaves no KV block to allocate; allowed: 2 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        """Cached blocks that were allocated again and so lost their content."""
        self._prefix_cache = prefix_cache
        self._ahead = ahead
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._chain: dict[int, list[bytes]] = {}  # owner's key -> hashes of its registered blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, including those that hold cached prefixes."""
        return len(self._free)

    def usage(self) -> BlockUsage:
        """Free, held and evicted blocks. Thread-safe."""
        num_free = len(self._free)
        return BlockUsage(num_free=num_free, num_used=self.num_blocks - 1 - num_free, num_evicted=self.num_evicted)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the whole pool."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def attach_prefix(self, owner: BlockOwner) -> int:
        """Give an owner without blocks the cached blocks of its longest known prefix.

        The last token is never part of it: its logits must be computed.

        Returns:
            Number of tokens found, a multiple of block_size.
        """
        chain: list[bytes] = []
        if self._prefix_cache:
            limit = max(0, len(owner.tokens) - 1 - self._ahead) // self.block_size
            for digest in self._digests(owner, [], limit):
                block = self._block_of.get(digest)
                if block is None:
                    break
                chain.append(digest)
                self._hold(block)
                owner.block_ids.append(block)
        self._chain[owner.key] = chain
        return len(chain) * self.block_size

    def reserve(self, owner: BlockOwner, num_tokens: int) -> bool:
        """Allocate blocks until the owner has room for `num_tokens` tokens.

        Returns:
            False if there are too few free blocks; the owner's blocks are unchanged then.
        """
        missing = self.blocks_for(num_tokens) - len(owner.block_ids)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            owner.block_ids.append(block)
        return True

    def register(self, owner: BlockOwner) -> None:
        """Enter the owner's full, computed blocks into the prefix cache."""
        if not self._prefix_cache:
            return
        chain = self._chain.setdefault(owner.key, [])
        full = owner.num_computed // self.block_size
        for index, digest in enumerate(self._digests(owner, chain, full), start=len(chain)):
            block = owner.block_ids[index]
            if digest not in self._block_of and block not in self._hash_of:
                self._block_of[digest] = block
                self._hash_of[block] = digest
            chain.append(digest)

    def trim(self, owner: BlockOwner, num_tokens: int) -> None:
        """Free the blocks beyond those that `num_tokens` tokens need: rolls back rejected draft tokens."""
        keep = self.blocks_for(num_tokens)
        while len(owner.block_ids) > keep:
            self._drop(owner.block_ids.pop())

    def release(self, owner: BlockOwner) -> None:
        """Free all blocks of an owner that ends or is preempted. Cached content stays in the prefix cache."""
        # Last blocks first, so that they are evicted first: a prefix is useless without its first blocks.
        while owner.block_ids:
            self._drop(owner.block_ids.pop())
        self._chain.pop(owner.key, None)

    def check(self) -> None:
        """Check the pool's invariants. For tests; O(num_blocks).

        Raises:
            AssertionError: free and held blocks are not all blocks, or the prefix index is inconsistent.
        """
        free, held = set(self._free), set(self._references)
        if free & held or len(free) + len(held) != self.num_blocks - 1 or SCRATCH_BLOCK in free | held:
            raise AssertionError(f"{len(free)} free + {len(held)} held blocks of {self.num_blocks - 1}")
        if any(count < 1 for count in self._references.values()):
            raise AssertionError("a held block without a reference")
        if {block: digest for digest, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("prefix index and block hashes disagree")

    def _digests(self, owner: BlockOwner, known: Sequence[bytes], upto: int) -> list[bytes]:
        """Content hashes of blocks len(known) .. upto - 1. Each includes its predecessor's, so it names a prefix."""
        digests: list[bytes] = []
        parent = known[-1] if known else owner.cache_salt
        tokens, size = owner.tokens, self.block_size
        for index in range(len(known), upto):
            content = np.asarray(tokens[index * size : (index + 1) * size + self._ahead], dtype=np.int64).tobytes()
            parent = hashlib.blake2b(parent + content, digest_size=16).digest()
            digests.append(parent)
        return digests

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            del self._references[block]
            self._free[block] = None
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.num_evicted += 1
