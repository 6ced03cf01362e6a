"""Which committed token prefixes lie in which blocks.

Every block's place is the digest of all tokens before it. Digests chain from a root that depends on the salt and
the adapter, so nothing is shared across roots:

      root = H(salt, adapter) -- tokens[0:bs] --> d1 = H(root, tokens[0:bs]) -- tokens[bs:2bs] --> d2 ...

The blocks below one digest are kept sorted by their tokens. A full block and a partly filled one are then the same
case: the longest common prefix of a query with any of them is reached at one of the query's two neighbours.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Sequence
from hashlib import blake2b


class PrefixIndex:
    """Maps (digest of what came before, tokens) to blocks; at most one entry a block."""

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        self._entries: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    @staticmethod
    def root(salt: str = "", adapter: str = "") -> bytes:
        """The digest before the first token."""
        return blake2b(repr((salt, adapter)).encode(), digest_size=16).digest()

    @staticmethod
    def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
        """The digest after a full block of `tokens` below `parent`."""
        return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

    def register(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Says that `block` holds `tokens`, committed, after `parent`; replaces what was said of it before.

        A partly filled block is append-only: its owner may write beyond `tokens` and register it again, longer.
        Two blocks may hold the same tokens.
        """
        self.drop(block)
        entry = (parent, tuple(tokens))
        self._entries[block] = entry
        bisect.insort(self._children.setdefault(parent, []), (entry[1], block))

    def drop(self, block: int) -> None:
        """Forgets a block, if it is known."""
        entry = self._entries.pop(block, None)
        if entry is None:
            return
        parent, tokens = entry
        siblings = self._children[parent]
        del siblings[bisect.bisect_left(siblings, (tokens, block))]
        if not siblings:
            del self._children[parent]

    def find(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The block below `parent` that shares the longest prefix with `tokens`: (block, length), or (0, 0)."""
        siblings = self._children.get(parent)
        if not siblings:
            return 0, 0
        query = tuple(tokens)
        at = bisect.bisect_left(siblings, (query,))
        best = (0, 0)
        for candidate, block in siblings[max(at - 1, 0) : at + 1]:
            length = _common_prefix(candidate, query)
            if length > best[1]:
                best = (block, length)
        return best

    def clear(self) -> None:
        self._children.clear()
        self._entries.clear()

    def check_integrity(self) -> None:
        """Asserts that both maps tell the same story."""
        listed = {block: (parent, tokens) for parent, row in self._children.items() for tokens, block in row}
        assert listed == self._entries, "the prefix index's two maps differ"
        assert all(row == sorted(row) and row for row in self._children.values()), "children are not sorted"


def _common_prefix(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    if left == right:
        return len(left)
    for length, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return length
    return min(len(left), len(right))
