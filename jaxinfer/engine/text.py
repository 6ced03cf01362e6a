"""From tokens to text: stop strings over incremental text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text that grows, the first stop string in it, and how much of it may already be shown.

    The match that *ends* first wins, as if text came a character at a time; of several that end together, the
    longest. A match that ends within the first `min_tokens` tokens does not count. While streaming, the longest end
    of the text that may still become a match is held back:

        text      t h e   e n d i n g        stops: "ending!"
        released  |<----->|                  "ending" is held until "!" comes or cannot come
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.text = ""
        self.num_released = 0
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._first_end = 0  # a match must end beyond this

    def push(self, new: str, *, may_match: bool) -> bool:
        """Appends text; True when a stop string is complete, and `text` is cut at it."""
        scanned = len(self.text)
        self.text += new
        if not may_match:
            self._first_end = len(self.text)
        elif self._cut(scanned):
            self.num_released = len(self.text)
            return True
        self.num_released = max(self.num_released, len(self.text) - self._num_held())
        return False

    def release(self) -> None:
        """Nothing more comes: what was held is text."""
        self.num_released = len(self.text)

    @property
    def released(self) -> str:
        return self.text[: self.num_released]

    def _cut(self, scanned: int) -> bool:
        best: tuple[int, int] | None = None  # (end, start)
        for stop in self._stops:
            start = self.text.find(stop, max(0, scanned - len(stop) + 1, self._first_end - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
                self.matched = stop
        if best is None:
            return False
        end, start = best
        self.text = self.text[: end if self._include else start]
        return True

    def _num_held(self) -> int:
        held = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return held
