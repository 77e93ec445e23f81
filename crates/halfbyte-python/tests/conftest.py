"""What the tests share: numbers, and small models in every form of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte

ROOT = Path(__file__).resolve().parents[3]
STDLIB = ROOT / "models" / "stdlib-11m"


def random(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def product(x: Any, w: Any) -> tuple[Any, Any]:
    """x · wᵀ in float64, and the magnitudes that bounds are of."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return x @ w.T, np.abs(x) @ np.abs(w).T


def assert_within(layer: halfbyte.Linear, y: Any, x: Any, w: Any, bias: Any = None) -> None:
    """Every element of y within the bound that the layer states."""
    exact, magnitude = product(x, w)
    if bias is not None:
        exact, magnitude = exact + bias, magnitude + np.abs(bias)
    y = np.asarray(y, np.float64)
    assert y.shape == exact.shape
    allowed = np.vectorize(lambda m: layer.bound(m, int(np.prod(y.shape[:-1])), str(y_type(y_of=x))))(magnitude)
    assert np.all(np.abs(y - exact) <= allowed), np.max(np.abs(y - exact) / allowed)


def y_type(y_of: Any) -> str:
    return {"float16": "float16", "float32": "float32"}[str(np.asarray(y_of).dtype)]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random weights, as transformers saves it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attention_bias=True,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    folder = tmp_path_factory.mktemp("llama") / "dense"
    model.to(torch.float16).save_pretrained(folder)
    return folder


# By name: the form of files, and the format of weights.
FORMS = {
    "gptq": ("gptq", "w4a16-g32"),
    "gptq-asym": ("gptq", "w4a16-g32-asym"),
    "gptq-8": ("gptq", "w8a16-g32"),
    "gptq-3": ("gptq", "w3a16-g32-asym"),
    "gptq-2": ("gptq", "w2a16-g32-asym"),
    "awq": ("awq", "w4a16-g32-asym"),
    "compressed-tensors": ("compressed-tensors", "w4a16-g32"),
    "compressed-tensors-asym": ("compressed-tensors", "w4a16-g32-asym"),
    "compressed-tensors-8": ("compressed-tensors", "w8a16"),
    "native": ("native", "w4a16-g32-float"),
}


@pytest.fixture(scope="session", params=FORMS)
def quantized_llama(request: pytest.FixtureRequest, llama: Path) -> Path:
    """The tiny Llama in each form of files."""
    form, format = FORMS[request.param]
    folder = llama.parent / request.param
    halfbyte.quantize_model(llama, folder, format, to=form)
    return folder
