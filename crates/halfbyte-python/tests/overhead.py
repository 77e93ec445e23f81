"""What a call of a small Linear costs beside the call from Rust: python overhead.py [--device cuda].

Of each batch of calls the mean, of 50 batches the least and the median, in ns, batches of all calls in turns. "from Rust" is the
same product in a loop in Rust; "no rows" goes the way of a call and computes nothing.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--k", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cpu":
        halfbyte.set_num_threads(1)
    synchronize = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    weight = np.random.default_rng(0).standard_normal((args.n, args.k), dtype=np.float32)
    layer = halfbyte.Linear(weight, format="w4a16-g32", device=args.device)
    dense = torch.nn.Linear(args.k, args.n, bias=False, device=args.device)
    rows = {m: torch.randn(m, args.k, device=args.device) for m in (0, 1)}
    out = torch.empty(1, args.n, device=args.device)
    calls: dict[str, Callable[[], Any]] = {
        "no rows, torch": lambda: layer(rows[0]),
        "1 row, torch": lambda: layer(rows[1]),
        "1 row, torch, out given": lambda: layer(rows[1], out),
        "torch.nn.Linear, no gradient": lambda: dense(rows[1]),
        "torch.empty": lambda: torch.empty(1, args.n, device=args.device),
        "an empty call": lambda: None,
    }
    if args.device == "cpu":
        calls["1 row, numpy"] = lambda array=rows[1].numpy(): layer(array)
    print(f"({args.n}, {args.k}), w4a16-g32, {args.device}, {layer.kernel(1, 'float32')}; torch {torch.__version__}")
    batches: dict[str, Callable[[], float]] = {name: lambda c=call: batch(c, synchronize) for name, call in calls.items()}
    batches["1 row, from Rust"] = lambda: layer._time(CALLS)
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
