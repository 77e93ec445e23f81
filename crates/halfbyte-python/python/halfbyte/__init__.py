"""The int-weight layer: quantised linear layers, convolutions and language models on CPUs and NVIDIA GPUs.

Tensors of torch, numpy, cupy, jax and paddle go in without a copy, and results are tensors of the same library.
"""

import os as _os
from typing import Any as _Any

from ._halfbyte import (
    Checkpoint,
    Conv2d,
    Conv2dInt8,
    Generation,
    Hessian,
    Linear,
    LinearInt8,
    Model,
    QuantizedTensor,
    Tensor,
    __version__,
    _after_fork,
    _convert,
    _inspect,
    _quantize_model,
    _verify,
    cuda_device_count,
    get_num_threads,
    linear_from_tensors,
    load,
    parse_format,
    quantize,
    set_num_threads,
)

if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_after_fork)

__all__ = [
    "Checkpoint",
    "Conv2d",
    "Conv2dInt8",
    "Generation",
    "Hessian",
    "Linear",
    "LinearInt8",
    "Model",
    "QuantizedTensor",
    "Tensor",
    "__version__",
    "convert",
    "cuda_device_count",
    "get_num_threads",
    "inspect",
    "linear_from_tensors",
    "load",
    "parse_format",
    "quantize",
    "quantize_model",
    "set_num_threads",
    "verify",
]


def _parsed(text: str) -> dict[str, _Any]:
    import json

    told: dict[str, _Any] = json.loads(text)
    return told


def inspect(path: "str | _os.PathLike[str]", *, group: "int | None" = None) -> dict[str, _Any]:
    """What is in a checkpoint, without reading its codes: ``architecture``, ``quantization``, ``tensors``, ``modules``, sizes, and
    in ``findings`` everything that looks wrong. ``group`` is for files of GPTQ that leave the group size open."""
    text, opened, files, config_file = _inspect(path, group)
    # Paths that are no text have another spelling in JSON.
    told = _parsed(text) | {"path": opened, "files": files}
    if config_file is not None:
        told["quantization"]["file"] = config_file
    return told


def convert(
    source: "str | _os.PathLike[str]",
    output: "str | _os.PathLike[str]",
    to: str,
    *,
    bits: "int | None" = None,
    group: "int | None" = None,
    two_level: bool = False,
    requantize: bool = False,
    overwrite: bool = False,
) -> dict[str, _Any]:
    """Writes a quantised model in another form of files, the same numbers: gptq, gptq_v1, gptq_v2, awq, compressed-tensors,
    fpa_intb, fpa_intb_sm70, onnx, gguf or native. What the form cannot hold is a ValueError, or rounded to nearest again with ``requantize``.
    ``requantized``, ``made_dense`` and ``left_out`` name what was not taken over as it is."""
    path, text = _convert(source, output, to, bits, group, two_level, requantize, overwrite)
    return {"path": path} | _parsed(text)


def quantize_model(
    source: "str | _os.PathLike[str]",
    output: "str | _os.PathLike[str]",
    format: str,
    *,
    to: str = "gptq",
    search: bool = False,
    symmetric: str = "narrow",
    overwrite: bool = False,
) -> dict[str, _Any]:
    """Writes a model with the linear layers of its blocks rounded to nearest, as ``w4a16-g128``, in the form ``to``, as in
    :func:`convert`. Embedding and output head stay as they are. Files say nothing of activations: a format with a8 is a ValueError.
    Calibration is done by the command line (``halfbyte quantize``)."""
    path, text = _quantize_model(source, output, format, to, search, symmetric, overwrite)
    return {"path": path} | _parsed(text)


def verify(first: "str | _os.PathLike[str]", second: "str | _os.PathLike[str]") -> dict[str, _Any]:
    """Compares what two checkpoints stand for, number by number: ``equal``, and what differs."""
    return _parsed(_verify(first, second))
