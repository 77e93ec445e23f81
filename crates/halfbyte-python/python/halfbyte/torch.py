"""Layers as torch modules, and products as operators that torch.compile and torch.export trace through."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.utils.dlpack

from . import _halfbyte

__all__ = ["Linear", "replace_linears"]

# Operators take numbers, not layers: each layer has one as long as it lives.
_layers: weakref.WeakValueDictionary[int, _halfbyte.Linear] = weakref.WeakValueDictionary()
_handles = itertools.count(1)

# Rows of W that a gradient takes at a time, so that little of it is in memory as floats.
_ROWS = 4096


def _layer(handle: int) -> _halfbyte.Linear:
    layer = _layers.get(handle)
    if layer is None:
        raise RuntimeError(
            f"halfbyte::linear: expected a layer that lives in this process, got number {handle}; an exported program needs "
            "the module that it was exported from"
        )
    return layer


@torch.library.custom_op("halfbyte::linear", mutates_args=())
def _linear(x: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    return _layer(handle)(x.detach())


def _weights(layer: _halfbyte.Linear, in_features: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """W as floats, some rows at a time."""
    for start in range(0, layer.out_features, _ROWS):
        stop = min(start + _ROWS, layer.out_features)
        yield slice(start, stop), torch.utils.dlpack.from_dlpack(layer.dequantize(start, stop))[:, :in_features]


@torch.library.custom_op("halfbyte::linear_backward", mutates_args=())
def _linear_backward(grad: torch.Tensor, handle: int, in_features: int) -> torch.Tensor:
    rows = grad.detach().reshape(-1, grad.shape[-1]).float()
    total = rows.new_zeros((rows.shape[0], in_features))
    for part, weight in _weights(_layer(handle), in_features):
        total += rows[:, part] @ weight
    return total.to(grad.dtype).reshape(*grad.shape[:-1], in_features)


@torch.library.custom_op("halfbyte::linear_tangent", mutates_args=())
def _linear_tangent(tangent: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    rows = tangent.detach().reshape(-1, tangent.shape[-1]).float()
    total = rows.new_empty((rows.shape[0], out_features))
    for part, weight in _weights(_layer(handle), rows.shape[1]):
        total[:, part] = rows @ weight.T
    return total.to(tangent.dtype).reshape(*tangent.shape[:-1], out_features)


def _register(operator: Any, backward: Callable[..., torch.Tensor]) -> None:
    """What an operator of rows needs: shapes, gradients, and all rows at once under vmap."""

    def fake(x: torch.Tensor, handle: int, size: int) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], size))

    def vmap(info: Any, in_dims: tuple[int | None, None, None], x: torch.Tensor, handle: int, size: int) -> tuple[torch.Tensor, int]:
        rows = x if in_dims[0] is None else x.movedim(in_dims[0], 0)
        y: torch.Tensor = operator(rows, handle, size)
        return (y.expand(info.batch_size, *y.shape) if in_dims[0] is None else y), 0

    operator.register_fake(fake)
    operator.register_vmap(vmap)
    operator.register_autograd(_gradient(backward), setup_context=_setup_context)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, int, int], output: torch.Tensor) -> None:
    x, handle, size = inputs
    # The layer lives as long as its gradient may be asked for.
    ctx.layer, ctx.handle, ctx.sizes = _layers.get(handle), handle, (x.shape[-1], size)


def _gradient(backward: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda ctx, grad: (backward(grad, ctx.handle, ctx.sizes[0]), None, None)


def _tangent(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda ctx, tangent, *_: forward(tangent, ctx.handle, ctx.sizes[1])


_register(_linear, lambda *inputs: _linear_backward(*inputs))
_register(_linear_backward, lambda *inputs: _linear_tangent(*inputs))
_register(_linear_tangent, lambda *inputs: _linear_backward(*inputs))


# The same for transformations of torch.func, which take no operator with gradients of its own, and for tangents.
class _Rows(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = staticmethod(_setup_context)


class _Product(_Rows):
    forward = staticmethod(lambda *inputs: _linear(*inputs))
    backward = staticmethod(_gradient(lambda *inputs: _Transposed.apply(*inputs)))
    jvp = staticmethod(_tangent(lambda *inputs: _Straight.apply(*inputs)))


class _Transposed(_Rows):
    forward = staticmethod(lambda *inputs: _linear_backward(*inputs))
    backward = staticmethod(_gradient(lambda *inputs: _Straight.apply(*inputs)))
    jvp = staticmethod(_tangent(lambda *inputs: _Transposed.apply(*inputs)))


class _Straight(_Rows):
    forward = staticmethod(lambda *inputs: _linear_tangent(*inputs))
    backward = staticmethod(_gradient(lambda *inputs: _Transposed.apply(*inputs)))
    jvp = staticmethod(_tangent(lambda *inputs: _Straight.apply(*inputs)))


def _is_transformed() -> bool:
    """Whether torch.func, or forward mode, is to see a product. A compiler takes the operator."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
    )


