"""The data axis: several engines, each on its own part of the mesh, behind one that looks like one of them.

      mesh data=2, tensor=2        devices 0 1 | 2 3
                                   engine    0 |   1         the same weights, a cache and a scheduler each

      make -> submit -> route -+-> engine 0, stepped by a thread while it has work
                               +-> engine 1, stepped by a thread while it has work
      step: waits until one of them has made a step

A step of an engine waits for its device, and much of what dispatching one costs is XLA's, with Python's lock released;
so a thread an engine keeps all devices busy, at each one's own pace, whatever the others compute.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxinfer.config import EngineConfig
from jaxinfer.core import SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.interrupts import deferred_interrupts
from jaxinfer.engine.lockstep import open_lockstep
from jaxinfer.engine.requests import Prompt, RequestFactory
from jaxinfer.engine.state import RequestState
from jaxinfer.metrics import EngineStats, ReplicatedStats
from jaxinfer.sharding.mesh import replica_meshes, resolve_mesh
from jaxinfer.sharding.processes import current

LOGGER = logging.getLogger("jaxinfer")

KNOWN_TOKEN_WORTH = 4
"""Live tokens that a replica may have beyond another's for each token of a prompt that it need not compute. An 8B model
on an H200 computes a token in 23 us, and reads one of a context in 33 ns a step: the same over 700 steps, a few
answers' length; 4 keeps replicas nearer to each other than that."""


@dataclass(eq=False)
class Replica:
    """An engine and the thread that steps it. What is not said to be otherwise changes under the front end's lock."""

    engine: Engine
    number: int
    gate: threading.Lock = field(default_factory=threading.Lock)
    """Held by callers from before they ask for the engine's lock: the thread, which lets go of that for no time at all,
    waits here between steps."""
    is_running: bool = False  # has a thread
    is_woken: bool = False  # something was submitted since the thread last looked
    num_arriving: int = 0  # tokens of requests on their way to the engine
    num_routed: int = 0  # tokens of all requests so far
    error: Exception | None = None  # lost: what a failed step could not be recovered from

    def load(self) -> int:
        """Tokens that requests here have so far, waiting and running. Waits for nobody."""
        return self.num_arriving + sum(map(_num_tokens, self.engine.live_states()))


