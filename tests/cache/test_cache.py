"""Pool and prefix index against simple models, with hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.cache import BlockPool, PrefixIndex


class PoolMachine(RuleBasedStateMachine):
    """Random takes, touches and releases; the free list against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: set[int] = set()
        self.pool = BlockPool(9, is_cached=self.cached.__contains__, on_take=self.cached.discard)
        self.free = list(range(1, 9))
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 9))
    def take(self, count):
        taken = self.pool.take(count)
        if count > len(self.free):
            assert taken is None
            return
        assert taken == self.free[:count]
        assert not self.cached & set(taken)
        self.free = self.free[count:]
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cached=st.booleans())
    def release(self, data, cached):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if cached:
            self.cached |= set(blocks)
        self.pool.release(reversed(blocks))
        for block in reversed(blocks):
            if not any(block in held for held in self.held):
                self.free.insert(len(self.free) if block in self.cached else 0, block)

    @rule(data=st.data())
    def touch(self, data):
        known = sorted(self.cached)
        if known:
            blocks = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=3))
            self.pool.touch(blocks)
            self.free = [block for block in self.free if block not in blocks]
            self.held.append(list(blocks))

    @invariant()
    def agrees(self):
        assert list(self.pool.free_blocks()) == self.free
        assert self.pool.num_free + self.pool.num_used == 8
        self.pool.check_integrity(self.held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)


def test_the_null_block_is_never_given_out():
    pool = BlockPool(4)
    assert pool.take(4) is None
    assert sorted(pool.take(3) or []) == [1, 2, 3]
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_releasing_too_often_is_caught():
    pool = BlockPool(4)
    block = (pool.take(1) or [])[0]
    pool.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.release([block])


def common(left, right) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    entries=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20),
    dropped=st.sets(st.integers(0, 19)),
    query=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_find_gives_the_longest_common_prefix(entries, dropped, query):
    index, root = PrefixIndex(), PrefixIndex.root()
    for block, tokens in enumerate(entries, start=1):
        index.register(block, root, tokens)
    for block in dropped:
        index.drop(block)
    index.check_integrity()
    alive = {block: tokens for block, tokens in enumerate(entries, start=1) if block not in dropped}
    best = max((common(tokens, query) for tokens in alive.values()), default=0)
    block, length = index.find(root, query)
    assert length == best
    assert (block == 0) == (best == 0)
    assert best == 0 or common(alive[block], query) == best


def test_digests_depend_on_everything_before():
    one, other = PrefixIndex.root("a"), PrefixIndex.root("b")
    assert len({one, other, PrefixIndex.root("a", "lora"), PrefixIndex.root("", "a"), PrefixIndex.root()}) == 5
    assert PrefixIndex.extend(one, [1, 2]) == PrefixIndex.extend(one, [1, 2])
    assert PrefixIndex.extend(one, [1, 2]) != PrefixIndex.extend(one, [2, 1])
    assert PrefixIndex.extend(one, [1]) != PrefixIndex.extend(other, [1])


def test_registering_again_replaces():
    index, root = PrefixIndex(), PrefixIndex.root()
    index.register(1, root, [1, 2])
    index.register(1, root, [1, 2, 3])
    assert index.find(root, [1, 2, 3, 4]) == (1, 3)
    assert len(index) == 1
    index.drop(1)
    index.drop(1)
    assert index.find(root, [1]) == (0, 0)
