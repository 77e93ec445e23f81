"""``halfbyte.paddle`` beside paddlepaddle's CPU wheel: the same codes and scales, tensors in and out, and a chain from its quantiser
to a model that runs. Without paddle these tests are skipped; ``HALFBYTE_REQUIRE_PADDLE=1`` makes that a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import halfbyte.paddle as ours

if os.environ.get("HALFBYTE_REQUIRE_PADDLE") == "1":
    import paddle
else:
    paddle = pytest.importorskip("paddle")

import paddle.nn.quant as theirs  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
ARCHS = (70, 75, 80, 86, 89, 90, 100)


def same(a, b) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_random_weights_have_the_codes_and_scales_of_paddle() -> None:
    rng = np.random.default_rng(5)
    for round in range(12):
        k, n = 64 * int(rng.integers(1, 6)), 16 * int(rng.integers(1, 10))
        w = rng.standard_normal((k, n)) * 10.0 ** rng.integers(-6, 4, (1, n))
        x = paddle.to_tensor(w, dtype=("float16", "bfloat16")[round % 2])
        for algo in ("weight_only_int8", "weight_only_int4", "llm.int8"):
            for group_size in (-1, 64, 128):
                for arch in ARCHS:
                    # Paddle transposes the codes of llm.int8 wrongly for sm_70, beyond their memory.
                    if algo == "llm.int8" and arch == 70:
                        continue
                    for a, b in zip(
                        ours.weight_quantize(x, algo, arch, group_size), theirs.weight_quantize(x, algo, arch, group_size)
                    ):
                        same(a, b)


def test_tensors_of_paddle_go_in_and_come_out() -> None:
    w = paddle.rand([128, 48]).astype("bfloat16")
    x = paddle.rand([2, 3, 128]).astype("bfloat16")
    codes, scale = theirs.weight_quantize(w, "weight_only_int4", 80, 64)
    y = ours.weight_only_linear(x, codes, paddle.ones([48], "bfloat16"), scale, "int4", 80, 64)
    assert isinstance(y, paddle.Tensor) and y.dtype == paddle.bfloat16 and y.shape == [2, 3, 48]
    dense = ours.weight_dequantize(codes, scale, "weight_only_int4", group_size=64)
    assert dense.dtype == paddle.bfloat16 and dense.shape == [128, 48]
    wide = [t.astype("float64") for t in (x, dense, y)]
    magnitude = wide[0].abs() @ wide[1].abs() + 1
    assert ((wide[2] - wide[0] @ wide[1] - 1).abs() <= 3 * 2.0**-8 * magnitude).all()
    scaled = ours.apply_per_channel_scale(x[0], x[0, 0])
    same(scaled, (x[0].astype("float32") * x[0, 0].astype("float32")).astype("bfloat16"))
    codes, scale = theirs.weight_quantize(w, "llm.int8", 80)
    y = ours.llm_int8_linear(x, codes, None, scale)
    assert y.dtype == paddle.bfloat16 and y.shape == [2, 3, 48]


def test_gradients_reach_x() -> None:
    w = paddle.rand([64, 32]).astype("float16")
    codes, scale = ours.weight_quantize(w)
    x = paddle.rand([4, 64]).astype("float16")
    x.stop_gradient = False
    y = ours.weight_only_linear(x, codes, None, scale)
    y.astype("float32").sum().backward()
    dense = ours.weight_dequantize(codes, scale).astype("float32").sum(1)
    np.testing.assert_allclose(x.grad.astype("float32").numpy(), np.tile(dense.numpy(), (4, 1)), rtol=1e-3)


def command() -> list[str]:
    """The command line: HALFBYTE_COMMAND, the one of this build, or cargo's."""
    given = os.environ.get("HALFBYTE_COMMAND")
    if given:
        return [given]
    built = ROOT / "target/debug/halfbyte"
    return [str(built)] if built.exists() else ["cargo", "run", "--quiet", "--locked", "--package", "halfbyte-cli", "--"]


def run(*arguments: object) -> str:
    done = subprocess.run([*command(), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, -1)])
def test_chain_from_paddles_quantiser_to_text(tmp_path: Path, bits: int, group_size: int) -> None:
    """Paddle quantises the linears of a model; its codes are the same in each file on the way, and the model runs."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    load_file = pytest.importorskip("safetensors.numpy").load_file
    source = ROOT / "models/stdlib-11m"
    dense = {}
    for path in source.glob("*.safetensors"):
        dense.update(load_file(path))
    folder = tmp_path / "paddle"
    folder.mkdir()
    stored, expected = {}, {}
    for name, tensor in dense.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        module = name.removesuffix(".weight")
        w = paddle.to_tensor(np.ascontiguousarray(tensor.T), dtype="float16")
        codes, scale = theirs.weight_quantize(w, f"weight_only_int{bits}", 80, group_size)
        stored[f"{module}.quant_weight"], stored[f"{module}.quant_scale"] = codes.numpy(), scale.numpy()
        expected[module] = codes.numpy(), scale.numpy()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "weight_quantize_algo": f"weight_only_int{bits}",
        "group_size": group_size,
        "arch": 80,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, folder)

    trt, native, back = tmp_path / "trt", tmp_path / "native", tmp_path / "back"
    for before, after, form in ((folder, trt, "fpa_intb"), (trt, native, "native"), (native, back, "fpa_intb")):
        run("convert", before, "--to", form, "-o", after)
        run("verify", before, after)
    for model in (trt, back):
        file = load_file(next(model.glob("*.safetensors")))
        for module, (codes, scale) in expected.items():
            assert file[f"{module}.weight"].tobytes() == codes.tobytes(), module
            scales = file.get(f"{module}.per_channel_scale", file.get(f"{module}.weights_scaling_factor"))
            np.testing.assert_array_equal(scales, scale)
    texts = [
        run("run", model, "--device", "cpu", "--quiet", "--prompt", "import os", "--max-tokens", "12")
        for model in (folder, trt, native)
    ]
    assert texts[0] and texts[0] == texts[1] == texts[2]
