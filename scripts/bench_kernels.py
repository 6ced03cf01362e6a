"""Check and time the kernels on the GPU at hand: `python scripts/bench_kernels.py [WORDS ...] [--no-baselines]`.

Every attention case is checked against float32 attention on fresh random inputs with NaN in all unused slots, every
cache write against the reference bit by bit; then it is timed. A line of the table gives the time of one call, the
rate, its share of the roof measured in the same run (reading for decode, reading and writing for cache writes, a large
matmul for prefill), the goal in units of the rate, the relative error, and the time of a baseline over ours: jax's
bundled paged attention for decode, cuDNN for prefill, XLA's scatter for cache writes.

Timing: the difference between long and short runs of calls that are dispatched ahead, median of 5. Short calls are
chained in one program; decode calls take turns between two caches, so that none finds its keys in the L2 cache.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.kv_update import api as kv_update_api
from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu
from jaxinfer.kernels.paged_attention.arg_specs import Inputs, Spec

MAX_ERROR = 1e-2
CHECKED_ROWS = 24
GOALS = {
    "decode 256 x 1,024": 4000,
    "decode 32 x 8,192": 4200,
    "decode 16 x 4,096": 3700,
    "decode 1 x 32,768": 3200,
    "decode 256 ragged 100..2,000": 4000,
    "prefill 8 x 1,024": 410,
    "prefill 1 x 8,192": 700,
    "prefill 1 x 32,768": 670,
    "1,024 new on 7,168, 1 row": 550,
    "1,024 new on 7,168, 8 rows": 610,
}
"""GB/s of K and V, or TFLOP/s: the best known figures for an H200, or a little more."""
VARIANTS = {"decode fp8 256 x 1,024: through SMEM": {"keys_in_registers": False}}
"""Other parameters for a case, by fields of DecodeParams."""
KV_UPDATES = {"kv_update 256 rows": 256, "kv_update 8,192 rows": 8192}


@dataclasses.dataclass(frozen=True)
class Result:
    """Seconds a call, its bytes or operations, and its error."""

    seconds: float
    work: float
    error: float
    baseline: float | None = None  # seconds
    remark: str = ""


def seconds_per_call(function: Callable, *arguments, calls: int = 6, repeats: int = 5) -> float:
    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = function(*arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    run(3)  # compiles; XLA captures a command buffer on the second call
    return float(np.median([(run(calls + 1) - run(1)) / calls for _ in range(repeats)]))


def reading_roof() -> float:
    """Bytes a second of a sum over 4 GiB."""
    x = jnp.ones(1 << 30, jnp.float32)
    return x.nbytes / seconds_per_call(jax.jit(jnp.sum), x)


def copying_roof() -> float:
    """Bytes a second, read and written, of adding 1 to 2 GiB of float32."""
    x = jnp.ones(1 << 29, jnp.float32)
    return 2 * x.nbytes / seconds_per_call(jax.jit(lambda x: x + 1), x)


def matmul_roof() -> float:
    """Operations a second of a bf16 product of 8,192^3, on random data."""
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / seconds_per_call(jax.jit(jnp.matmul), a, a)


def sample_queries(spec: Spec) -> Iterator[tuple[int, np.ndarray]]:
    """(row, positions of queries) to check: some decode rows; of three prefill rows the tile edges and some more."""
    rng, last = np.random.default_rng(0), len(spec.seq_lens) - 1
    if max(spec.query_lens) > 1:
        rows = sorted({0, len(spec.seq_lens) // 2, last})
    else:
        rows = sorted({0, last, *rng.integers(0, last + 1, CHECKED_ROWS).tolist()})
    for row in rows:
        new, length = spec.query_lens[row], spec.seq_lens[row]
        edges = np.minimum([0, 1, 63, 64, new - 1], new - 1)
        picks = edges if new == 1 else np.concatenate([edges, rng.integers(0, new, 11)])
        yield row, length - new + (picks[:1] if new == 1 else picks)


@partial(jax.jit, static_argnames="scale")
def exact_attention(
    q: jax.Array, positions: jax.Array, inputs: Inputs, row: jax.Array, scales: dict[str, jax.Array], *, scale: float
) -> jax.Array:
    """float32 attention of queries q[n, H, D] at `positions` of one row, without matrix units."""

    def gather(cache: jax.Array, factor: jax.Array | float) -> jax.Array:
        pages = cache[inputs.block_tables[row]].astype(jnp.float32) * factor
        return jnp.moveaxis(pages, 1, 0).reshape(cache.shape[1], -1, cache.shape[3])

    keys = gather(inputs.k_cache, scales.get("k_scale", 1.0))
    values = gather(inputs.v_cache, scales.get("v_scale", 1.0))

    def attend(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, position = query
        seen = jnp.arange(keys.shape[1]) <= position
        grouped = q.astype(jnp.float32).reshape(keys.shape[0], -1, 1, q.shape[-1])
        scores = jnp.where(seen, (grouped * keys[:, None]).sum(-1) * scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)[..., None]
        return (weights * jnp.where(seen[:, None], values, 0)[:, None]).sum(2).reshape(q.shape)

    return jax.lax.map(attend, (q, positions))


def relative_error(spec: Spec, inputs: Inputs, out: jax.Array) -> float:
    """The worst row's; NaN if any output is not finite."""
    starts, worst = np.cumsum((0, *spec.query_lens)), 0.0
    exact = partial(exact_attention, inputs=inputs, scales=arg_specs.make_scales(spec), scale=spec.head_dim**-0.5)
    for row, positions in sample_queries(spec):
        tokens = starts[row] + positions - (spec.seq_lens[row] - spec.query_lens[row])
        expected = exact(inputs.q[tokens], jnp.asarray(positions), row=jnp.asarray(row))
        got, expected = np.asarray(out[tokens].astype(jnp.float32)), np.asarray(expected)
        worst = max(worst, float(np.linalg.norm(got - expected) / np.linalg.norm(expected)))
    return worst if bool(jnp.isfinite(out).all()) else float("nan")


