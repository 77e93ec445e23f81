"""Layers against numpy, torch and onnxruntime's definition."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from conftest import assert_within, product, random

import halfbyte

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "format", ["w4a16-g128", "w4a16-g32-asym", "w8a16", "w3a16-g64", "w2a16-g32-float", "w4a32-g100-sf32", "w8a16-tensor", None]
)
@pytest.mark.parametrize("m", [1, 3, 65])
def test_linear_is_within_its_bound(format: str | None, m: int) -> None:
    w, x, bias = random((96, 256), 1), random((m, 256), 2), random((96,), 3)
    layer = halfbyte.Linear(w, bias, format)
    exact = w if format is None else halfbyte.quantize(w, format).dequantize()
    assert_within(layer, layer(x), x, exact, bias)
    assert np.array_equal(layer.dequantize(), exact)
    assert np.array_equal(layer.dequantize(64, 70), exact[64:70])
    assert (layer.in_features, layer.out_features, layer.has_bias, layer.device) == (256, 96, True, "cpu")
    assert layer.format == (None if format is None else halfbyte.parse_format(format))
    assert np.array_equal(layer.bias, bias) and layer.nbytes > 0 and isinstance(layer.kernel(m), str)


def test_quantised_activations_are_near() -> None:
    w, x = random((64, 256), 4), random((8, 256), 5)
    layer = halfbyte.Linear(w, format="w8a8-g128")
    exact, magnitude = product(x, layer.dequantize())
    assert np.all(np.abs(layer(x) - exact) <= magnitude / 100)


@pytest.mark.parametrize("name", ["relu", "relu6", "gelu", "gelu_tanh", "silu"])
def test_activations_as_torch_has_them(name: str) -> None:
    w, x = random((64, 64), 6), random((4, 64), 7)
    plain, with_activation = halfbyte.Linear(w), halfbyte.Linear(w, activation=name)
    functional = torch.nn.functional
    functions = {
        "relu": functional.relu,
        "relu6": functional.relu6,
        "gelu": functional.gelu,
        "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
        "silu": functional.silu,
    }
    expected = functions[name](torch.from_numpy(plain(x)))
    assert torch.allclose(torch.from_numpy(with_activation(x)), expected, rtol=1e-5, atol=1e-5)
    assert with_activation.activation == name


def test_layers_that_cannot_be() -> None:
    w = random((8, 64), 8)
    for arguments, options, message in [
        ((w[0],), {}, "expected a weight of two dimensions"),
        ((w, np.zeros(7, np.float32)), {}, r"expected a bias of shape \(8,\)"),
        ((w,), {"format": "w5a16"}, "format: expected weights of 2, 3, 4 or 8 bits"),
        ((w,), {"activation": "tanh"}, "activation: expected"),
        ((w,), {"symmetric": "wide"}, "expected symmetric"),
        ((np.full((8, 64), np.nan, np.float32),), {"format": "w4a16"}, "expected finite numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            halfbyte.Linear(*arguments, **options)
    with pytest.raises(TypeError):
        halfbyte.Linear(w.astype(np.float64))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("channels", "options"),
    [
        ((8, 16, 1), {"padding": 1}),
        ((32, 64, 1), {"stride": 2, "padding": (1, 2)}),
        ((32, 32, 32), {"padding": 1}),
        ((32, 64, 2), {"dilation": (1, 2), "stride": (2, 1)}),
    ],
)
def test_conv2d_as_torch(channels: tuple[int, int, int], options: dict[str, Any], layout: str) -> None:
    ci, co, groups = channels
    w, bias, x = random((co, ci // groups, 3, 3), 9), random((co,), 10), random((2, ci, 9, 11), 11)
    layer = halfbyte.Conv2d(w, bias, groups=groups, layout=layout, **options)
    expected = torch.nn.functional.conv2d(*map(torch.from_numpy, (x, w, bias)), groups=groups, **options).numpy()
    y = layer(x if layout == "nchw" else np.ascontiguousarray(x.transpose(0, 2, 3, 1)))
    y = y if layout == "nchw" else y.transpose(0, 3, 1, 2)
    assert y.shape == expected.shape and np.allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_conv2d_of_codes() -> None:
    w, x = random((32, 32, 3, 3), 12), random((1, 32, 6, 6), 13)
    layer = halfbyte.Conv2d(w, format="w8a16-g32", padding=1)
    dense = halfbyte.Conv2d(w, padding=1)(x)
    assert layer.format == "w8a16-g32" and np.abs(layer(x) - dense).max() < np.abs(dense).max() / 50
    y = layer(torch.from_numpy(x))
    assert type(y) is torch.Tensor and np.array_equal(y.numpy(), layer(x))
    with pytest.raises(ValueError, match=r"conv2d: expected an x of shape \(batch, 32, h, w\)"):
        layer(x[:, :31])
    with pytest.raises(ValueError, match="four dimensions"):
        halfbyte.Conv2d(w[0])
    for option, wrong in [
        ("padding", -1),
        ("padding", (1, -1)),
        ("padding", (1, 1, 1, -1)),
        ("padding", (1, 1, 1)),
        ("stride", -1),
        ("stride", (2**64, 1)),
        ("dilation", (1, -1)),
        ("groups", -1),
    ]:
        with pytest.raises(ValueError, match=f"^{option}: expected .*, got {re.escape(str(wrong))}"):
            halfbyte.Conv2d(w, **{option: wrong})
    for wrong in (1.5, (1.5, 1), None):
        with pytest.raises(TypeError):
            halfbyte.Conv2d(w, padding=wrong)
    same = halfbyte.Conv2d(w, stride=[1, 1], padding=(1, 1, 1, 1), dilation=np.int64(1))
    assert np.array_equal(same(x), dense)
    with pytest.raises(ValueError, match="one or two numbers"):
        halfbyte.Conv2d(w, stride=(1, 2, 3, 4))
    with pytest.raises(ValueError):
        layer(x[:, :, :0])


def requantised(sums: Any, scale: Any, zero: int, low: int, high: int) -> Any:
    """Exact sums to bytes: one multiplication in float32, halves to the even number."""
    return np.clip(np.rint(sums.astype(np.float32) * scale.astype(np.float32)) + zero, low, high)


@pytest.mark.parametrize("x_dtype", ["uint8", "int8"])
@pytest.mark.parametrize("outputs", ["uint8", "int8", "float32"])
def test_linear_int8_to_the_bit(x_dtype: str, outputs: str) -> None:
    draw = np.random.default_rng(14)
    low = 0 if x_dtype == "uint8" else -128
    x = draw.integers(low, low + 256, (5, 70)).astype(x_dtype)
    w = draw.integers(-127, 128, (33, 70)).astype(np.int8)
    scales = draw.uniform(0.001, 0.02, 33).astype(np.float32)
    bias = draw.integers(-1000, 1000, 33).astype(np.int32)
    x_zero = low + 7
    sums = (x.astype(np.int64) - x_zero) @ w.T.astype(np.int64) + bias
    options: dict[str, Any] = {"x_scale": 0.05, "x_zero": x_zero, "x_dtype": x_dtype}
    weight_scales = scales.tolist()
    if outputs == "float32":
        layer = halfbyte.LinearInt8(w, weight_scales, bias, **options)
        expected = sums.astype(np.float32) * (np.float32(0.05) * scales)
    else:
        zero = 100 if outputs == "uint8" else -3
        layer = halfbyte.LinearInt8(w, weight_scales, bias, y_scale=0.7, y_zero=zero, y_dtype=outputs, **options)
        ends = np.iinfo(outputs)
        expected = requantised(sums, (np.float32(0.05) * scales) / np.float32(0.7), zero, ends.min, ends.max)
    y = layer(x)
    assert y.dtype == outputs and np.array_equal(y, expected.astype(outputs))
    assert np.array_equal(layer(torch.from_numpy(x)).numpy(), y)
    with pytest.raises(TypeError, match=f"expected an x of {x_dtype}"):
        layer(x.astype(np.int32))
    with pytest.raises(ValueError, match="expected an x of shape"):
        layer(x[:, :69])


def test_conv2d_int8_as_integers() -> None:
    draw = np.random.default_rng(15)
    x = draw.integers(0, 256, (2, 16, 7, 8)).astype(np.uint8)
    w = draw.integers(-127, 128, (24, 16, 3, 3)).astype(np.int8)
    layer = halfbyte.Conv2dInt8(w, 0.01, x_scale=0.05, x_zero=128, y_scale=3.0, y_zero=10, padding=1, activation="relu")
    exact = torch.nn.functional.conv2d(torch.from_numpy(x).double() - 128, torch.from_numpy(w).double(), padding=1).numpy()
    scale = np.float32(0.05) * np.float32(0.01) / np.float32(3.0)
    expected = np.maximum(requantised(exact, np.asarray(scale), 10, 0, 255), 10)
    assert np.array_equal(layer(x), expected.astype(np.uint8))
    floats = halfbyte.Conv2dInt8(w, 0.01, x_scale=0.05, x_zero=128, padding=1, y_dtype="float16")
    assert floats(x).dtype == np.float16


def test_int8_layers_that_cannot_be() -> None:
    w = np.zeros((4, 8), np.int8)
    with pytest.raises(ValueError, match="finite scale above 0"):
        halfbyte.LinearInt8(w, 1.0, x_scale=0.0)
    with pytest.raises(ValueError, match="expected 1 or 4 scales"):
        halfbyte.LinearInt8(w, [1.0, 2.0], x_scale=1.0)
    for option, wrong in [("x_zero", 2**31), ("y_zero", -(2**40)), ("weight_zero", 2**31), ("weight_zero", [0, 0, 0, 2**31])]:
        with pytest.raises(ValueError, match=f"^{option}: expected a zero point of 32 bits, got "):
            halfbyte.LinearInt8(w, 1.0, x_scale=1.0, **{option: wrong})
    with pytest.raises(TypeError, match="a weight of uint8 or int8"):
        halfbyte.LinearInt8(w.astype(np.float32), 1.0, x_scale=1.0)
    with pytest.raises(ValueError):
        halfbyte.LinearInt8(w, 1.0, np.zeros(4, np.float32), x_scale=1.0, y_scale=1.0)


def test_quantize_by_every_method() -> None:
    w, inputs = random((32, 128), 16), random((400, 128), 17) * np.linspace(0.1, 3, 128, dtype=np.float32)
    hessian = halfbyte.Hessian(128)
    hessian.add(inputs[:150].reshape(3, 50, 128))
    hessian.add(torch.from_numpy(inputs[150:]))
    assert (hessian.k, hessian.rows) == (128, 400)
    exact = inputs @ w.T

    def loss(q: halfbyte.QuantizedTensor) -> float:
        scaled = inputs if q.input_scales is None else inputs / q.input_scales
        return float(np.square(scaled @ q.dequantize().T - exact).sum())

    rtn = halfbyte.quantize(w, "w3a16-g32-asym")
    by_gptq = halfbyte.quantize(w, "w3a16-g32-asym", method="gptq", hessian=hessian)
    by_awq = halfbyte.quantize(w, "w3a16-g32-asym", method="awq", hessian=hessian)
    assert loss(by_gptq) < 0.9 * loss(rtn) and loss(by_awq) < loss(rtn)
    once = halfbyte.quantize(w, "w3a16-g32-asym", method="gptq", inputs=inputs)
    assert loss(once) < 0.9 * loss(rtn)
    ordered = halfbyte.quantize(w, "w3a16-g32-asym", method="gptq", hessian=hessian, act_order=True)
    assert ordered.group_index is not None and loss(ordered) < loss(rtn)
    # AWQ's inputs have to be divided first, and a layer says so.
    with pytest.raises(ValueError, match=r"weight.folded\(\)"):
        halfbyte.Linear(by_awq)
    folded = halfbyte.Linear(by_awq.folded())
    assert np.abs(folded(inputs / by_awq.input_scales) - exact).max() < 20
    for options in ({"method": "gptq"}, {"hessian": hessian}, {"method": "hqq"}, {"act_order": True}):
        with pytest.raises(ValueError, match="quantize: expected"):
            halfbyte.quantize(w, "w4a16-g32", **options)
    with pytest.raises(ValueError, match="^k: expected 0 or more, in 64 bits, got -1"):
        halfbyte.Hessian(-1)
    with pytest.raises(ValueError, match="^start: expected"):
        folded.dequantize(-1)
    with pytest.raises(ValueError, match="^m: expected"):
        folded.kernel(-1)
    with pytest.raises(ValueError, match="Hessian"):
        halfbyte.quantize(w, "w4a16-g32", method="gptq", hessian=halfbyte.Hessian(64))


def test_parts_of_a_quantized_tensor() -> None:
    w = random((16, 96), 18)
    for format in ("w4a16-g32", "w4a16-g32-asym", "w8a16-g96-float", "w2a16"):
        q = halfbyte.quantize(w, format)
        codes, scales, zeros = q.codes(), q.scales(), q.zeros()
        again = halfbyte.QuantizedTensor(q.format, codes, scales, zeros)
        assert (q.shape, codes.dtype, q.format) == ((16, 96), np.uint8, halfbyte.parse_format(format))
        assert np.array_equal(again.dequantize(), q.dequantize()) and np.array_equal(again.codes(), codes)
        assert halfbyte.Linear(q).format == q.format
    group = np.repeat(scales, 96 // scales.shape[1], 1)
    assert np.array_equal((codes.astype(np.float32) - 2) * group, q.dequantize())
    with pytest.raises(ValueError, match="codes of 2 bits"):
        halfbyte.QuantizedTensor("w2a16", np.full((16, 96), 4, np.uint8), scales)
    with pytest.raises(ValueError, match="expected a weight of"):
        halfbyte.Linear(q, format="w4a16-g32")
