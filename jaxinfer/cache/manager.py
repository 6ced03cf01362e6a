"""The scheduler's view of the KV cache: look up, allocate, commit, free.

Rules 15 to 19 of the scheduling specification, kept in one place. What a request owns is its `block_ids`; what this
class remembers of it beside that is the chain of digests of its full blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxinfer.cache.block_pool import BlockPool
from jaxinfer.cache.prefix_index import PrefixIndex
from jaxinfer.core import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A reusable prefix: whole blocks to share, then maybe part of one block to copy.

    `num_tokens` counts both; `partial_source` is the block to copy from, or 0.
    """

    block_ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    partial_source: int = 0


@dataclass(slots=True)
class CacheStats:
    """Counts since the start: tokens looked up at admission, tokens reused, blocks copied."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_partial_copies: int = 0


class KVCacheManager:
    """Blocks of `block_size` tokens for requests, with reuse of committed prefixes.

    Args:
      num_blocks: blocks in the device arrays, the null block included.
      block_size: tokens a block.
      enable_prefix_caching: without it nothing is looked up or registered.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, is_cached=self.index.__contains__, on_take=self.index.drop)
        self.stats = CacheStats()
        self._digests: dict[Request, list[bytes]] = {}
        self._copying: set[Request] = set()  # admitted with a copy whose step has not been committed

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        return self.pool.num_used / self.pool.num_usable

    def lookup(self, request: Request) -> PrefixHit:
        """The longest reusable prefix, at most `num_tokens - 1`: one token is always computed for its logits.

        Changes nothing. Use the hit in the same plan, or not at all.
        """
        if not self.enable_prefix_caching:
            return PrefixHit()
        size, tokens = self.block_size, request.token_ids
        limit = len(tokens) - 1
        digest = PrefixIndex.root(request.cache_salt)
        blocks, digests = [], []
        for start in range(0, limit, size):
            query = tokens[start : start + size]
            block, length = self.index.find(digest, query)
            if length < size or start + size > limit:
                length = min(length, limit - start)
                return PrefixHit(blocks, digests, start + length, block if length else 0)
            digest = PrefixIndex.extend(digest, query)
            blocks.append(block)
            digests.append(digest)
        return PrefixHit(blocks, digests, len(blocks) * size)

    def fork(self, leader: Request, num_prompt_tokens: int) -> PrefixHit:
        """The hit that a sibling has in its leader's prompt blocks: all but one token, with or without caching."""
        num_tokens = num_prompt_tokens - 1
        full, rest = divmod(num_tokens, self.block_size)
        source = leader.block_ids[full] if rest else 0
        return PrefixHit(leader.block_ids[:full], self._digests[leader][:full], num_tokens, source)

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> list[tuple[int, int]] | None:
        """Gives a request that owns nothing the blocks for its first `num_tokens` tokens, the hit's included.

        Returns the (source, destination) block copies to make before the step, or None, changing nothing, when
        there are too few free blocks. The copied block's destination is the block that the first computed token
        needs anyway, so there is no state in which only the copy lacks a block. The source takes no reference:
        copies of a plan read before anything of that plan writes.
        """
        assert not request.block_ids, f"request {request.request_id} is admitted twice"
        num_new = self._blocks_for(num_tokens) - len(hit.block_ids)
        if num_new > self.pool.num_free - self.pool.count_free(hit.block_ids):
            return None
        self.pool.touch(hit.block_ids)
        taken = self.pool.take(num_new)
        assert taken is not None
        request.block_ids = [*hit.block_ids, *taken]
        self._digests[request] = list(hit.digests)
        self.stats.num_queried_tokens += request.num_tokens
        self.stats.num_hit_tokens += hit.num_tokens
        if not hit.partial_source:
            return []
        self.stats.num_partial_copies += 1
        self._copying.add(request)
        return [(hit.partial_source, taken[0])]

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all; False, changing nothing, when there are too few blocks."""
        num_new = self._blocks_for(num_tokens) - len(request.block_ids)
        if num_new <= 0:
            return True
        taken = self.pool.take(num_new)
        if taken is None:
            return False
        request.block_ids.extend(taken)
        return True

    def commit(self, request: Request, num_committed: int, *, with_tail: bool = False) -> None:
        """Registers the full blocks among the first `num_committed` tokens, whose K and V are surely written.

        To be called when a step of the request was committed.

        Args:
          with_tail: registers the last, partly filled block too.
        """
        self._copying.discard(request)
        if not self.enable_prefix_caching or request not in self._digests:
            return
        size, tokens, digests = self.block_size, request.token_ids, self._digests[request]
        num_committed = min(num_committed, len(tokens))
        parent = digests[-1] if digests else PrefixIndex.root(request.cache_salt)
        for number in range(len(digests), num_committed // size):
            content = tokens[number * size : (number + 1) * size]
            self.index.register(request.block_ids[number], parent, content)
            parent = PrefixIndex.extend(parent, content)
            digests.append(parent)
        tail = tokens[len(digests) * size : num_committed]
        if with_tail and tail:
            self.index.register(request.block_ids[len(digests)], parent, tail)

    def free(self, request: Request, num_committed: int) -> None:
        """Gives back every block of a request; registered ones stay reusable until they are taken.

        Its tail is registered first, unless a copy into its blocks is still in flight.
        """
        if request not in self._copying:
            self.commit(request, num_committed, with_tail=True)
        self._copying.discard(request)
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        self._digests.pop(request, None)

    def discard(self, request: Request) -> None:
        """Gives back every block of a request whose content is not to be trusted: nothing of it stays reusable."""
        for block in request.block_ids:
            self.index.drop(block)
        self.free(request, 0)

    def reset(self) -> None:
        """Empties the prefix index. Running requests keep their blocks."""
        self.index.clear()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Asserts that the pool, the index and the live requests' tables agree."""
        requests = list(requests)
        self.pool.check_integrity([request.block_ids for request in requests])
        self.index.check_integrity()
        owners = {request for request in requests if request.block_ids}
        assert set(self._digests) == owners, "digests are kept for requests without blocks"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
