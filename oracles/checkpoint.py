"""Tensors of a folder of safetensors files, as the software of its scheme gets them: through torch, by module."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def take_modules(tensors: dict[str, torch.Tensor], marker: str, parts: set[str]) -> dict[str, dict[str, np.ndarray]]:
    """Takes the named parts of every module that has the marker out of `tensors`. Scales widen to f32.

    In f32 the product of a code of 8 bits and an f16 or bf16 scale is exact; in f16, in which this software would
    multiply by itself, it is rounded.
    """
    modules = {}
    for name in [name.removesuffix("." + marker) for name in tensors if name.endswith("." + marker)]:
        found = {part: tensors.pop(f"{name}.{part}") for part in sorted(parts) if f"{name}.{part}" in tensors}
        modules[name] = {part: (t.float() if t.is_floating_point() else t).numpy() for part, t in found.items()}
    return modules


def dense(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The tensors that are left, in f32."""
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}
