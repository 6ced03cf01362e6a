"""One engine in several processes: each has its own scheduler over its own devices, and all do the same in one order.

      process 0, Leader          submit   end   step   reset      what changes the scheduler is told first, then done
          |                        |       |     |       |
      process 1, ..., Follower   submit   end   step   reset      until process 0 closes

Requests are told as they were made: ids, parameters, drawn seeds. Tokens are not told: a step leaves them on every
device, and each process fetches its own copy. Scheduler and cache read no clock and go through nothing in the order of
a salted hash, so all plan the same steps; a step's collectives wait for all.

A failed step may have failed in one process only, so it ends the run.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.core import FinishReason, Request, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.interrupts import deferred_interrupts
from jaxinfer.engine.state import RequestState
from jaxinfer.sharding.processes import Processes

type OnCompile = Callable[[int, bool], None]


class Member(Engine):
    """The engine of one of the processes.

    Args:
      processes: the run.
      config, on_compile: as for `Engine`.
    """

    def __init__(self, processes: Processes, config: EngineConfig, on_compile: OnCompile | None = None) -> None:
        self._processes = processes
        super().__init__(config, on_compile)

    def _fail(self, error: Exception) -> NoReturn:
        self._processes.fail_together(error)


class Leader(Member):
    """That of process 0, which tells the others what it does."""

    def submit(self, states: list[RequestState]) -> None:
        """As `Engine.submit`, on all processes.

        Raises:
          RuntimeError: after `close`.
        """
        if self._processes.has_left:
            raise RuntimeError("the other processes have left: this engine is closed")
        with deferred_interrupts(), self.lock:
            self._reap()
            self._processes.tell({"op": "submit", "states": [pack_state(state) for state in states]})
            super().submit(states)

    def step(self) -> bool:
        """As `Engine.step`, on all processes; an idle engine tells nobody."""
        with deferred_interrupts(), self.lock:
            self._reap()
            if self._in_flight or self._scheduler.has_work:
                self._processes.tell({"op": "step"})
            return super().step()

    def reset_prefix_cache(self) -> bool:
        """As `Engine.reset_prefix_cache`, on all processes."""
        with deferred_interrupts(), self.lock:
            self._reap()
            self._processes.tell({"op": "reset"})
            return super().reset_prefix_cache()

    def close(self) -> None:
        """Aborts what runs and sends the other processes away: nothing can be run after that."""
        super().close()
        self._processes.leave()

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        if any(answer.request in self._live for answer in state.answers):
            self._processes.tell({"op": "end", "request": state.request.arrival, "reason": reason})
        super()._end(state, reason)


class Follower(Member):
    """That of another process: it does what process 0 tells."""

    def follow(self) -> None:
        """Does what process 0 does until that closes. Ctrl-C is for process 0."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        while (message := self._processes.receive())["op"] != "close":
            try:
                self._apply(message)
            except Exception as error:
                self._fail(error)
        self._processes.leave()

    def _apply(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "submit":
                self.submit([self._unpack(packed) for packed in message["states"]])
            case "step":
                self.step()
            case "end":
                states = (state for state, _ in self._live.values())
                state = next(state for state in states if state.request.arrival == message["request"])
                self._end(state, FinishReason(message["reason"]))
            case "reset":
                self.reset_prefix_cache()
            case other:
                raise AssertionError(f"unknown message {other!r}")

    def _unpack(self, packed: dict[str, Any]) -> RequestState:
        """A request without its text, unless a stop string may end it."""
        requests = unpack_requests(packed)
        return RequestState(requests, None, self.tokenizer if requests[0].params.stop else None)


PLAIN_FIELDS = (
    "request_id",
    "prompt_token_ids",
    "max_tokens",
    "arrival",
    "priority",
    "cache_salt",
    "seed",
    "is_watched",
)
"""Fields of `Request` that JSON has as they are."""


def pack_state(state: RequestState) -> dict[str, Any]:
    """A request that has not been run, with all its answers, as JSON values."""
    return {"answers": [_pack(answer.request) for answer in state.answers]}


def _pack(request: Request) -> dict[str, Any]:
    return {
        **{name: getattr(request, name) for name in PLAIN_FIELDS},
        "params": dataclasses.asdict(request.params),
        "eos_token_ids": sorted(request.eos_token_ids),
        "bad_word_ids": request.bad_word_ids,
    }


def unpack_requests(packed: dict[str, Any]) -> list[Request]:
    """What `pack_state` packed, after JSON: the first leads the others."""
    requests: list[Request] = []
    for one in packed["answers"]:
        special = {
            "params": SamplingParams(**one["params"]),
            "eos_token_ids": frozenset(one["eos_token_ids"]),
            "bad_word_ids": tuple(map(tuple, one["bad_word_ids"])),
            "leader": requests[0] if requests else None,
        }
        requests.append(Request(**{**one, **special}))
    return requests


def open_lockstep(processes: Processes, config: EngineConfig, on_compile: OnCompile | None = None) -> Leader:
    """The engine of a run of several processes, to be called in all of them with the same configuration.

    Raises:
      ValueError: what `Engine` raises, configurations that differ, and a second engine.
      SystemExit: with code 0, in all processes but 0, once process 0 has closed its engine: they have served it.
    """
    if processes.has_engine:
        raise ValueError("a run of several processes has one engine, and this is the second")
    processes.has_engine = True
    try:
        check_equal(processes.exchange(settings(config)))
        if processes.leads:
            return Leader(processes, config, on_compile)
        follower = Follower(processes, config, on_compile)
    except Exception as error:
        processes.fail(error, 2 if isinstance(error, ValueError) else 1)
        raise
    follower.follow()
    raise SystemExit(0)


def settings(config: EngineConfig) -> dict[str, str]:
    """What has to be the same in all processes. Paths may differ: they are of hosts."""
    own = {item.name for item in dataclasses.fields(config)} - {"model", "tokenizer", "compile_cache"}
    device = jax.local_devices()[0]
    return {**{name: str(getattr(config, name)) for name in sorted(own)}, "device": device.device_kind}


def check_equal(all_settings: Sequence[dict[str, str]]) -> None:
    """Refuses processes that would not do the same.

    Raises:
      ValueError: names the first setting that differs.
    """
    first = all_settings[0]
    for number, other in enumerate(all_settings):
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(f"process {number} has {name} {other[name]}, process 0 has {value}")
