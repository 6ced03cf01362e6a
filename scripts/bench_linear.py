"""Check and time products of few rows on the GPU at hand: `python scripts/bench_linear.py [WORDS ...] [--tune FILE]`.

Every product of the decoder layers in `arg_specs` is checked against float32 on fresh random inputs, then timed with
all that stands around it (norm, activation, residual), beside the same operations by XLA. A line gives the time of one
call, the rate at which the weight was read, its share of the reading roof measured in the same run, the relative
error, and XLA's time. With --tune, some 10 sets of parameters are tried a product, and those that beat XLA written to
FILE in the form of `kernels/linear/tuned/`.

Timing: the difference between long and short runs of programs that are dispatched ahead, median of 5. A program
is a chain of calls, each of which adds to the result of the one before, over as many weights as exceed the L2 cache.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bench_kernels import reading_roof, seconds_per_call

from jaxinfer.kernels.linear import arg_specs, mosaic_gpu, reference
from jaxinfer.kernels.linear.arg_specs import Spec
from jaxinfer.kernels.linear.tuning import ATOM, SPLITS, Params, Product, default_params, tuned_params

COLD_BYTES = 160e6
CALLS = 24
MAX_ERROR = 6e-3


def product_of(spec: Spec) -> Product:
    segments = 1 if spec.activation is None else 2
    return Product(spec.rows, math.prod(spec.inputs), segments, math.prod(spec.outputs) // segments)


def flat_inputs(spec: Spec, seed: int) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Inputs as the kernel takes them, always with a residual."""
    product = product_of(spec)
    x, weight, options = arg_specs.make_inputs(dataclasses.replace(spec, has_residual=True), seed)
    residual = options.pop("residual").reshape(spec.rows, -1)
    weight = weight.reshape(product.size, product.segments, product.columns)
    return x.reshape(spec.rows, -1), weight, options | {"residual": residual}


def by_xla(x: jax.Array, weight: jax.Array, *, activation: str | None, **options: jax.Array) -> jax.Array:
    return reference.linear(x, weight[:, 0] if activation is None else weight, activation=activation, **options)


def by_kernel(params: Params) -> Callable[..., jax.Array]:
    return partial(mosaic_gpu.linear, params=params)


def compile_chain(spec: Spec, multiply: Callable[..., jax.Array], copies: int) -> tuple[Callable, Callable]:
    """A program of CALLS calls or more over `copies` weights, and one of a single call."""
    multiply = jax.jit(multiply, static_argnames="activation")

    def once(x, weight, options):
        return multiply(x, weight, activation=spec.activation, **options)

    def chain(inputs, residual):
        for i in range(max(CALLS, copies)):
            x, weight, options = inputs[i % copies]
            residual = once(x, weight, options | {"residual": residual})
        return residual

    one = jax.eval_shape(lambda: flat_inputs(spec, 0))
    return jax.jit(chain).lower([one] * copies, one[2]["residual"]).compile(), jax.jit(once).lower(*one).compile()


def relative_error(spec: Spec, once: Callable, inputs: list) -> float:
    worst = 0.0
    for x, weight, options in inputs[:2]:
        wide = {name: value.astype(jnp.float32) for name, value in options.items() if name != "norm_weight"}
        if spec.has_norm:  # its roundings are part of the specification
            x_exact = reference.rms_norm(x, options["norm_weight"], 1e-6).astype(jnp.float32)
        else:
            x_exact = x.astype(jnp.float32)
        expected = np.asarray(by_xla(x_exact, weight.astype(jnp.float32), activation=spec.activation, **wide))
        out = np.asarray(once(x, weight, options).astype(jnp.float32))
        worst = max(worst, float(np.linalg.norm(out - expected) / np.linalg.norm(expected)))
    return worst


