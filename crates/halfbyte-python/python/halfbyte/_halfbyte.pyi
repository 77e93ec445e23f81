from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeVar, final

import numpy
import numpy.typing

_Tensor = TypeVar("_Tensor")
_Path = str | PathLike[str]
_Pair = int | tuple[int, int]
_Padding = int | tuple[int, int] | tuple[int, int, int, int]
_Floats = numpy.typing.NDArray[numpy.float32]
_Activation = Literal["none", "relu", "relu6", "gelu", "gelu_tanh", "silu"]
_Act = Literal["a16", "a32", "a8", "a8-xasym"]
_Layout = Literal["nchw", "nhwc"]
_Symmetric = Literal["narrow", "full"]

__version__: str

@final
class Tensor:
    """Elements in memory of our own, which ``from_dlpack`` of any library takes without a copy."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    def tolist(self) -> list[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class QuantizedTensor:
    """A weight matrix as codes with scales and zero points."""

    def __new__(
        cls, format: str, codes: Any, scales: Any, zeros: Any | None = None, group_index: Sequence[int] | None = None
    ) -> QuantizedTensor: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def input_scales(self) -> _Floats | None: ...
    @property
    def group_index(self) -> list[int] | None: ...
    def folded(self) -> QuantizedTensor: ...
    def codes(self) -> numpy.typing.NDArray[numpy.uint8]: ...
    def scales(self) -> _Floats: ...
    def zeros(self) -> numpy.typing.NDArray[numpy.int32] | _Floats | None: ...
    def dequantize(self) -> _Floats: ...
    def __copy__(self) -> QuantizedTensor: ...
    def __deepcopy__(self, _memo: Any) -> QuantizedTensor: ...

@final
class Hessian:
    """What GPTQ and AWQ need to know of a layer's inputs: the sum of xᵀx over all of them, in float64."""

    def __new__(cls, k: int) -> Hessian: ...
    def add(self, x: Any) -> None: ...
    @property
    def k(self) -> int: ...
    @property
    def rows(self) -> int: ...

def quantize(
    weight: Any,
    format: str,
    *,
    method: Literal["rtn", "gptq", "awq"] = "rtn",
    hessian: Hessian | None = None,
    inputs: Any | None = None,
    search: bool = False,
    symmetric: _Symmetric = "narrow",
    act_order: bool = False,
    static_groups: bool = False,
    damping: float | None = None,  # 0.01
) -> QuantizedTensor:
    """Quantises a weight matrix ``[n, k]``; AWQ's result has ``input_scales``, by which its inputs must be divided."""

