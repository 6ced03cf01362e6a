"""Meshes and rules: what a user may ask for, and where arrays then lie."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec

from jaxinfer.sharding.mesh import AXES, make_mesh, parse_mesh
from jaxinfer.sharding.rules import LOGICAL_TO_MESH, local_shape, partition_spec, sharding_of


@dataclass(frozen=True)
class FakeDevice:
    id: int


SIZES = st.dictionaries(st.sampled_from(AXES), st.integers(1, 64), min_size=1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=SIZES)
def test_a_mesh_is_what_was_written(sizes):
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    assert parse_mesh(text) == {name: sizes.get(name, 1) for name in AXES}
    assert parse_mesh(text.replace(",", " , ")) == parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensors=2", "unknown mesh axis 'tensors' in 'tensors=2'; did you mean tensor?"),
        ("x=2", "unknown mesh axis 'x' in 'x=2'; axes are data, pipe, expert, tensor"),
        ("", "unknown mesh axis '' in ''; axes are data, pipe, expert, tensor"),
        ("tensor=2,tensor=4", "mesh axis tensor stands twice in 'tensor=2,tensor=4'"),
        ("tensor", "mesh axis tensor needs a positive size, such as tensor=2, got 'tensor'"),
        ("data=0", "mesh axis data needs a positive size, such as data=2, got 'data=0'"),
        ("data=-1", "mesh axis data needs a positive size, such as data=2, got 'data=-1'"),
        ("data=1.5", "mesh axis data needs a positive size, such as data=2, got 'data=1.5'"),
    ],
)
def test_mistakes_are_told(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_mesh(text)


def test_neighbours_share_a_tensor_axis():
    devices = [FakeDevice(number) for number in range(10)]
    mesh = make_mesh({"tensor": 2, "data": 4}, devices)
    assert dict(mesh.shape) == {"data": 4, "pipe": 1, "expert": 1, "tensor": 2}
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids.reshape(4, 2).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_too_few_devices():
    with pytest.raises(ValueError, match="mesh data=2 x tensor=4 needs 8 devices, there are 3"):
        make_mesh({"tensor": 4, "data": 2}, [FakeDevice(number) for number in range(3)])


def test_rules():
    assert partition_spec(("embed", "kv_heads", None, "head_dim")) == PartitionSpec(None, "tensor", None, None)
    with pytest.raises(ValueError, match="unknown logical axis 'heads'; known are vocab, kv_heads"):
        partition_spec(("heads",))
    with pytest.raises(ValueError, match="map twice to mesh axis 'tensor'"):
        partition_spec(("vocab", "mlp"))
    assert {mesh_axis for mesh_axis in LOGICAL_TO_MESH.values() if mesh_axis} <= set(AXES)


def test_what_cannot_be_divided_is_refused_with_both_numbers():
    mesh = AbstractMesh((3,), ("tensor",))
    with pytest.raises(ValueError, match=re.escape("layers.0.mlp.down: 3073 (mlp) cannot be divided among tensor=3")):
        sharding_of("layers.0.mlp.down", (3073, 1024), ("mlp", "embed"), mesh)
    assert sharding_of("layers.0.mlp.down", (3072, 1024), ("mlp", "embed"), mesh).spec == PartitionSpec("tensor", None)


def test_local_shapes():
    axes = ("embed", "kv_heads", None, "head_dim")
    assert local_shape((1024, 8, 4, 128), axes, {"tensor": 4}) == (1024, 2, 4, 128)
    assert local_shape((1024, 8, 4, 128), axes, {}) == (1024, 8, 4, 128)
