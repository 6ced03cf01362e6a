"""Check and time `all_reduce` on the GPUs at hand: `python scripts/bench_all_reduce.py [--stress CALLS]`.

Every case is checked on fresh random inputs, -0 among them: all ranks must have the float32 sum in the order of the
ranks, rounded once. Then two times a call are given, both from a program with a chain of calls:

  device   the program waits behind a long matmul, so that the host is ahead of the devices: what the GPUs need
  alone    programs back to back: what a step of nothing else would take, which is mostly the host's time

`--stress` repeats calls of three shapes with values that change with every call, while one rank or the other is held up
at random, and counts wrong elements.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfer.kernels.all_reduce import Channel, all_reduce, all_reduce_norm, connect
from jaxinfer.kernels.all_reduce.arg_specs import DECODE, Spec, parts
from jaxinfer.sharding.mesh import make_mesh

CALLS = 64
STRESSED = (Spec(1, 4096), Spec(64, 4096), Spec(8, 1024))
STEPS = 1000
"""Of a stress program: each calls all of `STRESSED` once."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A mesh, its channel and the implementation that uses it."""

    mesh: Mesh
    channel: Channel
    implementation: str

    def on_ranks(self, body: Callable[..., Any], num_inputs: int) -> Callable[..., Any]:
        """A program of `body(channel, *inputs)` on every rank, which gets its part [1, ...] of each placed input."""

        # The psum keeps devices together until all have loaded the program: see all_reduce.
        def with_psum(channel, *inputs):
            return body(channel, *inputs), lax.psum(jnp.ones((1,), jnp.float32), "tensor")

        specs = (Channel.spec(self.mesh), *[P("tensor")] * num_inputs)
        run = jax.shard_map(with_psum, mesh=self.mesh, in_specs=specs, out_specs=(P("tensor"), P()), check_vma=False)
        program = jax.jit(run)
        return lambda *inputs: program(self.channel, *inputs)[0]

    def place(self, x: jax.Array) -> jax.Array:
        """[ranks, ...], a row to each rank."""
        return jax.device_put(x, NamedSharding(self.mesh, P("tensor")))

    def reduce(self, x: jax.Array, channel: Channel) -> jax.Array:
        return all_reduce(x, "tensor", channel=channel, implementation=self.implementation)

    def reduce_norm(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array, channel: Channel
    ) -> Sequence[jax.Array]:
        options = {"channel": channel, "implementation": self.implementation}
        return all_reduce_norm(x, residual, weight, "tensor", **options)


def is_right(bench: Bench, spec: Spec) -> bool:
    """Whether all ranks have the sum, for two messages in turn."""
    program = bench.on_ranks(lambda channel, x: bench.reduce(x[0], channel)[None], 1)
    for seed in range(2):
        x = parts(spec, len(bench.mesh.devices.flat), seed)
        total = np.zeros(x.shape[1:], np.float32)
        for part in np.asarray(x.astype(jnp.float32)):
            total += part
        out = program(bench.place(x))
        if not np.array_equal(np.asarray(out), np.broadcast_to(jnp.asarray(total).astype(spec.dtype)[None], out.shape)):
            return False
    return True


def chain(bench: Bench, spec: Spec, num_calls: int, *, has_norm: bool) -> Callable[[], Any]:
    """A program of calls that depend on each other. Values double with each: they stay in range."""

    def body(channel, x):
        x = residual = x[0]
        weight = jnp.ones(spec.hidden, spec.dtype)
        for _ in range(num_calls):
            if has_norm:
                x, residual = bench.reduce_norm(x, residual, weight, channel)
            else:
                x = bench.reduce(x, channel)
        return x[None]

    ranks = len(bench.mesh.devices.flat)
    x = bench.place(jnp.full((ranks, spec.rows, spec.hidden), 1e-20, spec.dtype))
    return partial(bench.on_ranks(body, 1), x)