def make_plan(spec: Spec, inputs: Inputs, params: mosaic_gpu.Params | None) -> mosaic_gpu.Plan:
    build = partial(
        mosaic_gpu.plan,
        num_tokens=spec.num_tokens,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_query_len=max(spec.query_lens),
        is_fp8=spec.kv_dtype.itemsize == 1,
        params=params,
    )
    return jax.jit(build)(inputs.seq_lens, inputs.query_start_loc)


class AttentionCase:
    """A program of one prefill call, or of a chain of decode calls that takes about a millisecond."""

    def __init__(self, spec: Spec, params: mosaic_gpu.Params | None = None, *, chain: int | None = None) -> None:
        self.spec, self.params = spec, params
        self.is_decode = max(spec.query_lens) == 1
        self.count = (chain or int(np.clip(4e9 / spec.kv_bytes, 4, 64))) if self.is_decode else 1

    def make_inputs(self, **unused: float) -> list[Inputs]:
        """Two sets for decode, whose calls alternate between them."""
        return [arg_specs.make_inputs(self.spec, seed=seed, **unused) for seed in range(1 + self.is_decode)]

    def lower(self) -> jax.stages.Lowered:
        attend = jax.jit(partial(mosaic_gpu.paged_attention, **arg_specs.make_options(self.spec)))

        def calls(sets: list[Inputs], plan: mosaic_gpu.Plan) -> tuple[list[jax.Array], list[jax.Array]]:
            checked = [attend(*inputs, step_plan=plan) for inputs in sets]
            q = checked[-1]
            for i in range(self.count - len(sets)):
                q = attend(*sets[i % 2]._replace(q=q), step_plan=plan)
            # An array that is returned twice is copied.
            return checked, [q] if self.count > len(sets) else []

        sets = jax.eval_shape(self.make_inputs)
        plan = jax.eval_shape(lambda inputs: make_plan(self.spec, inputs, self.params), sets[0])
        return jax.jit(calls).lower(sets, plan)

    def measure(self, program: Callable, sets: list[Inputs] | None = None) -> Result:
        sets = sets or self.make_inputs()
        plan = make_plan(self.spec, sets[0], self.params)
        checked = program(sets, plan)[0]
        error = max(relative_error(self.spec, x, out) for x, out in zip(sets, checked, strict=True))
        seconds = seconds_per_call(program, sets, plan) / self.count
        return Result(seconds, self.spec.kv_bytes if self.is_decode else self.spec.flops, error)

    def lower_baseline(self) -> jax.stages.Lowered:
        """The same work by jax's bundled kernel or cuDNN, for `baseline_inputs`."""
        inputs = jax.eval_shape(self.baseline_inputs)
        if not self.is_decode:
            attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            return jax.jit(attend).lower(*inputs)
        from jax.experimental.pallas.ops.gpu import paged_attention as bundled

        def calls(q: jax.Array, sets: list[tuple[jax.Array, ...]]) -> jax.Array:
            for i in range(self.count):
                q = bundled.paged_attention(q, *sets[i % 2], k_splits=16)
            return q

        return jax.jit(calls).lower(*inputs)

    def baseline_inputs(self) -> tuple:
        spec = self.spec
        if self.is_decode:
            if spec.kv_dtype.itemsize == 1 or spec.head_dim & (spec.head_dim - 1):
                raise NotImplementedError("no such case there")
            sets = self.make_inputs(unused=0.0)
            width = sets[0].block_tables.shape[1] // 16 * 16 or None
            pages = [[jnp.moveaxis(cache, 1, 0) for cache in (x.k_cache, x.v_cache)] for x in sets]
            return sets[0].q, [(*kv, x.block_tables[:, :width], x.seq_lens) for kv, x in zip(pages, sets, strict=True)]
        if spec.query_lens != spec.seq_lens or len(set(spec.query_lens)) > 1:
            raise NotImplementedError("no such case there")
        keys = jax.random.split(jax.random.key(0), 3)
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        shape = (len(spec.query_lens), spec.query_lens[0])
        return tuple(
            jax.random.normal(key, (*shape, n, spec.head_dim), spec.dtype) for key, n in zip(keys, heads, strict=True)
        )

    def measure_baseline(self, program: Callable) -> float:
        return seconds_per_call(program, *self.baseline_inputs()) / self.count


