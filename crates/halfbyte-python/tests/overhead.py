"""What a call of a small Linear costs beside the call from Rust: python overhead.py [--device cuda] [--dtype float16].

Of each batch of calls the mean, of 50 batches the least and the median, in ns, batches of all calls in turns. "from Rust" is the
same product of the same tensors in a loop in Rust, in the same stream; "no rows" goes the way of a call and computes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import halfbyte

BATCHES, CALLS = 50, 400


def batch(call: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    synchronize()
    begun = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begun) / CALLS


def timed(layer: halfbyte.Linear, x: torch.Tensor, out: torch.Tensor, synchronize: Callable[[], Any]) -> float:
    synchronize()
    return layer._time(x, out, CALLS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--k", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cpu":
        halfbyte.set_num_threads(1)
    synchronize = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    weight = np.random.default_rng(0).standard_normal((args.n, args.k), dtype=np.float32)
    layer = halfbyte.Linear(weight, format="w4a16-g32", device=args.device)
    kind = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    dense = torch.nn.Linear(args.k, args.n, bias=False, **kind)
    rows = {m: torch.randn(m, args.k, **kind) for m in (0, 1)}
    out = {m: torch.empty(m, args.n, **kind) for m in (0, 1)}
    calls: dict[str, Callable[[], Any]] = {
        "no rows, torch": lambda: layer(rows[0]),
        "1 row, torch": lambda: layer(rows[1]),
        "no rows, torch, out given": lambda: layer(rows[0], out[0]),
        "1 row, torch, out given": lambda: layer(rows[1], out[1]),
        "torch.nn.Linear, no gradient": lambda: dense(rows[1]),
        "torch.empty": lambda: torch.empty(1, args.n, **kind),
        "an empty call": lambda: None,
    }
    if args.device == "cpu":
        calls["1 row, numpy"] = lambda array=rows[1].numpy(): layer(array)
    print(f"({args.n}, {args.k}), w4a16-g32, {args.dtype}, {args.device}, {layer.kernel(1, args.dtype)}; torch {torch.__version__}")
    batches: dict[str, Callable[[], float]] = {name: lambda c=call: batch(c, synchronize) for name, call in calls.items()}
    batches["1 row, from Rust"] = lambda: timed(layer, rows[1], out[1], synchronize)
    times: dict[str, list[float]] = {name: [] for name in batches}
    with torch.no_grad():
        for _ in range(BATCHES):
            for name, of in batches.items():
                times[name].append(of())
    for name, each in times.items():
        each.sort()
        print(f"{name:32} least {each[0]:8.0f} ns   median {each[len(each) // 2]:8.0f} ns")


if __name__ == "__main__":
    main()
