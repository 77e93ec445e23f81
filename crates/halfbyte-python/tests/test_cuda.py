"""Layers and models on a GPU: torch, cupy and jax there, streams, graphs, forks. Skipped where there is no GPU.

On a machine without Rust: install the wheel, torch and pytest, and run this file with conftest.py beside it; HALFBYTE_ROOT names a
checkout, or a folder with its models/.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random

import halfbyte

torch = pytest.importorskip("torch")

if halfbyte.cuda_device_count() == 0:
    pytest.skip("no GPU: nothing on a GPU was tested", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("this torch sees no GPU: nothing on a GPU was tested", allow_module_level=True)

import halfbyte.paddle as quant  # noqa: E402
import halfbyte.torch as ht  # noqa: E402

ROOT = Path(os.environ.get("HALFBYTE_ROOT", Path(__file__).resolve().parents[3]))
W, BIAS = random((256, 512), 1), random((256,), 2)
FORMAT = "w4a16-g128"


def layer(**options: Any) -> halfbyte.Linear:
    return halfbyte.Linear(W, BIAS, FORMAT, device="cuda", **options)


def exact(x: Any) -> tuple[Any, Any]:
    w = halfbyte.quantize(W, FORMAT).dequantize().astype(np.float64)
    x = x.double().cpu().numpy()
    return x @ w.T + BIAS, np.abs(x) @ np.abs(w).T + np.abs(BIAS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 7, 64, 300])
def test_torch_on_the_device(dtype: Any, m: int) -> None:
    of = layer()
    x = torch.from_numpy(random((m, 512), m)).to("cuda", dtype)
    y = of(x)
    assert y.device == x.device and y.dtype == dtype and y.shape == (m, 256)
    expected, magnitude = exact(x)
    allowed = np.vectorize(lambda v: of.bound(v, m, str(dtype).removeprefix("torch.")))(magnitude)
    assert np.all(np.abs(y.double().cpu().numpy() - expected) <= allowed)
    out = torch.empty_like(y)
    assert of(x, out=out) is out and torch.equal(out, y)
    assert of(x[:0]).shape == (0, 256)
    assert torch.equal(of(x.T.contiguous().T), y)


def test_the_current_stream_is_used() -> None:
    of, x = layer(), torch.randn(64, 512, device="cuda", dtype=torch.float16)
    expected = of(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late, y = torch.zeros_like(x), torch.empty_like(expected)
        of(late, y)  # The first call in a stream makes its workspace, and torch its memory: both wait.
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        of(late, y)  # Behind the copy, which is behind the pause.
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(y, expected)


def test_recorded_in_a_graph() -> None:
    of, x = layer(), torch.randn(3, 512, device="cuda", dtype=torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        of(x)  # Once before, in the stream that records.
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = of(x)
    for seed in (1, 2):
        x.copy_(torch.from_numpy(random((3, 512), seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, of(x))


def test_gradients_and_modules() -> None:
    module = ht.Linear(layer())
    x = torch.randn(5, 512, device="cuda", requires_grad=True)
    module(x).backward(torch.ones(5, 256, device="cuda"))
    weight = torch.from_numpy(halfbyte.quantize(W, FORMAT).dequantize()).cuda()
    assert torch.allclose(x.grad, weight.sum(0).expand(5, -1), rtol=1e-3, atol=1e-3)
    on_cpu = ht.Linear(halfbyte.Linear(W, BIAS, FORMAT))
    moved = on_cpu.cuda()
    assert moved.layer.device == "cuda:0" and torch.equal(moved(x.detach()), module(x.detach()))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.detach()), module(x.detach()))
    with pytest.raises(ValueError, match="a layer on the CPU, or made for cpu"):
        module.cpu()


def test_convolutions_and_bytes() -> None:
    w, x = random((32, 64, 3, 3), 3), torch.from_numpy(random((2, 64, 10, 10), 4)).cuda().half()
    conv = halfbyte.Conv2d(w, padding=1, device="cuda", format="w8a16-g64")
    on_cpu = halfbyte.Conv2d(w, padding=1, format="w8a16-g64")
    assert torch.allclose(conv(x).float().cpu(), torch.from_numpy(on_cpu(x.float().cpu().numpy())), rtol=1e-2, atol=5e-2)
    draw = np.random.default_rng(5)
    codes, bytes_ = draw.integers(-127, 128, (64, 128), dtype=np.int8), draw.integers(0, 256, (9, 128), dtype=np.uint8)
    options: dict[str, Any] = {"x_scale": 0.02, "x_zero": 128, "y_scale": 0.5, "y_zero": 100}
    both = [halfbyte.LinearInt8(codes, 0.01, device=device, **options) for device in ("cpu", "cuda")]
    assert np.array_equal(both[1](torch.from_numpy(bytes_).cuda()).cpu().numpy(), both[0](bytes_))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_functions_of_paddle_have_the_bits_of_the_cpu(dtype: Any) -> None:
    w, x = (torch.from_numpy(random(shape, seed)).to(dtype) for shape, seed in (((512, 96), 8), ((2, 9, 512), 9)))
    x[0, 3, 7] = 40.0
    for algo, group_size in itertools.product(("llm.int8", "weight_only_int8", "weight_only_int4"), (-1, 64, 128)):
        on_cpu, on_gpu = (quant.weight_quantize(t, algo, 80, group_size) for t in (w, w.cuda()))
        for mine, want in zip(on_gpu, on_cpu, strict=True):
            assert mine.is_cuda and mine.dtype == want.dtype and torch.equal(mine.cpu(), want)
        if algo != "llm.int8":
            wide = [quant.weight_dequantize(*tensors, algo, group_size=group_size) for tensors in (on_gpu, on_cpu)]
            assert wide[0].is_cuda and wide[0].dtype == dtype and torch.equal(wide[0].cpu(), wide[1])
    codes, scale = quant.weight_quantize(w, "llm.int8", 80)
    for bias in (None, torch.from_numpy(random((96,), 10)).to(dtype)):
        for threshold in (6.0, 2.0, 0.0):
            want = quant.llm_int8_linear(x, codes, bias, scale, threshold)
            there = [None if t is None else t.cuda() for t in (x, codes, bias, scale)]
            y = quant.llm_int8_linear(*there, threshold)
            assert y.is_cuda and y.dtype == dtype and y.shape == (2, 9, 96) and torch.equal(y.cpu(), want)
    assert quant.llm_int8_linear(x[:, :0].cuda(), codes.cuda(), None, scale.cuda()).shape == (2, 0, 96)
    with pytest.raises(ValueError, match="where the weight lies"):
        quant.llm_int8_linear(x.cuda(), codes, None, scale)
    with pytest.raises(ValueError, match="where the scales lie"):
        quant.weight_dequantize(codes.cuda(), scale)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    of, x = layer(), cupy.asarray(random((6, 512), 6), dtype=cupy.float16)
    y = of(x)
    assert isinstance(y, cupy.ndarray) and y.dtype == cupy.float16 and y.shape == (6, 256)
    assert np.array_equal(cupy.asnumpy(y), of(torch.from_numpy(cupy.asnumpy(x)).cuda()).cpu().numpy())
    with cupy.cuda.Stream(non_blocking=True) as stream:
        again = of(x)
        stream.synchronize()
    assert cupy.array_equal(again, y)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax without a GPU")
    of, x = layer(), jax.numpy.asarray(random((6, 512), 7), dtype=jax.numpy.float16)
    y = of(x)
    assert isinstance(y, jax.Array) and y.devices() == x.devices()
    assert np.array_equal(np.asarray(y), of(torch.from_numpy(np.array(x)).cuda()).cpu().numpy())


def test_what_lies_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an x on cuda:0, where the weight lies, got one on cpu"):
        layer()(np.zeros((1, 512), np.float32))
    with pytest.raises(ValueError, match="expected an x on cpu"):
        halfbyte.Linear(W, format=FORMAT)(torch.zeros(1, 512, device="cuda"))
    with pytest.raises(RuntimeError):
        halfbyte.Linear(W, format=FORMAT, device="cuda:99")
    on_gpu = halfbyte.Linear(torch.from_numpy(W).cuda(), format=FORMAT)
    assert on_gpu.device == "cuda:0"


def test_a_fork_after_a_gpu_was_in_use_is_told() -> None:
    program = (
        "import halfbyte, numpy, os\n"
        "w = numpy.ones((64, 128), numpy.float32)\n"
        "layer = halfbyte.Linear(w, format='w4a16-g128', device='cuda')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: halfbyte.Linear(w, format='w4a16-g128', device='cuda')\n"
        "    except RuntimeError as error: os._exit(0 if 'forked' in str(error) else 2)\n"
        "    os._exit(1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "0", out.stderr


def test_a_model() -> None:
    folder = ROOT / "models" / "stdlib-11m"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: no model was run")
    on_cpu, on_gpu = (halfbyte.load(folder, format=FORMAT, device=device) for device in ("cpu", "cuda"))
    assert on_gpu.device == "cuda:0"
    assert np.abs(on_cpu.logits("def ") - on_gpu.logits("def ")).max() < 0.1
    assert len("".join(on_gpu.generate("def ", max_tokens=16, ignore_end=True))) > 16


def test_transformers_on_the_device(llama: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import halfbyte.transformers as hft

    halfbyte.quantize_model(llama, tmp_path / "q", "w4a16-g32")
    load = transformers.AutoModelForCausalLM.from_pretrained
    on_cpu = load(tmp_path / "q", config=hft.config(tmp_path / "q"), dtype=torch.float32)
    on_gpu = load(tmp_path / "q", config=hft.config(tmp_path / "q"), dtype=torch.float32, device_map="cuda")
    assert on_gpu.model.layers[0].mlp.up_proj.layer.device == "cuda:0"
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.allclose(on_gpu(ids.cuda()).logits.cpu(), on_cpu(ids).logits, rtol=1e-3, atol=1e-3)
