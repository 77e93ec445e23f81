"""Makes iq4_nl, iq4_xs, mxfp4 and nvfp4: random blocks, and what gguf makes of them.

Needs gguf 0.19.0, numpy, safetensors. Run in this folder.
"""

import hashlib
import os

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from safetensors.numpy import save_file

rng = np.random.default_rng(20261127)
# Ordinary, negative, subnormal, zero, large.
HALVES = np.array([0.0371, -0.5, 3e-6, 0.0, -0.0, 121.0, 5e-5, -0.002], dtype=np.float16).view(np.uint8).reshape(8, 2)


def random_blocks(kind, rows, blocks_of_row):
    return rng.integers(0, 256, (rows, blocks_of_row, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


def save(name, kind, blocks):
    rows = blocks.reshape(blocks.shape[0], -1)
    with np.errstate(over="ignore"):
        save_file({"blocks": rows, "dequant": gguf.quants.dequantize(rows, kind)}, name)
    os.chmod(name, 0o644)
    data = open(name, "rb").read()
    print(name, rows.shape, len(data), hashlib.sha256(data).hexdigest())


blocks = random_blocks(T.IQ4_NL, 8, 6)
blocks[:, :, :2] = HALVES[:, None]
save("iq4_nl.safetensors", T.IQ4_NL, blocks)

blocks = random_blocks(T.IQ4_XS, 8, 1)
blocks[:, :, :2] = HALVES[:, None]
save("iq4_xs.safetensors", T.IQ4_XS, blocks)

# Every exponent but 255, which is NaN.
blocks = random_blocks(T.MXFP4, 15, 17)
blocks[:, :, 0] = np.arange(255, dtype=np.uint8).reshape(15, 17)
save("mxfp4.safetensors", T.MXFP4, blocks)

# Every scale without a sign but 0x7f, which is NaN; 0 twice.
blocks = random_blocks(T.NVFP4, 16, 2)
blocks[:, :, :4] = (np.arange(128) % 127).astype(np.uint8).reshape(16, 2, 4)
save("nvfp4.safetensors", T.NVFP4, blocks)
