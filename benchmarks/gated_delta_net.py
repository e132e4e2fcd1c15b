"""The gated delta net: its kernels against each other, against the same recurrence as a compiled scan, and the machine.

    python benchmarks/gated_delta_net.py [--seq 2048] [--heads 16] [--dim 128] [--repeat 5] [--json PATH]

One thread, processor time, the best of several runs. `chunks` is the op on the whole sequence; `tokens` is the kernel
that goes token by token, which the op uses for pieces that are shorter than a chunk, so it gets the sequence in such
pieces; `calls` is the same kernel as a model that generates runs it, one call a token, the state in place. `scan` is
the common form that a profile may ask for. `gradient` is a forward pass that keeps what it needs, and the way back.
The peak is what f32 multiply-adds reach at most on this machine, as `rlx` measures it for its reports; the floor is the
time that the multiply-adds of the recurrence itself would take there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from harness import command, describe_machine, timestamp, write_json

import rlx
from rlx.backends.base import backend
from rlx.ops.recurrent import CHUNK
from rlx.transforms import value_and_grad

NAMES = ("q", "k", "v", "g", "beta")
Arrays = Mapping[str, np.ndarray]


def graph(heads: int, dim: int, *, carried: bool = False) -> rlx.Graph:
    g = rlx.Graph("gated_delta_net")
    wide = [g.input(name, ("batch", "seq", heads, dim)) for name in NAMES[:3]]
    rates = [g.input(name, ("batch", "seq", heads)) for name in NAMES[3:]]
    if not carried:
        return g.set_outputs([g.gated_delta_net(*wide, *rates, state_size=dim)])
    state = g.state("state", ("batch", heads, dim, dim))
    return g.set_outputs(g.gated_delta_net_carry(*wide, *rates, state, state_size=dim)[:1])


def numbers(seq: int, heads: int, dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, seq, heads, dim)) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.uniform(0, 0.1, (1, seq, heads)), rng.uniform(0, 1, (1, seq, heads))
    return {n: x.astype(np.float32) for n, x in zip(NAMES, (q, k, v, g, beta), strict=True)}


def in_pieces(length: int, inputs: Arrays, heads: int, dim: int) -> Callable[[], np.ndarray]:
    """The sequence in pieces of so many tokens, the state in place."""
    f = rlx.compile(graph(heads, dim, carried=True), threads=1)
    seq = inputs["q"].shape[1]
    pieces = [{n: x[:, i : i + length].copy() for n, x in inputs.items()} for i in range(0, seq, length)]

    def run() -> np.ndarray:
        state = np.zeros((1, heads, dim, dim), np.float32)
        return np.concatenate([f.run({**piece, "state": state})[0] for piece in pieces], axis=1)

    return run


def subjects(inputs: Arrays, heads: int, dim: int) -> dict[str, Callable[[], Any]]:
    common = rlx.CompileProfile().with_kernel_dispatch(rlx.KernelDispatchPolicy.FORCE_COMMON)
    chunks = rlx.compile(graph(heads, dim), threads=1)
    scan = rlx.compile(graph(heads, dim), threads=1, profile=common)
    summed = graph(heads, dim)
    summed.set_outputs([summed.outputs[0].sum()])
    gradient = rlx.compile(value_and_grad(summed, NAMES), threads=1)
    return {
        "chunks": lambda: chunks.run(inputs)[0],
        "tokens": in_pieces(CHUNK - 1, inputs, heads, dim),
        "calls": in_pieces(1, inputs, heads, dim),
        "scan": lambda: scan.run(inputs)[0],
        "gradient": lambda: gradient.run(inputs),
    }


def best_time(run: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """The best processor time; the first run also plans."""
    best, result = float("inf"), run()
    for _ in range(repeat):
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
    return best, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("seq", 2048), ("heads", 16), ("dim", 128), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    inputs = numbers(args.seq, args.heads, args.dim)
    # A token reads the matrix of a head twice and changes it once: a multiply-add each, for each of its elements.
    flops = 6.0 * args.seq * args.heads * args.dim**2
    times, results = {}, {}
    for name, run in subjects(inputs, args.heads, args.dim).items():
        times[name], results[name] = best_time(run, args.repeat)
    peak = backend("cpu").ceilings(rlx.Session("cpu").target, 1).gflops
    floor = flops / peak / 1e9
    print(f"gated_delta_net, seq {args.seq}, {args.heads} heads of {args.dim}, f32, 1 thread")
    print(f"peak {peak:.0f} GFLOP/s, so that a forward pass takes {floor * 1e3:.1f} ms at least")
    for name, seconds in times.items():
        share, gain = floor / seconds, times["scan"] / seconds
        print(f"  {name:8} {seconds * 1e3:8.1f} ms  {share:5.0%} of the peak  {gain:5.2f} x scan")
    ratios = {f"chunks over {name}": times[name] / times["chunks"] for name in ("tokens", "calls", "scan")}
    ratios["backward over forward"] = times["gradient"] / times["chunks"] - 1
    for name, ratio in ratios.items():
        print(f"  {name}: {ratio:.2f}")
    largest = np.abs(results["scan"]).max()
    errors = {n: float(np.abs(results[n] - results["scan"]).max() / largest) for n in ("chunks", "tokens", "calls")}
    print("  they differ from the scan by " + ", ".join(f"{e:.0e}" for e in errors.values()) + " of the largest")
    if args.json:
        write_json(args.json, {
            "machine": describe_machine(), "date": timestamp(), "command": command(), "peak_gflops": peak,
            "floor_ms": floor * 1e3, "best_ms": {n: s * 1e3 for n, s in times.items()}, "ratios": ratios,
            "differences": errors,
        })  # fmt: skip


if __name__ == "__main__":
    main()
