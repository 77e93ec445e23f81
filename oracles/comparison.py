"""The comparison that every check makes: all numbers of a file, read by foreign software, against those expected.

Numbers are compared as f32 and exactly. Only the sign of a zero is free: a product with an identity matrix, which some
of the software has to be asked for, does not keep it.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


@dataclass
class Weight:
    """A weight in the format that is checked: its name in the dense checkpoint, what the file stores of it, and its reader."""

    name: str
    parts: dict[str, np.ndarray]
    read: Callable[[dict[str, np.ndarray]], np.ndarray]
    # Where a bit is flipped, as part and byte; the middle of each part where nothing is said.
    flips: dict[str, tuple[str, int]] = field(default_factory=dict)


class Difference(Exception):
    """A file that does not hold what it should."""


def run(check: Callable[[Path, dict[str, np.ndarray]], tuple[list[Weight], dict[str, np.ndarray]]]) -> None:
    """Makes a script of a check: arguments are pairs of the model to check and the dense model it stands for.

    The check is given the model and the expected tensors; it returns the weights and, already read, the other tensors.
    """
    paths = [Path(argument) for argument in sys.argv[1:]]
    if not paths or len(paths) % 2:
        sys.exit(f"usage: {sys.argv[0]} MODEL REFERENCE [MODEL REFERENCE]...\n"
                 "REFERENCE: a folder written by `halfbyte dequantize --dtype f32`")
    for model, reference in zip(paths[::2], paths[1::2]):
        try:
            # Standard output is for results; some packages log there.
            with contextlib.redirect_stdout(sys.stderr):
                done = compare(check, model, reference)
            print(f"{model.name}: {done}", flush=True)
        except Difference as difference:
            sys.exit(f"{model}: {difference}")


def compare(check, model: Path, reference: Path) -> str:
    """Compares every tensor of a model, then shows that a flipped bit would have been seen. Returns what was done."""
    expected = load_reference(reference)
    weights, dense = check(model, expected)
    names = [weight.name for weight in weights] + list(dense)
    if len(names) != len(set(names)) or set(names) != set(expected):
        raise Difference(f"tensors missing: {sorted(set(expected) - set(names))}; "
                         f"unexpected: {sorted(set(names) - set(expected))}; of {len(names)}")
    if not weights:
        raise Difference("no weight in the format that is checked")
    for weight in weights:
        if why := difference(weight.read(weight.parts), expected[weight.name]):
            raise Difference(f"{weight.name}: {why}")
    for name, tensor in dense.items():
        if why := difference(tensor, expected[name]):
            raise Difference(f"{name}: {why}")
    flips = []
    for weight in weights:
        for what, parts in flipped(weight):
            if what in flips:
                continue
            if not seen(weight, parts, expected[weight.name]):
                raise Difference(f"{weight.name}: a flipped bit in {what} makes no difference: the check is blind")
            flips.append(what)
    elements = sum(expected[weight.name].size for weight in weights)
    others = sum(tensor.size for tensor in dense.values())
    return (f"{len(weights)} weights of {elements} elements and {len(dense)} other tensors of {others}, all equal; "
            f"a flipped bit is seen in {', '.join(flips)}")


def load_reference(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a dense checkpoint in f32."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        sys.exit(f"{folder}: no tensors")
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            sys.exit(f"{folder}: {name} is {tensor.dtype}, expected float32")
    return tensors


def load_config(folder: Path) -> dict:
    """The quantization_config of a checkpoint."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def difference(got: np.ndarray, expected: np.ndarray) -> str | None:
    """Says where two tensors differ."""
    if got.dtype != np.float32 or got.shape != expected.shape:
        return f"{got.dtype} {list(got.shape)}, expected float32 {list(expected.shape)}"
    places = np.argwhere(got != expected)
    if len(places) == 0:
        return None
    first = tuple(int(i) for i in places[0])
    return f"{len(places)} of {got.size} differ, first {list(first)}: {got[first]!r}, expected {expected[first]!r}"


def flipped(weight: Weight) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The parts of a weight with the lowest bit of one number flipped, for each part or place in turn."""
    middles = {part: (part, array.size // 2 * array.itemsize) for part, array in weight.parts.items()}
    for what, (part, byte) in (weight.flips or middles).items():
        array = weight.parts[part].copy()
        array.reshape(-1).view(np.uint8)[byte] ^= 1
        yield what, weight.parts | {part: array}


def seen(weight: Weight, parts: dict[str, np.ndarray], expected: np.ndarray) -> bool:
    """Whether these parts stand for other numbers, or for none."""
    try:
        return difference(weight.read(parts), expected) is not None
    except IndexError:
        # A group index beyond the last group.
        return True
