"""Runs Paddle's own unit tests of its quantised layers on a CPU, with the functions of ``halfbyte.paddle`` in the place of its kernels.

    python paddle_unit_tests.py FOLDER [TEST...]

FOLDER holds copies of ``test/quantization/test_weight_only_linear.py``, ``test_llm_int8_linear.py``,
``test_apply_per_channel_scale.py`` and ``test_weight_quantize.py`` of PaddlePaddle/Paddle; those that are missing are named. Needs
paddlepaddle 3.3 (the CPU wheel) and halfbyte.

The tests are for GPUs. What makes them run here, and nothing else is changed:

* Paddle says that it is compiled with CUDA 12 and that the device is of sm_80; ``Tensor.cuda()`` leaves a tensor where it is, and a
  CUDAPlace is a CPUPlace;
* operations in half precision and in bytes that the CPU wheel lacks (matmul, Linear, max, add, multiply) are done in wider types and
  rounded once.

Where a test quantises, Paddle's own CPU kernel quantises too, and codes and scales have to be equal, bit by bit.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import unittest
from pathlib import Path

import numpy as np
import paddle
import paddle.base
import paddle.nn.quant as quant
import paddle.pir_utils
from paddle.nn.quant import quantized_linear

import halfbyte.paddle as ours

FILES = ("test_weight_only_linear", "test_llm_int8_linear", "test_apply_per_channel_scale", "test_weight_quantize")
HALVES = (paddle.float16, paddle.bfloat16)

compared = 0


class Core:
    """Paddle's core, which has a GPU."""

    def __init__(self, core):
        self._core = core

    def __getattr__(self, name):
        return getattr(self._core, name)

    @staticmethod
    def is_compiled_with_cuda():
        return True

    @staticmethod
    def is_bfloat16_supported(place):
        return True

    @staticmethod
    def CUDAPlace(index):
        return paddle.CPUPlace()


theirs = quant.weight_quantize


def weight_quantize(x, algo="weight_only_int8", arch=None, group_size=-1):
    global compared
    result = ours.weight_quantize(x, algo, arch, group_size)
    if isinstance(x, paddle.Tensor):
        for mine, paddles in zip(result, theirs(x.detach(), algo, arch or 80, group_size)):
            assert mine.dtype == paddles.dtype and mine.shape == paddles.shape, (mine, paddles)
            np.testing.assert_array_equal(mine.numpy(), paddles.numpy())
            compared += 1
    return result


def widened(function):
    """A function of tensors that computes halves in float32."""

    def wide(value):
        return value.astype("float32") if isinstance(value, paddle.Tensor) and value.dtype in HALVES else value

    def call(*args, **options):
        dtypes = [value.dtype for value in (*args, *options.values()) if isinstance(value, paddle.Tensor)]
        half = next((dtype for dtype in dtypes if dtype in HALVES), None)
        if half is None:
            return function(*args, **options)
        result = function(*map(wide, args), **{name: wide(value) for name, value in options.items()})
        return result.astype(half)

    return call


def matmul_of_bytes(function):
    """Sums of products of bytes, which float64 holds, in int32."""

    def call(x, y, *args, **options):
        if isinstance(x, paddle.Tensor) and x.dtype == paddle.int8:
            return function(x.astype("float64"), y.astype("float64"), *args, **options).astype("int32")
        return function(x, y, *args, **options)

    return call


def host():
    """Puts all of it in place."""
    for name in (name for name in ours.__all__ if hasattr(quant, name)):
        function = weight_quantize if name == "weight_quantize" else getattr(ours, name)
        setattr(quant, name, function)
        setattr(quantized_linear, name, function)
    paddle.base.core = Core(paddle.base.core)
    paddle.CUDAPlace = Core.CUDAPlace
    paddle.device.cuda.get_device_capability = lambda *_: (8, 0)
    popen = os.popen
    os.popen = lambda command: io.StringIO("release 12.0, V12.0") if "nvcc" in command else popen(command)
    paddle.Tensor.cuda = lambda self, *_: self
    for name in ("max", "multiply"):
        setattr(paddle, name, widened(getattr(paddle, name)))
    paddle.matmul = widened(matmul_of_bytes(paddle.matmul))
    for name in ("__add__", "__mul__"):
        setattr(paddle.Tensor, name, widened(getattr(paddle.Tensor, name)))
    linear = widened(paddle.nn.functional.linear)
    paddle.nn.Linear.forward = lambda self, x: linear(x, self.weight, self.bias)
    # Gone since Paddle runs all graphs in its new representation.
    if not hasattr(paddle.pir_utils, "test_with_pir_api"):
        paddle.pir_utils.test_with_pir_api = lambda test: test


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    host()
    sys.path.insert(0, str(folder))
    loader, suite = unittest.TestLoader(), unittest.TestSuite()
    for file in FILES:
        if not (folder / f"{file}.py").is_file():
            print(f"not there: {file}.py")
            continue
        tests = loader.loadTestsFromModule(importlib.import_module(file))
        print(f"{file}: {tests.countTestCases()} tests")
        suite.addTests(tests)

    def chosen(tests):
        for test in tests:
            if isinstance(test, unittest.TestSuite):
                yield from chosen(test)
            elif not names or any(name in test.id() for name in names):
                yield test

    # Modules import each other: a class is found again wherever it is imported.
    unique = {test.id(): test for test in chosen(suite)}
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(unique.values()))
    print(f"{compared} tensors of codes and scales are equal to Paddle's own, bit by bit")
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