def _is_watched(x: torch.Tensor) -> bool:
    """Whether anything but a kernel is to see a product: a gradient, a compiler, a mode, a transformation, a subclass."""
    return (
        type(x) is not torch.Tensor
        or (x.requires_grad and torch.is_grad_enabled())
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or _is_transformed()
        or torch._C._get_tracing_state() is not None
    )


def _numbered(device: Any) -> Any:
    """A device with its number: of "cuda", which has none, that of torch's current one."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


class Linear(torch.nn.Module):
    """A :class:`halfbyte.Linear` as a module: constant weights, gradients with respect to x.

    The packed weight is no parameter: it is neither in ``state_dict()`` nor changed by ``half()``. ``to(device)`` packs it for
    another device, from a CPU.
    """

    def __init__(self, layer: _halfbyte.Linear) -> None:
        super().__init__()
        if layer.activation != "none":
            raise ValueError(f"Linear: expected a layer without activation function, got one with {layer.activation}")
        self._set(layer)

    def _set(self, layer: _halfbyte.Linear) -> None:
        self.layer = layer
        self.handle = next(_handles)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        _layers[self.handle] = layer

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, format: str, *, device: Any = None, search: bool = False, symmetric: str = "narrow"
    ) -> Linear:
        """The layer with its weight rounded to nearest."""
        weight, bias = linear.weight.detach(), linear.bias
        return cls(
            _halfbyte.Linear(
                weight,
                None if bias is None else bias.detach(),
                format,
                device=weight.device if device is None else _numbered(device),
                search=search,
                symmetric=symmetric,
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _is_watched(x):
            return self.layer(x.detach() if x.requires_grad else x)
        product = _Product.apply if _is_transformed() else torch.ops.halfbyte.linear
        y: torch.Tensor = product(x, self.handle, self.out_features)
        return y

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = _numbered(fn(torch.empty(0, device=self.layer.device)).device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"Linear.to: expected cpu or cuda, got {device}")
        if str(device) != self.layer.device:
            self._set(self.layer.to(device))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Linear:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        # A number of its own, for the same packed weight.
        twin._set(self.layer)
        return twin

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.layer.has_bias}, "
            f"format={self.layer.format}, device={self.layer.device}"
        )


def replace_linears(
    model: torch.nn.Module,
    format: str,
    *,
    skip: Collection[str] = ("lm_head",),
    device: Any = None,
    search: bool = False,
    symmetric: str = "narrow",
) -> torch.nn.Module:
    """Replaces each ``torch.nn.Linear`` of a model in memory by a :class:`Linear` of this format; returns the model.

    ``skip`` names modules that stay, by their full name or its last part. A layer that stands in several places is replaced in each of
    them by the same one, unless it is to stay in one. On an error the model is as it was.
    """
    if isinstance(skip, (str, bytes)):
        raise TypeError(f"replace_linears: expected skip to be several names, as [{skip!r}], got a {type(skip).__name__}")
    if type(model) is torch.nn.Linear:
        raise ValueError("replace_linears: expected a model with layers in it, got a Linear itself: Linear.from_linear makes one of it")
    places = []
    for name, module in model.named_modules():
        for child_name, child in module._modules.items():
            if type(child) is torch.nn.Linear:
                places.append((module, child_name, f"{name}.{child_name}" if name else child_name, child))
    # By identity: the same layer may have several names. A skipped one stays in all its places, or its weights would be there twice.
    stays = {id(child) for _, child_name, full_name, child in places if child_name in skip or full_name in skip}
    replacements: dict[int, Linear] = {}
    for _, _, full_name, child in places:
        if id(child) in stays or id(child) in replacements:
            continue
        try:
            replacement = Linear.from_linear(child, format, device=device, search=search, symmetric=symmetric)
        except (ValueError, MemoryError, RuntimeError) as error:
            raise type(error)(f"replace_linears: {full_name}: {error}") from None
        replacements[id(child)] = replacement.train(child.training)
    for module, child_name, _, child in places:
        if id(child) in replacements:
            setattr(module, child_name, replacements[id(child)])
    return model
