"""Makes the files of this folder: state dicts that torch 2.15.0 saved, and the same tensors in safetensors.

Needs torch, numpy, safetensors. Run in this folder; ../gptq has the GPTQ modules that `gptq*` hold.
"""

import collections
import json
import os

import torch
from safetensors.torch import load_file, save_file

torch.manual_seed(2026)
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
WITHOUT_STORAGE_CLASS = [torch.uint16, torch.uint32, torch.uint64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def every_type():
    tensors = collections.OrderedDict()
    for dtype in FLOATS:
        tensors[str(dtype)] = torch.randn(3, 5).to(dtype)
    for dtype in INTEGERS + WITHOUT_STORAGE_CLASS:
        tensors[str(dtype)] = torch.randint(0, 100, (2, 7)).to(dtype)
    for dtype in EIGHT_BITS:
        tensors[str(dtype)] = torch.rand(6).add(0.5).to(dtype)
    tensors["torch.complex64"] = torch.randn(4, dtype=torch.complex64)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    return tensors


def views():
    """Tensors that share a storage, or that are a part of one, or in another order there."""
    base = torch.randn(4, 6)
    cube = torch.arange(2 * 3 * 4, dtype=torch.int32).reshape(2, 3, 4)
    return {
        "embed.weight": base,
        "head.weight": base,
        "transposed": base.t(),
        "rows": base[1:3],
        "columns": base[:, 2:5],
        "every_other": base.flatten()[1::2],
        "permuted": cube.permute(2, 0, 1),
        "of_one": torch.randn(5, 1).t(),
    }


def save(name, tensors, saved=None, **options):
    """A file of torch's, and what torch reads from it."""
    torch.save(tensors if saved is None else saved, name, **options)
    loaded = torch.load(name, weights_only=False)
    for wrapper in ["model", "state_dict"]:
        loaded = loaded.get(wrapper, loaded)
    loaded = {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
    assert list(loaded) == list(tensors)
    return {k: v.detach().clone().contiguous() for k, v in loaded.items()}


LEGACY = {"_use_new_zipfile_serialization": False}
for stem, make in [("every_type", every_type), ("views", views)]:
    tensors = make()
    expected = save(stem + ".pt", tensors)
    save_file(expected, stem + ".safetensors")
    # Types without a class of storages are written to legacy files, but torch does not read them there.
    old = {k: v for k, v in tensors.items() if v.dtype not in WITHOUT_STORAGE_CLASS + EIGHT_BITS}
    again = save(stem + "_legacy.pt", old, **LEGACY)
    assert all(torch.equal(expected[k], v) for k, v in again.items())

module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).half()
expected = save("module.pt", module.state_dict())
save_file(expected, "module.safetensors")
save("module_protocol5.pt", module.state_dict(), pickle_protocol=5)
save("module_legacy.pt", module.state_dict(), **LEGACY)
parameters = collections.OrderedDict(module.named_parameters())
save("module_parameters.pt", parameters)
# As training loops save: the dict lies in another, beside what is no tensor.
wrapped = {"epoch": 3, "loss": 0.25, "sizes": torch.Size([4, 3]), "note": b"\x00\xff", "model": module.state_dict()}
save("module_wrapped.pt", module.state_dict(), wrapped)
save("module_wrapped_protocol4.pt", module.state_dict(), wrapped, pickle_protocol=4)
two = {"model": module.state_dict(), "ema": module.state_dict()}
torch.save(two, "two_state_dicts.pt")

shards = {"pytorch_model-00001-of-00002.bin": ["0.weight", "1.bias"], "pytorch_model-00002-of-00002.bin": ["0.bias", "1.weight"]}
os.makedirs("sharded", exist_ok=True)
for name, keys in shards.items():
    torch.save({key: module.state_dict()[key] for key in keys}, "sharded/" + name)
weight_map = {key: name for name, keys in shards.items() for key in keys}
with open("sharded/pytorch_model.bin.index.json", "w") as index:
    json.dump({"metadata": {"total_size": 48}, "weight_map": weight_map}, index, indent=1, sort_keys=True)

# GPTQ modules as they were saved before there were configs: named in a model's way, zero points less one.
for name, golden in [("gptq_w4_act", "gptq_w4_g32_act"), ("gptq_w3", "gptq_w3_g32"), ("gptq_w2_pc", "gptq_w2_pc"), ("gptq_w8", "gptq_w8_g32")]:
    tensors = load_file(f"../gptq/{golden}.safetensors")
    parts = [("qweight", "qweight"), ("v1.qzeros", "qzeros"), ("scales", "scales"), ("g_idx", "g_idx"), ("bias", "bias")]
    module = {f"model.layers.0.mlp.down_proj.{to}": tensors[part] for part, to in parts}
    torch.save(module, name + ".pt", **(LEGACY if name == "gptq_w3" else {}))

# Modules of compressed-tensors, codes in bytes and in words, whose tensors are views.
generator = torch.Generator().manual_seed(20261130)
whole = {
    "m.weight": torch.randint(-128, 128, (8, 16), dtype=torch.int8, generator=generator),
    "m.weight_scale": torch.randn(8, 2, generator=generator).half(),
    "m.weight_zero_point": torch.randint(-128, 128, (8, 2), dtype=torch.int8, generator=generator),
    "p.weight_packed": torch.randint(-(2**31), 2**31, (8, 8), generator=generator).int(),
    "p.weight_scale": torch.randn(8, 1, generator=generator).half(),
    "p.weight_shape": torch.tensor([8, 64]),
}
strided = {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in whole.items()}
assert not any(tensor.is_contiguous() for tensor in strided.values())
save_file(save("compressed_views.pt", strided), "compressed_views.safetensors")
