"""Reference-counted blocks and the free list.

The free list is a doubly linked list threaded through two int lists; block 0, the null block that padding rows
write to, doubles as its sentinel, so it can never be handed out:

      0 <-> 7 <-> 3 <-> ... <-> 12 <-> 0
            ^ taken next               ^ cached blocks come back here: least recently used first

A freed block keeps its content and its place in the prefix index until it is taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


class BlockPool:
    """`num_blocks` blocks, of which block 0 is reserved.

    Args:
      num_blocks: blocks in the device arrays, the null block included.
      is_cached: says whether a block is in the prefix index; decides which end of the free list it goes to.
      on_take: called with a block's id when it is taken from the free list (its content is about to go).
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        is_cached: Callable[[int], bool] = lambda block: False,
        on_take: Callable[[int], None] = lambda block: None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is reserved), got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_free = num_blocks - 1
        self._is_cached = is_cached
        self._on_take = on_take
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def take(self, count: int) -> list[int] | None:
        """Takes `count` blocks with one reference each, or None, changing nothing, when fewer are free."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self._next[0]
            self._unlink(block)
            self._on_take(block)
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block; one that was free leaves the free list, its content intact."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._unlink(block)
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drops a reference to each block. Give a request's blocks in reverse, so that its tail goes first."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} released once too often"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._link(block, before=0 if self._is_cached(block) else self._next[0])

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are on the free list (a hit on them makes them unavailable to others)."""
        return sum(1 for block in blocks if self.ref_counts[block] == 0)

    def free_blocks(self) -> Iterator[int]:
        """The free list from the block taken next to the one taken last."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Asserts that counts, list and the given block tables (all live ones) agree. For tests and idle times."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        assert expected[0] == 0, "a table holds the null block"
        assert expected == self.ref_counts, "reference counts differ from the tables"
        free = list(self.free_blocks())
        assert len(free) == len(set(free)) == self.num_free, "the free list is damaged"
        assert all(self.ref_counts[block] == 0 for block in free), "a used block is on the free list"
        assert self.num_free == sum(count == 0 for count in self.ref_counts[1:]), "a free block is on no list"
        assert all(self._prev[self._next[block]] == block for block in [0, *free]), "links differ"

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, *, before: int) -> None:
        previous = self._prev[before]
        self._next[previous], self._prev[block] = block, previous
        self._next[block], self._prev[before] = before, block
        self.num_free += 1
