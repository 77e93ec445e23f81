"""Reads AWQ checkpoints (gemm) with AutoAWQ."""

import importlib.util
from pathlib import Path

import numpy as np
import torch

import checkpoint
from comparison import Difference, Weight, load_config, run


def load_dequantize():
    """AutoAWQ's unpacking: its file alone, as the package imports what transformers no longer has."""
    package = Path(importlib.util.find_spec("awq").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("packing_utils", package / "utils/packing_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dequantize_gemm


dequantize_gemm = load_dequantize()


def check(folder: Path, _expected):
    config = load_config(folder)
    if config["version"].lower() != "gemm":
        raise Difference(f"version {config['version']}, expected gemm")
    bits = config.get("bits", config.get("w_bit"))
    group_size = config.get("group_size", config.get("q_group_size"))

    def read(parts) -> np.ndarray:
        qweight, qzeros, scales = (torch.from_numpy(parts[part]) for part in ("qweight", "qzeros", "scales"))
        size = len(qweight) if group_size == -1 else group_size
        return dequantize_gemm(qweight, qzeros, scales, bits, size).T.contiguous().numpy()

    tensors = checkpoint.load(folder)
    modules = checkpoint.take_modules(tensors, "qweight", {"qweight", "qzeros", "scales"})
    return [Weight(f"{name}.weight", parts, read) for name, parts in modules.items()], checkpoint.dense(tensors)


run(check)