def bench_kv_update(num_rows: int, *, num_kv_heads: int = 8, head_dim: int = 128, block_size: int = 64) -> Result:
    """New K and V rows into shuffled slots of caches of 2,048 blocks, in place."""
    slots = block_size + jax.random.permutation(jax.random.key(0), 2047 * block_size)[:num_rows].astype(jnp.int32)
    keys = jax.random.split(jax.random.key(1), 2)
    rows = [jax.random.normal(key, (num_rows, num_kv_heads, head_dim), jnp.bfloat16) for key in keys]

    def caches() -> list[jax.Array]:
        return [jnp.full((2048, num_kv_heads, block_size, head_dim), jnp.nan, jnp.bfloat16) for _ in range(2)]

    def run(implementation: str) -> tuple[float, list[jax.Array]]:
        count = 32

        @partial(jax.jit, donate_argnums=0)
        def calls(caches: list[jax.Array], k: jax.Array, v: jax.Array, slots: jax.Array) -> list[jax.Array]:
            for _ in range(count):
                caches = list(kv_update_api.kv_update(*caches, k, v, slots, implementation=implementation))
            return caches

        state = caches()

        def step() -> list[jax.Array]:
            nonlocal state
            state = calls(state, *rows, slots)
            return state

        return seconds_per_call(step) / count, state

    seconds, got = run("mosaic_gpu")
    baseline, expected = run("reference")
    bits = [jax.lax.bitcast_convert_type(x, jnp.int16) for x in (*got, *expected)]
    same = all(bool((a == b).all()) for a, b in zip(bits[:2], bits[2:], strict=True))
    work = 4 * rows[0].nbytes  # K and V, in and out
    return Result(seconds, work, 0.0 if same else float("nan"), baseline)