@final
class Linear:
    """``y = activation(x · Wᵀ + bias)``, with W packed once for a device."""

    def __new__(
        cls,
        weight: Any,
        bias: Any | None = None,
        format: str | None = None,
        *,
        activation: _Activation | None = None,
        device: Any | None = None,
        search: bool = False,
        symmetric: str = "narrow",
    ) -> Linear: ...
    def __call__(self, x: _Tensor, out: _Tensor | None = None) -> _Tensor: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def format(self) -> str | None: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def bias(self) -> _Floats | None: ...
    @property
    def activation(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def kernel(self, m: int, dtype: str = "float16") -> str: ...
    def bound(self, magnitude: float, m: int = 1, dtype: str = "float16") -> float: ...
    def dequantize(self, start: int = 0, stop: int | None = None) -> Any: ...
    def to(self, device: Any) -> Linear: ...
    def _time(self, x: _Tensor, out: _Tensor, calls: int) -> float: ...
    def __copy__(self) -> Linear: ...
    def __deepcopy__(self, _memo: Any) -> Linear: ...

@final
class Conv2d:
    """``y = activation(x ∗ W + bias)`` of images ``[batch, channels, h, w]``, or ``[batch, h, w, channels]``."""

    def __new__(
        cls,
        weight: Any,
        bias: Any | None = None,
        format: str | None = None,
        *,
        stride: _Pair = ...,  # 1
        padding: _Padding = ...,  # 0
        dilation: _Pair = ...,  # 1
        groups: int = 1,
        activation: _Activation | None = None,
        layout: _Layout = "nchw",
        device: Any | None = None,
        search: bool = False,
        symmetric: _Symmetric = "narrow",
    ) -> Conv2d: ...
    def __call__(self, x: _Tensor, out: _Tensor | None = None) -> _Tensor: ...
    @property
    def format(self) -> str | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def __copy__(self) -> Conv2d: ...
    def __deepcopy__(self, _memo: Any) -> Conv2d: ...

@final
class LinearInt8:
    """``y = activation(x · Wᵀ + bias)`` of bytes: sums are exact, rounded once, to the bit as onnxruntime's QLinearMatMul."""

    def __new__(
        cls,
        weight: Any,
        weight_scale: float | Sequence[float],
        bias: Any | None = None,
        *,
        x_scale: float,
        x_zero: int = 0,
        x_dtype: Literal["uint8", "int8"] = "uint8",
        weight_zero: int | Sequence[int] | None = None,
        y_scale: float | None = None,
        y_zero: int = 0,
        y_dtype: Literal["uint8", "int8", "float32", "float16", "bfloat16"] | None = None,
        activation: _Activation | None = None,
        device: Any | None = None,
    ) -> LinearInt8: ...
    def __call__(self, x: _Tensor, out: _Tensor | None = None) -> _Tensor: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def __copy__(self) -> LinearInt8: ...
    def __deepcopy__(self, _memo: Any) -> LinearInt8: ...

@final
class Conv2dInt8:
    """``y = activation(x ∗ W + bias)`` of bytes: sums are exact, rounded once, to the bit as onnxruntime's QLinearConv."""

    def __new__(
        cls,
        weight: Any,
        weight_scale: float | Sequence[float],
        bias: Any | None = None,
        *,
        x_scale: float,
        x_zero: int = 0,
        x_dtype: Literal["uint8", "int8"] = "uint8",
        weight_zero: int | Sequence[int] | None = None,
        y_scale: float | None = None,
        y_zero: int = 0,
        y_dtype: Literal["uint8", "int8", "float32", "float16", "bfloat16"] | None = None,
        stride: _Pair = ...,  # 1
        padding: _Padding = ...,  # 0
        dilation: _Pair = ...,  # 1
        groups: int = 1,
        activation: _Activation | None = None,
        layout: _Layout = "nchw",
        device: Any | None = None,
    ) -> Conv2dInt8: ...
    def __call__(self, x: _Tensor, out: _Tensor | None = None) -> _Tensor: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def __copy__(self) -> Conv2dInt8: ...
    def __deepcopy__(self, _memo: Any) -> Conv2dInt8: ...

@final
class Checkpoint:
    """The tensors of a model folder or file, and its linear layers by name."""

    def __new__(cls, path: _Path, *, group: int | None = None) -> Checkpoint: ...
    def modules(self) -> list[str]: ...
    def tensors(self) -> list[str]: ...
    def tensor_info(self, name: str) -> tuple[str, list[int]]: ...
    def linear(
        self, name: str, *, act: _Act = "a16", activation: _Activation | None = None, device: Any | None = None
    ) -> Linear: ...
    def quantized(self, name: str, *, act: _Act = "a16") -> QuantizedTensor: ...
    def floats(self, name: str) -> _Floats: ...

def linear_from_tensors(
    tensors: Mapping[str, Any],
    config: str | None = None,
    *,
    module: str = "linear",
    bias: Any | None = None,
    act: str = "a16",
    activation: _Activation | None = None,
    device: Any | None = None,
) -> Linear:
    """A layer whose tensors another loader has read, by the names that they have in files."""

@final
class Generation:
    """A text as it is written. Ends early when it is closed or let go of."""

    def __iter__(self) -> Iterator[str]: ...
    def __next__(self) -> str: ...
    def close(self) -> None: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def finish_reason(self) -> Literal["length", "end", "stop", "context", "cancelled", "error"] | None: ...

@final
class Model:
    """A language model: its weights on a device, its tokenizer."""

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        ignore_end: bool = False,
    ) -> Generation: ...
    def logits(self, prompt: str | Sequence[int]) -> _Floats: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def findings(self) -> list[str]: ...

def load(
    path: _Path,
    *,
    format: str | None = None,
    act: _Act | None = None,
    kv: Literal["f32", "f16", "bf16", "int8"] | None = None,
    device: Any | None = None,
    search: bool = False,
) -> Model:
    """Loads a language model: a folder in Hugging Face's form or a GGUF file."""

def parse_format(format: str) -> str:
    """A format in the spelling that the library gives it."""

def set_num_threads(threads: int | None = None) -> None:
    """Sets how many threads compute on the CPU, quantise and pack; None: as many as the system offers."""

def get_num_threads() -> int:
    """How many threads compute on the CPU."""

def cuda_device_count() -> int:
    """Number of GPUs that this process sees; 0 also where there is no driver."""

def _after_fork() -> None: ...
def _inspect(path: _Path, group: int | None) -> tuple[str, str, list[str], str | None]: ...
def _verify(first: _Path, second: _Path) -> str: ...
def _convert(
    source: _Path,
    output: _Path,
    to: str,
    bits: int | None,
    group: int | None,
    two_level: bool,
    requantize: bool,
    overwrite: bool,
) -> tuple[str, str]: ...
def _quantize_model(
    source: _Path, output: _Path, format: str, to: str, search: bool, symmetric: str, overwrite: bool
) -> tuple[str, str]: ...
def _paddle_weight_quantize(
    x: Any, bits: int, plain: bool, arch: int, group_size: int, bfloat16: bool
) -> tuple[Any, Any]: ...
def _paddle_weight_dequantize(x: Any, scale: Any, bits: int, group_size: int) -> Any: ...
def _paddle_linear(weight: Any, scale: Any, bias: Any, bits: int, arch: int, group_size: int) -> Linear: ...
def _paddle_llm_int8_linear(x: Any, weight: Any, scale: Any, bias: Any, threshold: float) -> Any: ...
def _paddle_apply_per_channel_scale(x: Any, scales: Any) -> Any: ...