def hold(mesh: Mesh, size: int = 8192, count: int = 5) -> Callable[[], Any]:
    """Several milliseconds of work for every device."""

    def multiply(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jnp.tanh(x @ x)
        return x

    x = jax.device_put(jnp.ones((size, size), jnp.bfloat16), NamedSharding(mesh, P()))
    run = jax.jit(jax.shard_map(multiply, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    return partial(run, x)


def seconds(function: Callable[[], Any], before: Callable[[], Any] | None = None, repeats: int = 7) -> float:
    """Median of a call, or of a call that is dispatched while `before` runs, both together."""
    for _ in range(4):  # XLA captures on the second run
        jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready((before() if before else None, function()))
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def alone(function: Callable[[], Any], repeats: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        out = function()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def print_times(benches: Sequence[Bench], specs: Sequence[Spec]) -> None:
    print(f"us a call, device (alone), {CALLS} in a chain")
    before = hold(benches[0].mesh)
    empty = seconds(chain(benches[0], specs[0], 0, has_norm=False), before)
    for has_norm in (False, True):
        for spec in specs:
            texts = []
            for bench in benches:
                program = chain(bench, spec, CALLS, has_norm=has_norm)
                device = (seconds(program, before) - empty) / CALLS
                texts.append(f"{bench.implementation} {device * 1e6:.2f} ({alone(program) / CALLS * 1e6:.1f})")
            print(f"{'with norm ' if has_norm else ''}{spec.rows} x {spec.hidden}: {', '.join(texts)}", flush=True)


def stress(bench: Bench, num_calls: int) -> int:
    """Wrong elements in that many calls."""
    ranks = len(bench.mesh.devices.flat)

    def values(spec: Spec, number: jax.Array, rank: jax.Array | int) -> jax.Array:
        row, column = (lax.broadcasted_iota(jnp.int32, (spec.rows, spec.hidden), i) for i in range(2))
        return ((row * 3 + column * 7 + number * 13 + rank * 29) % 61).astype(spec.dtype)

    def step(is_held, first, channel, i, state):
        wrong, work = state
        work = lax.cond(is_held[i], lambda work: jnp.tanh(work @ work), lambda work: work, work)
        for number, spec in enumerate(STRESSED):
            number = first + i * len(STRESSED) + number
            x, work, wrong = lax.optimization_barrier((values(spec, number, lax.axis_index("tensor")), work, wrong))
            out = bench.reduce(x, channel)
            expected = sum((values(spec, number, rank).astype(jnp.float32) for rank in range(ranks)), jnp.float32(0))
            wrong += jnp.sum(out.astype(jnp.float32) != expected, dtype=jnp.int32)
        return wrong, work

    def body(channel, is_held, first):
        state = jnp.int32(0), jnp.ones((1024, 1024), jnp.bfloat16)
        return lax.fori_loop(0, STEPS, partial(step, is_held[0], first[0], channel), state)[0][None]

    program, generator, wrong = bench.on_ranks(body, 2), np.random.default_rng(0), 0
    for first in range(0, num_calls, STEPS * len(STRESSED)):
        is_held = jnp.asarray(generator.random((ranks, STEPS)) < 0.2)
        counts = program(bench.place(is_held), bench.place(jnp.full(ranks, first, jnp.int32)))
        wrong += int(np.asarray(counts).sum())
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stress", type=int, default=0, metavar="CALLS")
    arguments = parser.parse_args()
    ranks = len(jax.devices())
    if jax.default_backend() != "gpu" or ranks < 2:
        parser.error(f"needs two GPUs or more, there are {ranks} devices of platform {jax.default_backend()}")
    mesh = make_mesh({"tensor": ranks})
    channel = connect(mesh, "tensor", rows=256, hidden=4096, dtype=jnp.dtype(jnp.bfloat16))
    ours, psum = (Bench(mesh, channel, implementation) for implementation in ("mosaic_gpu", "psum"))
    print(f"{ranks} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("right" if all(is_right(ours, spec) for spec in DECODE) else "WRONG", flush=True)
    print_times((ours, psum), DECODE)
    if arguments.stress:
        print(f"stress: {arguments.stress} calls, {stress(ours, arguments.stress)} wrong elements")


if __name__ == "__main__":
    main()
