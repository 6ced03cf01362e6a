"""What a step works out on the device from its plan and the counts that it keeps there."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.batch import AttentionMetadata, Batch, Carry


def derive_inputs(
    batch: Batch, tables: jax.Array, carry: Carry, block_size: int
) -> tuple[jax.Array, AttentionMetadata]:
    """Token ids, positions and slots of a step, from the device's own counts: the host may only know bounds.

    row s:    token t at position num_computed[slot] + (t - query_start_loc[s])
              in block tables[slot, position // block_size], at offset position % block_size
    """
    num_rows = batch.slot_ids.shape[0]
    computed = carry.num_computed.at[batch.slot_ids].get(mode="fill", fill_value=0)
    num_new = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    block_tables = tables.at[batch.slot_ids].get(mode="fill", fill_value=0)
    is_token = batch.token_rows < num_rows
    row = jnp.minimum(batch.token_rows, num_rows - 1)
    offset = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32) - batch.query_start_loc[row]
    positions = jnp.where(is_token, computed[row] + offset, 0)
    blocks = block_tables.at[row, positions // block_size].get(mode="clip")
    last_tokens = carry.last_tokens.at[batch.slot_ids].get(mode="fill", fill_value=0)
    is_carried = batch.from_carry[row] & (offset == 0) & is_token
    meta = AttentionMetadata(
        positions=positions,
        slot_mapping=jnp.where(is_token, blocks * block_size + positions % block_size, 0),
        block_tables=block_tables,
        seq_lens=jnp.where(num_new > 0, computed + num_new, 0),
        query_start_loc=batch.query_start_loc,
    )
    return jnp.where(is_carried, last_tokens[row], batch.token_ids), meta
