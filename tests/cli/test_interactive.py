"""`--interactive`, driven through a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from tiny_models import write_model


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], cache: str) -> None:
        self.leader, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True, start_new_session=True,
            env={**os.environ, "XDG_CACHE_HOME": cache, "TERM": "dumb"},
        )  # fmt: skip
        os.close(terminal)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 90) -> str:
        """What came up to and with `text`; it is taken off."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.leader], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.leader, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended without {text!r}: {self.seen!r}") from None
        before, self.seen = self.seen.split(text, 1)
        return before + text

    def write(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, and once more if it came between a prompt and the read behind it, where CPython may miss one."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)

    def close(self) -> int:
        code = self.process.wait(timeout=60)
        os.close(self.leader)
        return code


@pytest.fixture
def terminal(tmp_path):
    folder = write_model(tmp_path / "m", seed=4)
    flags = ["--model", folder, "--interactive", "--max-tokens", "3000", "--ignore-eos", "--num-blocks", "300",
             "--temperature", "0", "--max-num-seqs", "1", "--system", "s"]  # fmt: skip
    program = Terminal([sys.executable, "-m", "jaxinfer.generate", *map(str, flags)], str(tmp_path))
    yield program
    if program.process.poll() is None:
        program.process.kill()
        program.process.wait()


def test_a_conversation(terminal):
    """Streams; Ctrl-C stops the answer, not the program; history can be forgotten; /exit ends."""
    terminal.wait_for("/exit")
    terminal.wait_for("> ")
    terminal.write("hello\n")
    terminal.wait_for("hello")
    time.sleep(1.5)  # compiling or answering: either is stopped
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    assert terminal.process.poll() is None
    terminal.write("/reset\n")
    terminal.wait_for("> ")
    terminal.write("x" * 900 + "\n")
    terminal.wait_for("x" * 20)
    time.sleep(0.5)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    terminal.write("/exit\n")
    assert terminal.close() == 0


def test_end_of_input_ends(terminal):
    terminal.wait_for("> ")
    terminal.write("\x04")
    assert terminal.close() == 0


def test_interrupt_at_the_prompt_ends(terminal):
    terminal.wait_for("> ")
    terminal.interrupt()
    assert terminal.close() == 0
