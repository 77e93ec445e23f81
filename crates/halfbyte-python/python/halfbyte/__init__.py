"""The int-weight layer: quantised linear layers, convolutions and language models on CPUs and NVIDIA GPUs."""

import os as _os

from ._halfbyte import (
    Hessian,
    Linear,
    QuantizedTensor,
    Tensor,
    __version__,
    _after_fork,
    cuda_device_count,
    get_num_threads,
    quantize,
    set_num_threads,
)

if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_after_fork)

__all__ = [
    "Hessian",
    "Linear",
    "QuantizedTensor",
    "Tensor",
    "__version__",
    "cuda_device_count",
    "get_num_threads",
    "quantize",
    "set_num_threads",
]
