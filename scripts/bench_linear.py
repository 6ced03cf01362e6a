"""Check and time `linear` on the GPU at hand: `python scripts/bench_linear.py [WORDS ...] [--tune FILE]`.

Every product of the decoder layers in `arg_specs` is checked against float32 on fresh random inputs, then timed with
all that stands around it (norm, activation, residual), beside the same operations by XLA. A line gives the time of one
call, the rate at which the weight was read, its share of the reading roof measured in the same run, the relative
error, and XLA's time. With --tune, up to 20 sets of parameters are tried a product, and those that beat XLA written to
FILE in the form of `kernels/linear/tuned/`.

Timing: the difference between one run and four of a program that loops on the device, since the host is too slow to
launch such kernels one by one; median of 3. The loop's body is a chain of calls, each of which waits for the one
before, and adds to its result where the product has a residual, over as many weights as exceed the L2 cache.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bench_kernels import reading_roof

from jaxinfer.kernels.linear import arg_specs, mosaic_gpu, reference
from jaxinfer.kernels.linear.arg_specs import Spec
from jaxinfer.kernels.linear.tuning import (
    SPLITS,
    ManyRowsParams,
    Params,
    Product,
    default_params,
    tuned_params,
    wave,
)

type Multiply = Callable[..., jax.Array]

COLD_BYTES = 130e6
LOOP_SECONDS = 5e-3
MAX_ERROR = 6e-3


def flat_inputs(spec: Spec, seed: int) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Inputs as the kernel takes them."""
    product = spec.product
    x, weight, options = arg_specs.make_inputs(spec, seed)
    if spec.has_residual:
        options["residual"] = options["residual"].reshape(spec.rows, -1)
    return x.reshape(spec.rows, -1), weight.reshape(product.size, product.segments, product.columns), options


def by_xla(x: jax.Array, weight: jax.Array, *, activation: str | None, **options: jax.Array) -> jax.Array:
    return reference.linear(x, weight[:, 0] if activation is None else weight, activation=activation, **options)


def by_kernel(params: Params | ManyRowsParams) -> Multiply:
    return partial(mosaic_gpu.linear, params=params)


class Bench:
    """One product: its inputs, its programs and what they take."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.copies = max(2, int(COLD_BYTES / spec.weight_bytes) + 1)
        self.loops = max(2, int(LOOP_SECONDS / (self.copies * (spec.weight_bytes / 3.5e12 + 3e-6))))

    def compile(self, multiply: Multiply) -> Callable:
        """A program that loops over all inputs, and gives the first one's result as well."""
        multiply = jax.jit(multiply, static_argnames="activation")

        def once(x: jax.Array, weight: jax.Array, options: dict) -> jax.Array:
            return multiply(x, weight, activation=self.spec.activation, **options)

        def run(inputs: list, out: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            def chain(_, outs):
                out, outs = outs[-1], []
                for x, weight, options in inputs:
                    x, out = jax.lax.optimization_barrier((x, out))  # nothing may leave the loop
                    out = once(x, weight, options | ({"residual": out} if self.spec.has_residual else {}))
                    outs.append(out)  # all are results, or XLA would leave them out
                return outs

            return jax.lax.fori_loop(0, self.loops, chain, [out] * self.copies), once(*inputs[0])

        one = jax.eval_shape(lambda: flat_inputs(self.spec, 0))
        return jax.jit(run).lower([one] * self.copies, self.out_type).compile()

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.spec.rows, self.spec.product.columns), self.spec.dtype)

    def make_inputs(self) -> None:
        make = jax.jit(partial(flat_inputs, self.spec))
        self.inputs = [make(seed) for seed in range(self.copies)]
        self.out = jnp.zeros(self.out_type.shape, self.out_type.dtype)

    def measure(self, program: Callable) -> tuple[float, float]:
        """(seconds a call, relative error)."""

        def seconds(runs: int) -> float:
            start = time.perf_counter()
            for _ in range(runs):
                result = program(self.inputs, self.out)
            jax.block_until_ready(result)
            return time.perf_counter() - start

        seconds(2)
        per_run = float(np.median([(seconds(4) - seconds(1)) / 3 for _ in range(3)]))
        return per_run / (self.copies * self.loops + 1), self.relative_error(program)

    def relative_error(self, program: Callable) -> float:
        x, weight, options = self.inputs[0]
        wide = {name: value.astype(jnp.float32) for name, value in options.items() if name != "norm_weight"}
        if self.spec.has_norm:  # its roundings are part of the specification
            x = reference.rms_norm(x, options["norm_weight"], 1e-6)
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        expected = np.asarray(by_xla(x, weight, activation=self.spec.activation, **wide))
        out = np.asarray(program(self.inputs, self.out)[1].astype(jnp.float32))
        return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def candidates(product: Product) -> list[Params | ManyRowsParams]:
    """Parameters worth a try."""
    return [*few_rows(product), *many_rows(product)]


