"""What is refused: by which exception, in which words, and before memory is asked for."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import STDLIB, random

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


class WithoutSizes:
    """An object that hands out DLPack's tensor of two dimensions, without their sizes."""

    def __init__(self) -> None:
        # DLManagedTensor: data, device, ndim and dtype (float32), shape, strides, byte_offset; manager_ctx, deleter.
        fields = struct.pack("=Qii i2BH QQQ QQ", X.ctypes.data, 1, 0, 2, 2, 32, 1, 0, 0, 0, 0, 0)
        self.tensor = ctypes.create_string_buffer(fields, len(fields))

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_a_tensor_without_sizes() -> None:
    with pytest.raises(ValueError, match="expected sizes of 2 dimensions, got null"):
        LAYER(WithoutSizes())


def test_types_are_named() -> None:
    for x, name in ((np.ones((2, 64), object), "object"), (X.astype(">f4"), ">f4"), (np.full((2, 64), "a"), "<U1")):
        with pytest.raises(TypeError, match=f"got {name}"):
            LAYER(x)


@pytest.mark.parametrize("ids", [b"12", bytearray(b"12"), memoryview(b"12"), [True, False], (1, True)])
def test_bytes_and_truth_values_are_no_ids(ids: Any) -> None:
    model = halfbyte.load(STDLIB)
    q = halfbyte.quantize(W, "w4a16-g32")
    for call, option in (
        (lambda: model.generate(ids), "prompt"),
        (lambda: model.logits(ids), "prompt"),
        (lambda: model.decode(ids), "tokens"),
        (lambda: halfbyte.QuantizedTensor("w4a16-g32", q.codes(), q.scales(), None, ids), "group_index"),
    ):
        with pytest.raises(TypeError, match=f"^{option}: expected .*numbers from 0 on, in 32 bits, got"):
            call()


def test_bytes_are_no_sizes_and_no_scales() -> None:
    kernel = random((4, 4, 3, 3), 1)
    for option in ("stride", "padding", "dilation"):
        with pytest.raises(TypeError, match=f"^{option}: expected one number .*, got bytes"):
            halfbyte.Conv2d(kernel, **{option: b"\x01\x01"})
    codes = np.ones((2, 4), np.int8)
    with pytest.raises(TypeError, match="^weight_scale: expected a scale"):
        halfbyte.LinearInt8(codes, b"\x01\x01", x_scale=0.1)
    with pytest.raises(TypeError, match="^weight_zero: expected a zero point of 32 bits, got bytes"):
        halfbyte.LinearInt8(codes, 0.1, x_scale=0.1, weight_zero=b"\x01\x01")


def test_truth_values_are_no_numbers_and_numbers_no_truth_values() -> None:
    kernel = random((4, 4, 3, 3), 1)
    codes = np.ones((2, 4), np.int8)
    model = halfbyte.load(STDLIB)
    inputs = random((100, 64), 3)
    for call, option in (
        (lambda: halfbyte.Conv2d(kernel, stride=True), "stride"),
        (lambda: halfbyte.Conv2d(kernel, stride=np.True_), "stride"),
        (lambda: halfbyte.Conv2d(kernel, padding=(True, False)), "padding"),
        (lambda: halfbyte.Conv2d(kernel, padding=(0, 0, 0, True)), "padding"),
        (lambda: halfbyte.Conv2d(kernel, dilation=True), "dilation"),
        (lambda: halfbyte.Conv2d(kernel, groups=True), "groups"),
        (lambda: LAYER.bound(True), "magnitude"),
        (lambda: LAYER.bound(1.0, True), "m"),
        (lambda: halfbyte.set_num_threads(True), "threads"),
        (lambda: halfbyte.Hessian(True), "k"),
        (lambda: halfbyte.LinearInt8(codes, 0.1, x_scale=True), "x_scale"),
        (lambda: halfbyte.LinearInt8(codes, 0.1, x_scale=np.True_), "x_scale"),
        (lambda: halfbyte.LinearInt8(codes, 0.1, x_scale=0.1, y_scale=True), "y_scale"),
        (lambda: halfbyte.LinearInt8(codes, 0.1, x_scale=0.1, x_zero=True), "x_zero"),
        (lambda: halfbyte.LinearInt8(codes, 0.1, x_scale=0.1, weight_zero=[0, True]), "weight_zero"),
        (lambda: halfbyte.LinearInt8(codes, True, x_scale=0.1), "weight_scale"),
        (lambda: halfbyte.LinearInt8(codes, np.array([True, True]), x_scale=0.1), "weight_scale"),
        (lambda: halfbyte.quantize(W, "w4a16", method="gptq", inputs=inputs, damping=True), "damping"),
        (lambda: model.generate("a", temperature=True), "temperature"),
        (lambda: model.generate("a", top_k=True), "top_k"),
    ):
        with pytest.raises(TypeError, match=f"(?m)^{option}: expected .*, got a bool$"):
            call()
    for call, message in (
        (lambda: halfbyte.Conv2d(kernel, stride=1.5), "stride: expected one number of 1 or more, or two, got float"),
        (lambda: halfbyte.Conv2d(kernel, groups="1"), "groups: expected 0 or more, in 64 bits, got str"),
        (lambda: halfbyte.LinearInt8(codes, 0.1, x_scale="1"), "x_scale: expected a number, got str"),
        (lambda: halfbyte.Linear(W, format="w4a16", search=1), "search: expected True or False, got int"),
        (lambda: halfbyte.quantize(W, "w4a16", search=None), "search: expected True or False, got NoneType"),
    ):
        with pytest.raises(TypeError, match=f"(?m)^{message}$"):
            call()
    assert halfbyte.Conv2d(kernel, stride=np.int64(2), padding=[1, 1])(random((1, 4, 5, 5), 2)).shape == (1, 4, 3, 3)
    halfbyte.LinearInt8(codes, np.float32(0.1), x_scale=np.float32(1), y_scale=1)


