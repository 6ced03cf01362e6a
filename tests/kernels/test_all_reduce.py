"""`all_reduce`: its specification against psum on CPU devices, the channel, and the protocol of Hopper's kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxinfer.kernels.all_reduce import Channel, all_reduce, all_reduce_norm, choose, connect, is_reachable
from jaxinfer.kernels.all_reduce.arg_specs import Spec, parts
from jaxinfer.kernels.all_reduce.channel import EMPTY, NUM_COUNTERS, NUM_PARITIES
from jaxinfer.sharding.mesh import make_mesh

RANKS = 4
SPEC = Spec(3, 256, "float32")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "tensor": RANKS})


def reduced(mesh: Mesh, x: jax.Array, implementation: str, *rest: jax.Array) -> np.ndarray:
    """What every rank gets, [ranks, ...]; with a residual and a weight, the normalised rows above the residual."""

    def body(x, *rest):
        if not rest:
            return all_reduce(x[0], "tensor", implementation=implementation)[None]
        out = all_reduce_norm(x[0], *rest, "tensor", implementation=implementation)
        return jnp.concatenate(out)[None]

    specs = (P("tensor"), *(P() for _ in rest))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tensor"), check_vma=False)
    return np.asarray(jax.jit(run)(x, *rest).astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_is_the_float32_sum_in_the_order_of_the_ranks(mesh: Mesh, dtype: str) -> None:
    x = parts(Spec(3, 256, dtype), RANKS)
    total = np.zeros(x.shape[1:], np.float32)
    for part in np.asarray(x.astype(jnp.float32)):
        total += part
    expected = np.asarray(jnp.asarray(total).astype(dtype).astype(jnp.float32))
    out = reduced(mesh, x, "reference")
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))
    np.testing.assert_allclose(reduced(mesh, x, "psum"), out, rtol=1e-6 if dtype == "float32" else 2e-2, atol=2e-2)


def test_norm_is_what_its_parts_are(mesh: Mesh) -> None:
    x, residual = parts(SPEC, RANKS), parts(SPEC, 1, seed=1)[0]
    weight = parts(Spec(1, SPEC.hidden, SPEC.dtype), 1, seed=2)[0, 0]
    out = reduced(mesh, x, "reference", residual, weight)
    total = np.asarray(residual) + reduced(mesh, x, "reference")[0]
    normalised = total / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + 1e-6) * np.asarray(weight)
    np.testing.assert_allclose(out[0], np.concatenate([normalised, total]), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out, np.broadcast_to(out[0], out.shape))
    np.testing.assert_allclose(reduced(mesh, x, "psum", residual, weight), out, rtol=1e-5, atol=1e-5)


def test_a_channel_is_empty_and_every_rank_knows_its_group(mesh: Mesh) -> None:
    channel = connect(mesh, "tensor", rows=2, hidden=256, dtype=jnp.dtype(jnp.bfloat16))
    assert (channel.ranks, channel.row_bytes) == (RANKS, NUM_PARITIES * RANKS * 512)
    memory, table = np.asarray(channel.memory), np.asarray(channel.addresses, np.uint64)
    slots = channel.rows * channel.row_bytes // 4
    assert (memory[:, :slots] == EMPTY).all()
    assert memory.shape == (8, slots + 2 * NUM_COUNTERS)
    assert not memory[:, slots:].any()
    own = {shard.index[0].start: shard.data.unsafe_buffer_pointer() for shard in channel.memory.addressable_shards}
    for data, rank in itertools.product(range(2), range(RANKS)):
        row = table[data * RANKS + rank]
        group = [int(low) | int(high) << 32 for low, high in zip(row[:-1:2], row[1:-1:2], strict=True)]
        assert group == [own[data * RANKS + (rank + distance) % RANKS] for distance in range(RANKS)]
        assert row[-1] == rank
    assert Channel.spec(mesh) == P(tuple(mesh.axis_names))


def chosen(platform: str = "gpu", dtype: str = "bfloat16", rows: int = 1, hidden: int = 4096, ranks: int = 2) -> str:
    return choose(platform, compute_capability="9.0", dtype=jnp.dtype(dtype), rows=rows, hidden=hidden, ranks=ranks)


def test_what_is_chosen() -> None:
    assert chosen(rows=256) == "mosaic_gpu"
    assert chosen(rows=257) == "psum"
    assert chosen(rows=64, ranks=8) == "psum"
    assert chosen(hidden=4100) == "psum"
    assert chosen(hidden=8192, ranks=8) == "psum"
    assert chosen(dtype="float32") == "psum"
    assert chosen("tpu") == "psum"
    old = choose("gpu", compute_capability="8.0", dtype=jnp.dtype(jnp.bfloat16), rows=1, hidden=4096, ranks=2)
    assert old == "psum"


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


def test_devices_of_another_process_are_left_to_psum() -> None:
    assert is_reachable(make_mesh({"tensor": 2}, [FakeDevice(0, 0), FakeDevice(1, 0)]))
    apart = make_mesh({"tensor": 2}, [FakeDevice(0, 0), FakeDevice(1, 1)])
    assert not is_reachable(apart)
    with pytest.raises(NotImplementedError, match="several processes"):
        connect(apart, "tensor", rows=1, hidden=256, dtype=jnp.dtype(jnp.bfloat16))


def test_wrong_arguments_are_refused() -> None:
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), jnp.zeros((256,), jnp.bfloat16)
    with pytest.raises(ValueError, match="needs a channel"):
        all_reduce(x, "tensor", implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="'ring'"):
        all_reduce(x, "tensor", implementation="ring")
    with pytest.raises(ValueError, match=r"residual bfloat16\(1, 256\)"):
        all_reduce_norm(x, x[:1], weight, "tensor")
    with pytest.raises(ValueError, match=r"weight float32\(256,\)"):
        all_reduce_norm(x, x, weight.astype(jnp.float32), "tensor")


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank at one of its memory accesses: it stores to its peer, then polls and reads, then empties the slot."""

    message: int = 0
    stage: int = 0

    def after(self) -> Rank:
        return Rank(self.message, self.stage + 1) if self.stage < 2 else Rank(self.message + 1)


