"""``paddle.nn.quant``'s functions for weight-only and LLM.int8 layers, on the CPU too.

``weight_quantize``, ``weight_dequantize``, ``weight_only_linear``, ``llm_int8_linear`` and ``apply_per_channel_scale`` take Paddle's
arguments and have its defaults, shapes, types and kinds of errors. Tensors may be of paddle, torch or numpy, and results are of the
same library; numpy has no bfloat16: arrays of uint16 are its bits, as in paddle. Codes and scales are those of Paddle's CPU kernel,
bit by bit.

Static graphs of Paddle call back into Python where they meet one of these functions.

What differs: without ``arch`` a tensor on a CPU is laid out for sm_80, where Paddle raises; NaN and infinity in a weight are a
ValueError; products are rounded once, to the type of x, also where Paddle rounds weights or sums in between; outlier columns of
``llm_int8_linear`` have the weights that are theirs.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import numpy as np

from . import _halfbyte

__all__ = [
    "apply_per_channel_scale",
    "linear",
    "llm_int8_linear",
    "weight_dequantize",
    "weight_only_linear",
    "weight_quantize",
]

_ARCHS = (70, 75, 80, 86, 89, 90, 92, 100)
_ALGOS = {"weight_only_int8": 8, "weight_only_int4": 4, "llm.int8": 8}


def weight_quantize(
    x: Any, algo: str = "weight_only_int8", arch: int | None = None, group_size: int = -1
) -> tuple[Any, Any]:
    """Quantises weights ``[k, n]`` of float16 or bfloat16.

    Returns int8 codes (``[n, k]``, or ``[n / 2, k]`` with two codes of 4 bits a byte) in the layout of the architecture, or signed as
    they are (``llm.int8``), and scales ``[n]`` or ``[k / group_size, n]``, of x's type, for ``llm.int8`` of float32. k must be a
    multiple of 64 and n of 16.
    """
    _check_tensors("weight_quantize", x)
    arch = _arch(x, arch)
    _check_group_size(group_size)
    bits = _bits(algo, tuple(_ALGOS))
    if len(x.shape) != 2:
        raise ValueError(f"weight_quantize: the x tensor of quant op must be 2D, but got[{len(x.shape)}]")
    for size, divisor, which in ((x.shape[0], 64, "first"), (x.shape[1], 16, "second")):
        if size % divisor != 0:
            raise ValueError(
                f"weight_quantize: the {which} dimension of input must be divisible by {divisor}, but got[{size}]"
            )
    _check_half("weight_quantize", x)
    if _in_graph(x):
        (k, n), plain = x.shape, algo == "llm.int8"
        codes = ([n * bits // 8, k], "int8")
        scales = ([n] if group_size == -1 else [-(-k // group_size), n], "float32" if plain else x.dtype)
        out, scale = _node(lambda x: weight_quantize(x, algo, arch, group_size), [codes, scales], x)
        return out, scale
    x, bf16 = _widened(_detached(x))
    plain = algo == "llm.int8"
    out, scale = _halfbyte._paddle_weight_quantize(x, bits, plain, arch, group_size, bf16)
    return out, _narrowed(scale, bf16 and not plain)


def weight_dequantize(
    x: Any, scale: Any, algo: str = "weight_only_int8", out_dtype: Any = "float16", group_size: int = -1
) -> Any:
    """What codes of ``weight_quantize`` stand for, ``[k, n]`` of the scales' type (``out_dtype`` counts for nothing, as in Paddle).

    The codes must lie as for sm_75 and later.
    """
    _check_tensors("weight_dequantize", x, scale)
    _check_group_size(group_size)
    bits = _bits(algo, ("weight_only_int8", "weight_only_int4"))
    if len(x.shape) != 2:
        raise ValueError(f"weight_dequantize: the x tensor of dequantize op must be 2D, but got[{len(x.shape)}]")
    if _in_graph(x):
        meta = ([x.shape[1], x.shape[0] * 8 // bits], scale.dtype)
        return _node(lambda x, scale: weight_dequantize(x, scale, algo, out_dtype, group_size), [meta], x, scale)
    scale, bf16 = _widened(_detached(scale))
    return _narrowed(_halfbyte._paddle_weight_dequantize(_detached(x), scale, bits, group_size), bf16)


def weight_only_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    weight_scale: Any = None,
    weight_dtype: str = "int8",
    arch: int | None = None,
    group_size: int = -1,
) -> Any:
    """``x @ dequantised(weight) + bias`` of x ``[..., k]``, with a weight of ``weight_quantize``.

    The weight is packed anew in each call; `linear` packs it once. Gradients with respect to x are computed for tensors of paddle.
    """
    name = "weight_only_linear"
    _check_tensors(name, x, weight)
    arch = _arch(x, arch)
    _check_group_size(group_size)
    bits = _weight_bits(weight_dtype)
    _check_layer(name, weight, bias, weight_scale, bits, group_size)
    _check_inputs(name, x, weight)
    _check_half(name, x)

    if _in_graph(x):

        def again(x: Any, weight: Any, scale: Any, bias: Any = None) -> Any:
            return weight_only_linear(x, weight, bias, scale, weight_dtype, arch, group_size)

        return _node(again, [([*x.shape[:-1], weight.shape[0] * 8 // bits], x.dtype)], x, weight, weight_scale, bias)

    def multiply(x: Any) -> Any:
        layer = linear(weight, weight_scale, bias, weight_dtype, arch, group_size)
        wide, bf16 = _widened(x)
        return _narrowed(layer(wide), bf16)

    if _has_paddle_gradient(x):
        return _with_gradient(x, multiply, lambda: _dequantised(weight, weight_scale, bits, arch, group_size))
    return multiply(_detached(x))


def linear(
    weight: Any,
    weight_scale: Any,
    bias: Any = None,
    weight_dtype: str = "int8",
    arch: int | None = None,
    group_size: int = -1,
) -> _halfbyte.Linear:
    """The layer that ``weight_only_linear`` makes in each call, packed once. Paddle has no such function."""
    _check_tensors("linear", weight)
    arch = _arch(weight, arch)
    _check_group_size(group_size)
    bits = _weight_bits(weight_dtype)
    _check_layer("linear", weight, bias, weight_scale, bits, group_size)
    scale, _ = _widened(_detached(weight_scale))
    return _halfbyte._paddle_linear(_detached(weight), scale, _wide(bias), bits, arch, group_size)


def llm_int8_linear(x: Any, weight: Any, bias: Any = None, weight_scale: Any = None, threshold: float = 6.0) -> Any:
    """``x @ (weight * weight_scale).T + bias`` of x ``[..., k]``: rows of x as 8-bit codes, but for columns in which some ``|x|`` is
    above the threshold, which are multiplied as they are.
    """
    name = "llm_int8_linear"
    _check_tensors(name, x, weight)
    if weight_scale is None:
        raise ValueError(f"{name}: argument 'weight_scale' (position 3) must be Tensor, but got None")
    if len(weight.shape) != 2:
        raise ValueError(f"{name}: the input(weight) must be a 2D Tensor.")
    _check_inputs(name, x, weight)
    _check_weight(name, weight, 8)
    if weight_scale.shape[0] != weight.shape[0]:
        raise ValueError(
            f"{name}: input(weight_scale) dim[0] and input(weight) dim[0] should be equal, but received "
            f"{weight_scale.shape[0]} and {weight.shape[0]}"
        )
    _check_half(name, x)
    if _in_graph(x):

        def again(x: Any, weight: Any, scale: Any, bias: Any = None) -> Any:
            return llm_int8_linear(x, weight, bias, scale, threshold)

        return _node(again, [([*x.shape[:-1], weight.shape[0]], x.dtype)], x, weight, weight_scale, bias)
    x, bf16 = _widened(_detached(x))
    y = _halfbyte._paddle_llm_int8_linear(x, _detached(weight), _detached(weight_scale), _wide(bias), threshold)
    return _narrowed(y, bf16)


def apply_per_channel_scale(x: Any, scales: Any) -> Any:
    """``x * scales`` of x ``[m, n]`` and scales ``[n]``, in the type of x."""
    name = "apply_per_channel_scale"
    _check_tensors(name, x, scales)
    if len(x.shape) != 2:
        raise ValueError(f"{name}: the rank of Input(x) must be 2, but received {len(x.shape)}.")
    if len(scales.shape) != 1:
        raise ValueError(f"{name}: the rank of Input(scales) must be 1, but received {len(scales.shape)}.")
    if x.shape[1] != scales.shape[0]:
        raise ValueError(
            f"{name}: the second dim of Input(x) must be equal to the first dim of scales, but received "
            f"{x.shape[1]} and {scales.shape[0]}."
        )
    _check_half(name, x)
    if _in_graph(x):
        return _node(apply_per_channel_scale, [(x.shape, x.dtype)], x, scales)
    x, bf16 = _widened(_detached(x))
    return _narrowed(_halfbyte._paddle_apply_per_channel_scale(x, _wide(scales)), bf16)


def _check_tensors(name: str, *tensors: Any) -> None:
    for tensor in tensors:
        if not hasattr(tensor, "shape"):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def _arch(x: Any, arch: int | None) -> int:
    if arch is None:
        arch = _arch_of_device(x)
    if arch not in _ARCHS:
        raise ValueError(f"Currently, arch only support {', '.join(map(str, _ARCHS))}, but got {arch}.")
    return int(arch)


def _arch_of_device(x: Any) -> int:
    """That of the GPU that a tensor lies on; on a CPU 80, whose layout all but sm_70 have."""
    paddle, torch = _library(x, "paddle"), _library(x, "torch")
    if paddle is not None and x.place.is_gpu_place():
        major, minor = paddle.device.cuda.get_device_capability(x.place.gpu_device_id())
    elif torch is not None and x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
    else:
        return 80
    return int(major * 10 + minor)


def _library(x: Any, name: str) -> Any:
    """The module of that name, if x is a tensor of its."""
    module = sys.modules.get(name)
    return module if module is not None and isinstance(x, module.Tensor) else None


def _bits(algo: str, known: tuple[str, ...]) -> int:
    if algo not in known:
        raise ValueError(f"The algo must be in {list(known)}, but got[{algo}]")
    return _ALGOS[algo]


def _weight_bits(weight_dtype: Any) -> int:
    if weight_dtype not in ("int8", "int4"):
        raise ValueError(f"weight_only_linear: quant_method must be 'int8' or 'int4', but got {weight_dtype!r}")
    return 8 if weight_dtype == "int8" else 4


def _check_group_size(group_size: int) -> None:
    if group_size not in (-1, 64, 128):
        raise AssertionError(f"Currently group_size only support -1/64/128. but got {group_size} ")


def _check_weight(name: str, weight: Any, bits: int) -> None:
    """Of 4 bits Paddle refuses outputs that are no multiple of 32, though its quantiser takes those of 16; here both are taken."""
    for size, which in ((weight.shape[0] * 8 // bits, "first"), (weight.shape[1], "second")):
        if size % 16 != 0:
            raise ValueError(f"{name}: the {which} dimension of input must be divisible by 16, but got[{size}]")


def _check_layer(name: str, weight: Any, bias: Any, weight_scale: Any, bits: int, group_size: int) -> None:
    if weight_scale is None:
        raise ValueError(f"{name}: argument 'weight_scale' (position 3) must be Tensor, but got None")
    if len(weight.shape) != 2:
        raise ValueError(f"{name}: the input(weight) must be a 2D Tensor.")
    _check_weight(name, weight, bits)
    if bias is not None and len(bias.shape) != 1:
        raise ValueError(f"{name}: the size of Input(Bias)'s dimension should equal to 1.")
    rank, mode = (1, "per-channel") if group_size == -1 else (2, "groupwise")
    if len(weight_scale.shape) != rank:
        raise ValueError(f"{name}: the input(weight_scale) must be a {rank}D Tensor in {mode} mode.")


def _check_inputs(name: str, x: Any, weight: Any) -> None:
    if len(x.shape) == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: input(X) dim[-1] and input(Weight) dim[1] should be equal, but received shapes "
            f"{list(x.shape)} and {list(weight.shape)}"
        )


def _check_half(name: str, x: Any) -> None:
    dtype = str(x.dtype).rsplit(".", 1)[-1]
    if dtype not in ("float16", "bfloat16") and not _is_bf16_bits(x):
        # As Paddle, which has no kernel then.
        raise RuntimeError(f"{name}: expected float16 or bfloat16, got {dtype}")


def _is_bf16_bits(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.uint16


def _widened(x: Any) -> tuple[Any, bool]:
    """float32 of brain floats whose bits numpy holds, and whether it does; else x."""
    if not _is_bf16_bits(x):
        return x, False
    return (x.astype(np.uint32) << 16).view(np.float32), True


def _wide(x: Any) -> Any:
    return None if x is None else _widened(_detached(x))[0]


def _narrowed(x: Any, bf16: bool) -> Any:
    """The bits of the nearest brain floats, halves to even; x as it is, if it is not to be narrowed."""
    if not bf16:
        return x
    bits = x.view(np.uint32)
    nearest = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


def _detached(x: Any) -> Any:
    return x.detach() if _library(x, "paddle") is not None else x


def _in_graph(x: Any) -> bool:
    """Whether x is a value of a static graph of Paddle that is being built."""
    paddle = sys.modules.get("paddle")
    return paddle is not None and isinstance(x, paddle.pir.Value)


def _node(function: Any, metas: list[tuple[Any, Any]], *tensors: Any) -> Any:
    """A call of Python in a static graph, of outputs of these shapes and types."""
    paddle: Any = importlib.import_module("paddle")

    given = [tensor for tensor in tensors if tensor is not None]
    names = ["a", "b", "c", "d"][: len(given)]

    def of_names(call: Any) -> Any:
        # Paddle looks for names of arguments.
        return [lambda a: call(a), lambda a, b: call(a, b), lambda a, b, c: call(a, b, c), lambda a, b, c, d: call(a, b, c, d)][
            len(given) - 1
        ]

    def infer(*_: Any) -> Any:
        outs = [paddle.static.MetaTensor(shape=list(shape), dtype=_dtype(paddle, dtype)) for shape, dtype in metas]
        return outs[0] if len(outs) == 1 else tuple(outs)

    operation = paddle.static.register_op(
        of_names(function),
        name=f"halfbyte_{next(_nodes)}",
        infer_meta=of_names(infer),
        input_names=names,
        output_names=["y", "scale"][: len(metas)],
    )
    return operation(*given)


_nodes = itertools.count()


def _dtype(paddle: Any, dtype: Any) -> Any:
    return getattr(paddle, dtype) if isinstance(dtype, str) else dtype


def _has_paddle_gradient(x: Any) -> bool:
    paddle = _library(x, "paddle")
    return paddle is not None and not x.stop_gradient and paddle.is_grad_enabled()


def _dequantised(weight: Any, scale: Any, bits: int, arch: int, group_size: int) -> Any:
    """``[k, n]``; the layout of sm_70 is one that Paddle's function does not read either."""
    if arch == 70:
        raise ValueError("weight_only_linear: gradients need a weight laid out for sm_75 or later")
    return weight_dequantize(weight, scale, algo=f"weight_only_int{bits}", group_size=group_size)


def _with_gradient(x: Any, multiply: Any, dequantised: Any) -> Any:
    paddle: Any = importlib.import_module("paddle")

    class WeightOnlyLinear(paddle.autograd.PyLayer):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return multiply(x.detach())

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            weight = dequantised().astype("float32")
            return paddle.matmul(dy.astype("float32"), weight, transpose_y=True).astype(dy.dtype)

    return WeightOnlyLinear.apply(x)