def test_texts() -> None:
    model = halfbyte.load(STDLIB)
    for wrong in (5, ["a", 5], b"a", [b"a"]):
        with pytest.raises(TypeError, match="^stop: expected a text, or several, got (int|bytes)"):
            model.generate("def ", stop=wrong)
    with pytest.raises(ValueError, match="prompt: expected text of whole characters"):
        model.generate("\udc80")
    for wrong in ("", "x" * 1025):
        with pytest.raises(ValueError, match=f"stop: expected texts of 1 to 1024 bytes, got one of {len(wrong)}"):
            model.generate("def ", stop=["a", wrong])
    assert model.generate("def ", stop=("a", "b")).finish_reason is None


def test_unknown_tokens_are_not_decoded() -> None:
    model = halfbyte.load(STDLIB)
    ids = model.encode("def f(x):")
    assert model.decode(ids) == "def f(x):"
    for id in (model.vocab, 2**32 - 1):
        with pytest.raises(ValueError, match=str(id)):
            model.decode([*ids, id])


def test_parts_of_a_tensor_have_their_shapes() -> None:
    q = halfbyte.quantize(W, "w4a16-g32-asym")
    codes, scales, zeros = q.codes(), q.scales(), q.zeros()

    def made(scales: Any, zeros: Any) -> Any:
        return halfbyte.QuantizedTensor("w4a16-g32-asym", codes, scales, zeros)

    for dtype in (np.uint8, np.int8, np.int32, np.int64):
        assert np.array_equal(made(scales, zeros.astype(dtype)).dequantize(), q.dequantize())
    for wrong in (scales.T, scales.reshape(-1), scales[:, :1], scales[None]):
        with pytest.raises(ValueError, match=r"QuantizedTensor: expected scales of shape \(48, 2\), got shape"):
            made(np.ascontiguousarray(wrong), zeros)
    with pytest.raises(ValueError, match=r"QuantizedTensor: expected zeros of shape \(48, 2\), got shape \(2, 48\)"):
        made(scales, np.ascontiguousarray(zeros.T))
    for value in (-1, 17, 70000):
        with pytest.raises(ValueError, match=f"zero points from 0 to 16, got {value}"):
            made(scales, np.full_like(zeros, value))
    with pytest.raises(TypeError, match="got uint32"):
        made(scales, zeros.astype(np.uint32))
    with pytest.raises(ValueError, match=r"scales of shape \(48, 2\)"):
        halfbyte.QuantizedTensor("w4a16-g32", codes, np.ascontiguousarray(halfbyte.quantize(W, "w4a16-g32").scales().T))


