"""Makes mxfp4 and nvfp4: modules packed by compressed-tensors, and what its functions make of them in f32.

Needs compressed-tensors 0.20.0, torch 2.15.0, safetensors. Run in this folder.
"""

import hashlib
import os

import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from safetensors.torch import save_file

N, K = 24, 192
random = torch.Generator().manual_seed(20261127)


def save(name, compressor, settings, scale_of, global_scale):
    scheme = QuantizationScheme(targets=["Linear"], **settings)
    size = scheme.weights.group_size
    weight = torch.randn((N, K), generator=random) * torch.logspace(-3, 1, N)[:, None]
    largest = weight.reshape(N, -1, size).abs().amax(-1)
    state = {"weight": weight, "weight_scale": scale_of(largest)}
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    packed = compressor.compress(state, scheme)
    tensors = {key: value.contiguous() for key, value in packed.items()}
    scale = tensors["weight_scale"]
    scale = (decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale).to(torch.float32)
    codes = unpack_fp4_from_uint8(tensors["weight_packed"], N, K, torch.float32)
    tensors["decompressed"] = dequantize(
        codes, scale, args=scheme.weights, global_scale=global_scale, dtype=torch.float32
    )
    assert (tensors["decompressed"] - weight).abs().max() < 0.3 * weight.abs().max()
    save_file(tensors, name)
    os.chmod(name, 0o644)
    data = open(name, "rb").read()
    print(name, len(data), hashlib.sha256(data).hexdigest(), {k: (v.dtype, list(v.shape)) for k, v in tensors.items()})


save("mxfp4.safetensors", MXFP4PackedCompressor, MXFP4A16, lambda largest: 2.0 ** torch.floor(torch.log2(largest) - 2), None)
# The largest scale of a group is 448 of E4M3.
of_tensor = torch.tensor([448.0 * 6.0 / 40.0])
save("nvfp4.safetensors", NVFP4PackedCompressor, NVFP4A16,
     lambda largest: (largest / 6.0 * of_tensor).to(torch.float8_e4m3fn).to(torch.float32), of_tensor)
