"""What is refused: by which exception, in which words, and before memory is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import random

import halfbyte

W = random((48, 64), 1)
X = random((2, 64), 2)
LAYER = halfbyte.Linear(W, format="w4a16-g32")


@pytest.mark.parametrize("size", [2**33, 2**59])
def test_weights_without_elements_have_a_bounded_shape(size: int) -> None:
    # numpy makes no array of more than 2**63 bytes, whatever the other sizes are.
    def empty(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        return np.zeros(shape, dtype)

    for make in (
        lambda: halfbyte.quantize(empty((size, 0)), "w4a16"),
        lambda: halfbyte.Linear(empty((0, size)), format="w8a8-g2"),
        lambda: halfbyte.Linear(empty((size, 0))),
        lambda: halfbyte.LinearInt8(empty((size, 0), np.int8), 0.1, x_scale=0.1),
        lambda: halfbyte.LinearInt8(empty((0, size), np.int8), 0.1, x_scale=0.1),
        lambda: halfbyte.Conv2d(empty((size, 0, 1, 1))),
        lambda: halfbyte.Conv2dInt8(empty((size, 0, 1, 1), np.int8), 0.1, x_scale=0.1),
        lambda: halfbyte.QuantizedTensor("w4a16", empty((0, size), np.uint8), empty((0, 1))),
        lambda: halfbyte.linear_from_tensors({"weight": empty((size, 0))}),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()


def test_shapes_beyond_memory() -> None:
    layer = halfbyte.Linear(np.zeros((3, 0), np.float32))
    for rows in (2**50, 2**58, 2**60):
        with pytest.raises((ValueError, MemoryError)):
            layer(np.zeros((rows, 0), np.float32))
    layer = halfbyte.Linear(np.zeros((0, 0), np.float32))
    assert layer(np.zeros((2**58, 0), np.float32)).shape == (2**58, 0)


class Described:
    """An object that numpy's description of arrays describes."""

    def __init__(self, **fields: Any) -> None:
        self.__array_interface__ = {"data": (X.ctypes.data, False), "shape": (2, 64), "typestr": "<f4", "version": 3} | fields


def test_descriptions_that_say_nonsense() -> None:
    assert np.array_equal(np.asarray(LAYER(Described()).tolist(), np.float32), LAYER(X))
    for fields, message in (
        ({"strides": (4,)}, "expected 2 strides, got 1"),
        ({"strides": (256, 4, 4)}, "expected 2 strides, got 3"),
        ({"shape": (2**62, 2**62, 64)}, "expected a shape that fits memory"),
        ({"shape": (2**58, 64)}, "expected a shape that fits memory"),
        ({"shape": (2**58, 64), "strides": (0, 4)}, "expected a shape that fits memory"),
        ({"shape": (2**62, 0, 2**62)}, "expected a shape that fits memory"),
        ({"shape": (-2, 64)}, "expected sizes of 0 or more, got -2"),
    ):
        with pytest.raises(ValueError, match=message):
            LAYER(Described(**fields))
    for typestr in ("<i0", "<f0", "<f999", ">f4", "<q4", "f", ""):
        with pytest.raises(TypeError):
            LAYER(Described(typestr=typestr))
