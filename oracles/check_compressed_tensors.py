"""Reads compressed-tensors checkpoints with compressed-tensors, by the schemes that their configuration gives."""

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match

import checkpoint
from comparison import Difference, Weight, load_config, run


def scheme_of(name: str, config: QuantizationConfig) -> QuantizationScheme:
    """The scheme of a linear layer, found as the software finds it."""
    module = torch.nn.Linear(1, 1, device="meta")
    if is_match(name, module, config.ignore or []):
        raise Difference(f"{name} is packed, and the configuration says to ignore it")
    for scheme in config.config_groups.values():
        if is_match(name, module, scheme.targets):
            return scheme
    raise Difference(f"{name} is packed, and no group of the configuration targets it")


def check(folder: Path, _expected):
    config = QuantizationConfig.model_validate(load_config(folder))
    compressor = BaseCompressor.get_value_from_registry(config.format)

    def reader(name: str, shape: np.ndarray):
        scheme = scheme_of(name, config)
        wanted = set(compressor.compression_param_names(scheme)) - {"weight_shape"}

        def read(parts) -> np.ndarray:
            if set(parts) != wanted:
                raise Difference(f"{name}: {sorted(parts)}, expected {sorted(wanted)}")
            state = {part: torch.from_numpy(array) for part, array in parts.items()}
            state["weight_shape"] = torch.from_numpy(shape)
            return compressor.decompress(state, scheme)["weight"].contiguous().numpy()

        return read

    tensors = checkpoint.load(folder)
    names = {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}
    weights = []
    for name, parts in checkpoint.take_modules(tensors, "weight_packed", names).items():
        weights.append(Weight(f"{name}.weight", parts, reader(name, parts.pop("weight_shape"))))
    return weights, checkpoint.dense(tensors)


run(check)