def many_rows(product: Product) -> list[ManyRowsParams]:
    """One wave of at least 48 CTAs with all of an SM's memory."""
    found = []
    for block_n, splits, consumer_rows in itertools.product((64, 96, 128, 192, 256), SPLITS, (64, 128)):
        parts = splits * product.segments
        if product.rows < 64 or not 48 <= product.columns // block_n * parts <= wave(parts):
            continue
        for shares_x in (False, True):
            candidate = ManyRowsParams.filling(block_n, splits, consumer_rows, rows=product.rows, shares_x=shares_x)
            with contextlib.suppress(NotImplementedError):
                candidate.check(product)
                found.append(candidate)
    return found


def few_rows(product: Product) -> list[Params]:
    """Clusters of 90 to 400 CTAs over half or all of an SM's memory, in blocks of 64 x 64. Wider blocks never won."""
    found: dict[Params, None] = {}
    for splits, room in itertools.product(SPLITS, (104, 208)):
        stage = 64 * (product.segments * 64 + product.rows) * 2
        norm = 2 * product.size // splits * product.has_norm
        stages = min((room * 1024 - norm) // stage, product.size // splits // 64)
        if stages < 2 or not 90 <= product.columns // 64 * splits <= 400:
            continue
        params = Params(block_n=64, splits=splits, block_k=64, num_stages=stages)
        of_norm = [dataclasses.replace(params, **change) for change in ({"resident": True}, {"norm_apart": True})]
        for candidate in (params, *(of_norm if product.has_norm else ())):
            with contextlib.suppress(NotImplementedError):
                candidate.check(product)
                found[candidate] = None
    return list(found)


def tune(name: str, spec: Spec, pool: concurrent.futures.Executor) -> dict | None:
    """The fastest parameters if they beat XLA by 3%."""
    bench = Bench(spec)
    tried = candidates(spec.product)
    programs = [pool.submit(bench.compile, multiply) for multiply in (by_xla, *map(by_kernel, tried))]
    bench.make_inputs()
    concurrent.futures.wait(programs)  # XLA times its own candidates on the same GPU
    xla = bench.measure(programs[0].result())[0]
    best, best_seconds = None, math.inf
    for params, program in zip(tried, programs[1:], strict=True):
        if program.exception() is not None:
            print(f"    {params}: {program.exception()}")
            continue
        seconds, error = bench.measure(program.result())
        print(f"    {seconds * 1e6:7.2f} us error {error:.1e} {params}", flush=True)
        if error < MAX_ERROR and seconds < best_seconds:
            best, best_seconds = params, seconds
    print(f"{name:24s} XLA {xla * 1e6:7.2f} us, best {best_seconds * 1e6:7.2f} {best}", flush=True)
    if best is None or best_seconds > 0.97 * xla:
        return None
    fields = dataclasses.asdict(best)
    return {name: value for name, value in fields.items() if name != "exchange" and value is not False}


def tune_all(specs: dict[str, Spec], path: pathlib.Path, pool: concurrent.futures.Executor) -> None:
    """Tune product after product; what is done is in the file, should the time not suffice for all."""
    table: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
    for name, spec in specs.items():
        best, key, rows = tune(name, spec, pool), spec.product.name, str(spec.rows)
        by_rows = {r: params for r, params in table.pop(key, {}).items() if r != rows}
        if best is not None:
            by_rows[rows] = best
        if by_rows:
            table[key] = dict(sorted(by_rows.items(), key=lambda item: int(item[0])))
        path.write_text(json.dumps(table, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only products whose name has all of these")
    parser.add_argument("--tune", metavar="FILE", help="try parameters and write the best")
    options = parser.parse_args()
    specs = {n: s for n, s in arg_specs.BENCHMARKS.items() if all(w in n for w in options.words)}
    pool = concurrent.futures.ThreadPoolExecutor()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    if options.tune:
        tune_all(specs, pathlib.Path(options.tune), pool)
        return
    roof = reading_roof()
    print(f"reading roof {roof / 1e9:,.0f} GB/s")
    for name, spec in specs.items():
        bench, product = Bench(spec), spec.product
        params = tuned_params(product) or default_params(product)
        programs = [pool.submit(bench.compile, multiply) for multiply in (by_kernel(params), by_xla)]
        bench.make_inputs()
        concurrent.futures.wait(programs)
        (seconds, error), (xla, _) = (bench.measure(program.result()) for program in programs)
        rate = spec.weight_bytes / seconds
        line = f"{name:24s} {seconds * 1e6:7.2f} us {rate / 1e9:7,.0f} GB/s {rate / roof:5.2f} of roof"
        line += f"  error {error:.1e}  XLA {xla * 1e6:7.2f} us"
        print(line + ("" if error < MAX_ERROR else "  WRONG"), flush=True)


if __name__ == "__main__":
    main()
