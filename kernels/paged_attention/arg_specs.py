"""Cases of `paged_attention`, shared by its tests and benchmarks, and their inputs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Spec:
    """A batch. Row s has query_lens[s] new tokens and seq_lens[s] tokens in all; decode rows come first."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 64
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # that of q
    has_scales: bool = False
    padding_rows: int = 0
    padding_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.padding_tokens

    @property
    def kv_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.cache_dtype or self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the batch's rows hold."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of both products over the (query, key) pairs under the causal mask."""
        rows = zip(self.query_lens, self.seq_lens, strict=True)
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in rows)
        return 4 * self.num_heads * self.head_dim * pairs


class Inputs(NamedTuple):
    """Arguments of `paged_attention`, in its order."""

    q: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array


def decode(rows: int, length: int, **changes) -> Spec:
    heads: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    return Spec((1,) * rows, (length,) * rows, **(heads | changes))


def prefill(rows: int, new: int, cached: int = 0, **changes) -> Spec:
    heads: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return Spec((new,) * rows, (new + cached,) * rows, **(heads | changes))


FP8 = {"cache_dtype": "float8_e4m3fn", "has_scales": True}


def _ragged_decode() -> Spec:
    lengths = np.random.default_rng(5).integers(100, 2001, 256)
    return dataclasses.replace(decode(256, 1), seq_lens=tuple(int(n) for n in lengths))


DECODE_BENCHMARKS = {
    "decode 256 x 1,024": decode(256, 1024),
    "decode 256 x 1,024, block 16": decode(256, 1024, block_size=16),
    "decode 32 x 8,192": decode(32, 8192),
    "decode 16 x 4,096": decode(16, 4096),
    "decode 1 x 32,768": decode(1, 32768),
    "decode 256 ragged 100..2,000": _ragged_decode(),
    "decode fp8 256 x 1,024": decode(256, 1024, **FP8),
    "decode fp8 32 x 8,192": decode(32, 8192, **FP8),
    **{f"decode head_dim {dim}, 64 x 1,024": decode(64, 1024, head_dim=dim) for dim in (64, 80, 96, 112, 256)},
    "decode head_dim 80, fp8": decode(64, 1024, head_dim=80, **FP8),
}
PREFILL_BENCHMARKS = {
    "prefill 8 x 1,024": prefill(8, 1024),
    "prefill 1 x 8,192": prefill(1, 8192),
    "prefill 1 x 32,768": prefill(1, 32768),
    "1,024 new on 7,168, 1 row": prefill(1, 1024, 7168),
    "1,024 new on 7,168, 8 rows": prefill(8, 1024, 7168),
    "prefill ragged": Spec(
        (100, 1000, 517, 2000, 333),
        (100, 3000, 517, 2100, 4000),
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        padding_tokens=146,
    ),
}
# At most 16 tiles of 64 keys each: what the interpreters do in about a second.
SMALL = {
    "decode": Spec((1, 1, 1), (100, 64, 1), head_dim=128, padding_rows=1, padding_tokens=1),
    "mixed": Spec((1, 1, 70, 30), (65, 20, 100, 30), padding_rows=1, padding_tokens=2),
    "mixed, window, softcap, sinks, odd group, small blocks": Spec(
        (1, 50),
        (130, 90),
        num_heads=3,
        num_kv_heads=1,
        block_size=16,
        window=40,
        softcap=5.0,
        has_sinks=True,
    ),
}
# Small decode batches for what only some implementations can do.
SMALL_DECODE = {
    "decode, fp8": Spec((1, 1), (100, 64), num_heads=6, head_dim=128, padding_rows=1, padding_tokens=1, **FP8),
    "decode, fp8, head_dim 80": Spec((1, 1), (100, 20), head_dim=80, block_size=16, window=70, **FP8),
    "decode, head_dim 112": Spec((1, 1), (100, 64), num_heads=6, head_dim=112, block_size=128, has_sinks=True),
    "decode, head_dim 256": Spec((1,), (100,), head_dim=256, softcap=5.0, has_scales=True),
}
WIDE_DECODE = {
    f"decode, head_dim {head_dim}, {heads}/{kv_heads}{', fp8' if cache else ''}": Spec(
        (1, 1),
        (130, 3),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        padding_rows=1,
        padding_tokens=3,
        **cache,
    )
    for head_dim, block_size in ((64, 16), (80, 64), (96, 32), (112, 128), (128, 256), (192, 64), (256, 64))
    for heads, kv_heads, window, cache in ((8, 8, None, FP8), (9, 3, 50, FP8), (24, 2, None, {}), (32, 1, None, FP8))
    if (heads, head_dim) != (32, 256)  # more than registers hold
}
WIDE = {
    f"{name}, head_dim {head_dim}, block {block_size}, {heads}/{kv_heads}, {dtype}": Spec(
        query_lens,
        seq_lens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        dtype=dtype,
        padding_rows=1,
        padding_tokens=3,
    )
    for name, query_lens, seq_lens, window in (
        ("decode", (1, 1), (130, 3), None),
        ("window", (1, 40), (200, 100), 33),
        ("mixed", (1, 1, 5, 70), (17, 128, 40, 130), None),
    )
    for head_dim, block_size, heads, kv_heads, dtype in (
        (64, 16, 4, 4, "bfloat16"),
        (64, 256, 9, 3, "float16"),
        (128, 32, 16, 2, "bfloat16"),
        (128, 128, 12, 1, "bfloat16"),
        (192, 64, 4, 2, "bfloat16"),
    )
}


