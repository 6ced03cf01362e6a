"""Converts a model (safetensors folder, GGUF file, Hub id or "smollm2") to an Orbax folder, the fast way to load it.

python scripts/convert_checkpoint.py smollm2 converted/ --dtype float32
python -m jaxinfer.generate --model converted/ --prompt "Hello"
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
from flax import nnx

from jaxinfer.arguments import OneLineParser
from jaxinfer.config import DTYPES, EngineConfig
from jaxinfer.engine.build import load_weights, open_tokenizer
from jaxinfer.loaders import open_checkpoint, save_orbax
from jaxinfer.models import build_model, parse_config


def convert(model: str, folder: Path, dtype: str | None) -> None:
    """Writes `folder`; `dtype` None keeps the checkpoint's.

    Raises:
      ValueError: the model cannot be read, or the folder is not empty.
    """
    checkpoint = open_checkpoint(model)
    config = parse_config(checkpoint.config, checkpoint.generation_config)
    abstract = build_model(config, dtype or config.dtype)
    weights = load_weights(EngineConfig(), checkpoint, config, abstract, jax.devices()[0])
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(abstract))]
    save_orbax(
        folder,
        checkpoint,
        dict(zip(paths, weights, strict=True)),
        {**checkpoint.config, "torch_dtype": dtype or config.dtype},
    )
    tokenizer = open_tokenizer(EngineConfig(), checkpoint)
    if tokenizer is not None:
        tokenizer.save(folder)


def main() -> int:
    """The command line."""
    parser = OneLineParser(prog="convert_checkpoint.py", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    args = parser.parse_args()
    try:
        convert(args.model, args.folder, args.dtype)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
