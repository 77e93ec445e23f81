"""Times onnxruntime on the convolutions of a case file, as `halfbyte bench conv` times ours; prints JSON.

    python bench/peers/conv_onnxruntime.py --case bench/cases/resnet50.toml --threads 2

Three forms of each convolution, all with bias and relu, at their best:

* qlinear_conv: QLinearConv of u8 by i8 with a scale each output, images as planes, as ONNX has it; relu is the zero point 0
* qlinear_conv_nhwc: the same with images as pixels (com.microsoft, channels_last), which is what onnxruntime makes of it
  inside of a network
* conv: Conv and Relu in f32, images as planes

Weights, x and y are random and cold: as many sessions as it takes are run in turn, each with its own weights, x and y, all on
one pool of threads. x and y are bound once; `call_us` is what a call takes that computes nothing.
"""

import argparse
import json
import statistics
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

COLD_BYTES = 160_000_000
MOST_SESSIONS = 512


@dataclass
class Shape:
    """One convolution of a case file; what is left out there is 1, or 0 for padding."""

    origin: str
    ci: int
    co: int
    size: list[int]
    kernel: list[int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def output(self) -> list[int]:
        padded = (n + self.padding[axis] + self.padding[axis + 2] for axis, n in enumerate(self.size))
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel)]
        return [(n - r) // s + 1 for n, r, s in zip(padded, reach, self.stride)]

    def weight(self) -> list[int]:
        return [self.co, self.ci // self.groups, *self.kernel]

    def attributes(self) -> dict:
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.stride),
            "pads": list(self.padding),
            "dilations": list(self.dilation),
            "group": self.groups,
        }


def session(nodes: list, x: tuple, y: tuple, constants: dict[str, np.ndarray]) -> onnxruntime.InferenceSession:
    """A model of these nodes on the pool of threads that all sessions share; x and y are a type and a shape."""
    graph = helper.make_graph(
        nodes,
        "peer",
        [helper.make_tensor_value_info("x", *x)],
        [helper.make_tensor_value_info("y", *y)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=9, opset_imports=opsets)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound(made: onnxruntime.InferenceSession, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """A call that reads x and writes y where they lie."""
    binding = made.io_binding()
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    binding.bind_ortvalue_output("y", onnxruntime.OrtValue.ortvalue_from_numpy(y))
    return lambda: made.run_with_iobinding(binding)


def images(batch: int, channels: int, size: list[int], pixels_first: bool) -> list[int]:
    return [batch, *size, channels] if pixels_first else [batch, channels, *size]


def qlinear_conv(shape: Shape, batch: int, random: np.random.Generator, *, nhwc: bool = False) -> Callable[[], None]:
    k = int(np.prod(shape.weight()[1:]))
    scales = (0.01 + 0.005 * random.uniform(-1, 1, shape.co)).astype(np.float32)
    sum_steps = 147 * 73 * k**0.5
    constants = {
        "x_scale": np.float32(0.02),
        "x_zero": np.uint8(0),
        "w": random.integers(-127, 128, shape.weight(), dtype=np.int8),
        "w_scale": scales,
        "w_zero": np.zeros(shape.co, dtype=np.int8),
        "y_scale": np.float32(0.02 * 0.01 * sum_steps / 80),
        "y_zero": np.uint8(0),
        "bias": (0.1 * sum_steps * random.standard_normal(shape.co)).astype(np.int32),
    }
    constants = {name: np.asarray(value) for name, value in constants.items()}
    inputs = ["x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero", "bias"]
    more = {"domain": "com.microsoft", "channels_last": 1} if nhwc else {}
    node = helper.make_node("QLinearConv", inputs, ["y"], **shape.attributes(), **more)
    x_shape = images(batch, shape.ci, shape.size, nhwc)
    y_shape = images(batch, shape.co, shape.output(), nhwc)
    x = random.integers(0, 256, x_shape, dtype=np.uint8)
    made = session([node], (TensorProto.UINT8, x_shape), (TensorProto.UINT8, y_shape), constants)
    return bound(made, x, np.zeros(y_shape, dtype=np.uint8))


def qlinear_conv_nhwc(shape: Shape, batch: int, random: np.random.Generator) -> Callable[[], None]:
    return qlinear_conv(shape, batch, random, nhwc=True)


def conv(shape: Shape, batch: int, random: np.random.Generator) -> Callable[[], None]:
    constants = {
        "w": random.standard_normal(shape.weight(), dtype=np.float32),
        "bias": random.standard_normal(shape.co, dtype=np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "bias"], ["sums"], **shape.attributes()),
        helper.make_node("Relu", ["sums"], ["y"]),
    ]
    x_shape, y_shape = images(batch, shape.ci, shape.size, False), images(batch, shape.co, shape.output(), False)
    made = session(nodes, (TensorProto.FLOAT, x_shape), (TensorProto.FLOAT, y_shape), constants)
    return bound(made, random.standard_normal(x_shape, dtype=np.float32), np.zeros(y_shape, dtype=np.float32))


def nothing() -> Callable[[], None]:
    made = session([helper.make_node("Identity", ["x"], ["y"])], (TensorProto.FLOAT, [1]), (TensorProto.FLOAT, [1]), {})
    return bound(made, np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.float32))


FORMS = {"qlinear_conv": (qlinear_conv, 1), "qlinear_conv_nhwc": (qlinear_conv_nhwc, 1), "conv": (conv, 4)}


def median_us(calls: list[Callable[[], None]], seconds: float = 0.3, runs: int = 10) -> float:
    """Median of calls in turn, after every one was made once."""
    for call in calls:
        call()
    times, begun = [], time.perf_counter()
    while len(times) < runs or time.perf_counter() - begun < seconds:
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    onnxruntime.set_default_logger_severity(3)
    onnxruntime.set_global_thread_pool_sizes(arguments.threads, 1)
    case = tomllib.loads(arguments.case.read_text())
    results = []
    for shape in (Shape(**entry) for entry in case["shape"]):
        for batch in case["batch"]:
            elements = np.prod(shape.weight()) + batch * (
                shape.ci * np.prod(shape.size) + shape.co * np.prod(shape.output())
            )
            result = {"origin": shape.origin, "batch": batch}
            for form, (make, element_bytes) in FORMS.items():
                sessions = min(int(COLD_BYTES / (elements * element_bytes)) + 1, MOST_SESSIONS)
                calls = [make(shape, batch, np.random.default_rng(seed)) for seed in range(sessions)]
                result[f"{form}_us"] = median_us(calls)
            results.append(result)
    software = f"onnxruntime {onnxruntime.__version__}"
    report = {"software": software, "threads": arguments.threads, "call_us": median_us([nothing()]), "results": results}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
