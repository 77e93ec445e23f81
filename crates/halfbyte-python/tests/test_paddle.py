"""``halfbyte.paddle`` without paddle: against files that paddlepaddle 3.3.1 and onnxruntime wrote, and against its definitions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import halfbyte.paddle as quant

CRATES = Path(__file__).resolve().parents[2]
ARCHS = (70, 75, 80, 86, 89, 90, 92, 100)
TYPES = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32, "F64": np.float64, "I8": np.int8, "U8": np.uint8, "I32": np.int32}


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file; bfloat16 as its bits."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[8 + size :][slice(*t["data_offsets"])], TYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
    }


def wide(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def goldens(folder: str, pattern: str) -> list[Path]:
    found = sorted((CRATES / folder).glob(pattern))
    assert found, f"{folder}/{pattern}"
    return found


@pytest.mark.parametrize(
    "path", goldens("halfbyte/testdata/paddle_weight_quantize", "wq_*.safetensors"), ids=lambda path: path.stem
)
def test_codes_and_scales_are_those_of_paddle(path: Path) -> None:
    file = tensors(path)
    for algo, name in (("weight_only_int8", "int8"), ("weight_only_int4", "int4"), ("llm.int8", "llm_int8")):
        for group_size, groups in ((-1, "pc"), (64, "g64"), (128, "g128")):
            scale = file[f"{name}.{groups}.scale"]
            for arch in ARCHS:
                out = f"{name}.{groups}." + ("out" if name == "llm_int8" else "sm70.out" if arch == 70 else "sm80.out")
                if out not in file:
                    continue
                codes, scales = quant.weight_quantize(file["w"], algo, arch, group_size)
                np.testing.assert_array_equal(codes, file[out], strict=True)
                np.testing.assert_array_equal(scales, scale, strict=True)


@pytest.mark.parametrize(
    "path", goldens("halfbyte-checkpoint/testdata/weight_only_linear", "wol_*.safetensors"), ids=lambda path: path.stem
)
def test_products_are_those_of_the_codes(path: Path) -> None:
    file = tensors(path)
    x, w, bias = file["x"], file["w"], file["bias"]
    unit = 2.0**-11 if x.dtype == np.float16 else 2.0**-8
    for bits in (4, 8):
        for group_size, groups in ((-1, "pc"), (64, "g64"), (128, "g128")):
            name = f"int{bits}.{groups}."
            codes, scale = quant.weight_quantize(w, f"weight_only_int{bits}", 80, group_size)
            np.testing.assert_array_equal(codes.view(np.uint8).ravel(), file[name + "sm80_bytes"])
            np.testing.assert_array_equal(scale, file[name + "scale"], strict=True)
            y = quant.weight_only_linear(x, codes, bias, scale, f"int{bits}", 80, group_size)
            assert y.dtype == x.dtype
            dense = wide(quant.weight_dequantize(codes, scale, f"weight_only_int{bits}", group_size=group_size))
            magnitude = np.abs(wide(x)) @ np.abs(dense) * (1 + unit) + np.abs(wide(bias))
            allowed = (unit + (16 + len(w) ** 0.5) * 2.0**-24) * magnitude + 2.0**-25
            assert (np.abs(wide(y) - file[name + "y_f64"]) <= allowed).all()
            # The same weight in Volta's layout, in three dimensions, without bias.
            volta, _ = quant.weight_quantize(w, f"weight_only_int{bits}", 70, group_size)
            again = quant.weight_only_linear(x[None], volta, None, scale, f"int{bits}", 70, group_size)
            straight = quant.weight_only_linear(x, codes, weight_scale=scale, weight_dtype=f"int{bits}", group_size=group_size)
            np.testing.assert_array_equal(again, straight[None], strict=True)


@pytest.mark.parametrize(
    "path", goldens("halfbyte/testdata/llm_int8_linear", "llm_int8_*.safetensors"), ids=lambda path: path.stem
)
def test_llm_int8(path: Path) -> None:
    file = tensors(path)
    codes, scale = quant.weight_quantize(file["w"], "llm.int8", 80)
    np.testing.assert_array_equal(codes, file["weight_int8"], strict=True)
    np.testing.assert_array_equal(scale, file["weight_scale"], strict=True)
    y = quant.llm_int8_linear(file["x"], codes, file["bias"], scale)
    assert y.dtype == file["x"].dtype
    unit = 2.0**-11 if y.dtype == np.float16 else 2.0**-8
    expected = file["y_f64"]
    assert np.abs(wide(y) - expected).max() <= 1.01 * unit * np.abs(expected).max()


def test_apply_per_channel_scale() -> None:
    rng = np.random.default_rng(1)
    x, scales = rng.standard_normal((5, 40)).astype(np.float16), rng.random(40).astype(np.float16)
    np.testing.assert_array_equal(quant.apply_per_channel_scale(x, scales), x * scales, strict=True)
    # Brain floats by their bits: products, rounded once to nearest, ties to even.
    bits = (rng.standard_normal((5, 40)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    factors = (rng.random(40).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    product = (wide(bits) * wide(factors)).astype(np.float32).view(np.uint32).astype(np.uint64)
    expected = ((product + 0x7FFF + ((product >> 16) & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(quant.apply_per_channel_scale(bits, factors), expected, strict=True)


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    w = torch.randn(128, 48).to(torch.bfloat16)
    x = torch.randn(2, 3, 128).to(torch.bfloat16)
    codes, scale = quant.weight_quantize(w, "weight_only_int8", group_size=64)
    assert (codes.dtype, scale.dtype, codes.shape, scale.shape) == (torch.int8, torch.bfloat16, (48, 128), (2, 48))
    y = quant.weight_only_linear(x, codes, torch.ones(48), scale, group_size=64)
    dense = quant.weight_dequantize(codes, scale, group_size=64)
    assert (y.dtype, y.shape, dense.shape) == (torch.bfloat16, (2, 3, 48), (128, 48))
    expected = x.double() @ dense.double() + 1
    magnitude = x.double().abs() @ dense.double().abs() + 1
    # Dense weights are rounded once more.
    assert ((y.double() - expected).abs() <= 3 * 2.0**-8 * magnitude).all()


@pytest.mark.parametrize("algo", ["weight_only_int8", "weight_only_int4", "llm.int8"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float16", "bfloat16"])
def test_weight_quantize_as_documented(algo: str, bf16: bool) -> None:
    """Shapes and types for every architecture and group size, and codes that are the nearest to the weight over its scale."""
    k, n = 256, 48
    w = np.random.default_rng(3).standard_normal((k, n)).astype(np.float32)
    w = (w.view(np.uint32) >> 16).astype(np.uint16) if bf16 else w.astype(np.float16)
    bits, most = (4, 7) if algo.endswith("int4") else (8, 127)
    for group_size in (-1, 64, 128):
        groups = (1, k) if group_size == -1 else (k // group_size, group_size)
        of_volta, of_others = set(), set()
        for arch in ARCHS:
            codes, scale = quant.weight_quantize(w, algo, arch, group_size)
            assert codes.dtype == np.int8 and codes.shape == (n * bits // 8, k)
            assert scale.dtype == (np.float32 if algo == "llm.int8" else w.dtype)
            assert scale.shape == ((n,) if group_size == -1 else (groups[0], n))
            (of_volta if arch == 70 else of_others).add(codes.tobytes())
        # One layout for sm_70, one for all others; llm.int8 has one for all.
        assert len(of_volta) == len(of_others) == 1 and (of_volta == of_others) == (algo == "llm.int8")
        # Without an architecture, that of sm_80.
        assert quant.weight_quantize(w, algo, group_size=group_size)[0].tobytes() in of_others
        largest = np.abs(wide(w)).reshape(groups[0], groups[1], n).max(1)
        unit = 2.0**-8 if bf16 and algo != "llm.int8" else 2.0**-11
        np.testing.assert_allclose(wide(scale).reshape(groups[0], n), largest / most, rtol=unit)
        steps = np.repeat(wide(scale).reshape(groups[0], n), groups[1], 0)
        if algo == "llm.int8":
            stands_for = codes.T * steps
        else:
            stands_for = wide(quant.weight_dequantize(codes, scale, algo, group_size=group_size))
        # Half a step, and the rounding of the scale and of what is given back.
        assert (np.abs(stands_for - wide(w)) <= steps * (0.5 + most * 2 * unit)).all()


def test_zeros_and_empty_rows() -> None:
    w = np.zeros((64, 16), np.float16)
    codes, scale = quant.weight_quantize(w)
    assert (scale == 0).all() and (codes.view(np.uint8) == 255).all()
    assert (quant.weight_dequantize(codes, scale) == 0).all()
    y = quant.weight_only_linear(np.zeros((0, 64), np.float16), codes, None, scale)
    assert y.shape == (0, 16)


W, X = np.ones((64, 16), np.float16), np.ones((2, 64), np.float16)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "arch", lambda: quant.weight_quantize(W, arch=60)),
        (ValueError, "algo", lambda: quant.weight_quantize(W, algo="w4a8")),
        (ValueError, "algo", lambda: quant.weight_quantize(W.astype(np.int8), algo="w4a8")),
        (ValueError, "algo", lambda: quant.weight_quantize(W, algo="w4afp8")),
        (ValueError, "algo", lambda: quant.weight_quantize(W, algo="int8")),
        (ValueError, "arch", lambda: quant.weight_quantize(W, arch=0)),
        (AssertionError, "-1/64/128", lambda: quant.weight_quantize(W, group_size=0)),
        (ValueError, "2D", lambda: quant.weight_quantize(W[None])),
        (RuntimeError, "int8", lambda: quant.weight_quantize(W.astype(np.int8))),
        (ValueError, "NaN|infinity|finite", lambda: quant.weight_quantize(np.full((64, 16), np.inf, np.float16))),
        (ValueError, "2D", lambda: quant.weight_quantize(W[0])),
        (ValueError, "divisible by 64", lambda: quant.weight_quantize(W[:32])),
        (ValueError, "divisible by 16", lambda: quant.weight_quantize(W[:, :8])),
        (AssertionError, "-1/64/128", lambda: quant.weight_quantize(W, group_size=32)),
        (RuntimeError, "float32", lambda: quant.weight_quantize(W.astype(np.float32))),
        (ValueError, "NaN", lambda: quant.weight_quantize(np.full((64, 16), np.nan, np.float16))),
        (ValueError, "algo", lambda: quant.weight_dequantize(*quantised(), algo="llm.int8")),
        (ValueError, "scales of shape", lambda: quant.weight_dequantize(quantised()[0], quantised()[1][:8])),
        (ValueError, "weight_scale", lambda: quant.weight_only_linear(X, quantised()[0])),
        (ValueError, "int4", lambda: linear(weight_dtype="int5")),
        (ValueError, "1D", lambda: linear(weight_scale=np.ones((1, 16), np.float16))),
        (ValueError, "2D", lambda: linear(group_size=64)),
        (ValueError, "dim", lambda: linear(x=X[:, :32])),
        (ValueError, "bias", lambda: linear(bias=np.ones(8, np.float16))),
        (RuntimeError, "float32", lambda: linear(x=X.astype(np.float32))),
        (ValueError, "weight_scale", lambda: quant.llm_int8_linear(X, quantised()[0])),
        (ValueError, "threshold", lambda: quant.llm_int8_linear(X, *llm(), threshold=-1.0)),
        (ValueError, "dim", lambda: quant.llm_int8_linear(X[:, :32], *llm())),
        (ValueError, "rank", lambda: quant.apply_per_channel_scale(X[0], X[0])),
        (ValueError, "dim", lambda: quant.apply_per_channel_scale(X, X[0, :8])),
    ],
)
def test_errors(error: type[Exception], text: str, call) -> None:
    with pytest.raises(error, match=text):
        call()


def quantised() -> tuple[np.ndarray, np.ndarray]:
    return quant.weight_quantize(W)


def llm() -> tuple[np.ndarray, None, np.ndarray]:
    codes, scale = quant.weight_quantize(W, "llm.int8")
    return codes, None, scale


def linear(**changes):
    codes, scale = quantised()
    arguments = {"x": X, "weight": codes, "weight_scale": scale, **changes}
    return quant.weight_only_linear(**arguments)
