"""Runs the MatMulNBits nodes of ONNX models with onnxruntime, each on an identity matrix."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from comparison import Difference, Weight, run

INPUTS = ("A", "B", "scales", "zero_points", "g_idx", "bias")


def attributes(node: onnx.NodeProto) -> dict:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def identity_product(node: onnx.NodeProto, parts: dict[str, np.ndarray]) -> np.ndarray:
    """The weight `[N, K]` of a node: its product with the identity, the scales widened to f32.

    With accuracy level 0 onnxruntime turns the codes to f32 and multiplies in f32: exact here, as each output is one
    product and zeros. Another level, which lets it round x, does not change what the weight is.
    """
    given = attributes(node)
    k, n = given["K"], given["N"]
    inputs = ["A"] + [name if name in parts else "" for name in INPUTS[1:]]
    while not inputs[-1]:
        inputs.pop()
    single = helper.make_node("MatMulNBits", inputs, ["Y"], domain="com.microsoft", **(given | {"accuracy_level": 0}))
    graph = helper.make_graph(
        [single],
        "product",
        [helper.make_tensor_value_info("A", TensorProto.FLOAT, [k, k])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [k, n])],
        [numpy_helper.from_array(array, name) for name, array in parts.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.ascontiguousarray(session.run(["Y"], {"A": np.eye(k, dtype=np.float32)})[0].T)


def widened(tensor: onnx.TensorProto) -> np.ndarray:
    array = numpy_helper.to_array(tensor)
    return array if array.dtype in (np.uint8, np.int32) else array.astype(np.float32)


def check(path: Path, _expected):
    path = path / "model.onnx" if path.is_dir() else path
    onnx.checker.check_model(path)
    # The file as a whole, with the data beside it, is a model that onnxruntime takes.
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    graph = onnx.load(path).graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    weights = []
    for node in graph.node:
        if (node.domain, node.op_type) != ("com.microsoft", "MatMulNBits"):
            raise Difference(f"a node {node.domain}.{node.op_type}")
        named = {role: name for role, name in zip(INPUTS[1:], node.input[1:]) if name}
        parts = {role: widened(initializers.pop(name)) for role, name in named.items() if role != "bias"}
        name = f"{named['B'].rsplit('.weight', 1)[0]}.weight"
        weights.append(Weight(name, parts, lambda parts, node=node: identity_product(node, parts)))
    return weights, {name: widened(tensor) for name, tensor in initializers.items()}


run(check)
