"""Compile the TPU's kernels with no TPU present: they lower, fit in VMEM, and leave the caches where they are."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jaxinfer.kernels.kv_update import mosaic_tpu as kv_update
from jaxinfer.kernels.kv_update import reference as kv_update_reference
from jaxinfer.kernels.paged_attention import mosaic_tpu as paged_attention

pytestmark = pytest.mark.aot
MIB = 1 << 20
POOL_BYTES = 512 * MIB  # XLA may move a pool that fits in VMEM there
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.fixture(scope="module", params=["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
def sharding(request: pytest.FixtureRequest) -> Iterator[jax.sharding.Sharding]:
    """One device of a topology."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=request.param)
        yield jax.sharding.SingleDeviceSharding(topology.devices[0])


def nbytes(*arrays: jax.ShapeDtypeStruct) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def assert_in_place(compiled: jax.stages.Compiled, cache: jax.ShapeDtypeStruct, *, count: int = 2) -> None:
    assert compiled.memory_analysis().alias_size_in_bytes == count * nbytes(cache)
    assert not copies(compiled, cache)


def copies(compiled: jax.stages.Compiled, cache: jax.ShapeDtypeStruct) -> list[str]:
    """Instructions that copy a whole cache."""
    shape = f"[{','.join(map(str, cache.shape))}]"
    text = (line.split(", metadata=")[0] for line in compiled.as_text().splitlines())
    return [line.strip() for line in text if " copy" in line and shape in line]


@pytest.mark.parametrize(
    ("kv_heads", "block_size", "head_dim", "dtype", "num_tokens"),
    [
        (8, 128, 128, jnp.bfloat16, 2048),
        (8, 16, 128, jnp.bfloat16, 100),
        (2, 64, 256, jnp.bfloat16, 1),
        (1, 128, 128, jnp.float32, 256),
        (32, 128, 128, jnp.float32, 64),
    ],
)
def test_kv_update_is_in_place(
    sharding: jax.sharding.Sharding, kv_heads: int, block_size: int, head_dim: int, dtype: jnp.dtype, num_tokens: int
) -> None:
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    cache = shape((2000, kv_heads, block_size, head_dim), dtype)
    rows = shape((num_tokens, kv_heads, head_dim), dtype)
    update = jax.jit(kv_update.kv_update, donate_argnums=(0, 1))
    compiled = update.lower(cache, cache, rows, rows, shape((num_tokens,), jnp.int32)).compile()
    assert_in_place(compiled, cache)
    assert compiled.memory_analysis().temp_size_in_bytes < MIB


def test_a_scatter_is_not_in_place(sharding: jax.sharding.Sharding) -> None:
    """Why there is a kernel; and that `copies` finds copies."""
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    cache, rows = shape((2000, 8, 128, 128), jnp.bfloat16), shape((2048, 8, 128), jnp.bfloat16)
    update = jax.jit(kv_update_reference.kv_update, donate_argnums=(0, 1))
    compiled = update.lower(cache, cache, rows, rows, shape((2048,), jnp.int32)).compile()
    assert copies(compiled, cache)
    assert compiled.memory_analysis().temp_size_in_bytes >= nbytes(cache)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 16, "max_blocks": 256, "num_heads": 24, "window": 1000, "softcap": 30.0},
        {"dtype": jnp.float32, "has_sinks": True},
        {"num_kv_heads": 32, "block_size": 256},
        {"num_heads": 16, "num_kv_heads": 1, "head_dim": 256, "block_size": 64},
        {"num_tokens": 2048, "num_rows": 256, "max_blocks": 768},
        {"num_tokens": 256, "num_rows": 256, "is_decode": True},
    ],
    ids=str,
)
def test_paged_attention_copies_no_cache(sharding: jax.sharding.Sharding, options: dict) -> None:
    q, cache, compiled = compile_step(sharding, **options)
    assert_in_place(compiled, cache, count=4)
    # Queries and outputs, in the order of their KV heads, with the group padded to 8 in the decode launch.
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * nbytes(q) + MIB


def compile_step(
    sharding: jax.sharding.Sharding,
    *,
    head_dim: int = 128,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    block_size: int = 128,
    max_blocks: int = 64,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    dtype: jnp.dtype = jnp.bfloat16,
    num_tokens: int = 512,
    num_rows: int = 64,
    is_decode: bool = False,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.stages.Compiled]:
    """Two layers that write K and V and attend, with donated caches."""
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    num_blocks = POOL_BYTES // (num_kv_heads * block_size * head_dim * jnp.dtype(dtype).itemsize)
    cache = shape((num_blocks, num_kv_heads, block_size, head_dim), dtype)
    q = shape((num_tokens, num_heads, head_dim), dtype)
    rows = shape((num_tokens, num_kv_heads, head_dim), dtype)
    integers = [(num_tokens,), (num_rows, max_blocks), (num_rows,), (num_rows + 1,)]
    sinks = shape((num_heads,), jnp.float32) if has_sinks else None

    def step(caches, q, k, v, sinks, slot_mapping, block_tables, seq_lens, query_start_loc):
        attention_plan = paged_attention.plan(
            seq_lens,
            query_start_loc,
            num_tokens=num_tokens,
            num_heads=num_heads,
            head_dim=head_dim,
            max_query_len=1 if is_decode else None,
        )
        update_plan = kv_update.plan(slot_mapping)
        written = []
        for pair in caches:
            pair = kv_update.kv_update(*pair, k, v, slot_mapping, step_plan=update_plan)
            written.append(pair)
            options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
            batch = (block_tables, seq_lens, query_start_loc)
            q = paged_attention.paged_attention(q, *pair, *batch, **options, step_plan=attention_plan)
        return written, q

    arguments = ([(cache, cache)] * 2, q, rows, rows, sinks, *(shape(size, jnp.int32) for size in integers))
    return q, cache, jax.jit(step, donate_argnums=0).lower(*arguments).compile()
