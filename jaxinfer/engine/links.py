"""What passes between a pipeline's stages: arrays to the devices of the next one, and a step's results to processes
that do not have the last.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.core import PromptLogprobs, StepPlan, StepResult
from jaxinfer.sharding.placement import replicated


def is_spread(*meshes: Mesh) -> bool:
    """Whether some of the devices are another process's."""
    here = jax.process_index()
    return any(device.process_index != here for mesh in meshes for device in mesh.devices.flat)


def move(array: jax.Array, mesh: Mesh) -> jax.Array:
    """The array, whole on every device where it is, on the devices of another mesh of this process."""
    return jax.device_put(array, replicated(mesh))


class Link:
    """From one stage's devices to those of the next, some of them another process's.

    Jax copies from device to device within a process only. So both stages' devices run one small program together, in
    which each device of the one permutes with its counterpart of the other:

          stage 0    [T, hidden] -+   zeros          as one array [2 T, hidden]
          stage 1    zeros        +-> [T, hidden]    over a mesh of two rows

    Args:
      source, target: meshes of equally many devices.
    """

    def __init__(self, source: Mesh, target: Mesh) -> None:
        self.target = target
        both = np.stack([source.devices.ravel(), target.devices.ravel()])
        here = jax.process_index()
        self._own = [[device for device in row if device.process_index == here] for row in both]
        mesh = Mesh(both, ("stage", "rank"))
        self._sharding, spec = NamedSharding(mesh, PartitionSpec("stage")), PartitionSpec("stage")

        def permute(rows: jax.Array) -> jax.Array:
            return jax.lax.ppermute(rows, "stage", [(0, 1)])

        self._permute = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        self._zeros: dict[tuple[Any, ...], list[jax.Array]] = {}

    def send(self, array: jax.Array | None, shape: tuple[int, ...], dtype: Any) -> jax.Array | None:
        """To be called in all processes that have devices of either stage, in the same order; in others it is nothing.

        Args:
          array: whole on every device of the source; None where this process has none of those.
          shape, dtype: of the array.

        Returns:
          The array, whole on every device of the target; None where this process has none of those.
        """
        if not any(self._own):
            return None
        parts = {} if array is None else {shard.device: shard.data for shard in array.addressable_shards}
        sent = [parts[device] for device in self._own[0]]
        pair = (2 * shape[0], *shape[1:])
        given = jax.make_array_from_single_device_arrays(pair, self._sharding, [*sent, *self._room(shape, dtype)])
        shards = {shard.device: shard.data for shard in self._permute(given).addressable_shards}
        if not self._own[1]:
            return None
        received = [shards[device] for device in self._own[1]]
        return jax.make_array_from_single_device_arrays(shape, replicated(self.target), received)

    def _room(self, shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
        key = (shape, jnp.dtype(dtype))
        if key not in self._zeros:
            self._zeros[key] = [jnp.zeros(shape, dtype, device=device) for device in self._own[1]]
        return self._zeros[key]


def pack_result(result: StepResult, plan: StepPlan) -> dict[str, Any]:
    """A step's result as JSON values."""
    rows = {row.request: number for number, row in enumerate(plan.others)}
    return {
        "token_ids": result.token_ids,
        "decodes": result.decode_token_ids.tolist(),
        "logprobs": None if result.logprobs is None else [_pack_row(row) for row in result.logprobs],
        "prompts": [(rows[part.request], part.start, [*map(_pack_row, part.rows)]) for part in result.prompt_logprobs],
    }


def _pack_row(row: Any) -> list[Any]:
    logprob, rank, top_ids, top_values = row
    return [logprob, rank, np.asarray(top_ids).tolist(), np.asarray(top_values).tolist()]


def unpack_result(packed: dict[str, Any], plan: StepPlan) -> StepResult:
    """What `pack_result` packed, after JSON, for the same plan in another process."""
    return StepResult(
        packed["token_ids"],
        logprobs=packed["logprobs"],
        prompt_logprobs=[
            PromptLogprobs(plan.others[number].request, start, rows) for number, start, rows in packed["prompts"]
        ],
        decode_token_ids=np.array(packed["decodes"], np.int64),
    )