def make_case(name: str) -> AttentionCase:
    if name in VARIANTS:
        spec = arg_specs.DECODE_BENCHMARKS[name.split(": ")[0]]
        tuned = mosaic_gpu.tuned_params(spec.head_dim, is_fp8=spec.kv_dtype.itemsize == 1)
        decode = dataclasses.replace(tuned.decode, **VARIANTS[name])
        return AttentionCase(spec, dataclasses.replace(tuned, decode=decode))
    return AttentionCase((arg_specs.DECODE_BENCHMARKS | arg_specs.PREFILL_BENCHMARKS)[name])


def submit(pool: Executor, name: str, *, with_baseline: bool) -> Callable[[], Result]:
    """Start to compile a case; what is returned runs it."""
    if name in KV_UPDATES:
        return partial(bench_kv_update, KV_UPDATES[name])
    case = make_case(name)
    program = pool.submit(case.lower().compile)
    baseline, remark = None, ""
    try:
        if with_baseline and name not in VARIANTS and "head_dim" not in name:
            baseline = pool.submit(case.lower_baseline().compile)
    except Exception as problem:  # a baseline that cannot do a case must not end the run
        remark = str(problem).splitlines()[0][:30]

    def run() -> Result:
        result = case.measure(program.result())
        try:
            seconds = case.measure_baseline(baseline.result()) if baseline else None
            return dataclasses.replace(result, baseline=seconds, remark=remark)
        except Exception as problem:
            return dataclasses.replace(result, remark=str(problem).splitlines()[0][:30])

    return run


def line(name: str, result: Result, roofs: dict[str, float]) -> str:
    is_flops = name in arg_specs.PREFILL_BENCHMARKS
    roof = roofs["matmul" if is_flops else "copying" if name in KV_UPDATES else "reading"]
    rate, unit = result.work / result.seconds, "TFLOP/s" if is_flops else "GB/s"
    shown = rate / (1e12 if is_flops else 1e9)
    goal = f"{GOALS[name]:6,d}" if name in GOALS else "      "
    baseline = f"{result.baseline / result.seconds:6.2f} x" if result.baseline else result.remark
    wrong = "" if result.error < MAX_ERROR else "  WRONG"
    return (
        f"{name:34s} {result.seconds * 1e6:9,.1f} us {shown:7,.0f} {unit:7s} {goal} {rate / roof:5.2f}"
        f"  {result.error:7.1e}  {baseline}{wrong}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases whose name holds one of these")
    parser.add_argument("--no-baselines", action="store_true")
    options = parser.parse_args()
    start, pool = time.perf_counter(), ThreadPoolExecutor()
    roofs = {"reading": reading_roof(), "copying": copying_roof(), "matmul": matmul_roof()}
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; roofs: reading {roofs['reading'] / 1e9:,.0f} GB/s, ",
        end="",
    )
    print(f"copying {roofs['copying'] / 1e9:,.0f} GB/s, bf16 matmul {roofs['matmul'] / 1e12:,.0f} TFLOP/s")
    print(f"{'case':34s} {'time':>12s} {'rate':>15s} {'goal':>6s}  roof  error    baseline / ours")
    results, runs = {}, {}
    for name in (*arg_specs.DECODE_BENCHMARKS, *VARIANTS, *arg_specs.PREFILL_BENCHMARKS, *KV_UPDATES):
        if options.words and not any(word in name for word in options.words):
            continue
        try:
            runs[name] = submit(pool, name, with_baseline=not options.no_baselines)
        except Exception as problem:  # the other cases are still worth their time
            print(f"{name:34s} failed: {str(problem).splitlines()[0][:80]}", flush=True)
    for name, run in runs.items():
        try:
            results[name] = run()
            print(line(name, results[name], roofs), flush=True)
        except Exception as problem:
            print(f"{name:34s} failed: {str(problem).splitlines()[0][:80]}", flush=True)
    narrow, wide = results.get("decode fp8 256 x 1,024"), results.get("decode 256 x 1,024")
    if narrow and wide:
        print(f"fp8 caches: {wide.seconds / narrow.seconds:.2f} x the rows a second of bf16 (goal 1.5)")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
