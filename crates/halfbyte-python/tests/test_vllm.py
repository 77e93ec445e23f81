"""The plugin of vLLM against stand-ins for the part of vLLM 0.32 that it touches, written from its sources: vLLM itself is not run.

A stand-in loads what vLLM's own loaders would: shards of outputs behind each other, a rank's part of inputs or outputs.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import STDLIB, random

import halfbyte

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import halfbyte.vllm as plugin  # noqa: E402


class Parameter(torch.nn.Parameter):
    """As vLLM's: data and how it is cut."""

    def __new__(cls, data: Any, **options: Any) -> Any:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Any, weight_loader: Any, **options: Any) -> None:
        self.options = options


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the plugin registers, with the modules of vLLM that it imports."""
    classes: dict[str, Any] = {}

    class Config:
        def __init__(self) -> None:
            self.packed_modules_mapping: dict[str, list[str]] = {}

    class Unquantized:
        pass

    def register(name: str) -> Any:
        def keep(cls: Any) -> Any:
            classes[name] = cls
            return cls

        return keep

    contents: dict[str, dict[str, Any]] = {
        "vllm.model_executor.layers.linear": {
            "LinearBase": torch.nn.Module,
            "LinearMethodBase": object,
            "UnquantizedLinearMethod": Unquantized,
            "register_weight_loader_v2_supported_method": lambda cls: cls,
        },
        "vllm.model_executor.layers.quantization": {"QUANTIZATION_METHODS": [], "register_quantization_config": register},
        "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": Config},
        "vllm.model_executor.parameter": {
            name: type(name, (Parameter,), {})
            for name in (
                "BasevLLMParameter",
                "ChannelQuantScaleParameter",
                "GroupQuantScaleParameter",
                "PackedColumnParameter",
                "PackedvLLMParameter",
            )
        },
        "vllm.transformers_utils.config": {"get_safetensors_params_metadata": metadata},
    }
    for name, members in contents.items():
        for depth in range(1, name.count(".") + 2):
            package = ".".join(name.split(".")[:depth])
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or types.ModuleType(package))
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    plugin.register()
    classes["unquantized"] = Unquantized
    yield classes


def metadata(folder: str, revision: str | None = None) -> dict[str, Any]:
    """As vLLM reads it from the headers of a folder's files."""
    checkpoint = halfbyte.Checkpoint(folder)
    info = {name: checkpoint.tensor_info(name) for name in checkpoint.tensors()}
    return {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in info.items()}


def loaded(config: Any, folder: Path, prefix: str, sizes: tuple[int, int, list[int], int], rank: int = 0) -> Any:
    """A layer of these sizes as vLLM makes it: inputs of this rank and in all, outputs of this rank, outputs in all."""
    inputs_here, inputs, outputs_here, outputs = sizes
    layer = torch.nn.Module()
    method = config.get_quant_method(layer, prefix)
    method.create_weights(layer, inputs_here, outputs_here, inputs, outputs, torch.bfloat16, weight_loader=None)
    tensors = safetensors.load_file(folder / "model.safetensors")
    for part, parameter in layer.named_parameters():
        shards = [tensors[f"{name}.{part}"] for name in config.shards(prefix)]
        if "output_dim" not in parameter.options:
            parameter.data.copy_(shards[0])
            continue
        input_dim, output_dim = parameter.options.get("input_dim"), parameter.options["output_dim"]
        if input_dim is not None:
            here = parameter.shape[input_dim]
            shards = [shard.narrow(input_dim, rank * here, here) if shard.shape[input_dim] != here else shard for shard in shards]
        whole = torch.cat(shards, output_dim)
        here = parameter.shape[output_dim]
        if whole.shape[output_dim] != here:
            whole = whole.narrow(output_dim, rank * here, here)
        assert parameter.dtype == whole.dtype and parameter.shape == whole.shape, (part, parameter.shape, whole.shape)
        if "packed_factor" in parameter.options:
            packed = parameter.options["packed_dim"]
            bits = Fraction(32) / parameter.options["packed_factor"]
            assert packed in (input_dim, output_dim) and bits.denominator == 1 and bits in (2, 3, 4, 8)
        parameter.data.copy_(whole)
    method.process_weights_after_loading(layer)
    assert not list(layer.parameters())
    return lambda x, bias=None: method.apply(layer, x, bias)


