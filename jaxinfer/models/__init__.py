"""Model families: how a checkpoint's configuration and names become a `DenseModel`."""

from jaxinfer.models.dense import DenseModel
from jaxinfer.models.partition import Partition, cut_stages, divide
from jaxinfer.models.registry import Family, build_model, find_family, parse_config, supported_architectures

__all__ = [
    "DenseModel",
    "Family",
    "Partition",
    "build_model",
    "cut_stages",
    "divide",
    "find_family",
    "parse_config",
    "supported_architectures",
]
