"""What a program that is checked by mypy does with the stubs; not run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import halfbyte


def work(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    layer = halfbyte.Linear(x, format="w4a16-g128", activation="silu", device="cpu")
    q = halfbyte.quantize(x, "w4a16-g128", method="gptq", inputs=x)
    scales: npt.NDArray[np.float32] = q.scales()
    shape: tuple[int, int] = q.shape
    del scales, shape
    return layer(x)


def write(folder: str) -> str:
    model = halfbyte.load(folder, act="a8", kv="int8")
    text = ""
    for piece in model.generate("def ", max_tokens=8, stop=["\n\n"]):
        text += piece
    return text + str(halfbyte.verify(folder, folder)["equal"])
