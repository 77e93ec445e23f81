"""A tiny Llama: linears replaced in memory, and the same weights through the quantiser from every form of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import halfbyte.torch as ht  # noqa: E402
import halfbyte.transformers as hft  # noqa: E402

IDS = torch.tensor([[3, 14, 15, 92, 6, 5, 35, 89], [1, 2, 3, 4, 5, 6, 7, 8]])


def layers(model: Any) -> dict[str, ht.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ht.Linear)}


def dense_twin(folder: Path, llama: Path) -> Any:
    """The model of transformers with the weights that the codes stand for, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    checkpoint = halfbyte.Checkpoint(folder)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = torch.from_numpy(checkpoint.quantized(name).dequantize())
    return model


def assert_near(logits: Any, expected: Any) -> None:
    # Two layers of products with bounds of some 30 roundings of f32 each, in a stream of numbers around 1.
    assert torch.allclose(logits, expected, rtol=1e-4, atol=2e-5), (logits - expected).abs().max()


def test_logits_from_files_of_every_form(quantized_llama: Path, llama: Path) -> None:
    config = hft.config(quantized_llama)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        quantized_llama, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert len(layers(model)) == 14 and type(model.lm_head) is torch.nn.Linear
    with torch.no_grad():
        logits, expected = model(IDS).logits, dense_twin(quantized_llama, llama)(IDS).logits
    assert_near(logits, expected)
    # The numbers of one layer, exactly.
    name = "model.layers.1.mlp.down_proj"
    assert np.array_equal(layers(model)[name].layer.dequantize(), halfbyte.Checkpoint(quantized_llama).quantized(name).dequantize())


def test_linears_replaced_in_memory_are_those_of_the_files(llama: Path, tmp_path: Path) -> None:
    halfbyte.quantize_model(llama, tmp_path / "q", "w4a16-g32", to="gptq")
    replaced = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ht.replace_linears(replaced, "w4a16-g32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", config=hft.config(tmp_path / "q"), dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(replaced(IDS).logits, loaded(IDS).logits)
    # And those of our own program that runs the folder.
    with torch.no_grad():
        written = loaded.generate(IDS[:1], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert written.shape == (1, 16)


def test_a_dense_model_is_rounded_while_it_is_loaded(llama: Path) -> None:
    config = hft.HalfbyteConfig("w4a16-g32")
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, quantization_config=config, dtype=torch.float32)
    replaced = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ht.replace_linears(replaced, "w4a16-g32")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, replaced(IDS).logits)
    with pytest.raises(ValueError, match="expected a format"):
        transformers.AutoModelForCausalLM.from_pretrained(llama, quantization_config=hft.HalfbyteConfig())


def test_half_types_and_quantised_activations(llama: Path, tmp_path: Path) -> None:
    halfbyte.quantize_model(llama, tmp_path / "q", "w8a16-g32", to="compressed-tensors")
    expected = dense_twin(tmp_path / "q", llama)
    with torch.no_grad():
        reference = expected(IDS).logits
        for dtype, act, atol in ((torch.bfloat16, "a16", 0.05), (torch.float32, "a8", 0.05)):
            config = hft.config(tmp_path / "q", act=act)
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", config=config, dtype=dtype)
            assert layers(model)["model.layers.0.mlp.up_proj"].layer.format == ("w8a8-g32" if act == "a8" else "w8a16-g32")
            assert torch.allclose(model(IDS).logits.float(), reference, atol=atol)


def test_gradients_pass_through_a_loaded_model(llama: Path, tmp_path: Path) -> None:
    halfbyte.quantize_model(llama, tmp_path / "q", "w4a16-g32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", config=hft.config(tmp_path / "q"), dtype=torch.float32)
    twin = dense_twin(tmp_path / "q", llama)
    grads = []
    for of in (model, twin):
        embedded = of.get_input_embeddings()(IDS).detach().requires_grad_()
        of(inputs_embeds=embedded, labels=IDS).loss.backward()
        grads.append(embedded.grad)
    assert torch.allclose(*grads, rtol=1e-3, atol=1e-6)


def test_a_config_says_itself_again(llama: Path, tmp_path: Path) -> None:
    """As transformers does: by its dict, with the name of the method in it; and that of a folder of halfbyte's own form."""
    for format, act in (("w4a16-g128", "a16"), ("w4a8-g128", "a8"), ("w8a8-xasym", "a8-xasym"), ("w4a32-g32-sf32", "a32")):
        config = hft.HalfbyteConfig(format, act=act, skip=["score"])
        assert config.act == act == hft.HalfbyteConfig(format).act
        assert hft.HalfbyteConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    halfbyte.quantize_model(llama, tmp_path / "q", "w4a16-g32-float", to="native")
    straight, wrapped = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32, **options)
        for options in ({}, {"config": hft.config(tmp_path / "q")})
    )
    assert len(layers(straight)) == 14
    with torch.no_grad():
        assert torch.equal(straight(IDS).logits, wrapped(IDS).logits)


def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a checkpoint with a quantization_config"):
        hft.config(llama)
    with pytest.raises(ValueError, match="expected act"):
        hft.HalfbyteConfig(act="a4")
    for options, names in (({"skp": ["score"], "fromat": "w8a16"}, "skp, fromat"), ({"bits": 4}, "bits")):
        with pytest.raises(TypeError, match=f"HalfbyteConfig: expected format, act, source and skip, got {names}$"):
            hft.HalfbyteConfig("w4a16-g128", **options)
        with pytest.raises(TypeError, match=f"got {names}$"):
            hft.HalfbyteConfig(source={"quant_method": "gptq"}, **options)
    with pytest.raises(TypeError, match="the source of a quantised one, got both"):
        hft.HalfbyteConfig("w4a16-g128", source={"quant_method": "gptq"})
    for format, act in (("w4a16-g128", "a8"), ("w4a8-g128-xasym", "a8"), ("w4a8-g128", "a16")):
        with pytest.raises(ValueError, match=f"expected act to be what format says, or left out, got {act} with {format}"):
            hft.HalfbyteConfig(format, act=act)
    folder = tmp_path / "q"
    halfbyte.quantize_model(llama, folder, "w4a16-g32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=hft.config(folder))
    with pytest.raises(ValueError):
        model.save_pretrained(tmp_path / "again")
    # A config that its tensors contradict.
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError):
        transformers.AutoModelForCausalLM.from_pretrained(folder, config=hft.config(folder))
