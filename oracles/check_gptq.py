"""Reads GPTQ checkpoints with AutoGPTQ (the first version of the format) and GPTQModel (both versions)."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch

import checkpoint
from comparison import Difference, Weight, load_config, run

# It greets on standard output, which is for results here.
with contextlib.redirect_stdout(sys.stderr):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import dynamic_get
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module


def load_autogptq():
    """The linear layer of AutoGPTQ: its file alone, as the package imports what transformers no longer has."""
    package = Path(importlib.util.find_spec("auto_gptq").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("qlinear_cuda", package / "nn_modules/qlinear/qlinear_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.QuantLinear


AutoGPTQLinear = load_autogptq()


def fill(layer: torch.nn.Module, parts: dict[str, np.ndarray]) -> torch.nn.Module:
    """Puts the tensors of a checkpoint, whose shapes must be those that the layer has, in their places."""
    layer.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in parts.items()}, strict=True)
    return layer


def check(folder: Path, _expected):
    config = load_config(folder)
    version = config["checkpoint_format"]
    if version not in ("gptq", "gptq_v2"):
        raise Difference(f"checkpoint_format {version}")

    def reader(name: str):
        own = {key: dynamic_get(config.get("dynamic"), name, key, config[key]) for key in ("bits", "group_size", "sym")}

        def autogptq(k: int, n: int, parts) -> np.ndarray:
            layer = AutoGPTQLinear(own["bits"], own["group_size"], k, n, bias=False, weight_dtype=torch.float32)
            return fill(layer, parts)(torch.eye(k)).numpy()

        def gptqmodel(k: int, n: int, parts) -> np.ndarray:
            # The layer is made for f16 alone; its code takes scales of any type. No post_init: that compiles it.
            layer = TorchLinear(**own, desc_act=config["desc_act"], in_features=k, out_features=n).float()
            fill(layer, parts)
            if version == "gptq":
                convert_gptq_v1_to_v2_format_module(layer, bits=own["bits"], pack_dtype=torch.int32)
            return layer.eval().dequantize_weight().numpy()

        @torch.no_grad()
        def read(parts) -> np.ndarray:
            k, n = len(parts["g_idx"]), parts["scales"].shape[1]
            weight = gptqmodel(k, n, parts)
            if version == "gptq" and not np.array_equal(weight, autogptq(k, n, parts)):
                raise Difference(f"{name}: AutoGPTQ and GPTQModel read different numbers")
            return np.ascontiguousarray(weight.T)

        return read

    tensors = checkpoint.load(folder)
    modules = checkpoint.take_modules(tensors, "qweight", {"qweight", "qzeros", "scales", "g_idx"})
    return [Weight(f"{name}.weight", parts, reader(name)) for name, parts in modules.items()], checkpoint.dense(tensors)


run(check)
