"""Hopper's all-reduce on the GPUs of this host: every rank has the float32 sum, whatever messages came before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxinfer.kernels.all_reduce import Channel, all_reduce, all_reduce_norm, connect
from jaxinfer.kernels.all_reduce.arg_specs import DECODE, WIDTHS, Spec, parts
from jaxinfer.kernels.all_reduce.reference import add_norm
from jaxinfer.sharding.mesh import make_mesh

pytestmark = pytest.mark.two_devices


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    assert jax.default_backend() == "gpu", "these need Hopper GPUs"
    assert len(jax.devices()) > 1, "one GPU: nothing to reduce over"
    return make_mesh({"tensor": len(jax.devices())})


@pytest.fixture(scope="module")
def channels(mesh: Mesh) -> dict[str, Channel]:
    dtypes = ("bfloat16", "float16")
    return {dtype: connect(mesh, "tensor", rows=256, hidden=8192, dtype=jnp.dtype(dtype)) for dtype in dtypes}


def reduced(mesh: Mesh, channel: Channel, x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    """[ranks, T, hidden] for each result."""

    def body(channel, x, *rest):
        options = {"channel": channel, "implementation": "mosaic_gpu"}
        marker = jax.lax.psum(jnp.ones((1,)), "tensor")  # an XLA collective: see all_reduce
        if not rest:
            return marker, all_reduce(x[0], "tensor", **options)[None]
        return marker, *(out[None] for out in all_reduce_norm(x[0], *rest, "tensor", **options))

    specs = (Channel.spec(mesh), P("tensor"), *(P() for _ in rest))
    out_specs = (P(), *(P("tensor") for _ in rest or (0,)))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return jax.jit(run)(channel, x, *rest)[1:]


def total_of(x: jax.Array) -> np.ndarray:
    total = np.zeros(x.shape[1:], np.float32)
    for part in np.asarray(x.astype(jnp.float32)):
        total += part
    return total


@pytest.mark.parametrize("spec", [*DECODE, *WIDTHS], ids=str)
def test_every_rank_has_the_sum(mesh: Mesh, channels: dict[str, Channel], spec: Spec) -> None:
    for seed in range(3):  # both parities, and the first one again
        x = parts(spec, len(jax.devices()), seed)
        (out,) = reduced(mesh, channels[spec.dtype], x)
        expected = jnp.asarray(total_of(x)).astype(spec.dtype)[None]
        np.testing.assert_array_equal(np.asarray(out), np.broadcast_to(expected, out.shape))


@pytest.mark.parametrize("spec", [DECODE[0], DECODE[3], *WIDTHS[:3]], ids=str)
def test_norm_follows_the_sum(mesh: Mesh, channels: dict[str, Channel], spec: Spec) -> None:
    x, residual = parts(spec, len(jax.devices())), parts(spec, 1, seed=7)[0]
    weight = parts(Spec(1, spec.hidden, spec.dtype), 1, seed=8)[0, 0]
    out = reduced(mesh, channels[spec.dtype], x, residual, weight)
    for got, wanted in zip(out, add_norm(jnp.asarray(total_of(x)), residual, weight, 1e-6), strict=True):
        bits = np.asarray(got).view(np.uint16)
        np.testing.assert_array_equal(bits, np.broadcast_to(bits[:1], bits.shape))
        wide = np.asarray(got.astype(jnp.float32))
        np.testing.assert_allclose(wide[0], np.asarray(wanted.astype(jnp.float32)), rtol=1.6e-2, atol=1e-6)
