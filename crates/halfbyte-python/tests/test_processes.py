"""Threads, the lock of the interpreter, forks, and the import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import STDLIB, random

import halfbyte


def test_many_threads_get_the_bits_of_one() -> None:
    layer = halfbyte.Linear(random((96, 128), 1), format="w4a8-g32")
    inputs = [random((1 + i % 7, 128), i) for i in range(16)]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def work(first: int) -> None:
        for i in range(200):
            at = (first + i) % len(inputs)
            if not np.array_equal(layer(inputs[at]), expected[at]):
                wrong.append(at)
            if i % 50 == 0:
                q = halfbyte.quantize(inputs[at], "w8a16")
                halfbyte.Linear(q)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_other_threads_run_while_one_computes() -> None:
    """Python counts while a product of a tenth of a second or more is computed: the lock is free."""
    layer, x = halfbyte.Linear(random((2048, 2048), 2)), random((512, 2048), 3)
    layer(x)
    done, counted = threading.Event(), 0

    def compute() -> None:
        for _ in range(4):
            layer(x)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # Nobody is made to hand the lock over: only who lets go of it does.
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        while not done.is_set():
            counted += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counted > 10


def test_the_number_of_threads() -> None:
    layer, x = halfbyte.Linear(random((256, 256), 4), format="w4a16-g64"), random((33, 256), 5)
    before, expected = halfbyte.get_num_threads(), layer(x)
    try:
        for threads in (1, 2, 3):
            halfbyte.set_num_threads(threads)
            assert halfbyte.get_num_threads() == threads and np.array_equal(layer(x), expected)
        for wrong in (0, -1, 4097, 2**64):
            with pytest.raises(ValueError, match=f"expected 1 to 4096 threads, got {wrong}"):
                halfbyte.set_num_threads(wrong)
    finally:
        halfbyte.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by Linux's files")
def test_threads_that_were_set_quantise_and_pack() -> None:
    program = (
        "import halfbyte, halfbyte.paddle, numpy as np, os\n"
        "w = np.random.default_rng(1).standard_normal((256, 256), dtype=np.float32)\n"
        "halfbyte.set_num_threads(1)\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = threads()\n"
        "halfbyte.Linear(halfbyte.quantize(w, 'w4a16-g64', search=True))(w)\n"
        "codes, scales = halfbyte.paddle.weight_quantize(w.astype(np.float16), 'llm.int8', 80)\n"
        "halfbyte.paddle.llm_int8_linear(w.astype(np.float16), codes, weight_scale=scales)\n"
        "assert threads() == before, (threads(), before)\n"
        "print('done')\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip() == "done", out.stderr


def _make_every_layer() -> None:
    codes = np.ones((300, 300), np.int8)
    assert halfbyte.LinearInt8(codes, 0.5, x_scale=0.5)(np.ones((2, 300), np.uint8)).shape == (2, 300)
    layer = halfbyte.Conv2dInt8(np.ones((64, 64, 3, 3), np.int8), 0.5, x_scale=0.5)
    assert layer(np.ones((1, 64, 4, 4), np.uint8)).shape == (1, 64, 2, 2)
    for format in (None, "w4a16-g32"):
        assert halfbyte.Linear(random((300, 320), 1), format=format).dequantize().shape == (300, 320)
        layer2d = halfbyte.Conv2d(random((64, 64, 3, 3), 1), format=format)
        assert layer2d(random((1, 64, 4, 4), 2)).shape == (1, 64, 2, 2)
    x = random((400, 64), 3)
    for method in ("gptq", "awq"):
        assert halfbyte.quantize(random((64, 64), 1), "w4a16-g32", method=method, inputs=x).shape == (64, 64)
    tensors = {"weight": random((300, 320), 1)}
    assert halfbyte.linear_from_tensors(tensors).out_features == 300


def _ends_well(child: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the forked process hangs")
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_what_threads_held_at_a_fork_is_not_waited_for() -> None:
    model, hessian, x = halfbyte.load(STDLIB), halfbyte.Hessian(1024), random((4096, 1024), 8)
    reading = [model.generate("def ", max_tokens=1000, ignore_end=True) for _ in range(4)]
    threads = [threading.Thread(target=list, args=(text,)) for text in reading]
    threads.append(threading.Thread(target=hessian.add, args=(x,)))
    [thread.start() for thread in threads]
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for text in reading:
                text.close()
            del reading, text
            try:
                hessian.rows  # noqa: B018
            except RuntimeError as error:
                assert "forked" in str(error)
            status = 0
        finally:
            os._exit(status)
    _ends_well(child, 60)
    for text in reading:
        text.close()
    [thread.join() for thread in threads]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_has_threads_of_its_own() -> None:
    layer, x = halfbyte.Linear(random((512, 512), 6), format="w4a16-g64"), random((64, 512), 7)
    model = halfbyte.load(STDLIB)
    expected, writing = layer(x), model.generate("def ", max_tokens=1000)
    hessian = halfbyte.Hessian(512)
    hessian.add(x)
    next(writing)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert np.array_equal(layer(x), expected)
            quantised = halfbyte.quantize(random((512, 512), 6), "w4a16-g64")
            assert np.array_equal(halfbyte.Linear(quantised)(x), expected)
            _make_every_layer()
            assert "".join(model.generate("def ", max_tokens=3, ignore_end=True))
            with pytest.raises(RuntimeError, match="forked"):
                next(writing)
            writing.close()
            del writing
            hessian.add(x)
            assert hessian.rows == 128
            status = 0
        finally:
            os._exit(status)
    _ends_well(child, 120)
    writing.close()


def test_the_import_brings_no_other_library() -> None:
    program = (
        "import sys; before = set(sys.modules); import halfbyte; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; print(sorted(new - {'halfbyte'}))"
    )
    out = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": _path()})
    assert out.returncode == 0, out.stderr
    assert not {"numpy", "torch", "json"} & set(eval(out.stdout)), out.stdout


def _path() -> str:
    return os.path.dirname(os.path.dirname(halfbyte.__file__))


@pytest.mark.parametrize("read", ["[None for _ in text]", "list(text)", "''.join(text)"])
def test_ctrl_c_ends_a_text(read: str) -> None:
    program = (
        "import halfbyte, signal, threading, os\n"
        f"model = halfbyte.load({str(STDLIB)!r})\n"
        # A signal may fall between the last token of a text and its end: then once more.
        "for seconds in [1.0, 0.7, 1.3, 0.9, 1.1]:\n"
        "    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "    try:\n"
        "        while True:\n"
        "            text = model.generate('def ', max_tokens=400, ignore_end=True)\n"
        f"            {read}\n"
        "            assert len(text.tokens) == 400\n"
        "    except KeyboardInterrupt:\n"
        "        if len(text.tokens) < 400: break\n"
        "print(text.finish_reason, len(text.tokens) < 400)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": _path()})
    # A loop hears of it between two pieces, too, and has not closed the text then.
    assert out.stdout.strip() in ("cancelled True", "None True"), out.stderr


def test_threads_share_a_hessian_where_their_number_was_set() -> None:
    """No thread of the pool waits for what it holds itself."""
    program = (
        "import halfbyte, numpy as np, threading\n"
        "halfbyte.set_num_threads(2)\n"
        "hessian, x = halfbyte.Hessian(256), np.random.default_rng(1).normal(size=(64, 256)).astype('f4')\n"
        "def work():\n"
        "    for _ in range(40): hessian.add(x)\n"
        "    for method in ('gptq', 'awq'): halfbyte.quantize(x, 'w4a16-g128', method=method, hessian=hessian)\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(hessian.rows)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": _path()})
    assert out.stdout.strip() == str(4 * 40 * 64), out.stderr


@pytest.mark.parametrize("threads", [None, 2])
def test_ctrl_c_ends_the_work_on_a_model(threads: int | None, tmp_path: Path) -> None:
    """In the middle of the work: nothing is left then. A machine may be done before it comes, so it comes sooner each time."""
    out = tmp_path / "out"
    for seconds in (0.3, 0.1, 0.03):
        program = (
            "import halfbyte, os, signal, threading\n"
            f"halfbyte.set_num_threads({threads})\n"
            f"threading.Timer({seconds}, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
            "try:\n"
            "    while True:\n"
            f"        halfbyte.quantize_model({str(STDLIB)!r}, {str(out)!r}, 'w4a16-g32', search=True, overwrite=True)\n"
            "except KeyboardInterrupt: print('interrupted')\n"
        )
        told = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": _path()}
        )
        assert told.stdout.strip() == "interrupted", told.stderr
        left = [path.name for path in tmp_path.iterdir()]
        if not left:
            return
        # What is there is whole.
        assert left == ["out"] and halfbyte.inspect(out)["findings"] == []
        shutil.rmtree(out)
    raise AssertionError("the work went on to its end")
