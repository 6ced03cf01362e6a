"""The TPU's KV write against a plain loop, in the TPU interpreter."""

import itertools
from collections.abc import Callable
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.kv_update import mosaic_tpu

update = jax.jit(partial(mosaic_tpu.kv_update, interpret=pltpu.InterpretParams(detect_races=True)))


def check(
    slots: np.ndarray,
    *,
    blocks: int,
    kv_heads: int = 2,
    block_size: int = 32,
    dtype: str = "bfloat16",
    rows_dtype: str | None = None,
) -> None:
    """Every slot but 0 holds its row or what it held, NaN included, to the bit; no race was seen."""
    rng = np.random.default_rng(len(slots))
    cache = rng.standard_normal((2, blocks, kv_heads, block_size, 128), np.float32)
    cache[:, :, :, ::3] = np.nan
    rows = rng.standard_normal((2, len(slots), kv_heads, 128), np.float32)
    k_cache, v_cache = jnp.asarray(cache, dtype)
    k, v = jnp.asarray(rows, rows_dtype or dtype)
    got = update(k_cache, v_cache, k, v, jnp.asarray(slots, jnp.int32))
    assert not interpreter.races.races_found
    for old, new, out in zip((k_cache, v_cache), (k, v), got, strict=True):
        want, new = np.array(old), np.asarray(new.astype(dtype))
        for token, slot in enumerate(slots):
            want[slot // block_size, :, slot % block_size] = new[token]
        out = np.array(out)
        out[0, :, 0] = want[0, :, 0]  # any of the padding rows
        np.testing.assert_array_equal(out.view(np.uint8), want.view(np.uint8))


def packed(rows: list[tuple[int, int]], *, block_size: int, padding: int, seed: int) -> tuple[np.ndarray, int]:
    """Slots of rows (cached, new) over a shuffled pool, then padding; and the number of blocks."""
    counts = [-(-(cached + new) // block_size) for cached, new in rows]
    ids = iter(np.random.default_rng(seed).permutation(np.arange(1, sum(counts) + 1)))
    slots: list[int] = []
    for (cached, new), count in zip(rows, counts, strict=True):
        table = [next(ids) for _ in range(count)]
        slots += [table[p // block_size] * block_size + p % block_size for p in range(cached, cached + new)]
    return np.array(slots + [0] * padding, np.int32), sum(counts) + 1


@pytest.mark.parametrize(
    ("dtype", "rows_dtype", "kv_heads"),
    [("bfloat16", "bfloat16", 3), ("float32", "float32", 1), ("bfloat16", "float32", 2)],
)
def test_decode_and_prefill_rows(dtype: str, rows_dtype: str, kv_heads: int) -> None:
    rows = [(5, 1), (31, 1), (32, 1), (15, 1), (7, 20), (0, 17)]
    slots, blocks = packed(rows, block_size=32, padding=4, seed=0)
    check(slots, blocks=blocks, kv_heads=kv_heads, dtype=dtype, rows_dtype=rows_dtype)


def test_slots_in_any_order() -> None:
    """Tokens of one tile that are not neighbours in the batch, and more runs than the ring has buffers."""
    slots = np.random.default_rng(1).permutation(np.arange(1, 13 * 16))[:40]
    check(slots, blocks=13, block_size=16)


def test_tiles_that_span_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile written in one grid step is read again in the next one; the last chunk is not full."""
    monkeypatch.setattr(mosaic_tpu, "CHUNK", 8)
    slots = np.random.default_rng(2).permutation(np.arange(1, 96))[:21]
    update.clear_cache()
    check(slots, blocks=3)
    update.clear_cache()


def test_nothing_but_padding() -> None:
    check(np.zeros(5, np.int32), blocks=2)


def ragged(num_tokens: int, max_rows: int) -> Callable[[Callable], Callable]:
    """Batches of at most `num_tokens`: rows (cached, new), of which some are decode rows, and padding."""
    decode = st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=max_rows)
    prefill = st.lists(st.tuples(st.integers(0, 40), st.integers(2, (num_tokens - max_rows) // 2)), max_size=2)
    return hypothesis.given(decode=decode, prefill=prefill, seed=st.integers(0, 1000))


@hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
@ragged(64, 4)
def test_ragged_batches(decode: list[tuple[int, int]], prefill: list[tuple[int, int]], seed: int) -> None:
    rows = decode + prefill
    padding = 64 - sum(new for _, new in rows)
    slots, _ = packed(rows, block_size=16, padding=padding, seed=seed)
    check(slots, blocks=40, kv_heads=1, block_size=16)


@pytest.mark.slow
@hypothesis.settings(max_examples=30, deadline=None)
@ragged(300, 20)
def test_batches_of_many_chunks(decode: list[tuple[int, int]], prefill: list[tuple[int, int]], seed: int) -> None:
    rows = decode + prefill
    padding = 300 - sum(new for _, new in rows)
    slots, _ = packed(rows, block_size=64, padding=padding, seed=seed)
    check(slots, blocks=60, kv_heads=1, block_size=64)


def test_plan_has_every_token_once() -> None:
    slots = np.random.default_rng(3).integers(1, 600, 300)
    plan = jax.jit(mosaic_tpu.plan)(jnp.asarray(slots, jnp.int32))
    chunk, seen = mosaic_tpu.CHUNK, []
    for number, runs in enumerate(np.asarray(plan.num_runs)):
        starts = np.asarray(plan.run_starts)[number * (chunk + 1) :][: runs + 1]
        tiles = []
        for first, last in itertools.pairwise(starts):
            order = np.asarray(plan.order)[number * chunk + first : number * chunk + last] + number * chunk
            (tile,) = set(slots[order] // mosaic_tpu.TILE)
            tiles.append(tile)
            seen += order.tolist()
        assert len(set(tiles)) == len(tiles)
    assert sorted(seen) == list(range(300))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 64}, "head_dim 64"),
        ({"block_size": 20}, "block_size 20"),
        ({"dtype": jnp.float16}, "float16"),
        ({"kv_heads": 1024}, "1024 KV heads"),
        ({"num_tokens": 1 << 17}, "131072 rows"),
    ],
)
def test_says_what_it_cannot_do(change: dict, words: str) -> None:
    kind = {"kv_heads": 2, "block_size": 32, "head_dim": 128, "dtype": jnp.bfloat16, "num_tokens": 8} | change
    cache = jax.ShapeDtypeStruct((4, kind["kv_heads"], kind["block_size"], kind["head_dim"]), kind["dtype"])
    rows = jax.ShapeDtypeStruct((kind["num_tokens"], kind["kv_heads"], kind["head_dim"]), kind["dtype"])
    slots = jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(mosaic_tpu.kv_update, cache, cache, rows, rows, slots)
