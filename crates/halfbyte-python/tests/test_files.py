"""Checkpoints, conversion, verification, and a language model that runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import STDLIB, random

import halfbyte

PROMPT = "def "


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stdlib") / "gptq"
    told = halfbyte.quantize_model(STDLIB, folder, "w4a16-g128")
    assert told["to"] == "gptq" and told["modules"] > 0 and Path(told["path"]) == folder
    return folder


def test_inspect_convert_and_verify(quantized: Path, tmp_path: Path) -> None:
    found = halfbyte.inspect(quantized)
    assert found["quantization"]["quant_method"] == "gptq" and found["findings"] == []
    quantised = [module for module in found["modules"] if module["scheme"] == "gptq"]
    assert quantised and all(module["format"] == "w4a16-g128" for module in quantised)
    told = halfbyte.convert(quantized, tmp_path / "ct", "compressed-tensors")
    assert told["modules"] == len(quantised)
    assert told["requantized"] == told["made_dense"] == told["left_out"] == []
    same = halfbyte.verify(quantized, tmp_path / "ct")
    assert same["equal"] is True and same["differing"] == [] and same["compared"] > 0
    other = halfbyte.verify(quantized, STDLIB)
    assert other["equal"] is False and other["differing"]


def test_the_layouts_of_fpa_intb_are_written(tmp_path: Path) -> None:
    for to in ("fpa_intb", "fpa_intb_sm70"):
        told = halfbyte.quantize_model(STDLIB, tmp_path / to, "w8a16", to=to)
        assert told["to"] == to and told["modules"] > 0
        assert halfbyte.inspect(tmp_path / to)["quantization"]["quant_method"] == "fpa_intb"
        with pytest.raises(ValueError, match=f"expected a format that the form {to} has"):
            halfbyte.quantize_model(STDLIB, tmp_path / "x", "w3a16-g128", to=to)
    halfbyte.quantize_model(STDLIB, tmp_path / "native", "w8a16", to="native")
    assert halfbyte.convert(tmp_path / "native", tmp_path / "converted", "fpa_intb")["requantized"] == []
    assert halfbyte.verify(tmp_path / "native", tmp_path / "converted")["equal"] is True
    assert not (tmp_path / "x").exists()


def test_errors_of_files_are_those_of_python(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        halfbyte.inspect(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        halfbyte.load(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        halfbyte.convert(quantized, quantized.parent, "native")
    with pytest.raises(ValueError, match="to: expected one of gptq, .*, fpa_intb, fpa_intb_sm70, onnx, gguf, native, got"):
        halfbyte.convert(quantized, tmp_path / "x", "marlin")
    with pytest.raises(ValueError, match="a model that is not quantised yet"):
        halfbyte.quantize_model(quantized, tmp_path / "x", "w4a16-g128")
    with pytest.raises(ValueError):
        halfbyte.quantize_model(STDLIB, tmp_path / "x", "w4a16-g128-float", to="awq")
    assert not (tmp_path / "x").exists()
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ValueError):
        halfbyte.Checkpoint(tmp_path)


def test_layers_of_a_checkpoint_by_name(quantized: Path) -> None:
    checkpoint = halfbyte.Checkpoint(quantized)
    name = next(name for name in checkpoint.modules() if name.endswith("q_proj"))
    codes, layer = checkpoint.quantized(name), checkpoint.linear(name, act="a8")
    assert (layer.format, codes.format) == ("w4a8-g128", "w4a16-g128")
    assert np.array_equal(layer.dequantize(), codes.dequantize())
    x = random((3, layer.in_features), 1)
    assert checkpoint.linear(name)(x).shape == (3, layer.out_features)
    assert checkpoint.tensor_info(f"{name}.scales")[0] == "F16"
    norm = next(tensor for tensor in checkpoint.tensors() if tensor.endswith("norm.weight"))
    assert checkpoint.floats(norm).dtype == np.float32
    with pytest.raises(KeyError):
        checkpoint.tensor_info("nothing")
    with pytest.raises(ValueError):
        checkpoint.linear("nothing")
    dense = halfbyte.Checkpoint(STDLIB)
    with pytest.raises(ValueError, match="expected a quantised layer"):
        dense.quantized(name)
    assert dense.linear(name).format is None


def test_tensors_that_another_loader_has_read(quantized: Path) -> None:
    """By the names of each form, as transformers and vLLM hand them on."""
    safetensors = pytest.importorskip("safetensors.numpy")
    checkpoint = halfbyte.Checkpoint(quantized)
    name = next(name for name in checkpoint.modules() if name.endswith("up_proj"))
    tensors = safetensors.load_file(quantized / "model.safetensors")
    parts = {tensor.removeprefix(f"{name}."): value for tensor, value in tensors.items() if tensor.startswith(f"{name}.")}
    config = '{"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false}'
    layer = halfbyte.linear_from_tensors(parts, config, module=name, bias=np.ones(checkpoint.quantized(name).shape[0], np.float32))
    assert np.array_equal(layer.dequantize(), checkpoint.quantized(name).dequantize()) and layer.has_bias
    assert np.array_equal(halfbyte.linear_from_tensors(parts).dequantize(), layer.dequantize())
    for wrong in ({}, {"qweight": parts["qweight"]}, parts | {"scales": parts["scales"][:, 1:]}):
        with pytest.raises(ValueError):
            halfbyte.linear_from_tensors(wrong, config)
    with pytest.raises(ValueError, match="JSON object"):
        halfbyte.linear_from_tensors(parts, "[]")


def test_text_is_streamed(quantized: Path) -> None:
    model = halfbyte.load(quantized)
    assert model.device == "cpu" and model.parameters > 1e6 and model.vocab > 0 and model.max_context > 0
    writing = model.generate(PROMPT, max_tokens=24, ignore_end=True)
    pieces = list(writing)
    assert len(pieces) > 5 and writing.finish_reason == "length" and len(writing.tokens) == 24
    assert "".join(pieces) == model.decode(writing.tokens)
    # By tokens, the same; greedy is what the logits say.
    ids = model.encode(PROMPT)
    assert list(model.generate(ids, max_tokens=24, ignore_end=True)) == pieces
    assert int(np.argmax(model.logits(ids))) == writing.tokens[0]
    # Draws with a seed are the same each time; another seed's differ.
    draws = ["".join(model.generate(PROMPT, max_tokens=24, temperature=1.0, top_k=50, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_text_ends_where_it_should(quantized: Path) -> None:
    model = halfbyte.load(quantized)
    whole = "".join(model.generate(PROMPT, max_tokens=40, ignore_end=True))
    stop = whole[5:8]
    writing = model.generate(PROMPT, max_tokens=40, ignore_end=True, stop=[stop, "never comes"])
    assert "".join(writing) == whole[: whole.index(stop)] and writing.finish_reason == "stop"
    writing = model.generate(PROMPT, max_tokens=10_000, ignore_end=True)
    next(writing)
    assert writing.finish_reason is None
    writing.close()
    assert list(writing) == [] and writing.finish_reason == "cancelled"
    assert list(model.generate(PROMPT, max_tokens=0)) == []
    for arguments, message in [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top-p"),
        ({"min_p": 2.0}, "min-p"),
        ({"repetition_penalty": 0.0}, "penalty"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(PROMPT, **arguments)
    for option in ("max_tokens", "top_k", "seed"):
        for number in (-1, 2**64):
            with pytest.raises(ValueError, match=f"^{option}: expected 0 or more, in 64 bits, got {number}"):
                model.generate(PROMPT, **{option: number})
        with pytest.raises(TypeError):
            model.generate(PROMPT, **{option: 1.5})
    for stop in ("", [""], ["\n", ""], "x" * 1025):
        with pytest.raises(ValueError, match="stop: expected texts of 1 to 1024 bytes, got one of"):
            model.generate(PROMPT, stop=stop)
    assert list(model.generate(PROMPT, max_tokens=2, stop=["x" * 1024])) and list(model.generate(PROMPT, max_tokens=2, stop=[]))
    with pytest.raises(ValueError, match="^prompt: expected text of whole characters, or numbers from 0 on, in 32 bits, got"):
        model.generate([1, -1])
    with pytest.raises(ValueError, match="^tokens: expected"):
        model.decode([-1])
    with pytest.raises(ValueError, match="at least one token"):
        model.generate([])
    with pytest.raises(ValueError, match="expected an id below"):
        model.generate([10_000_000])
    with pytest.raises(TypeError):
        model.generate(3.5)


def test_models_are_rounded_while_they_are_loaded() -> None:
    exact, rounded = halfbyte.load(STDLIB), halfbyte.load(STDLIB, format="w8a8-g128", kv="int8")
    assert rounded.nbytes < exact.nbytes
    a, b = (model.logits(PROMPT) for model in (exact, rounded))
    assert not np.array_equal(a, b) and np.abs(a - b).max() < 1.0
    with pytest.raises(ValueError, match="act to be what format says"):
        halfbyte.load(STDLIB, format="w8a8-g128", act="a16")
    with pytest.raises(ValueError, match="kv: expected"):
        halfbyte.load(STDLIB, kv="f8")


def test_options_that_would_change_nothing_for_a_model(quantized: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    for options in ({"format": "w8a16-g128"}, {"format": "w4a8-g128", "search": True}):
        with pytest.raises(ValueError, match=f"load: expected no format for a model that is quantised already, got {options['format']}"):
            halfbyte.load(quantized, **options)
    dense = halfbyte.Checkpoint(STDLIB)
    for act in ("a8", "a8-xasym"):
        assert halfbyte.load(quantized, act=act).vocab > 0
        with pytest.raises(ValueError, match="load: expected act a8 or a8-xasym with a model that is quantised, .* got it with the floats"):
            halfbyte.load(STDLIB, act=act)
        with pytest.raises(ValueError, match=f"act: expected a16 or a32 with a dense layer, .* got a8 or a8-xasym with `{name}`"):
            dense.linear(name, act=act)
        with pytest.raises(ValueError, match="act: expected a16 or a32 with a dense layer"):
            halfbyte.linear_from_tensors({"weight": random((8, 8), 1)}, act=act)
    for act in ("a16", "a32"):
        assert halfbyte.load(STDLIB, act=act).vocab > 0 and dense.linear(name, act=act).format is None
    for format in ("w4a8-g32", "w8a8-xasym"):
        with pytest.raises(ValueError, match=f"quantize_model: expected a format with a16, .* got {format}"):
            halfbyte.quantize_model(STDLIB, tmp_path / "x", format)
    assert not (tmp_path / "x").exists()


def test_a_text_that_an_error_ends_says_so(tmp_path: Path) -> None:
    """Norms of 1e37 and more, whose products are beyond f32."""
    folder = tmp_path / "copy"
    shutil.copytree(STDLIB, folder)
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        tensors, bytes_ = {}, b""
        for name, info in header.items():
            if name == "__metadata__":
                continue
            part = data[8 + size :][slice(*info["data_offsets"])]
            if name.endswith("norm.weight"):
                part = (np.frombuffer(part, np.float16).astype(np.float32) * np.float32(1e37)).tobytes()
                info["dtype"] = "F32"
            tensors[name] = info | {"data_offsets": [len(bytes_), len(bytes_) + len(part)]}
            bytes_ += part
        text = json.dumps(tensors).encode()
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes_)
    writing = halfbyte.load(folder).generate(PROMPT, max_tokens=3)
    assert writing.finish_reason is None
    with pytest.raises(RuntimeError):
        list(writing)
    assert writing.finish_reason == "error" and list(writing) == [] and writing.tokens == []
    writing.close()
    assert writing.finish_reason == "error"


def test_a_model_folder_without_a_tokenizer_is_refused(quantized: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(quantized, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises((OSError, ValueError)):
        halfbyte.load(folder)


def test_paths_that_are_no_text_are_written_and_told(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/o\xff")
    told = halfbyte.quantize_model(STDLIB, odd, "w4a16-g128")
    assert told["path"] == odd and Path(odd).is_dir()
    converted = halfbyte.convert(odd, odd + "2", "compressed-tensors")
    assert converted["path"] == odd + "2" and converted["modules"] == told["modules"]
    assert halfbyte.verify(odd, odd + "2")["equal"]
    for folder in (odd, odd + "2"):
        found = halfbyte.inspect(folder)
        assert found["path"] == folder and found["quantization"]["file"] == f"{folder}/config.json"
        assert found["files"] == [f"{folder}/model.safetensors"] and list(found)[:2] == ["path", "architecture"]
    dense = os.fsdecode(os.fsencode(tmp_path) + b"/d\xff")
    shutil.copytree(STDLIB, dense)
    found = halfbyte.inspect(dense)
    assert found["path"] == dense and found["quantization"] is None and len(found["files"]) == 2
    assert all(Path(file).is_file() for file in found["files"])
