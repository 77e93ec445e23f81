"""Runs Paddle's own unit tests of its quantised layers on a CPU, with the functions of ``halfbyte.paddle`` in the place of its kernels.

    python paddle_unit_tests.py FOLDER [TEST...]

FOLDER holds copies of ``test/quantization/test_weight_only_linear.py``, ``test_llm_int8_linear.py``,
``test_apply_per_channel_scale.py`` and ``test_weight_quantize.py`` of PaddlePaddle/Paddle; those that are missing are named. Needs
paddlepaddle 3.3 (the CPU wheel) and halfbyte.

The tests are for GPUs. What makes them run here, and nothing else is changed:

* Paddle says that it is compiled with CUDA 12 and that the device is of sm_80; ``Tensor.cuda()`` leaves a tensor where it is, and a
  CUDAPlace is a CPUPlace;
* operations in half precision and in bytes that the CPU wheel lacks (matmul, Linear, max, add, multiply) are done in float32, which
  holds all of their numbers, and rounded once;
* in static graphs the five functions are calls of Python (``paddle.static.py_func``).

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


def is_static(x):
    return not isinstance(x, paddle.Tensor)


def in_python(function, out_dtypes, out_shapes, tensors, **options):
    """A call of a function in a static graph."""
    given = [tensor for tensor in tensors if tensor is not None]

    def call(*values):
        values = iter(values)
        with paddle.base.dygraph.guard(paddle.CPUPlace()):
            return function(*(None if tensor is None else paddle.to_tensor(next(values)) for tensor in tensors), **options)

    block = paddle.static.default_main_program().current_block()
    pir = paddle.framework.in_pir_mode()
    outs = [
        paddle.static.data(f"out_{id(given)}_{i}", shape, dtype)
        if pir
        else block.create_var(name=f"out_{id(given)}_{i}", dtype=dtype, shape=shape)
        for i, (dtype, shape) in enumerate(zip(out_dtypes, out_shapes))
    ]
    made = paddle.static.py_func(call, given, outs)
    return made if len(out_dtypes) > 1 else (made[0] if isinstance(made, (list, tuple)) else made)


theirs = quant.weight_quantize


def weight_quantize(x, algo="weight_only_int8", arch=None, group_size=-1):
    global compared
    if is_static(x):
        k, n = x.shape
        codes = [n // 2 if algo == "weight_only_int4" else n, k]
        scales = [n] if group_size == -1 else [-(-k // group_size), n]
        options = {"algo": algo, "arch": arch, "group_size": group_size}
        return in_python(ours.weight_quantize, ["int8", x.dtype], [codes, scales], [x], **options)
    result = ours.weight_quantize(x, algo, arch, group_size)
    for mine, paddles in zip(result, theirs(x.detach(), algo, arch or 80, group_size)):
        assert mine.dtype == paddles.dtype and mine.shape == paddles.shape, (mine, paddles)
        np.testing.assert_array_equal(mine.numpy(), paddles.numpy())
        compared += 1
    return result


def weight_dequantize(x, scale, algo="weight_only_int8", out_dtype="float16", group_size=-1):
    if is_static(x):
        shape = [x.shape[1], x.shape[0] * (2 if algo == "weight_only_int4" else 1)]
        options = {"algo": algo, "out_dtype": out_dtype, "group_size": group_size}
        return in_python(ours.weight_dequantize, [scale.dtype], [shape], [x, scale], **options)
    return ours.weight_dequantize(x, scale, algo, out_dtype, group_size)


def weight_only_linear(x, weight, bias=None, weight_scale=None, weight_dtype="int8", arch=None, group_size=-1):
    if is_static(x):
        shape = [*x.shape[:-1], weight.shape[0] * (2 if weight_dtype == "int4" else 1)]
        options = {"weight_dtype": weight_dtype, "arch": arch, "group_size": group_size}
        return in_python(ours.weight_only_linear, [x.dtype], [shape], [x, weight, bias, weight_scale], **options)
    return ours.weight_only_linear(x, weight, bias, weight_scale, weight_dtype, arch, group_size)


def llm_int8_linear(x, weight, bias=None, weight_scale=None, threshold=6.0):
    if is_static(x):
        shape = [*x.shape[:-1], weight.shape[0]]
        tensors = [x, weight, bias, weight_scale]
        return in_python(ours.llm_int8_linear, [x.dtype], [shape], tensors, threshold=threshold)
    return ours.llm_int8_linear(x, weight, bias, weight_scale, threshold)


def apply_per_channel_scale(x, scales):
    if is_static(x):
        return in_python(ours.apply_per_channel_scale, [x.dtype], [x.shape], [x, scales])
    return ours.apply_per_channel_scale(x, scales)


def widened(function, narrow=True):
    """A function of tensors that computes halves in float32."""

    def wide(value):
        return value.astype("float32") if isinstance(value, paddle.Tensor) and value.dtype in HALVES else value

    def call(*args, **options):
        dtypes = [value.dtype for value in (*args, *options.values()) if isinstance(value, paddle.Tensor)]
        half = next((dtype for dtype in dtypes if dtype in HALVES), None)
        if half is None:
            return function(*args, **options)
        result = function(*map(wide, args), **{name: wide(value) for name, value in options.items()})
        return result.astype(half) if narrow and isinstance(result, paddle.Tensor) else result

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
    for function in (weight_quantize, weight_dequantize, weight_only_linear, llm_int8_linear, apply_per_channel_scale):
        setattr(quant, function.__name__, function)
        setattr(quantized_linear, function.__name__, function)
    paddle.base.core = Core(paddle.base.core)
    paddle.CUDAPlace = Core.CUDAPlace
    paddle.device.cuda.get_device_capability = lambda *_: (8, 0)
    popen = os.popen
    os.popen = lambda command: io.StringIO("release 12.0, V12.0") if "nvcc" in command else popen(command)
    paddle.Tensor.cuda = lambda self, *_: self
    for name in ("max", "multiply"):
        setattr(paddle, name, widened(getattr(paddle, name)))
    paddle.matmul = widened(matmul_of_bytes(paddle.matmul))
    paddle.rand = of_type(paddle.rand)
    for name in ("__add__", "__iadd__", "__mul__", "__truediv__", "__gt__"):
        setattr(paddle.Tensor, name, widened(getattr(paddle.Tensor, name), narrow=name != "__gt__"))
    linear = paddle.nn.Linear.forward
    paddle.nn.Linear.forward = lambda self, x: widened(
        lambda x, weight, bias: paddle.nn.functional.linear(x, weight, bias)
    )(x, self.weight, self.bias)
    return linear


def of_type(function):
    """Random numbers of halves, which the CPU wheel draws in float32 only."""

    def call(shape, dtype=None, **options):
        if dtype in ("float16", "bfloat16", *HALVES) and paddle.in_dynamic_mode():
            return function(shape, "float32", **options).astype(dtype)
        return function(shape, dtype, **options)

    return call


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
