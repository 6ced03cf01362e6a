"""Several processes as one run: who they are, a line from process 0 to each other one, and what happens when one dies.

      process 0 ---- messages (transport.py) ---- process 1, 2, ...      what the engine does; values to agree on
          |  \\                                        |
          |   jax's coordination service <--- relay ---+                how devices find each other
          +---------- collectives of XLA -------------+

Each end watches its line. When it breaks without a farewell the process says so and ends at once, whatever its main
thread is doing: that may be waiting in a collective that will never be complete.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from jaxinfer.sharding.transport import Connection, Message, Relay, dial, listen, reserve, split_address

START_SECONDS = 300
"""In which all processes have to come; containers may start one after the other."""
LEAVE_SECONDS = 60
"""In which all processes have to leave once the first one does."""
GRACE_SECONDS = 3
"""After another process said what mistake it found: most likely this one is about to say the same."""
HELLO_SECONDS = 5
"""In which whoever connects has to say who they are."""

_current: Processes | None = None


class Processes:
    """This process's place in a run of several, and its lines to the others.

    Args:
      index: of this process; process 0 leads.
      count: of all.
      peers: of process 0, lines to all others; of the others, the one to process 0.
      hosts: names for messages.
    """

    def __init__(self, index: int, count: int, peers: Mapping[int, Connection], hosts: Mapping[int, str]) -> None:
        self.index, self.count = index, count
        self._peers, self._hosts = dict(peers), dict(hosts)
        self._inboxes: dict[int, queue.SimpleQueue[Message]] = {number: queue.SimpleQueue() for number in peers}
        self.has_engine = False
        self._ending = threading.Lock()
        self._code: int | None = None  # what this process ends with, once it has failed
        self.has_left = False  # for good
        self._leaving, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._bound_leaving, daemon=True, name="jaxinfer-leaving").start()
        for number in peers:
            threading.Thread(target=self._watch, args=(number,), daemon=True, name=f"jaxinfer-peer-{number}").start()

    @property
    def leads(self) -> bool:
        return self.index == 0

    def name(self, number: int) -> str:
        """As in "process 1 of 2 (host)"."""
        return f"process {number} of {self.count} ({self._hosts[number]})"

    # -- messages ---------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Sends a message to every other process that this one has a line to."""
        for connection in self._peers.values():
            with contextlib.suppress(OSError):  # the watcher of that line sees it too, and ends the run
                connection.send(message)

    def receive(self) -> Message:
        """The next message of process 0; waits for it."""
        return self._inboxes[0].get()

    def exchange(self, value: Any) -> list[Any]:
        """A value from every process, by number; all have to call this, in the same order. JSON values.

        Raises:
          SystemExit: process 0 has left instead.
        """
        if self.leads:
            values = [value, *(inbox.get()["value"] for inbox in self._inboxes.values())]
            self.tell({"op": "values", "values": values})
            return values
        self.tell({"op": "value", "value": value})
        reply = self.receive()
        if reply["op"] != "values":
            raise SystemExit(f"{self.name(0)} has left")
        return reply["values"]

    # -- ends ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException | str, code: int = 1) -> None:
        """Tells the others that this process cannot go on, and why (a line, or an error of this process); they end with
        the same code.
        """
        if self._code is None and not self._left.is_set():
            self._code = code
            line = error if isinstance(error, str) else f"{self.name(self.index)}: {error}"
            self.tell({"op": "failed", "error": " ".join(line.split()), "code": code})

    def end(self, line: str, code: int = 1) -> NoReturn:
        """Ends this process at once, from any thread, with one line on stderr."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is about to
        self.fail(line, code)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            print(line, file=sys.stderr, flush=True)
        os._exit(code)

    def fail_together(self, error: BaseException) -> NoReturn:
        """Ends the run for an error that may only say that another process is gone: that is told if it is so."""
        time.sleep(GRACE_SECONDS)  # in which the watcher ends it
        self.end(f"{self.name(self.index)}: {type(error).__name__}: {error}".partition("\n")[0])

    def leave(self) -> None:
        """The orderly end: process 0 sends the others away; all wait for each other. Again, it does nothing."""
        if self.has_left or self._code is not None:
            return
        self.has_left = True
        self._leaving.set()
        self.tell({"op": "close" if self.leads else "left"})
        jax.distributed.shutdown()  # which waits for all
        self._left.set()

    def _watch(self, number: int) -> None:
        """Reads a line until it ends."""
        is_seen_off = False
        while (message := self._peers[number].receive()) is not None:
            match message.get("op"):
                case "failed" if self._code is None:
                    self._follow_suit(number, message)
                case "left":
                    is_seen_off = True
                case _:
                    self._inboxes[number].put(message)
                    if message.get("op") == "close":
                        self._leaving.set()
        if self._code is not None:
            time.sleep(GRACE_SECONDS)  # to say why
            os._exit(self._code)  # it waits for the others at exit, in vain
        if not (is_seen_off or self.has_left):
            self.end(f"{self.name(number)} is gone: the run ends")

    def _follow_suit(self, number: int, message: Message) -> None:
        if message["code"] == 2:
            time.sleep(GRACE_SECONDS)
            if self._code is not None:
                return
        self.end(message["error"], message["code"])

    def _bound_leaving(self) -> None:
        """Makes sure that leaving has an end. (A thread of its own: at the program's exit none can be started.)"""
        self._leaving.wait()
        if not self._left.wait(LEAVE_SECONDS):
            self.end(f"{self.name(self.index)}: not all left within {LEAVE_SECONDS} seconds")


def current() -> Processes | None:
    """The run that this process belongs to; None where it is alone.

    Raises:
      ValueError: the program has called `jax.distributed.initialize` by itself.
    """
    if _current is None and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError("several processes: call jaxinfer.sharding.processes.connect_processes, not jax.distributed")
    return _current


def minimum(value: int) -> int:
    """The smallest of all processes' values; all have to call this, in the same order."""
    return value if _current is None else min(_current.exchange(value))


def maximum(value: int) -> int:
    """The largest of all processes' values; as `minimum`."""
    return value if _current is None else max(_current.exchange(value))


# -- start -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a run's processes meet, and which one this is."""

    host: str
    port: int
    count: int
    index: int
    local_device_ids: list[int] | None = None  # None: all that the process sees


def connect_processes(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None, *, timeout: float = START_SECONDS
) -> Processes | None:
    """Makes this process one of a run. To be called once, in every process, before anything of jax runs.

    It calls `jax.distributed.initialize`, so a program does not. Then `jax.devices()` are those of all processes, and
    an `LLM` with a mesh over them is opened by all; see "Several processes" in docs/meshes.md.

    Args:
      coordinator: HOST:PORT of process 0, which listens there; or "auto": what Slurm, Open MPI, Kubernetes or a Cloud
        TPU sets, as jax finds it.
      num_processes: of the run. None with "auto".
      process_id: of this one, from 0. None with "auto".
      timeout: seconds in which all have to come.

    Returns:
      The run, or None where it has one process only.

    Raises:
      ValueError: arguments that are missing, out of range, or not those of the other processes; a second call.
      ConnectionError: some process did not come.
    """
    global _current
    if _current is not None:
        raise ValueError(f"this process is already process {_current.index} of {_current.count}")
    place = find_place(coordinator, num_processes, process_id, timeout)
    if place.count == 1:
        return None
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as reserved:
        if place.index == 0:
            port = reserved.enter_context(reserve()).getsockname()[1]
            peers, hosts = gather(place, deadline, port)
        else:
            peers, hosts, port = join(place, deadline)
            port = Relay(place.host, port).port
        _current = Processes(place.index, place.count, peers, hosts)
        try:
            jax.distributed.initialize(
                f"127.0.0.1:{port}",
                place.count,
                place.index,
                local_device_ids=place.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, int(deadline - time.monotonic())),
            )
        except Exception as error:
            _current.fail(error)
            raise
    atexit.register(_current.leave)
    return _current