@dataclasses.dataclass(frozen=True)
class State:
    """Two ranks and the slots in the memory of each, a parity an entry: the number of a message, or EMPTY."""

    ranks: tuple[Rank, Rank]
    slots: tuple[tuple[int, ...], tuple[int, ...]]

    def after(self, me: int, owner: int, parity: int, word: int) -> State:
        """Rank `me` has accessed a slot in the memory of `owner`, which now holds `word`."""
        ranks, slots = list(self.ranks), [list(row) for row in self.slots]
        ranks[me] = ranks[me].after()
        slots[owner][parity] = word
        return State((ranks[0], ranks[1]), (tuple(slots[0]), tuple(slots[1])))


def steps(state: State, num_parities: int, num_messages: int, found: set[str]) -> Iterator[State]:
    """Where the next access of either rank leads; what went wrong in it is added to `found`."""
    for me, rank in enumerate(state.ranks):
        if rank.message == num_messages:
            continue
        parity = rank.message % num_parities
        here, there = state.slots[me][parity], state.slots[1 - me][parity]
        if rank.stage == 0:
            if there != EMPTY:
                found.add("overwritten")
            yield state.after(me, 1 - me, parity, rank.message)
        elif rank.stage == 1 and here != EMPTY:
            if here != rank.message:
                found.add("wrong message")
            yield state.after(me, me, parity, here)
        elif rank.stage == 2:
            yield state.after(me, me, parity, int(EMPTY))


def outcomes(num_parities: int, num_messages: int = 4) -> set[str]:
    """How the exchange of messages of one word can end, over all interleavings of the ranks' memory accesses."""
    empty = (int(EMPTY),) * num_parities
    waiting, found = [State((Rank(), Rank()), (empty, empty))], set()
    seen = set(waiting)
    while waiting:
        state = waiting.pop()
        following = list(steps(state, num_parities, num_messages, found))
        if not following:
            found.add("done" if all(rank.message == num_messages for rank in state.ranks) else "stuck")
        waiting += [new for new in following if new not in seen]
        seen.update(following)
    return found


def test_the_protocol_needs_its_parities() -> None:
    assert outcomes(NUM_PARITIES) == {"done"}
    assert "overwritten" in outcomes(1)
