"""Ctrl-C waits until the engine's state is whole again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Holds SIGINT back inside the block and delivers it at its end.

    An exception between dispatch and rebinding would leave deleted (donated) buffers behind, and one inside the
    scheduler half a plan. Only the main thread receives signals; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
        if received:
            signal.raise_signal(signal.SIGINT)
