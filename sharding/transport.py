"""Messages between the processes of a run: JSON objects with their length before them, over TCP. And a relay."""

from __future__ import annotations

import contextlib
import json
import numbers
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

type Message = dict[str, Any]

GONE_SECONDS = 30
"""After which a host that answers nothing any more, not even TCP, counts as gone."""
MAX_BYTES = 1 << 30
"""Of a message."""
RETRY_SECONDS = 0.1


class Connection:
    """One end of a stream of messages. Any thread may send; one receives."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._sending = threading.Lock()
        keep_alive(stream)

    @property
    def host(self) -> str:
        """The other end's address."""
        with contextlib.suppress(OSError):
            return self._stream.getpeername()[0].removeprefix("::ffff:")
        return "unknown host"

    def send(self, message: Message) -> None:
        """Raises OSError where the other end is gone."""
        data = json.dumps(message, default=_plain).encode()
        with self._sending:
            self._stream.sendall(struct.pack(">Q", len(data)) + data)

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when the other end is gone, or sends what is none.

        Raises:
          TimeoutError: nothing has come for `timeout` seconds.
        """
        try:
            self._stream.settimeout(timeout)
            size = self._read(8)
            if size is None or struct.unpack(">Q", size)[0] > MAX_BYTES:
                return None
            data = self._read(struct.unpack(">Q", size)[0])
            message = None if data is None else json.loads(data)
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Ends the stream in both directions; a thread that receives sees its end."""
        hang_up(self._stream)

    def _read(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            part = self._stream.recv(min(count - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return bytes(data)


def _plain(value: Any) -> Any:
    """JSON for the numbers that callers hand in, such as NumPy's."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r} is not JSON")


def hang_up(stream: socket.socket) -> None:
    """Ends a stream, or listening, for all threads that wait there."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
    stream.close()


def keep_alive(stream: socket.socket) -> None:
    """No delay for small messages; an end that vanished without a word is noticed within `GONE_SECONDS`."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {
        "TCP_KEEPIDLE": GONE_SECONDS // 6,
        "TCP_KEEPINTVL": GONE_SECONDS // 6,
        "TCP_KEEPCNT": 5,
        "TCP_USER_TIMEOUT": GONE_SECONDS * 1000,
    }
    for name, value in probes.items():
        if hasattr(socket, name):  # not on every system
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def split_address(text: str) -> tuple[str, int]:
    """ "host:1234" or "[::1]:1234" -> (host, port).

    Raises:
      ValueError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator must be HOST:PORT or 'auto', got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(port: int, host: str = "") -> socket.socket:
    """A listening socket; on all interfaces unless a host is named.

    Raises:
      ValueError: the port is taken.
    """
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ValueError(f"cannot listen at port {port}: {error.strerror}") from None


def reserve() -> socket.socket:
    """A port that this host gives to nobody else, neither to listen at nor to connect from, while the socket is open.

    A server that sets SO_REUSEPORT, as gRPC's do, can listen there. (A port that was only found to be free may be
    another program's a moment later.)
    """
    is_dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    if is_dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("", 0))
    return reserved


def dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connection, tried again until `time.monotonic()` reaches the deadline.

    Raises:
      OSError: nobody answered; the last reason.
    """
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(0.1, min(10.0, deadline - time.monotonic())))
        except OSError:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise
            time.sleep(RETRY_SECONDS)


class Relay:
    """Passes connections to a port of this host on to another address.

    When the far end breaks a connection off, the near end is not told: jax's client of its coordination service would
    abort the process, with a stack trace. What is to be done then is for whoever watches the run.

    Args:
      host: where to.
      port: where to.
    """

    def __init__(self, host: str, port: int) -> None:
        self._far = host, port
        self._server = listen(0, "127.0.0.1")
        self._ends: list[socket.socket] = []
        self.port: int = self._server.getsockname()[1]
        _start(self._accept)

    def close(self) -> None:
        """Breaks everything off."""
        for end in [self._server, *self._ends]:
            hang_up(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                self._ends.append(near)
                with contextlib.suppress(OSError):  # the far end has gone
                    self._connect(near)

    def _connect(self, near: socket.socket) -> None:
        far = socket.create_connection(self._far, timeout=GONE_SECONDS)
        self._ends.append(far)
        far.settimeout(None)
        keep_alive(far)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _start(lambda: _pump(near, far))
        _start(lambda: _pump(far, near, closes=False))


def _pump(source: socket.socket, target: socket.socket, *, closes: bool = True) -> None:
    """Copies until the source ends; `closes`: then ends the target too."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    if closes:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True, name="jaxinfer-transport").start()
