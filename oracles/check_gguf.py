"""Reads GGUF files with gguf, llama.cpp's package. It computes in f32, as the format's C code does."""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGUFReader, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize

from comparison import Difference, Weight, run

# What a tensor may be, with the bytes of a block that hold its scale and its minimum, low byte first; codes end it.
PLACES = {
    GGMLQuantizationType.F16: {"values": 0},
    GGMLQuantizationType.Q4_0: {"scales": 0, "codes": -1},
    GGMLQuantizationType.Q4_1: {"scales": 0, "minima": 2, "codes": -1},
    GGMLQuantizationType.Q8_0: {"scales": 0, "codes": -1},
}


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of the dense checkpoint.

    llama.cpp rotates neighbouring rows, where the checkpoint has the two halves of a head: its converter
    (convert_hf_to_gguf.py, `permute`) swaps [heads, 2, half] to [heads, half, 2]; this swaps back.
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def check(path: Path, expected):
    reader = GGUFReader(path / "model.gguf" if path.is_dir() else path)
    if reader.fields["general.architecture"].contents() != "llama":
        raise Difference("general.architecture: expected llama")
    heads = {
        "q_proj": reader.fields["llama.attention.head_count"].contents(),
        "k_proj": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, reader.fields["llama.block_count"].contents())
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in expected}

    weights, dense = [], {}
    for tensor in reader.tensors:
        name, kind = known.get(tensor.name, tensor.name), tensor.tensor_type
        rows = heads.get(name.split(".")[-2] if "." in name else "")

        def read(parts, kind=kind, rows=rows) -> np.ndarray:
            weight = dequantize(parts["data"], kind)
            return unpermuted(weight, rows) if rows else weight

        if kind == GGMLQuantizationType.F32:
            dense[name] = read({"data": tensor.data})
        elif kind not in PLACES:
            raise Difference(f"{name}: {kind.name} is not expected")
        else:
            size = GGML_QUANT_SIZES[kind][1]
            middle = tensor.data.nbytes // size // 2 * size
            flips = {what: ("data", middle + place % size) for what, place in PLACES[kind].items()}
            weights.append(Weight(name, {"data": np.array(tensor.data)}, read, flips))
    return weights, dense


run(check)
