"""Tensors in and out: no copies, types and places that do not fit, read-only, strided and empty ones."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from conftest import assert_within, random

import halfbyte

torch = pytest.importorskip("torch")

W = random((48, 64), 1)
LAYER = halfbyte.Linear(W, format="w4a16-g32")
DEQUANTIZED = halfbyte.quantize(W, "w4a16-g32").dequantize()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 64), (2, 3, 64), (2, 1, 2, 64)])
def test_numpy_in_numpy_out(dtype: Any, shape: tuple[int, ...]) -> None:
    x = random(shape, 2, dtype)
    y = LAYER(x)
    assert type(y) is np.ndarray and y.dtype == dtype and y.shape == (*shape[:-1], 48) and y.flags.writeable
    assert_within(LAYER, y, x, DEQUANTIZED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_in_torch_out(dtype: Any) -> None:
    x = torch.from_numpy(random((3, 5, 64), 3)).to(dtype)
    y = LAYER(x)
    assert type(y) is torch.Tensor and y.dtype == dtype and y.shape == (3, 5, 48) and not y.requires_grad
    # The bits of f32: exact activations are the same numbers in every type.
    wide = LAYER(x.float())
    assert torch.equal(y, wide.to(dtype))
    y += 1  # A tensor of torch like any other.


def test_every_library_gets_the_same_bits() -> None:
    x = random((4, 64), 4)
    y = LAYER(x)
    assert np.array_equal(LAYER(torch.from_numpy(x)).numpy(), y)
    for library in ("jax", "paddle"):
        try:
            module = __import__(library)
        except ImportError:
            continue
        given = module.numpy.asarray(x) if library == "jax" else module.to_tensor(x)
        theirs = LAYER(given)
        assert type(theirs) is type(given)
        assert np.array_equal(np.asarray(theirs), y)
        if library == "jax":
            with pytest.raises(ValueError, match="read-only"):
                LAYER(given, out=module.numpy.zeros((4, 48)))


def test_an_output_is_written_where_it_lies() -> None:
    x = random((4, 64), 5)
    for out, given in ((np.zeros((4, 48), np.float32), x), (torch.zeros(4, 48), torch.from_numpy(x))):
        y = LAYER(given, out=out)
        assert y is out and np.array_equal(np.asarray(y), LAYER(x))


def test_no_copy_comes_between() -> None:
    """Another library's view of our memory, and ours of another's, have one address."""
    ours = halfbyte.Linear(W, format="w4a16-g32").dequantize()
    assert ours.flags.owndata or ours.base is not None
    out = torch.zeros(4, 48)
    before = out.data_ptr()
    assert LAYER(torch.from_numpy(random((4, 64), 6)), out=out).data_ptr() == before
    array = np.zeros((4, 48), np.float32)
    assert LAYER(random((4, 64), 6), out=array).ctypes.data == array.ctypes.data
    # What comes in is not copied either: y changes with the memory that x is a view of.
    x = np.zeros((4, 64), np.float32)
    view = torch.from_numpy(x)
    x[:] = 1
    assert np.array_equal(LAYER(view).numpy(), LAYER(x))


class Foreign:
    """A tensor of a library that nobody knows: `__dlpack__` of an array, counted."""

    def __init__(self, array: Any, versions: bool = True) -> None:
        self.array, self.versions, self.calls = array, versions, 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        self.calls += 1
        if not self.versions and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versions", [True, False])
def test_a_library_that_is_not_known_gets_a_tensor_of_ours(versions: bool) -> None:
    x = random((4, 64), 7)
    y = LAYER(Foreign(x, versions))
    assert isinstance(y, halfbyte.Tensor)
    assert (y.shape, y.dtype, y.device) == ((4, 48), "float32", "cpu")
    for taken in (np.from_dlpack(y), torch.from_dlpack(y).numpy()):
        assert np.array_equal(taken, LAYER(x))
    # Both are views of one memory, which outlives the tensor.
    a, b = np.from_dlpack(y), torch.from_dlpack(y)
    del y
    assert a.ctypes.data == b.data_ptr() and np.array_equal(a, b.numpy())


def test_capsules_of_either_form_are_taken_once() -> None:
    y = LAYER(Foreign(random((4, 64), 7)))
    for options in ({}, {"max_version": (1, 0)}):
        capsule = y.__dlpack__(**options)
        torch.utils.dlpack.from_dlpack(capsule)
        with pytest.raises(RuntimeError):
            torch.utils.dlpack.from_dlpack(capsule)
    del capsule
    unused = y.__dlpack__()
    del unused  # Deletes its claim.
    with pytest.raises(BufferError):
        y.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        y.__dlpack__(copy=True)


def test_what_does_not_lie_row_by_row_is_right() -> None:
    base = random((64, 10), 8)
    expected = LAYER(np.ascontiguousarray(base.T))
    assert np.array_equal(LAYER(base.T), expected)
    assert np.array_equal(LAYER(torch.from_numpy(base).T).numpy(), expected)
    wide = random((5, 128), 9)
    assert np.array_equal(LAYER(wide[:, ::2]), LAYER(wide[:, ::2].copy()))
    assert np.array_equal(LAYER(wide[::-1, :64]), LAYER(wide[::-1, :64].copy()))
    assert np.array_equal(LAYER(torch.from_numpy(wide)[:, 3:67]).numpy(), LAYER(wide[:, 3:67].copy()))
    expanded = torch.from_numpy(wide[:1, :64]).expand(3, 64)
    assert np.array_equal(LAYER(expanded).numpy(), LAYER(np.repeat(wide[:1, :64], 3, 0)))
    # Not aligned for its type.
    raw = np.zeros(4 * 64 + 1, np.uint8)
    odd = np.ndarray((1, 64), np.float32, raw.data, 1)
    odd[:] = wide[:1, :64]
    assert np.array_equal(LAYER(odd), LAYER(wide[:1, :64].copy()))


def test_read_only_arrays_are_read_and_never_written() -> None:
    x, out = random((4, 64), 10), np.zeros((4, 48), np.float32)
    expected = LAYER(x)
    x.flags.writeable = False
    assert np.array_equal(LAYER(x), expected)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        LAYER(x, out=out)
    assert not out.any()


def test_empty_tensors() -> None:
    for shape in ((0, 64), (3, 0, 64), (0, 0, 64)):
        assert LAYER(np.zeros(shape, np.float32)).shape == (*shape[:-1], 48)
        assert LAYER(torch.zeros(shape)).shape == (*shape[:-1], 48)
    assert halfbyte.Linear(np.zeros((0, 64), np.float32))(np.zeros((2, 64), np.float32)).shape == (2, 0)


@pytest.mark.parametrize("x", [np.zeros((4, 63), np.float32), np.zeros((64, 4), np.float32), np.float32(1) * np.ones(()), np.zeros((0,), np.float32)])
def test_another_shape(x: Any) -> None:
    with pytest.raises(ValueError, match=r"linear: expected an x of shape \(\.\.\., 64\), got shape"):
        LAYER(x)
    with pytest.raises(ValueError, match="linear: expected an x of shape"):
        LAYER(torch.from_numpy(np.asarray(x)))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int8", "bool", "complex64", ">f4", "datetime64[s]", "U4"])
def test_another_type(dtype: str) -> None:
    with pytest.raises((TypeError, ValueError), match="expected"):
        LAYER(np.zeros((4, 64), dtype))


@pytest.mark.parametrize("x", [None, 1, "x", [[0.0] * 64], b"\0" * 256, memoryview(bytearray(256)), object()])
def test_no_tensor_at_all(x: Any) -> None:
    with pytest.raises(TypeError, match="x: expected a tensor with __dlpack__"):
        LAYER(x)


def test_tensors_of_torch_that_have_no_memory_or_a_gradient() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        LAYER(torch.zeros(4, 64, device="meta"))
    with pytest.raises(ValueError, match=r"halfbyte.torch.Linear computes gradients, x.detach\(\) goes without"):
        LAYER(torch.zeros(4, 64, requires_grad=True))
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        LAYER(torch.zeros(4, 64).to_sparse())
    with pytest.raises((ValueError, TypeError)):
        LAYER(torch.zeros(4, 64, dtype=torch.float64))
    assert torch.equal(LAYER(torch.nn.Parameter(torch.ones(1, 64), requires_grad=False)), LAYER(torch.ones(1, 64)))


def test_outputs_that_do_not_fit() -> None:
    x = random((4, 64), 11)
    with pytest.raises(ValueError, match=r"expected an out of shape \(4, 48\), got \(48, 4\)"):
        LAYER(x, out=np.zeros((48, 4), np.float32))
    with pytest.raises(TypeError, match="expected an out of float32, got float16"):
        LAYER(x, out=np.zeros((4, 48), np.float16))
    with pytest.raises(ValueError, match="out: expected a tensor whose elements lie row by row"):
        LAYER(x, out=np.zeros((48, 4), np.float32).T)
    room = np.zeros((4, 64), np.float32)
    with pytest.raises(ValueError, match="shares memory with x"):
        LAYER(room, out=room.reshape(-1)[: 4 * 48].reshape(4, 48))
    with pytest.raises(TypeError):
        LAYER(x, out=[0])


def test_a_device_that_is_not_there() -> None:
    if halfbyte.cuda_device_count():
        pytest.skip("there is a GPU: test_cuda.py tests it")
    with pytest.raises(RuntimeError):
        halfbyte.Linear(W, format="w4a16-g32", device="cuda")
    with pytest.raises(ValueError, match='device: expected cpu, cuda or cuda:N, got "tpu"'):
        halfbyte.Linear(W, format="w4a16-g32", device="tpu")


def test_devices_may_be_what_torch_calls_them() -> None:
    assert halfbyte.Linear(W, format="w4a16-g32", device=torch.device("cpu")).device == "cpu"


def test_layers_of_bytes_are_copied_as_others_are() -> None:
    codes = np.ones((2, 4, 1, 1), np.int8)
    for layer in (halfbyte.LinearInt8(codes[:, :, 0, 0], 0.1, x_scale=0.1), halfbyte.Conv2dInt8(codes, 0.1, x_scale=0.1)):
        assert copy.copy(layer) is layer and copy.deepcopy({"layer": layer})["layer"] is layer
