"""Golden cases of tiny models, and a forward pass of one through the paged cache."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfer.batch import AttentionMetadata
from jaxinfer.config import EngineConfig, Kernels
from jaxinfer.engine.build import load_weights
from jaxinfer.loaders import open_checkpoint
from jaxinfer.models import build_model, divide, parse_config, supported_architectures
from jaxinfer.sharding.mesh import resolve_mesh
from jaxinfer.sharding.parameters import abstract_parameters

TINY = Path(__file__).parents[1] / "goldens" / "tiny"
TOLERANCE = 1e-4  # float32 against float64 differs by 2e-5 at most; the least wrong setting tried, by 0.02


def read(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    with np.load(TINY / f"{name}.npz") as arrays:
        return json.loads((TINY / f"{name}.json").read_text()), dict(arrays)


def supported() -> list[str]:
    cases = [path.stem for path in sorted(TINY.glob("*.json"))]
    return [name for name in cases if read(name)[0]["config"]["architectures"][0] in supported_architectures()]


def forward(
    folder: Path,
    token_ids: list[int],
    block_size: int = 16,
    dtype: str = "float32",
    mesh: str | None = None,
    kernels: Kernels | str = "reference",
) -> np.ndarray:
    """Logits of all positions, float32 [T, V], through the paged cache; V is padded on a mesh."""
    checkpoint = open_checkpoint(str(folder))
    cut = divide(parse_config(checkpoint.config), resolve_mesh(mesh))
    model = build_model(cut, dtype, kernels)
    weights = load_weights(EngineConfig(), checkpoint, cut, model, jax.devices()[0])
    graph, state = nnx.split(model)
    tree = jax.tree.structure(state)
    length = len(token_ids)
    blocks = -(-length // block_size)
    page = jnp.full((blocks + 1, cut.whole.num_kv_heads, block_size, cut.whole.head_dim), jnp.nan, jnp.dtype(dtype))
    positions = jnp.arange(length, dtype=jnp.int32)
    meta = AttentionMetadata(
        positions=positions,
        slot_mapping=positions + block_size,
        block_tables=jnp.arange(1, blocks + 1, dtype=jnp.int32)[None],
        seq_lens=jnp.array([length], jnp.int32),
        query_start_loc=jnp.array([0, length], jnp.int32),
    )

    def run(weights, caches, meta):
        bound = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        hidden, _ = bound(jnp.array(token_ids, jnp.int32), meta, caches)
        return bound.logits(hidden)

    arguments = (weights, [(page, page)] * cut.model.num_layers, meta)
    if cut.mesh is not None:
        names = P(None, "tensor")
        specs = (parameter_specs(model, cut.mesh), names, P())
        run = jax.shard_map(run, mesh=cut.mesh, in_specs=specs, out_specs=names, check_vma=False)
    return np.asarray(jax.jit(run)(*arguments))


def parameter_specs(model: nnx.Module, mesh: Mesh) -> list[P]:
    """Where each parameter lies."""
    shardings = [leaf.sharding for leaf in abstract_parameters(model, mesh)]
    return [sharding.spec for sharding in shardings if isinstance(sharding, NamedSharding)]
