"""Converts a model (safetensors folder, GGUF file, Hub id or "smollm2") to an Orbax folder, the fast way to load it.

python scripts/convert_checkpoint.py smollm2 converted/ --dtype float32
python -m jaxinfer.generate --model converted/ --prompt "Hello"
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxinfer.arguments import OneLineParser
from jaxinfer.config import DTYPES, EngineConfig
from jaxinfer.engine.build import load_weights, open_tokenizer
from jaxinfer.loaders import open_checkpoint, save_orbax
from jaxinfer.models import build_model, cut_stages, parse_config
from jaxinfer.models.partition import narrow
from jaxinfer.sharding.mesh import resolve_mesh


def convert(model: str, folder: Path, dtype: str | None, mesh: str | None = None) -> None:
    """Writes `folder`; `dtype` None keeps the checkpoint's. With a mesh each device holds its part meanwhile.

    Raises:
      ValueError: the model cannot be read or divided, or the folder is not empty.
    """
    checkpoint = open_checkpoint(model)
    config = parse_config(checkpoint.config, checkpoint.generation_config)
    dtype = dtype or config.dtype
    parameters: dict[Any, jax.Array] = {}
    for cut in cut_stages(config, resolve_mesh(mesh)):
        stage = build_model(cut, dtype)
        weights = load_weights(EngineConfig(), checkpoint, cut, stage, jax.devices()[0])
        for (path, _), array in zip(nnx.to_flat_state(nnx.state(stage)), weights, strict=True):
            path = cut.path_in_model(path)
            parameters[path] = narrow(path, array, cut)
    save_orbax(folder, checkpoint, parameters, {**checkpoint.config, "torch_dtype": dtype})
    tokenizer = open_tokenizer(EngineConfig(), checkpoint)
    if tokenizer is not None:
        tokenizer.save(folder)


def main() -> int:
    """The command line."""
    parser = OneLineParser(prog="convert_checkpoint.py", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    parser.add_argument("--mesh", help="such as tensor=2 or pipe=2: over which devices the weights lie meanwhile")
    args = parser.parse_args()
    try:
        convert(args.model, args.folder, args.dtype, args.mesh)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
