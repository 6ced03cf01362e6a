"""Checkpoints: what a file holds, and how it gets onto the devices."""

from jaxinfer.loaders.checkpoint import Checkpoint, Index, ReadTensor, Source, fill_weights
from jaxinfer.loaders.dummy import Dummy, dummy_weights
from jaxinfer.loaders.locate import embedded_model, open_checkpoint
from jaxinfer.loaders.orbax_folder import OrbaxFolder, save_orbax

__all__ = [
    "Checkpoint",
    "Dummy",
    "Index",
    "OrbaxFolder",
    "ReadTensor",
    "Source",
    "dummy_weights",
    "embedded_model",
    "fill_weights",
    "open_checkpoint",
    "save_orbax",
]
