"""Items of the prefill kernel, inside the kernel: reading them from the plan, dealing them, handing them over."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_plan import ROWS, PrefillParams


@dataclasses.dataclass(frozen=True)
class Item:
    """A query tile and its heads, all int32 scalars. The producer hands it to the consumers as a record."""

    token: jax.Array  # of the tile's first row, in the batch; a multiple of TILE_ROWS
    low: jax.Array  # the tile's rows [low, high) are tokens of this row of the batch
    high: jax.Array
    position: jax.Array  # of the tile's first row; negative if that is another row's token
    seq_len: jax.Array
    head: jax.Array  # first query head
    first_step: jax.Array  # K/V tiles [first_step, end_step) of the row
    end_step: jax.Array

    def part(self, consumer: jax.Array | int, per_item: int) -> tuple[jax.Array, jax.Array]:
        """Head, and offset into the tile, of a consumer (counted through the cluster)."""
        return self.head + consumer % per_item, self.head * 0 + (consumer // per_item) * ROWS

    def write(self, record: Any) -> None:
        for i, field in enumerate(dataclasses.fields(self)):
            record[i] = getattr(self, field.name)

    @classmethod
    def read(cls, record: Any) -> "Item":
        return cls(*(record[i] for i in range(NUM_FIELDS)))


jax.tree_util.register_dataclass(Item)
NUM_FIELDS = len(dataclasses.fields(Item))


def is_item(record: Any) -> jax.Array:
    """Whether a record holds an item; the last one a CTA gets does not."""
    return record[NUM_FIELDS - 1] > 0


def write_end(record: Any) -> None:
    record[NUM_FIELDS - 1] = jnp.int32(0)


@dataclasses.dataclass(frozen=True)
class ItemList:
    """All items of the step, by number."""

    tiles_ref: Any
    sections_ref: Any
    num_tiles_ref: Any
    heads: int
    group: int
    window: int | None
    params: PrefillParams

    @property
    def per_item(self) -> int:
        return self.params.heads_per_item(self.group)

    @property
    def total(self) -> jax.Array:
        return self.num_tiles_ref[0] * (self.heads // self.per_item)

    def read(self, index: jax.Array) -> tuple[jax.Array, Item]:
        """The row of the block table, and the item."""
        # A section's items take as many numbers as its tiles have items, so the tile at this place is one of its.
        place = index // (self.heads // self.per_item)
        first, count, kv_heads = (self.sections_ref[place, k] for k in range(3))
        width = kv_heads * (self.group // self.per_item)  # items of a tile side by side
        chunk, rest = _divide(index - first * (self.heads // self.per_item), count * width)
        tile, column = _divide(rest, width)
        row, token, low, high, position, seq_len = (self.tiles_ref[first + tile, k] for k in range(6))
        first_key = 0 if self.window is None else jnp.maximum(position + low - self.window + 1, 0)
        return row, Item(
            token,
            low,
            high,
            position,
            seq_len,
            (chunk * width + column) * self.per_item,
            first_key // self.params.block_kv + position * 0,
            pl.cdiv(position + high, self.params.block_kv),
        )

    def deal(self, i: jax.Array, claim_smem: Any, claimed: Any) -> jax.Array:
        """The number of the i-th item of this cluster; `total` or more if there is none.

        claim_smem[2, 1] and claimed[2], a barrier all CTAs of the cluster arrive at, hand a claim over; when number i
        is there, the other CTA has read number i - 1, whose place the next claim takes.
        """
        if self.params.is_interpreted:
            cluster, clusters = lax.axis_index("cta"), lax.axis_size("cta")
            return i * clusters + jnp.where(lax.rem(i, 2) == 0, cluster, clusters - 1 - cluster)
        slot, last = lax.rem(i, 2), self.total + lax.axis_size("cta") - 1
        if self.params.ctas == 1:
            _claim(self.num_tiles_ref, last, claim_smem.at[slot], cluster=1)
        else:
            leads = lax.axis_index("rank") == 0
            pl.when(leads)(lambda: _claim(self.num_tiles_ref, last, claim_smem.at[slot], cluster=self.params.ctas))
            plgpu.barrier_arrive(claimed.at[slot])
            plgpu.barrier_wait(claimed.at[slot])
        return claim_smem[slot, 0]


def _divide(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    quotient = lax.div(a, b)
    return quotient, a - quotient * b


def _claim(num_tiles_ref: Any, last: jax.Array, smem: Any, *, cluster: int) -> None:
    """Put the next number into smem[0] of all CTAs of the cluster. After `last`, a launch's last claim, comes 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.RefType()))
    def claim(_, counts, last, smem):
        i32 = ir.IntegerType.get_signless(32)
        counter = mgpu_utils.memref_ptr(mgpu_utils.memref_slice(counts, (slice(1, 2),)))
        mgpu_utils.warpgroup_barrier()
        with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
            number = mgpu_utils.inline_ptx(
                "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;",
                counter,
                last.registers.item(),
                result_types=i32,
                has_side_effects=True,
            )
            for rank in range(cluster):
                mgpu_utils.inline_ptx(
                    """
    {
        .reg .b32 mapped;
        mapa.shared::cluster.u32 mapped, $0, $1;
        st.shared::cluster.u32 [mapped], $2;
    }""",
                    mgpu_utils.memref_ptr(smem),
                    mgpu_utils.c(rank, i32),
                    number,
                    has_side_effects=True,
                )
            if cluster > 1:
                mgpu_utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)
        mgpu_utils.warpgroup_barrier()

    claim(num_tiles_ref, last, smem)  # pyright: ignore[reportCallIssue]