class Bench:
    """Inputs of one product and what it takes."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.copies = max(2, int(COLD_BYTES / spec.weight_bytes) + 1)
        self.calls = max(CALLS, self.copies)

    def compile(self, multiply: Callable[..., jax.Array]) -> tuple[Callable, Callable]:
        return compile_chain(self.spec, multiply, self.copies)

    def make_inputs(self) -> None:
        make = jax.jit(partial(flat_inputs, self.spec))
        self.inputs = [make(seed) for seed in range(self.copies)]

    def measure(self, programs: tuple[Callable, Callable]) -> tuple[float, float]:
        """(seconds a call, relative error)."""
        chain, once = programs
        error = relative_error(self.spec, once, self.inputs)
        return seconds_per_call(chain, self.inputs, self.inputs[0][2]["residual"], repeats=3) / self.calls, error


def candidates(product: Product) -> list[Params]:
    """Parameters worth a try: 90 to 400 CTAs, a half or all of an SM's memory."""
    found = []
    for block_n, splits, block_k, room in itertools.product((64, 128, 192), SPLITS, (64, 128), (100, 200)):
        num_ctas = product.columns // block_n * splits
        if product.columns % block_n or product.size % (splits * block_k) or not 90 <= num_ctas <= 400:
            continue
        tiles = product.size // splits // block_k
        stage = block_k * (product.segments * block_n + product.rows) * 2
        stages = min(tiles, (room * 1024 - product.segments * product.rows * block_n * 4) // stage)
        if stages < 2 or (block_k > ATOM and product.rows > 32):
            continue
        params = Params(block_n=block_n, splits=splits, block_k=block_k, num_stages=stages)
        try:
            params.check(product)
        except NotImplementedError:
            continue
        if params not in found:
            found.append(params)
    return found


def tune(name: str, spec: Spec, pool: concurrent.futures.Executor) -> dict | None:
    """The fastest parameters if they beat XLA by 3%."""
    bench = Bench(spec)
    tried = candidates(product_of(spec))
    programs = [pool.submit(bench.compile, multiply) for multiply in (by_xla, *map(by_kernel, tried))]
    bench.make_inputs()
    xla = bench.measure(programs[0].result())[0]
    best, best_seconds = None, 0.97 * xla
    for params, program in zip(tried, programs[1:], strict=True):
        seconds, error = bench.measure(program.result())
        if error < MAX_ERROR and seconds < best_seconds:
            best, best_seconds = params, seconds
    print(f"{name:24s} XLA {xla * 1e6:7.2f} us, best {best_seconds * 1e6:7.2f} {best}", flush=True)
    return (
        None
        if best is None
        else {"block_n": best.block_n, "splits": best.splits, "block_k": best.block_k} | {"num_stages": best.num_stages}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only products whose name has all of these")
    parser.add_argument("--tune", metavar="FILE", help="try parameters and write the best")
    options = parser.parse_args()
    specs = {n: s for n, s in arg_specs.BENCHMARKS.items() if all(w in n for w in options.words)}
    pool = concurrent.futures.ThreadPoolExecutor()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    if options.tune:
        table: dict[str, dict] = {}
        for name, spec in specs.items():
            product, best = product_of(spec), tune(name, spec, pool)
            if best is not None:
                key = f"{product.size}x{product.segments}x{product.columns}"
                table.setdefault(key, {})[str(spec.rows)] = best
        with open(options.tune, "w") as file:
            json.dump(table, file, indent=2)
        return
    roof = reading_roof()
    print(f"reading roof {roof / 1e9:,.0f} GB/s")
    for name, spec in specs.items():
        bench, product = Bench(spec), product_of(spec)
        params = tuned_params(product) or default_params(product)
        programs = [pool.submit(bench.compile, multiply) for multiply in (by_kernel(params), by_xla)]
        bench.make_inputs()
        (seconds, error), (xla, _) = (bench.measure(program.result()) for program in programs)
        rate = spec.weight_bytes / seconds
        line = f"{name:24s} {seconds * 1e6:7.2f} us {rate / 1e9:7,.0f} GB/s {rate / roof:5.2f} of roof"
        line += f"  error {error:.1e}  XLA {xla * 1e6:7.2f} us"
        print(line + ("" if error < MAX_ERROR else "  WRONG"), flush=True)


if __name__ == "__main__":
    main()
