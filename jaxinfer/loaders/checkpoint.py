"""The protocol of a checkpoint, and the one way from it to arrays: every leaf filled exactly once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

type Index = tuple[slice, ...]
"""A slice with explicit start and stop per dimension."""
type ReadTensor = Callable[[str, Index], np.ndarray]


class Checkpoint(Protocol):
    """A model on disk, with Hugging Face's names for tensors and configuration keys."""

    path: str
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def tokenizer_data(self) -> dict[str, Any] | None:
        """The tokenizer's metadata, where the file itself holds it."""
        ...

    def tensor_names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """The part of a tensor that `index` says."""
        ...


@dataclass(frozen=True)
class Source:
    """One parameter's origin: tensors with the shapes they must have, and how a part of it is assembled."""

    tensors: Mapping[str, tuple[int, ...]]
    assemble: Callable[[ReadTensor, Index], np.ndarray]


IGNORED_TENSORS = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors that old checkpoints carry and that are computed here."""


def fill_weights(
    checkpoint: Checkpoint,
    leaves: Sequence[tuple[tuple[str | int, ...], jax.ShapeDtypeStruct]],
    sources: Mapping[tuple[str | int, ...], Source],
    sharding_for: Callable[[tuple[str | int, ...]], Sharding],
    *,
    others: Iterable[Source] = (),
    is_tied: bool,
) -> list[jax.Array]:
    """Loads all parameters, each straight to its shards.

    Args:
      leaves: (path, abstract array) in the model's leaf order.
      sources: where each path comes from; exactly the paths of `leaves`.
      sharding_for: path -> sharding.
      others: of what else the checkpoint must have: the model's other stages.
      is_tied: the head is the embedding; a separate `lm_head.weight` must then equal it.

    Raises:
      ValueError: a missing, extra or misshapen tensor, by name.
    """
    assert {path for path, _ in leaves} == set(sources), "model and sources name different parameters"
    _check_tensors(checkpoint, [*sources.values(), *others], is_tied=is_tied)
    return [_fill_leaf(checkpoint, sources[path], leaf, sharding_for(path)) for path, leaf in leaves]


def _fill_leaf(checkpoint: Checkpoint, source: Source, leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    def fill(index: Index | None) -> np.ndarray:
        assert index is not None
        part = source.assemble(checkpoint.read, full_index(index, leaf.shape))
        return np.ascontiguousarray(part.astype(leaf.dtype))

    return jax.make_array_from_callback(leaf.shape, sharding, fill)


def full_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """Explicit start and stop for every dimension."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def _check_tensors(checkpoint: Checkpoint, sources: Iterable[Source], *, is_tied: bool) -> None:
    expected = {name: shape for source in sources for name, shape in source.tensors.items()}
    names = set(checkpoint.tensor_names())
    missing = sorted(set(expected) - names)
    if missing:
        raise ValueError(f"{checkpoint.path}: tensor {missing[0]} is missing{_and_more(missing)}")
    extra = {name for name in names - set(expected) if not IGNORED_TENSORS.search(name)}
    if is_tied and "lm_head.weight" in extra:
        _check_tied_head(checkpoint)
        extra.discard("lm_head.weight")
    if extra:
        listed = sorted(extra)
        raise ValueError(f"{checkpoint.path}: tensor {listed[0]} has no place in the model{_and_more(listed)}")
    for name, shape in expected.items():
        if checkpoint.shape(name) != shape:
            raise ValueError(f"{checkpoint.path}: {name} has shape {checkpoint.shape(name)}, expected {shape}")


def _check_tied_head(checkpoint: Checkpoint) -> None:
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if checkpoint.shape(head) == checkpoint.shape(embedding):
        index = full_index((slice(None),) * 2, checkpoint.shape(head))
        if np.array_equal(checkpoint.read(head, index), checkpoint.read(embedding, index)):
            return
    raise ValueError(f"{checkpoint.path}: tie_word_embeddings is true, but {head} differs from {embedding}")


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