def configured(registered: dict[str, Any], folder: Path) -> Any:
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = registered["halfbyte"].from_config(said)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    config.maybe_update_config(str(folder))
    return config


def test_layers_of_a_rank_and_fused_ones(registered: dict[str, Any], quantized_llama: Path) -> None:
    if quantized_llama.name == "native":
        pytest.skip("vLLM does not know halfbyte's own form")
    config, checkpoint = configured(registered, quantized_llama), halfbyte.Checkpoint(quantized_llama)
    block = "model.layers.0"
    weights = {name: checkpoint.quantized(f"{block}.{name}").dequantize() for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    )}
    x = torch.from_numpy(random((5, 64), 1))
    fused = loaded(config, quantized_llama, f"{block}.self_attn.qkv_proj", (64, 64, [64, 32, 32], 128))
    expected = x.numpy() @ np.concatenate([weights[f"self_attn.{part}_proj"] for part in "qkv"]).T
    assert np.allclose(fused(x).numpy(), expected, rtol=1e-4, atol=1e-4)
    bias = torch.ones(128)
    assert torch.equal(fused(x, bias), fused(x) + bias)
    # Two ranks: outputs of gate and up cut, inputs of down cut; their sum is the whole.
    wide = torch.from_numpy(random((3, 128), 2))
    expected = wide.numpy() @ weights["mlp.down_proj"].T
    per_channel = quantized_llama.name == "compressed-tensors-8"
    halves = [loaded(config, quantized_llama, f"{block}.mlp.down_proj", (64, 128, [64], 64), rank) for rank in (0, 1)]
    total = sum(half(wide[:, 64 * rank : 64 * rank + 64].contiguous()) for rank, half in enumerate(halves))
    assert np.allclose(total.numpy(), expected, rtol=1e-4, atol=1e-4), per_channel
    o = loaded(config, quantized_llama, f"{block}.self_attn.o_proj", (64, 64, [32], 64), 1)
    assert np.allclose(o(x).numpy(), (x.numpy() @ weights["self_attn.o_proj"].T)[:, 32:], rtol=1e-4, atol=1e-4)


