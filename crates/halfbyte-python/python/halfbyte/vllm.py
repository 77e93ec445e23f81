"""A plugin of vLLM: linear layers of GPTQ, AWQ and compressed-tensors by halfbyte's kernels.

Installed with the package (``vllm.general_plugins``); chosen with ``LLM(folder, quantization="halfbyte")`` or
``vllm serve folder --quantization halfbyte``. Written against vLLM 0.32. Experts are left to vLLM, which refuses them. Act-order is
refused, and so is a rank's part that is no whole groups.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

import torch

from . import _halfbyte
from .torch import Linear

__all__ = ["register"]

_METHODS = ("gptq", "awq", "compressed-tensors")

# The tensors of a module: the dimension of inputs, that of outputs, and how many codes of which of them a word packs (0: none).
_PARTS: dict[str, dict[str, tuple[int | None, int | None, str]]] = {
    "gptq": {"qweight": (0, 1, "in"), "qzeros": (0, 1, "out"), "scales": (0, 1, "")},
    "awq": {"qweight": (0, 1, "out"), "qzeros": (0, 1, "out"), "scales": (0, 1, "")},
    "compressed-tensors": {
        "weight_packed": (1, 0, "in"),
        "weight_scale": (1, 0, ""),
        "weight_zero_point": (1, 0, "out"),
        "weight_shape": (None, None, ""),
    },
}

_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}


def register() -> None:
    """Called by vLLM in each of its processes, perhaps several times."""
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    if "halfbyte" in QUANTIZATION_METHODS:
        return

    @register_quantization_config("halfbyte")
    class HalfbyteConfig(QuantizationConfig):  # type: ignore[misc]
        """What a checkpoint says of its quantisation, and what its files hold."""

        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            self.config = config
            self.method = _method_of(config)
            self.stored: dict[str, dict[str, tuple[str, list[int]]]] = {}
            # By vLLM's names of modules: those of the files, which the config knows.
            self.names: dict[str, str] = {}
            if self.method == "gptq":
                _refuse_act_order(config)

        def get_name(self) -> str:
            return "halfbyte"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 75

        @staticmethod
        def get_config_filenames() -> list[str]:
            return ["quantize_config.json", "quant_config.json"]

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> HalfbyteConfig:
            return cls(config)

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
        ) -> str | None:
            # Only where the user says so: without that vLLM's own methods serve.
            return "halfbyte" if user_quant == "halfbyte" and _method_of(hf_quant_cfg, False) else None

        def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
            from vllm.transformers_utils.config import get_safetensors_params_metadata

            for name, said in get_safetensors_params_metadata(model_name, revision=revision).items():
                module, _, part = name.rpartition(".")
                if "dtype" not in said:
                    continue  # What a file says of itself.
                self.stored.setdefault(module, {})[part] = (said["dtype"], list(said["shape"]))

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            renamed = {new: old for old in self.stored for new in hf_to_vllm_mapper.apply_list([old])}
            self.stored = {new: self.stored[old] for new, old in renamed.items()}
            self.names = {new: self.names.get(old, old) for new, old in renamed.items()}

        def shards(self, prefix: str) -> list[str]:
            """The modules of the checkpoint that vLLM makes one layer of."""
            head, _, last = prefix.rpartition(".")
            parts = self.packed_modules_mapping.get(last, [last])
            return [f"{head}.{part}" if head else part for part in parts]

        def names_of(self, prefix: str) -> list[str]:
            """The same by the names of the files."""
            return [self.names.get(name, name) for name in self.shards(prefix)]

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None
            quantized = [_codes_of(self.method) in self.stored.get(name, {}) for name in self.shards(prefix)]
            if not any(quantized):
                return UnquantizedLinearMethod()
            if not all(quantized):
                raise ValueError(f"halfbyte: expected all parts of {prefix} to be quantised, or none, got some")
            return HalfbyteLinearMethod(self, prefix)

    @register_weight_loader_v2_supported_method
    class HalfbyteLinearMethod(LinearMethodBase):  # type: ignore[misc]
        """Makes room for a layer's tensors as files hold them, packs them, multiplies."""

        def __init__(self, config: HalfbyteConfig, prefix: str) -> None:
            self.config, self.prefix = config, prefix
            self.sizes = (0, 0, 0)
            self.columns = 0

        def create_weights(
            self,
            layer: torch.nn.Module,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            shards = [self.config.stored[name] for name in self.config.shards(self.prefix)]
            sizes = (input_size, input_size_per_partition, sum(output_partition_sizes))
            compressed = self.config.method == "compressed-tensors"
            groups = shards[0]["weight_scale"][1][1] if compressed else shards[0]["scales"][1][0]
            self.columns = _columns(self.prefix, self.config.config, self.config.names_of(self.prefix), (input_size, groups))
            if groups > 1 and input_size != input_size_per_partition and input_size_per_partition % self.columns:
                raise ValueError(
                    f"halfbyte: {self.prefix}: expected a rank's part in whole groups of {self.columns}, got {input_size_per_partition} inputs"
                )
            loader = attributes["weight_loader"]
            for part, parameter in _parameters(self.prefix, self.config.method, shards, sizes, loader).items():
                layer.register_parameter(part, parameter)
            self.sizes = sizes

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            _, inputs, outputs = self.sizes
            tensors = {part: getattr(layer, part).data for part in _PARTS[self.config.method] if hasattr(layer, part)}
            device = tensors[_codes_of(self.config.method)].device
            if "weight_shape" in tensors:
                tensors["weight_shape"] = torch.tensor([outputs, inputs], dtype=torch.int64)
            if self.config.method == "gptq":
                # Of columns in their order, which is what is left where act-order is refused.
                tensors["g_idx"] = torch.arange(inputs, dtype=torch.int32) // self.columns
            packed = _halfbyte.linear_from_tensors(
                tensors, json.dumps(self.config.config), module=self.config.names_of(self.prefix)[0], device=device
            )
            for part in _PARTS[self.config.method].keys() & tensors.keys():
                delattr(layer, part)
            layer.halfbyte = Linear(packed)

        def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            packed: Any = layer.halfbyte
            y: torch.Tensor = packed(x)
            return y if bias is None else y + bias


def _method_of(config: dict[str, Any], must: bool = True) -> str:
    method = str(config.get("quant_method", "")).lower()
    if method not in _METHODS:
        if must:
            raise ValueError(f"halfbyte: expected a checkpoint of {', '.join(_METHODS)}, got {method!r}")
        return ""
    return method


def _refuse_act_order(config: dict[str, Any]) -> None:
    """ValueError: a GPTQ config, or a rule in it for some modules, with act-order. One group of all columns has no order."""
    for rule, own in [("", {}), *_rules(config)]:
        fields = config | own
        name = next((name for name in ("desc_act", "act_order") if fields.get(name)), None)
        if name is not None and _group_size(own, _group_size(config)) != -1:
            where = f" for the modules {rule!r}" if rule else ""
            raise ValueError(f"halfbyte: expected GPTQ without act-order in vLLM, got {name}{where}")


def _rules(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What a GPTQ config has for some modules of their own: expressions for their names, the first that matches being the one that counts."""
    return [(rule, own if isinstance(own, dict) else {}) for rule, own in (config.get("dynamic") or {}).items()]


def _group_size(fields: dict[str, Any], default: Any = None) -> Any:
    return next((fields[name] for name in ("group_size", "q_group_size") if fields.get(name) is not None), default)


def _columns(prefix: str, config: dict[str, Any], names: list[str], shape: tuple[int, int]) -> int:
    """Columns that share a scale, in all modules of a layer of so many inputs and groups. ValueError: it cannot be known."""
    inputs, groups = shape
    if groups == 1:
        return inputs
    if _method_of(config) != "gptq":
        # Of these the last group is as long as the others.
        if inputs % groups:
            raise ValueError(f"halfbyte: {prefix}: expected groups of one length, got {groups} of {inputs} inputs")
        return inputs // groups
    sizes = {_group_size(_rule_of(config, name), _group_size(config)) for name in names}
    size = sizes.pop()
    if sizes:
        raise ValueError(f"halfbyte: {prefix}: expected parts with one group size to be one layer, got {sorted({size, *sizes}, key=str)}")
    if not isinstance(size, int) or size < 1 or -(-inputs // size) != groups:
        raise ValueError(f"halfbyte: {prefix}: expected scales for the config's group size, {size}, of {inputs} inputs, got {groups} groups")
    return size


def _rule_of(config: dict[str, Any], module: str) -> dict[str, Any]:
    """What a GPTQ config has for a module of its own."""
    for rule, own in _rules(config):
        if re.match(rule.removeprefix("+:").removeprefix("-:"), module):
            return own
    return {}


def _codes_of(method: str) -> str:
    return "weight_packed" if method == "compressed-tensors" else "qweight"


def _parameters(
    prefix: str,
    method: str,
    shards: list[dict[str, tuple[str, list[int]]]],
    sizes: tuple[int, int, int],
    loader: Any,
) -> dict[str, torch.nn.Parameter]:
    """A parameter for each tensor of a layer, of the type that files have, with the sizes of this rank's part."""
    from vllm.model_executor.parameter import (
        BasevLLMParameter,
        ChannelQuantScaleParameter,
        GroupQuantScaleParameter,
        PackedColumnParameter,
        PackedvLLMParameter,
    )

    inputs, inputs_here, outputs_here = sizes
    parameters: dict[str, torch.nn.Parameter] = {}
    for part, (input_dim, output_dim, packs) in _PARTS[method].items():
        stored = [shard.get(part) for shard in shards]
        if all(said is None for said in stored):
            continue
        first = stored[0]
        if first is None or any(said is None or said[0] != first[0] for said in stored):
            raise ValueError(f"halfbyte: {prefix}.{part}: expected parts of one type to be one layer, got several")
        dtype, shape = _TYPES[first[0]], list(first[1])
        if input_dim is None or output_dim is None:
            parameters[part] = BasevLLMParameter(data=torch.empty(shape, dtype=dtype), weight_loader=loader)
            continue
        scales = shards[0]["weight_scale" if method == "compressed-tensors" else "scales"][1]
        outputs = scales[0 if method == "compressed-tensors" else 1]
        # Codes a word: 32/3 of 3 bits.
        factor = Fraction(outputs if packs == "out" else inputs, shape[output_dim if packs == "out" else input_dim])
        # One group for all inputs is every rank's.
        whole = shape[input_dim] == 1 and inputs != inputs_here
        if not whole:
            shape[input_dim] = _share(prefix, part, shape[input_dim], inputs_here, inputs)
        shape[output_dim] = _share(prefix, part, shape[output_dim], outputs_here, outputs)
        data = torch.empty(shape, dtype=dtype)
        options: dict[str, Any] = {"data": data, "weight_loader": loader, "output_dim": output_dim}
        if packs:
            options |= {"packed_factor": factor, "packed_dim": input_dim if packs == "in" else output_dim}
        if whole:
            kind = PackedColumnParameter if packs else ChannelQuantScaleParameter
        else:
            options["input_dim"] = input_dim
            kind = PackedvLLMParameter if packs else GroupQuantScaleParameter
        parameters[part] = kind(**options)
    return parameters


def _share(prefix: str, part: str, size: int, here: int, of: int) -> int:
    """A rank's part of a dimension. ValueError: it is not whole words, or groups."""
    if size * here % of:
        raise ValueError(f"halfbyte: {prefix}.{part}: expected a rank's part in whole words and groups, got {size} · {here}/{of}")
    return size * here // of
