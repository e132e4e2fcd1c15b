"""The gated delta net: its own kernel against the same recurrence as a compiled scan, and both against the machine.

    python benchmarks/gated_delta_net.py [--seq 2048] [--heads 16] [--dim 128] [--repeat 5]

One thread, processor time, the best of several runs. The scan is the common form that a profile may ask for; the peak
is what f32 multiply-adds reach at most on this machine, as `rlx` measures it for its reports.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import rlx
from rlx.backends.cpu.ceilings import ceilings


def graph(heads: int, dim: int) -> rlx.Graph:
    g = rlx.Graph("gated_delta_net")
    wide = [g.input(name, ("batch", "seq", heads, dim)) for name in ("q", "k", "v")]
    rates = [g.input(name, ("batch", "seq", heads)) for name in ("g", "beta")]
    g.set_outputs([g.gated_delta_net(*wide, *rates, state_size=dim)])
    return g


def numbers(seq: int, heads: int, dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, seq, heads, dim)) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.uniform(0, 0.1, (1, seq, heads)), rng.uniform(0, 1, (1, seq, heads))
    return {n: x.astype(np.float32) for n, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("seq", 2048), ("heads", 16), ("dim", 128), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    common = rlx.CompileProfile().with_kernel_dispatch(rlx.KernelDispatchPolicy.FORCE_COMMON)
    inputs = numbers(args.seq, args.heads, args.dim)
    # A token reads the matrix of a head twice and changes it once: a multiply-add each, for each of its elements.
    flops = 6.0 * args.seq * args.heads * args.dim**2
    times, results = {}, {}
    for name, profile in (("kernel", rlx.CompileProfile()), ("scan", common)):
        f = rlx.compile(graph(args.heads, args.dim), threads=1, profile=profile)
        best = float("inf")
        for _ in range(args.repeat + 1):  # the first run also plans
            start = time.process_time()
            (results[name],) = f.run(inputs)
            best = min(best, time.process_time() - start)
        times[name] = best
    peak = ceilings(rlx.Session("cpu").target, 1).gflops
    print(f"gated_delta_net, seq {args.seq}, {args.heads} heads of {args.dim}, f32, 1 thread, peak {peak:.0f} GFLOP/s")
    for name, seconds in times.items():
        rate = flops / seconds / 1e9
        print(f"  {name:6} {seconds * 1e3:8.1f} ms  {rate:6.1f} GFLOP/s  {rate / peak:5.0%} of the peak")
    error = np.abs(results["kernel"] - results["scan"]).max() / np.abs(results["scan"]).max()
    print(f"  the kernel is {times['scan'] / times['kernel']:.1f}x as fast; they differ by {error:.0e} of the largest")


if __name__ == "__main__":
    main()