def test_what_is_chosen_and_what_is_refused(registered: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    cls = registered["halfbyte"]
    assert cls.override_quantization_method({"quant_method": "gptq"}, "halfbyte") == "halfbyte"
    assert cls.override_quantization_method({"quant_method": "gptq"}, None) is None
    assert cls.override_quantization_method({"quant_method": "fp8"}, "halfbyte") is None
    with pytest.raises(ValueError, match="expected a checkpoint of gptq"):
        cls.from_config({"quant_method": "fp8"})
    for said, words in (
        ({"desc_act": True}, "got desc_act$"),
        ({"act_order": True}, "got act_order$"),
        ({"dynamic": {"+:.*down_proj": {"desc_act": True}}}, "got desc_act for the modules '\\+:.*down_proj'"),
        ({"dynamic": {".*down_proj": {"act_order": True}}}, "got act_order for the modules '.*down_proj'"),
        ({"desc_act": True, "group_size": -1, "dynamic": {"o_proj": {"group_size": 64}}}, "got desc_act for the modules 'o_proj'"),
    ):
        with pytest.raises(ValueError, match=f"without act-order in vLLM, {words}"):
            cls.from_config({"quant_method": "gptq", "group_size": 32} | said)
    # One group of all columns has no order.
    cls.from_config({"quant_method": "gptq", "desc_act": True, "group_size": -1})
    cls.from_config({"quant_method": "gptq", "group_size": 32, "dynamic": {"-:lm_head": {}, "a": {"desc_act": True, "group_size": -1}}})
    halfbyte.quantize_model(llama, tmp_path / "q", "w4a16-g32")
    config = configured(registered, tmp_path / "q")
    assert isinstance(config.get_quant_method(torch.nn.Module(), "lm_head"), registered["unquantized"])
    del config.stored["model.layers.0.self_attn.k_proj"]
    with pytest.raises(ValueError, match="all parts of .* to be quantised"):
        config.get_quant_method(torch.nn.Module(), "model.layers.0.self_attn.qkv_proj")


def test_a_last_group_that_is_not_whole(registered: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """384 inputs in groups of 256: 256 and 128, not twice 192."""
    halfbyte.quantize_model(STDLIB, tmp_path / "q", "w4a16-g256")
    config, checkpoint = configured(registered, tmp_path / "q"), halfbyte.Checkpoint(tmp_path / "q")
    name, sizes, eye = "model.layers.0.self_attn.o_proj", (384, 384, [384], 384), torch.eye(384)
    weight = checkpoint.quantized(name).dequantize()
    assert np.array_equal(loaded(config, tmp_path / "q", name, sizes)(eye).numpy().T, weight)
    with pytest.raises(ValueError, match=f"{name}: expected a rank's part in whole groups of 256, got 192 inputs"):
        loaded(config, tmp_path / "q", name, (192, 384, [384], 384))
    # Of a rule of its own, by the names of the files: 192 columns, which the shapes fit as well.
    config.config["dynamic"] = {"+:model.layers.0.self_attn.[ko]_proj": {"group_size": 192}}
    parts = {part: tensor for part, tensor in safetensors.load_file(tmp_path / "q" / "model.safetensors").items()}
    parts = {part.removeprefix(f"{name}."): tensor for part, tensor in parts.items() if part.startswith(f"{name}.")}
    said = json.dumps(config.config | {"group_size": 192, "dynamic": {}})
    parts["g_idx"] = torch.arange(384, dtype=torch.int32) // 192
    twice = halfbyte.linear_from_tensors(parts, said).dequantize()
    assert not np.array_equal(twice, weight)
    assert np.array_equal(loaded(config, tmp_path / "q", name, sizes)(eye).numpy().T, twice)
    with pytest.raises(ValueError, match=r"qkv_proj: expected parts with one group size to be one layer, got \[192, 256\]"):
        loaded(config, tmp_path / "q", "model.layers.0.self_attn.qkv_proj", (384, 384, [384, 384, 384], 1152))
    config.config["dynamic"]["+:model.layers.0.self_attn.[ko]_proj"]["group_size"] = 128
    with pytest.raises(ValueError, match="expected scales for the config's group size, 128, of 384 inputs, got 2 groups"):
        loaded(config, tmp_path / "q", name, sizes)
    assert not [str(warning.message) for warning in recwarn if "halfbyte" in str(warning.filename) or name in str(warning.message)]


def test_rules_of_a_config_are_for_names_of_files(registered: dict[str, Any], tmp_path: Path) -> None:
    halfbyte.quantize_model(STDLIB, tmp_path / "q", "w4a16-g256")
    config = configured(registered, tmp_path / "q")
    config.config["dynamic"] = {"model.layers.0.self_attn.o_proj": {"group_size": 192}}
    for old, new in (("model.", "decoder."), ("decoder.", "language.")):
        mapper = types.SimpleNamespace(apply_list=lambda names, old=old, new=new: [name.replace(old, new, 1) for name in names])
        config.apply_vllm_mapper(mapper)
    assert config.names_of("language.layers.0.self_attn.qkv_proj")[2] == "model.layers.0.self_attn.v_proj"
    method = config.get_quant_method(torch.nn.Module(), "language.layers.0.self_attn.o_proj")
    method.create_weights(torch.nn.Module(), 384, [384], 384, 384, torch.float32, weight_loader=None)
    assert method.columns == 192


def test_the_package_names_the_plugin() -> None:
    """`pip install` registers it; a folder on the path does not."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        points = distribution("halfbyte").entry_points
    except PackageNotFoundError:
        pytest.skip("the package is not installed, only on the path")
    assert [(p.name, p.value) for p in points if p.group == "vllm.general_plugins"] == [("halfbyte", "halfbyte.vllm:register")]
