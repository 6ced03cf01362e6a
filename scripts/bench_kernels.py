"""Check and time the kernels on the GPU at hand: `python scripts/bench_kernels.py [WORDS ...] [--no-baselines]`.

Every case is checked against float32 attention on fresh random inputs with NaN in all unused slots, then timed.
A line gives the time of one call, the rate, its share of the roof measured in the same run (reading for decode, a
large matmul for prefill), the relative error, and the time of a baseline: jax's bundled paged attention for decode,
cuDNN for prefill.

Timing: the difference between long and short runs of calls that are dispatched ahead, median of 5; decode calls are
chained 8 to a program and alternate between two caches, so that no call finds its keys in the L2 cache.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu
from jaxinfer.kernels.paged_attention.arg_specs import Inputs, Spec

CHAIN = 8
MAX_ERROR = 1e-2


def seconds_per_call(function: Callable, *arguments, calls: int = 12, repeats: int = 5) -> float:
    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = function(*arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    run(3)  # compiles; XLA captures a command buffer on the second call
    return float(np.median([(run(calls + 2) - run(2)) / calls for _ in range(repeats)]))


def reading_roof() -> float:
    """Bytes a second of a sum over 4 GiB."""
    x = jnp.ones(1 << 30, jnp.float32)
    return x.nbytes / seconds_per_call(jax.jit(jnp.sum), x)


def matmul_roof() -> float:
    """Operations a second of a bf16 product of 8,192^3, on random data."""
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / seconds_per_call(jax.jit(jnp.matmul), a, a)


def sample_queries(spec: Spec) -> Iterator[tuple[int, np.ndarray]]:
    """(row, positions of queries) to check: every decode row; of three prefill rows the tile edges and some more."""
    rng = np.random.default_rng(0)
    rows = range(len(spec.seq_lens))
    if max(spec.query_lens) > 1:
        rows = sorted({0, len(rows) // 2, len(rows) - 1})
    for row in rows:
        new, length = spec.query_lens[row], spec.seq_lens[row]
        edges = np.minimum([0, 1, 63, 64, new - 1], new - 1)
        picks = edges if new == 1 else np.concatenate([edges, rng.integers(0, new, 11)])
        yield row, length - new + (picks[:1] if new == 1 else picks)


@partial(jax.jit, static_argnames="scale")
def exact_attention(q: jax.Array, positions: jax.Array, inputs: Inputs, row: jax.Array, *, scale: float) -> jax.Array:
    """float32 attention of queries q[n, H, D] at `positions` of one row, without matrix units."""

    def gather(cache: jax.Array) -> jax.Array:
        pages = cache[inputs.block_tables[row]].astype(jnp.float32)
        return jnp.moveaxis(pages, 1, 0).reshape(cache.shape[1], -1, cache.shape[3])

    keys, values = gather(inputs.k_cache), gather(inputs.v_cache)

    def attend(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, position = query
        seen = jnp.arange(keys.shape[1]) <= position
        grouped = q.astype(jnp.float32).reshape(keys.shape[0], -1, 1, q.shape[-1])
        scores = jnp.where(seen, (grouped * keys[:, None]).sum(-1) * scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)[..., None]
        return (weights * jnp.where(seen[:, None], values, 0)[:, None]).sum(2).reshape(q.shape)

    return jax.lax.map(attend, (q, positions))


def relative_error(spec: Spec, inputs: Inputs, out: jax.Array, *, scale: float) -> float:
    starts, worst = np.cumsum((0, *spec.query_lens)), 0.0
    for row, positions in sample_queries(spec):
        tokens = starts[row] + positions - (spec.seq_lens[row] - spec.query_lens[row])
        expected = exact_attention(inputs.q[tokens], jnp.asarray(positions), inputs, jnp.asarray(row), scale=scale)
        got, expected = np.asarray(out[tokens].astype(jnp.float32)), np.asarray(expected)
        worst = max(worst, float(np.linalg.norm(got - expected) / np.linalg.norm(expected)))
    return worst if np.isfinite(np.asarray(out.astype(jnp.float32))).all() else float("nan")


def make_plan(spec: Spec, inputs: Inputs, params: mosaic_gpu.Params | None) -> mosaic_gpu.Plan:
    build = partial(
        mosaic_gpu.plan,
        num_tokens=spec.num_tokens,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_query_len=max(spec.query_lens),
        params=params,
    )
    return jax.jit(build)(inputs.seq_lens, inputs.query_start_loc)


def bench(spec: Spec, params: mosaic_gpu.Params | None = None) -> tuple[float, float]:
    """(seconds a call, relative error)."""
    is_decode = max(spec.query_lens) == 1
    sets = [arg_specs.make_inputs(spec, seed=seed) for seed in range(2 if is_decode else 1)]
    scale = spec.head_dim**-0.5
    attend = jax.jit(partial(mosaic_gpu.paged_attention, scale=scale))
    plan = make_plan(spec, sets[0], params)
    error = max(relative_error(spec, x, attend(*x, step_plan=plan), scale=scale) for x in sets)
    if not is_decode:
        return seconds_per_call(lambda: attend(*sets[0], step_plan=plan)), error

    @jax.jit
    def chain(q: jax.Array, sets: list[Inputs], plan: mosaic_gpu.Plan) -> jax.Array:
        for i in range(CHAIN):
            q = attend(*sets[i % 2]._replace(q=q), step_plan=plan)
        return q

    return seconds_per_call(chain, sets[0].q, sets, plan) / CHAIN, error


def decode_baseline(spec: Spec) -> float:
    from jax.experimental.pallas.ops.gpu import paged_attention as bundled

    inputs = arg_specs.make_inputs(spec, seed=0, unused=0.0)
    pages = [jnp.moveaxis(cache, 1, 0) for cache in (inputs.k_cache, inputs.v_cache)]
    tables = inputs.block_tables[:, : inputs.block_tables.shape[1] // 16 * 16 or None]
    attend = jax.jit(partial(bundled.paged_attention, k_splits=16))
    return seconds_per_call(attend, inputs.q, *pages, tables, inputs.seq_lens)


def prefill_baseline(spec: Spec) -> float:
    if spec.query_lens != spec.seq_lens or len(set(spec.query_lens)) > 1:
        raise NotImplementedError("cuDNN needs equal rows without a cache")
    shape = (len(spec.query_lens), spec.query_lens[0])
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (
        jax.random.normal(key, (*shape, n, spec.head_dim), spec.dtype) for key, n in zip(keys, heads, strict=True)
    )
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return seconds_per_call(jax.jit(attend), q, k, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases whose name holds one of these")
    parser.add_argument("--no-baselines", action="store_true")
    options = parser.parse_args()
    reading, matmul = reading_roof(), matmul_roof()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"roofs: reading {reading / 1e9:,.0f} GB/s, bf16 matmul {matmul / 1e12:,.0f} TFLOP/s")
    for cases, baseline in (
        (arg_specs.DECODE_BENCHMARKS, decode_baseline),
        (arg_specs.PREFILL_BENCHMARKS, prefill_baseline),
    ):
        for name, spec in cases.items():
            if options.words and not any(word in name for word in options.words):
                continue
            seconds, error = bench(spec)
            if baseline is decode_baseline:
                rate, share = (
                    f"{spec.kv_bytes / seconds / 1e9:7,.0f} GB/s   ",
                    spec.kv_bytes / seconds / reading,
                )
            else:
                rate, share = f"{spec.flops / seconds / 1e12:7,.0f} TFLOP/s", spec.flops / seconds / matmul
            line = f"{name:32s} {seconds * 1e6:9,.1f} us {rate} {share:5.2f} of roof  error {error:.1e}"
            if not options.no_baselines:
                try:
                    line += f"  baseline {baseline(spec) * 1e6:9,.1f} us"
                except Exception as problem:  # a baseline that cannot do a case must not end the run
                    line += f"  no baseline: {str(problem).splitlines()[0][:60]}"
            print(line + ("" if error < MAX_ERROR else "  WRONG"), flush=True)


if __name__ == "__main__":
    main()
