"""KV blocks as plain integers: who holds which, and which can be found again by what they contain.

Owns free and held blocks, reference counts, the hash-based prefix cache and its evictions. Knows no tensor. Only this
class changes an owner's `block_ids`.

    block 0 is scratch: padding points there and nobody owns it
    free    oldest ... newest      a freed block keeps its hash until it is handed out again
    held    block id -> references
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
    """What the pool needs to know of a request (of the target) or a sequence (of the draft)."""

    key: int
    tokens: list[int]
    block_ids: list[int]

    @property
    def num_computed(self) -> int:
        """Cells of its blocks that hold something, from the first on."""
        ...


class BlockPool:
    """Allocates KV blocks to requests.

    Args:
        num_blocks: blocks of the cache, the scratch block included.
        block_size: tokens per block.
        prefix_cache: whether blocks with equal prefixes are shared.
        ahead: what a cell holds depends on so many tokens after its own, too.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool, ahead: int = 0) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks: {num_blocks} leaves no KV block to hand out; allowed: 2 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        """Cached blocks overwritten because space was needed."""
        self._prefix_cache = prefix_cache
        self._ahead = ahead
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._chain: dict[int, list[bytes]] = {}  # request key -> hashes of its registered blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out; those of cached prefixes are among them."""
        return len(self._free)

    def usage(self) -> BlockUsage:
        """Free, held and evicted blocks. Thread-safe."""
        num_free = len(self._free)
        return BlockUsage(num_free=num_free, num_used=self.num_blocks - 1 - num_free, num_evicted=self.num_evicted)

    @property
    def capacity(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def attach_prefix(self, request: BlockOwner) -> int:
        """Give a request without blocks the cached blocks of its longest known prefix.

        At least the last cell is left out: its logits must be computed.

        Returns:
            Cells found, a multiple of block_size.
        """
        chain: list[bytes] = []
        if self._prefix_cache:
            limit = max(0, len(request.tokens) - 1 - self._ahead) // self.block_size
            for digest in self._digests(request.tokens, [], limit):
                block = self._block_of.get(digest)
                if block is None:
                    break
                chain.append(digest)
                self._hold(block)
                request.block_ids.append(block)
        self._chain[request.key] = chain
        return len(chain) * self.block_size

    def reserve(self, request: BlockOwner, num_tokens: int) -> bool:
        """Make sure the request has blocks for `num_tokens` tokens; all or nothing.

        Returns:
            False when there are not enough free blocks; nothing has changed then.
        """
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            request.block_ids.append(block)
        return True

    def register(self, request: BlockOwner) -> None:
        """Make the request's full, computed blocks findable by their content."""
        if not self._prefix_cache:
            return
        chain = self._chain.setdefault(request.key, [])
        full = request.num_computed // self.block_size
        for index, digest in enumerate(self._digests(request.tokens, chain, full), start=len(chain)):
            block = request.block_ids[index]
            if digest not in self._block_of and block not in self._hash_of:
                self._block_of[digest] = block
                self._hash_of[block] = digest
            chain.append(digest)

    def trim(self, request: BlockOwner, num_tokens: int) -> None:
        """Roll back: return the blocks beyond what `num_tokens` tokens need."""
        keep = self.blocks_for(num_tokens)
        while len(request.block_ids) > keep:
            self._drop(request.block_ids.pop())

    def release(self, request: BlockOwner) -> None:
        """Return all blocks of a request that ends or is preempted. Cached content stays findable."""
        # Last blocks first, so that they are evicted first: a prefix is useless without its beginning.
        while request.block_ids:
            self._drop(request.block_ids.pop())
        self._chain.pop(request.key, None)

    def check(self) -> None:
        """Raise AssertionError when the books do not balance. For tests; O(num_blocks)."""
        free, held = set(self._free), set(self._references)
        if free & held or len(free) + len(held) != self.num_blocks - 1 or SCRATCH_BLOCK in free | held:
            raise AssertionError(f"{len(free)} free + {len(held)} held blocks of {self.num_blocks - 1}")
        if any(count < 1 for count in self._references.values()):
            raise AssertionError("a held block without a reference")
        if {block: digest for digest, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("prefix index and block hashes disagree")

    def _digests(self, tokens: Sequence[int], known: Sequence[bytes], upto: int) -> list[bytes]:
        """Chained content hashes of blocks len(known) .. upto - 1."""
        digests: list[bytes] = []
        parent = known[-1] if known else b""
        size = self.block_size
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
