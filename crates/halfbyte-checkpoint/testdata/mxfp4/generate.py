"""Makes experts.safetensors: experts of a layer as GPT-OSS's files have them, and what transformers makes of them.

Needs transformers 5.23.0, torch 2.15.0, safetensors. Run in this folder.
"""

import hashlib
import os

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS, HIDDEN, INNER = 2, 64, 32
random = torch.Generator().manual_seed(20261127)


def integers(least, end, *shape):
    return torch.randint(least, end, shape, dtype=torch.uint8, generator=random)


tensors = {}
for name, rows, columns in [("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)]:
    blocks = integers(0, 256, EXPERTS, rows, columns // 32, 16)
    # Ordinary ones, and the least and the greatest at which f32 holds all values.
    scales = integers(110, 130, EXPERTS, rows, columns // 32)
    scales[0, :4, 0] = torch.tensor([0, 1, 2, 252], dtype=torch.uint8)
    tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    tensors[f"{name}_bias"] = torch.randn((EXPERTS, rows), generator=random)
    # [experts, columns, rows], as GPT-OSS has experts in 16 bits.
    tensors[f"expected.{name}"] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
save_file(tensors, "experts.safetensors")
os.chmod("experts.safetensors", 0o644)
data = open("experts.safetensors", "rb").read()
print(len(data), hashlib.sha256(data).hexdigest())