def make_inputs(spec: Spec, seed: int, *, unused: float = float("nan")) -> Inputs:
    """Random inputs over a shuffled block table; `unused` fills the null block, unused slots and padding tokens."""
    rng = np.random.default_rng(seed)
    block_size, dtype = spec.block_size, jnp.dtype(spec.dtype)
    blocks = [-(-length // block_size) for length in spec.seq_lens]
    rows = len(blocks) + spec.padding_rows
    block_tables = np.zeros((rows, max(blocks) + 1), np.int32)
    used = np.zeros((sum(blocks) + 1, block_size), bool)
    ids = rng.permutation(np.arange(1, sum(blocks) + 1, dtype=np.int32))
    for row, (count, length) in enumerate(zip(blocks, spec.seq_lens, strict=True)):
        block_tables[row, :count], ids = ids[:count], ids[count:]
        used[block_tables[row, :count]] = (np.arange(count * block_size) < length).reshape(count, block_size)

    starts = np.cumsum((0, *spec.query_lens, *(0,) * spec.padding_rows))
    keys = jax.random.split(jax.random.key(seed), 3)
    cache = (len(used), spec.num_kv_heads, block_size, spec.head_dim)
    fill = jax.jit(lambda x, used: jnp.where(used, x, jnp.asarray(unused, x.dtype)), donate_argnums=0)

    @jax.jit
    def random_cache(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, cache, dtype).astype(spec.kv_dtype)

    is_used = jnp.asarray(used)[:, None, :, None]
    is_token = (jnp.arange(spec.num_tokens) < starts[-1])[:, None, None]
    return Inputs(
        fill(jax.random.normal(keys[0], (spec.num_tokens, spec.num_heads, spec.head_dim), dtype), is_token),
        fill(random_cache(keys[1]), is_used),
        fill(random_cache(keys[2]), is_used),
        jnp.asarray(block_tables),
        jnp.asarray((*spec.seq_lens, *(0,) * spec.padding_rows), jnp.int32),
        jnp.asarray(starts, jnp.int32),
    )


def make_sinks(spec: Spec) -> jax.Array | None:
    return jnp.linspace(-1.0, 2.0, spec.num_heads) if spec.has_sinks else None


def make_scales(spec: Spec) -> dict[str, jax.Array]:
    """The arguments k_scale and v_scale where the spec has such."""
    return {"k_scale": jnp.float32(0.7), "v_scale": jnp.float32(1.3)} if spec.has_scales else {}


def make_options(spec: Spec) -> dict[str, Any]:
    """The keyword arguments of `paged_attention`."""
    return {
        "scale": spec.head_dim**-0.5,
        "window": spec.window,
        "softcap": spec.softcap,
        "sinks": make_sinks(spec),
        **make_scales(spec),
    }