def test_options_that_would_count_for_nothing() -> None:
    inputs = random((100, 64), 3)
    codes = np.ones((2, 4), np.int8)
    for call in (
        lambda: halfbyte.Linear(W, search=True),
        lambda: halfbyte.Linear(W, symmetric="full"),
        lambda: halfbyte.Linear(halfbyte.quantize(W, "w4a16"), search=True),
        lambda: halfbyte.Conv2d(random((4, 4, 3, 3), 1), search=True),
        lambda: halfbyte.quantize(W, "w4a16", damping=0.1),
        lambda: halfbyte.quantize(W, "w4a16", method="awq", inputs=inputs, damping=0.1),
        lambda: halfbyte.quantize(W, "w4a16", method="awq", inputs=inputs, search=True),
        lambda: halfbyte.load(STDLIB, search=True),
        lambda: halfbyte.LinearInt8(codes, 0.1, x_scale=0.1, y_zero=3),
        lambda: halfbyte.LinearInt8(codes, 1e-46, x_scale=1e10),
        lambda: halfbyte.LinearInt8(codes, [0.1, 1e-300], x_scale=0.1),
        lambda: halfbyte.quantize(W, "w4a16-asym", symmetric="full"),
        lambda: halfbyte.Linear(W, format="w4a16-asym", symmetric="full"),
        lambda: halfbyte.Conv2d(random((4, 4, 3, 3), 1), format="w8a16-float", symmetric="full"),
        lambda: LAYER.bound(-1.0),
        lambda: LAYER.bound(float("nan")),
        lambda: halfbyte.Conv2d(random((4, 4, 3, 3), 1), stride=(1, 0)),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    with pytest.raises(ValueError, match="at least 1 group"):
        halfbyte.Conv2d(random((4, 4, 3, 3), 1), groups=0)
    halfbyte.quantize(W, "w4a16", method="gptq", inputs=inputs, damping=0.05)


def test_any_mapping_has_tensors() -> None:
    from types import MappingProxyType

    assert halfbyte.linear_from_tensors(MappingProxyType({"weight": W})).out_features == 48


def test_signatures_can_be_read() -> None:
    import inspect

    for layer in (halfbyte.Conv2d, halfbyte.Conv2dInt8):
        defaults = {name: p.default for name, p in inspect.signature(layer).parameters.items()}
        assert (defaults["stride"], defaults["padding"], defaults["dilation"]) == (1, 0, 1)


def test_functions_of_paddle_take_tensors() -> None:
    import halfbyte.paddle

    with pytest.raises(TypeError, match="weight_quantize: expected a tensor, got NoneType"):
        halfbyte.paddle.weight_quantize(None)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_memory_that_is_short_is_a_memory_error() -> None:
    program = (
        "import halfbyte, numpy as np, resource\n"
        "w = np.zeros((4096, 4096), np.float32)\n"
        "kernels = w.reshape(4096, 1024, 2, 2)\n"
        "halfbyte.Linear(w[:64], format='w4a16')\n"
        "quantized = halfbyte.quantize(w, 'w4a16')\n"
        "layer = halfbyte.Linear(quantized)\n"
        "halfbyte.Conv2d(kernels[:64], format='w4a16')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), -1))\n"
        "def refused(call):\n"
        "    try: call()\n"
        "    except MemoryError: return\n"
        "    raise AssertionError('there is memory')\n"
        "refused(lambda: halfbyte.Linear(w))\n"
        "refused(lambda: halfbyte.quantize(w, 'w8a16'))\n"
        "refused(lambda: halfbyte.Hessian(4096))\n"
        "refused(lambda: halfbyte.LinearInt8(w.view(np.int8)[:, :4096], 0.1, x_scale=0.1))\n"
        "for format in (None, 'w4a16', 'w8a8', 'w8a16-tensor'):\n"
        "    refused(lambda: halfbyte.Conv2d(kernels, format=format))\n"
        "refused(lambda: halfbyte.Conv2dInt8(kernels.view(np.int8), 0.1, x_scale=0.1))\n"
        "refused(lambda: quantized.dequantize())\n"
        "refused(lambda: layer.dequantize())\n"
        "print('done')\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip() == "done", out.stderr


def test_lengths_that_no_list_of_numbers_has() -> None:
    class Liar(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 2**62

    model = halfbyte.load(STDLIB)
    q = halfbyte.quantize(W, "w4a16-g32")
    for call, option in (
        (lambda: model.decode(range(10**13)), "tokens"),
        (lambda: model.generate(Liar([1, 2])), "prompt"),
        (lambda: halfbyte.QuantizedTensor("w4a16-g32", q.codes(), q.scales(), None, range(10**13)), "group_index"),
        (lambda: halfbyte.LinearInt8(np.ones((2, 4), np.int8), range(10**13), x_scale=0.1), "weight_scale"),
    ):
        with pytest.raises(ValueError, match=f"^{option}: expected"):
            call()


def test_numpy_has_no_bfloat16() -> None:
    layer = halfbyte.LinearInt8(np.ones((2, 64), np.int8), 0.1, x_scale=0.1, y_dtype="bfloat16")
    with pytest.raises(TypeError, match="^result: expected a type that numpy has, .* got bfloat16"):
        layer(np.ones((1, 64), np.uint8))
