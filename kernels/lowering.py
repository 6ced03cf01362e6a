"""What lowering costs.

Mosaic GPU (jax 0.11.2) starts ptxas to ask for its version each time that a kernel converts a boolean or an eight-bit
number: 50 ms, up to 150 times a kernel. Most of the seconds that a step's lowering took were these.
"""

from __future__ import annotations

import functools

from jax.experimental.mosaic.gpu import fragmented_array

QUESTION = "_get_ptxas_isa_version"


def ask_ptxas_once() -> None:
    """Keeps ptxas' version for the rest of the process. Does nothing where there is no Mosaic GPU library."""
    library = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    ask = getattr(library, QUESTION, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(library, QUESTION, functools.cache(ask))
