"""The stream in which a tensor on a GPU may be used, by stand-ins for cupy and paddle: no GPU is needed."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import halfbyte
import halfbyte.paddle as quant

LAYER = halfbyte.Linear(np.ones((8, 16), np.float32), format="w4a16-g16")
# By the number of a device: its current stream.
STREAMS = {0: 100, 1: 101, 2: 102}


class OnDevice:
    """A tensor that says where it lies, notes for which stream it is asked, and is not handed out."""

    def __init__(self, index: int) -> None:
        self.index, self.asked = index, 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __dlpack__(self, *, stream: int, **_: Any) -> Any:
        self.asked = stream
        raise BufferError("noted")


def asked(library: str, index: int) -> int:
    x = type("Tensor", (OnDevice,), {"__module__": f"{library}.core"})(index)
    with pytest.raises(ValueError, match="noted"):
        LAYER(x)
    return int(x.asked)


def test_of_cupy_it_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def get_current_stream() -> Any:
        return types.SimpleNamespace(ptr=STREAMS[current[-1]])

    cupy = types.ModuleType("cupy")
    cupy.__dict__["cuda"] = types.SimpleNamespace(Device=Device, get_current_stream=get_current_stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert [asked("cupy", index) for index in STREAMS] == list(STREAMS.values()) and current == [1]
    # An error leaves the device that was the current one.
    with pytest.raises(KeyError):
        LAYER(type("Tensor", (OnDevice,), {"__module__": "cupy"})(9))
    assert current == [1]


class Stream:
    def __init__(self, raw: int) -> None:
        self.stream_base = types.SimpleNamespace(raw_stream=raw)


def test_of_paddle_it_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_stream(device: str = "gpu:1") -> Stream:
        return Stream(STREAMS[int(device.removeprefix("gpu:"))])

    paddle = types.ModuleType("paddle")
    paddle.__dict__["device"] = types.SimpleNamespace(current_stream=current_stream)
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    assert [asked("paddle", index) for index in STREAMS] == list(STREAMS.values())


def test_the_architecture_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Place:
        def is_gpu_place(self) -> bool:
            return True

        def gpu_device_id(self) -> int:
            return 2

    class Tensor:
        place = Place()

    def get_device_capability(device: int = 0) -> tuple[int, int]:
        return [(8, 0), (8, 6), (9, 0)][device]

    paddle = types.ModuleType("paddle")
    cuda = types.SimpleNamespace(get_device_capability=get_device_capability)
    paddle.__dict__.update(Tensor=Tensor, device=types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    assert quant._arch_of_device(Tensor()) == 90
