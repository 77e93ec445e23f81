"""Products of bytes by onnxruntime's QLinearMatMul whose sums come close to halves.

The scales make M = sI·sW/sO come close to 1/(2c): codes then depend on the type that M is computed in and on the order of
its factors. Of each kind of bytes the first products are kept in which M in f64 and M = sI·(sW/sO) in f32 give other codes.

    pip install numpy onnx==1.23.2 onnxruntime==1.31.1 safetensors && python generate.py
"""

import numpy as np
import onnxruntime
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

M, K, N = 24, 12, 20
KINDS = {"u8s8": (np.uint8, np.int8), "s8s8": (np.int8, np.int8), "u8u8": (np.uint8, np.uint8)}


def qlinear_matmul(x, x_scale, x_zp, w, w_scale, w_zp, y_scale, y_zp):
    """`w` is `[k, n]`."""
    values = dict(x_scale=x_scale, x_zp=x_zp, w=w, w_scale=w_scale, w_zp=w_zp, y_scale=y_scale, y_zp=y_zp)
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node("QLinearMatMul", ["x", *values], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", dtype, x.shape)],
        [helper.make_tensor_value_info("y", dtype, [x.shape[0], w.shape[1]])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def codes(sums, multiplier, zero, dtype):
    info = np.iinfo(dtype)
    return np.clip(np.rint(sums.astype(multiplier.dtype) * multiplier) + zero, info.min, info.max)


rng = np.random.default_rng(7)
for kind, (x_type, w_type) in KINDS.items():
    for _ in range(1000):
        low, high = np.iinfo(x_type).min, np.iinfo(x_type).max
        x = rng.integers(low, high + 1, (M, K)).astype(x_type)
        w_zp = np.full(N, rng.integers(0, 256) if w_type == np.uint8 else 0).astype(w_type)
        w = (w_zp.astype(int) + rng.integers(-3, 4, (K, N))).clip(np.iinfo(w_type).min, np.iinfo(w_type).max).astype(w_type)
        x_zp, y_zp = x_type(rng.integers(low, high + 1)), x_type(rng.integers(low // 2, high // 2 + 1))
        a, c = rng.integers(1, 40, 2)
        x_scale = np.float32(a * 0.1)
        w_scale = (rng.integers(1, 40) * 0.01 * 2.0 ** rng.integers(0, 3, N)).astype(np.float32)
        y_scale = np.float32(x_scale * w_scale.min() * 2 * c)
        sums = (x.astype(np.int64) - int(x_zp)) @ (w.astype(np.int64) - w_zp.astype(np.int64))
        y = qlinear_matmul(x, x_scale, x_zp, w, w_scale, w_zp, y_scale, y_zp)
        in_f64 = codes(sums, np.float64(x_scale) * w_scale.astype(np.float64) / np.float64(y_scale), int(y_zp), x_type)
        reordered = codes(sums, x_scale * (w_scale / y_scale), int(y_zp), x_type)
        if (y != in_f64).any() and (y != reordered).any():
            break
    else:
        raise SystemExit(f"no product for {kind}")
    print(kind, "differ in f64:", (y != in_f64).sum(), "reordered:", (y != reordered).sum())
    tensors = dict(x=x, w=w.T.copy(), x_scale=x_scale, w_scale=w_scale, y_scale=y_scale, x_zp=x_zp, w_zp=w_zp, y_zp=y_zp, y=y)
    tensors = {name: np.atleast_1d(value) for name, value in tensors.items()}
    save_file(tensors | {"acc_i32": sums.astype(np.int32)}, f"near_ties_{kind}.safetensors")