class Replicas:
    """Engines with the same model and settings behind the interface of one; `max_num_seqs` and memory are each one's.

    A request goes to one engine and stays there, with all its answers. Its tokens do not depend on which.

    Args:
      config: with a mesh whose axis "data" says how many there are.
      on_compile: as for `Engine`.

    Raises:
      ValueError: the model or the settings cannot be had.
    """

    def __init__(self, config: EngineConfig, on_compile: Callable[[int, bool], None] | None = None) -> None:
        meshes = replica_meshes(resolve_mesh(config.mesh))
        # One after the other: each finds what it has to compile in the cache that the first one filled.
        engines = [Engine(dataclasses.replace(config, mesh=mesh), on_compile) for mesh in meshes]
        self._replicas = [Replica(engine, number) for number, engine in enumerate(engines)]
        self.lock = threading.Condition()
        self._num_steps = self._num_waiting = 0
        smallest = min(engines, key=lambda engine: engine.config.num_blocks or 0)
        self.model, self.tokenizer, self.account = smallest.model, smallest.tokenizer, smallest.account
        longest = min(engine.config.max_model_len or 0 for engine in engines)
        self.config = dataclasses.replace(smallest.config, mesh=config.mesh, max_model_len=longest)
        self.factory = RequestFactory(self.model, self.tokenizer, longest, config.seed)

    @property
    def engines(self) -> list[Engine]:
        """One a place on the axis "data"."""
        return [replica.engine for replica in self._replicas]

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    @property
    def num_devices(self) -> int:
        """Of all engines together."""
        return sum(engine.num_devices for engine in self.engines)

    # -- requests ---------------------------------------------------------------------------------

    def make(
        self, prompt: Prompt, params: SamplingParams, *, is_streaming: bool = False, priority: int = 0
    ) -> RequestState:
        """As `Engine.make`."""
        with self.lock:
            requests, text = self.factory.make(prompt, params, priority=priority)
        return RequestState(requests, text, self.tokenizer, is_streaming=is_streaming)

    def submit(self, states: list[RequestState]) -> None:
        """Queues checked requests, each on the replica that `choose` finds; compiles what they can reach there.

        Raises:
          RuntimeError: no replica is left.
        """
        for replica, group in self._route(states):
            num_tokens = sum(map(_num_tokens, group))
            try:
                with replica.gate, replica.engine.lock:  # until all is compiled
                    replica.engine.submit(group)
            finally:
                with deferred_interrupts(), self.lock:
                    replica.num_arriving -= num_tokens
                    self._wake(replica)

    def _route(self, states: Sequence[RequestState]) -> list[tuple[Replica, list[RequestState]]]:
        with self.lock:
            replicas = [replica for replica in self._replicas if replica.error is None]
            if not replicas:
                raise RuntimeError(f"all {self.num_replicas} replicas have failed") from self._replicas[0].error
            loads = [replica.load() for replica in replicas]
            groups: dict[Replica, list[RequestState]] = {}
            for state in states:
                known = [replica.engine.num_known_tokens(state.request) for replica in replicas]
                index = choose(loads, known, [replica.num_routed for replica in replicas])
                groups.setdefault(replicas[index], []).append(state)
                loads[index] += _num_tokens(state)
                replicas[index].num_arriving += _num_tokens(state)
                replicas[index].num_routed += _num_tokens(state)
            return list(groups.items())

    def abort(self, state: RequestState) -> None:
        """As `Engine.abort`."""
        for replica in self._replicas:
            if state in replica.engine.live_states():
                with replica.gate:
                    replica.engine.abort(state)

    def abandon(self, *states: RequestState) -> None:
        """As `Engine.abandon`."""
        for engine in self.engines:  # to those that do not have them it says nothing
            engine.abandon(*states)

    def abort_all(self) -> None:
        """Ends every live request, and waits until nothing runs."""
        for replica in self._replicas:
            with replica.gate:
                replica.engine.abort_all()
        while self.step():
            pass

    close = abort_all

    def find(self, request_id: str) -> RequestState | None:
        """The live request with this id."""
        states = (state for engine in self.engines for state in engine.live_states())
        return next((state for state in states if state.request.request_id == request_id), None)

    # -- stepping ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Waits until a replica has made a step; False when all are idle.

        With `lock` held, nothing that a replica then does goes unseen; it is released while this waits.

        Raises:
          RuntimeError: a replica is lost, and its requests could not even be ended.
        """
        with self.lock:
            for replica in self._replicas:
                if replica.engine.live_states() and not replica.is_running:
                    if replica.error is not None:
                        raise RuntimeError(f"replica {replica.number} has failed") from replica.error
                    self._wake(replica)
            num_steps = self._num_steps
            self._num_waiting += 1
            try:
                self.lock.wait_for(lambda: self._num_steps != num_steps or not self._is_busy)
            finally:
                self._num_waiting -= 1
            return self._num_steps != num_steps or self._is_busy

    @property
    def _is_busy(self) -> bool:
        return any(replica.is_running for replica in self._replicas)

    def _wake(self, replica: Replica) -> None:
        """Makes sure, under the lock, that the replica is stepped again."""
        replica.is_woken = True
        if not replica.is_running and replica.error is None:
            threading.Thread(target=self._run, args=(replica,), name=f"jaxinfer-replica-{replica.number}").start()
            replica.is_running = True

    def _run(self, replica: Replica) -> None:
        """Steps a replica until it is idle, or until the program has ended and nobody waits."""
        goes_on = True
        while goes_on:
            with replica.gate:
                pass
            try:
                did_something = replica.engine.step()
            except Exception as error:  # what the engine itself could not get over
                self._lose(replica, error)
                did_something = False
            with self.lock:
                is_wanted = self._num_waiting > 0 or threading.main_thread().is_alive()
                goes_on = (did_something or replica.is_woken) and is_wanted and replica.error is None
                replica.is_woken, replica.is_running = False, goes_on
                self._num_steps += 1
                self.lock.notify_all()

    def _lose(self, replica: Replica, error: Exception) -> None:
        """Takes a replica out of use and ends its requests."""
        LOGGER.error("replica %d has failed and is not used any more", replica.number, exc_info=error)
        with self.lock:
            replica.error = error
        try:
            replica.engine.abort_all(f"replica {replica.number} has failed: {type(error).__name__}: {error}")
        except Exception:  # `step` tells it
            LOGGER.exception("the requests of replica %d cannot be ended", replica.number)

    # -- state ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """As `Engine.reset_prefix_cache`, on every replica."""
        for replica in self._replicas:
            with replica.gate:
                replica.engine.reset_prefix_cache()
        return True

    def stats(self) -> ReplicatedStats:
        """Counts of all replicas together, and each one's."""
        parts: list[EngineStats] = []
        for replica in self._replicas:
            with replica.gate:
                parts.append(replica.engine.stats())
        num_failed = sum(replica.error is not None for replica in self._replicas)
        return ReplicatedStats.of(parts, num_failed)


def choose(loads: Sequence[int], known: Sequence[int], routed: Sequence[int]) -> int:
    """Where a request goes: to the least loaded replica, counting each token found in a cache as several of load.

    So the one that knows the longest prefix gets it while its load is within a margin of the others', and the margin is
    in proportion to what would have to be computed again. Of equals, the one that was given least so far.

    Args:
      loads: a replica's live tokens, waiting and running.
      known: tokens of the request that the replica has cached.
      routed: tokens that the replica was given since the start.

    Returns:
      An index.
    """
    costs = [load - KNOWN_TOKEN_WORTH * num for load, num in zip(loads, known, strict=True)]
    return min(range(len(costs)), key=lambda index: (costs[index], routed[index]))


def _num_tokens(state: RequestState) -> int:
    """Of all answers that have not ended, prompt and output."""
    return sum(answer.request.num_tokens for answer in state.answers if not answer.request.is_finished)


def open_engine(config: EngineConfig, on_compile: Callable[[int, bool], None] | None = None) -> Engine | Replicas:
    """An engine, or as many as the mesh's axis "data" has places behind one. Arguments and errors as for `Engine`.

    In a run of several processes: see `open_lockstep`.
    """
    processes = current()
    if processes is not None:
        return open_lockstep(processes, config, on_compile)
    mesh = resolve_mesh(config.mesh)
    is_replicated = mesh is not None and mesh.shape["data"] > 1
    return Replicas(config, on_compile) if is_replicated else Engine(config, on_compile)