def find_place(coordinator: str, num_processes: int | None, process_id: int | None, timeout: float) -> Place:
    """Checks what was given, or asks the cluster.

    Raises:
      ValueError: see `connect_processes`.
    """
    if coordinator == "auto":
        if num_processes is not None or process_id is not None:
            raise ValueError("coordinator 'auto' finds num_processes and process_id by itself: leave them out")
        return _ask_cluster(timeout)
    host, port = split_address(coordinator)
    for name, value in (("num_processes", num_processes), ("process_id", process_id)):
        if value is None:
            raise ValueError(f"coordinator {coordinator} needs {name} too")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be an integer, got {value!r}")
    assert num_processes is not None
    assert process_id is not None
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id must be between 0 and {num_processes - 1}, got {process_id}")
    return Place(host, port, num_processes, process_id)


def _ask_cluster(timeout: float) -> Place:
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize asks, which keeps the answers to itself

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(timeout))
    except Exception as error:  # each kind of cluster raises its own
        raise ValueError(f"coordinator 'auto': {type(error).__name__}: {error}") from None
    address, count, index, local_device_ids = found
    if address is None or count is None or index is None:
        raise ValueError("coordinator 'auto': there is no Slurm, Open MPI, Kubernetes or Cloud TPU: give HOST:PORT")
    host, port = split_address(address)
    return Place(host, port, count, index, None if local_device_ids is None else list(local_device_ids))


