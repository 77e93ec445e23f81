"""Quantised checkpoints in transformers, multiplied by halfbyte's kernels.

    import halfbyte.transformers
    model = AutoModelForCausalLM.from_pretrained(folder, config=halfbyte.transformers.config(folder))

Checkpoints of GPTQ, AWQ and compressed-tensors, and those that halfbyte writes in its own form. A dense model is rounded to nearest
while it is loaded with ``quantization_config=halfbyte.transformers.HalfbyteConfig("w4a16-g128")``.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _halfbyte
from .torch import Linear, replace_linears

__all__ = ["HalfbyteConfig", "HalfbyteQuantizer", "config"]

# How safetensors call the types that tensors of quantised modules have.
_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


@register_quantization_config("halfbyte")
class HalfbyteConfig(QuantizationConfigMixin):
    """What becomes of a model.

    format: what linear layers of a dense model are rounded to. source: ``quantization_config`` of a quantised checkpoint. act: what
    becomes of the activations of its layers: a16 (the default), a32, a8 or a8-xasym; with a format, what that says. skip: modules of a
    dense model that stay.
    """

    def __init__(
        self,
        format: str | None = None,
        *,
        act: str | None = None,
        source: dict[str, Any] | None = None,
        skip: list[str] | None = None,
        **fields: Any,
    ) -> None:
        self.quant_method: Any = "halfbyte"
        # transformers hands on what a config says, this among it.
        fields.pop("quant_method", None)
        if "version" in fields and source is None:
            # A folder of halfbyte's own form, which names this method itself.
            source, format, fields = {"quant_method": "halfbyte", "format": format, **fields}, None, {}
        if fields:
            raise TypeError(f"HalfbyteConfig: expected format, act, source and skip, got {', '.join(fields)}")
        if format is not None and source is not None:
            raise TypeError("HalfbyteConfig: expected a format for a dense model or the source of a quantised one, got both")
        if act not in (None, "a16", "a32", "a8", "a8-xasym"):
            raise ValueError(f"HalfbyteConfig: expected act a16, a32, a8 or a8-xasym, got {act!r}")
        self.format = None if format is None else _halfbyte.parse_format(format)
        self.act = (act or "a16") if self.format is None else _act_of(self.format)
        if act not in (None, self.act):
            raise ValueError(f"HalfbyteConfig: expected act to be what format says, or left out, got {act} with {self.format}")
        self.source = source if source is not None or format is not None else {"quant_method": "halfbyte"}
        if isinstance(skip, (str, bytes)):
            raise TypeError(f"HalfbyteConfig: expected skip to be several names, as [{skip!r}], got a {type(skip).__name__}")
        self.skip = list(skip) if skip is not None else ["lm_head"]


def _act_of(format: str) -> str:
    """What becomes of activations, as a format's name has it."""
    first, *others = format.split("-")
    act = "a" + first.partition("a")[2]
    return f"{act}-xasym" if "xasym" in others else act


def config(folder: Any, *, act: str = "a16", **kwargs: Any) -> Any:
    """The configuration of a quantised checkpoint, for ``from_pretrained(folder, config=...)``."""
    read = AutoConfig.from_pretrained(folder, **kwargs)
    for part in (read, read.get_text_config(decoder=True)):
        source = getattr(part, "quantization_config", None)
        if source is not None:
            source = source if isinstance(source, dict) else source.to_dict()
            part.quantization_config = {"quant_method": "halfbyte", "act": act, "source": source}
            return read
    raise ValueError(f"config: expected a checkpoint with a quantization_config, got none in {folder}")


class _Loading(torch.nn.Module):
    """Where transformers puts the tensors of a quantised layer, before they are packed."""

    def __init__(self, name: str, tensors: dict[str, tuple[str, list[int]]], has_bias: bool, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.name, self.parts = name, list(tensors)
        for part, (dtype, shape) in tensors.items():
            if dtype not in _DTYPES:
                raise ValueError(f"{name}.{part}: expected a type of quantised checkpoints, got {dtype}")
            empty = torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
            self.register_parameter(part, torch.nn.Parameter(empty, requires_grad=False))
        bias = linear.bias if linear.bias is not None else linear.weight.new_empty(linear.out_features)
        self.bias = torch.nn.Parameter(bias.detach(), requires_grad=False) if has_bias else None


@register_quantizer("halfbyte")
class HalfbyteQuantizer(HfQuantizer):
    """Loads the layers of a quantised checkpoint, or rounds those of a dense one."""

    requires_calibration = False
    quantization_config: HalfbyteConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized and self.quantization_config.format is None:
            raise ValueError("HalfbyteConfig: expected a format for a model that is not quantised, as w4a16-g128, got none")

    def get_weight_conversions(self) -> list[Any]:
        # Tensors come as they are stored; halfbyte reads every scheme's own form.
        return []

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            return model
        stored = _stored_tensors(checkpoint_files)
        prefix = f"{model.base_model_prefix}."
        for name, module in list(model.named_modules()):
            if not isinstance(module, torch.nn.Linear):
                continue
            spelled = next(
                (s for s in (name, prefix + name, name.removeprefix(prefix)) if _is_quantized(stored.get(s, {}))), None
            )
            if spelled is None:
                continue
            tensors = {part: said for part, said in stored[spelled].items() if part != "bias"}
            loading = _Loading(spelled, tensors, "bias" in stored[spelled], module)
            model.set_submodule(name, loading)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            options = self.quantization_config
            return replace_linears(model, str(options.format), skip=options.skip)
        said = json.dumps(self.quantization_config.source)
        for name, module in list(model.named_modules()):
            if isinstance(module, _Loading):
                model.set_submodule(name, self._packed(module, said))
        return model

    def _packed(self, loading: _Loading, said: str) -> Linear:
        tensors = {part: getattr(loading, part).detach() for part in loading.parts}
        device = next(iter(tensors.values())).device
        layer = _halfbyte.linear_from_tensors(
            tensors,
            said,
            module=loading.name,
            bias=None if loading.bias is None else loading.bias.detach(),
            act=self.quantization_config.act,
            device=device,
        )
        return Linear(layer).eval()

    def is_serializable(self, **kwargs: Any) -> bool:
        # The packed weights are no tensors of torch: the folder that the model came from stays what can be loaded.
        return False

    @property
    def is_trainable(self) -> bool:
        # Adapters beside constant weights: gradients pass through.
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _stored_tensors(checkpoint_files: Any) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """By module: type and shape of each of its tensors."""
    if not checkpoint_files:
        raise ValueError("halfbyte: expected a checkpoint in files, got a state dict")
    modules: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for file in checkpoint_files:
        checkpoint = _halfbyte.Checkpoint(file)
        for tensor in checkpoint.tensors():
            module, _, part = tensor.rpartition(".")
            modules.setdefault(module, {})[part] = checkpoint.tensor_info(tensor)
    return modules


def _is_quantized(tensors: dict[str, tuple[str, list[int]]]) -> bool:
    """Whether these are codes: of GPTQ and AWQ, of compressed-tensors packed and as bytes, of halfbyte's own form."""
    codes = ("qweight", "weight_packed", "codes")
    return any(part in tensors for part in codes) or tensors.get("weight", ("",))[0] in ("I8", "U8")
