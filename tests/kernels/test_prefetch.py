"""What is asked for ahead lies inside the weight, and no more than allowed."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.kernels.linear import api, choose_prefetch
from jaxinfer.kernels.linear.tuning import Params, PrefetchSettings, Product
from jaxinfer.kernels.prefetch import PIECE, Prefetch


@given(
    rows=st.integers(1, 4096), columns=st.integers(1, 8192), parts=st.sampled_from((1, 2, 3, 4, 8)), size=st.integers(0)
)
def test_beginnings_lie_inside_their_parts(rows: int, columns: int, parts: int, size: int) -> None:
    weight = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    found = Prefetch.of(weight, size, parts=parts)  # pyright: ignore[reportArgumentType]
    part_bytes = rows * columns * 2 / parts
    if found is None:
        assert min(part_bytes, size // parts) < PIECE or part_bytes % 16
        return
    asked = found.beginnings
    assert asked.parts == parts
    assert asked.size % PIECE == 0
    assert PIECE <= asked.size <= part_bytes
    assert asked.size * parts <= size
    assert min(part_bytes, size // parts) - asked.size < PIECE  # as much as may be


def test_few_rows_before_a_product_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = jnp.zeros((8, 2, 64, 1024), jnp.bfloat16)
    assert choose_prefetch("mosaic_gpu", 16, weight, num_inputs=3) is None  # nothing is said about it
    settings = PrefetchSettings(max_rows=32, max_bytes=1 << 20)
    monkeypatch.setattr(api, "prefetch_settings", lambda: settings)
    found = choose_prefetch("mosaic_gpu", 32, weight, num_inputs=3)
    assert found is not None
    assert (found.beginnings.parts, found.beginnings.size) == (1, 1 << 20)
    assert choose_prefetch("mosaic_gpu", 48, weight, num_inputs=3) is None
    assert choose_prefetch("reference", 16, weight, num_inputs=3) is None

    def tuned(product: Product, *, head_dim: int | None) -> Params | None:
        assert product.name.startswith("1024x1x1024")
        return Params(splits=4 if head_dim is None else 2)

    monkeypatch.setattr(api, "tuned_params", tuned)
    found = choose_prefetch("mosaic_gpu", 32, weight, num_inputs=3)
    assert found is not None
    assert (found.beginnings.parts, found.beginnings.size) == (4, 1 << 18)
    found = choose_prefetch("mosaic_gpu", 32, weight, num_inputs=3, head_dim=128)
    assert found is not None
    assert found.beginnings.parts == 2  # fused with what follows
    assert choose_prefetch("mosaic_gpu", 32, weight.astype(jnp.float32), num_inputs=3) is None