def gather(place: Place, deadline: float, service_port: int) -> tuple[dict[int, Connection], dict[int, str]]:
    """Process 0 waits for the others, and tells them the port of jax's coordination service: (lines, hosts).

    Raises:
      ValueError: another process has other arguments. All that have come are told.
      ConnectionError: one has not come by the deadline of `time.monotonic()`.
    """
    start, peers, hosts = time.monotonic(), {}, {0: socket.gethostname()}
    with listen(place.port) as server, contextlib.ExitStack() as to_close:
        while len(peers) < place.count - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = Connection(server.accept()[0])
                to_close.callback(connection.close)
                hello = connection.receive(HELLO_SECONDS)
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                missing = ", ".join(str(number) for number in range(1, place.count) if number not in peers)
                seconds = round(deadline - start)
                message = f"of {place.count} processes, {missing} did not come within {seconds} seconds"
                raise ConnectionError(message) from None
            if hello is None or hello.get("op") != "hello":
                connection.close()  # a stranger
                continue
            refusal = _refusal(hello, place, peers)
            if refusal is not None:
                for other in [*peers.values(), connection]:
                    other.send({"op": "refused", "error": refusal})
                raise ValueError(refusal)
            peers[hello["index"]], hosts[hello["index"]] = connection, hello["host"]
        to_close.pop_all()
    for connection in peers.values():
        connection.send({"op": "welcome", "port": service_port, "host": hosts[0]})
    return dict(sorted(peers.items())), hosts


def _refusal(hello: Message, place: Place, peers: Mapping[int, Connection]) -> str | None:
    """What is wrong with a process that says hello."""
    index, count = hello["index"], hello["count"]
    if count != place.count:
        return f"process {index} ({hello['host']}) is one of {count} processes, process 0 one of {place.count}"
    if index in peers or index == 0:
        return f"two processes are process {index} of {count}, one of them on {hello['host']}"
    if hello["jax"] != jax.__version__:
        return f"process {index} ({hello['host']}) runs jax {hello['jax']}, process 0 runs {jax.__version__}"
    return None


def join(place: Place, deadline: float) -> tuple[dict[int, Connection], dict[int, str], int]:
    """Another process reports to process 0: (the line, hosts, port of jax's coordination service there).

    Raises:
      ValueError: process 0 refuses this process, or another one.
      ConnectionError: it does not answer by the deadline of `time.monotonic()`.
    """
    start, where = time.monotonic(), f"{place.host}:{place.port}"
    hello = {"index": place.index, "count": place.count, "host": socket.gethostname(), "jax": jax.__version__}
    with contextlib.ExitStack() as to_close:
        try:
            connection = Connection(dial(place.host, place.port, deadline))
            to_close.callback(connection.close)
            connection.send({"op": "hello", **hello})
            reply = connection.receive(max(0.01, deadline - time.monotonic()))
        except OSError as error:
            reason, seconds = error.strerror or str(error), round(deadline - start)
            raise ConnectionError(f"process 0 did not answer at {where} within {seconds} seconds: {reason}") from None
        if reply is None or reply.get("op") not in ("welcome", "refused"):
            raise ConnectionError(f"process 0 at {where} ended before all processes had come")
        if reply["op"] == "refused":
            raise ValueError(reply["error"])
        to_close.pop_all()
    return {0: connection}, {0: reply["host"], place.index: hello["host"]}, reply["port"]
