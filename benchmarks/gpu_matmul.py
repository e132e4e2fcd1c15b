"""Matmul kernels on a GPU, variant by variant: shapes of Qwen3 in decoding and prefill, random bf16 weights.

    python benchmarks/gpu_matmul.py --models 0.6b 8b --rows 1 8 32 512 4096 --json results.json

Launches of a variant are one CUDA graph that walks through copies of the weights, so that they come from memory and not
from the L2 cache, with programmatic dependent launch as in a model. A line is a variant; `*` marks the planner's own.
All variants of a case must give the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlx.backends.cuda.gpu import Gpu, gpu
from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, KernelPlan, entry
from rlx.backends.cuda.matmul.generator import MatmulGenerator, RowsChoice, plan_rows, plan_tiles, tile_choices
from rlx.backends.cuda.matmul.tiles import Tile
from rlx.backends.cuda.matmul.warpgroups import GroupTile
from rlx.backends.cuda.modules import load_variants
from rlx.dtypes import BF16, F32
from rlx.lir.kernels import Epilogue, EpilogueOperand, MatmulKernel
from rlx.lir.loops import Let, Ref

SHAPES = {  # hidden, intermediate, rows of q k v, columns of o; the vocabulary has 151,936 tokens
    "0.6b": (1024, 3072, 4096, 2048), "1.7b": (2048, 6144, 4096, 2048), "8b": (4096, 12288, 6144, 4096),
}  # fmt: skip
VOCABULARY = 151_936
SPREAD = 256 << 20  # bytes that the copies of a case cover at least
PATTERN = 1 << 22  # random numbers, which repeat
SCRATCH = 1 << 30
FEW = 8
LARGE = 512  # rows from which every tile is tried
GROUPS, RIVALS = 8, 5  # variants of groups of warps and of others per case


@dataclass(frozen=True)
class Case:
    """A product: C[m, n] = A[m, k] B[k, n] with one or two weights."""

    model: str
    part: str
    m: int
    n: int
    k: int
    weights: int

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * 2 * self.weights

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.weights


def cases(models: list[str], rows: list[int]) -> Iterator[Case]:
    for model in models:
        hidden, ffn, qkv, query = SHAPES[model]
        for m in rows:
            yield Case(model, "qkv", m, qkv, hidden, 1)
            yield Case(model, "o", m, hidden, query, 1)
            yield Case(model, "gate up", m, ffn, hidden, 2)
            yield Case(model, "down", m, hidden, ffn, 1)
            if m <= FEW:
                yield Case(model, "head", m, VOCABULARY, hidden, 1)


def kernel_of(case: Case, narrow: bool) -> MatmulKernel:
    """A residual addition, or a gate; A is f32 or bf16."""
    acc, x = Ref("acc", F32), Ref("x0", F32)
    gate = acc / ((-acc).exp() + 1.0) * Ref("acc1", F32)
    value = gate if case.weights == 2 else acc + x
    epilogue = Epilogue("epilogue", (Let("v", value),), (Ref("v", F32),))
    operands = (EpilogueOperand("x0", F32, True), EpilogueOperand("y1", F32, True, True))
    kind, stored, sums = (BF16, None, F32) if narrow else (F32, BF16, None)
    return MatmulKernel(kind, None, case.weights, epilogue, operands, sums=sums, stored=stored)


class Bench:
    """Memory and launches on a device."""

    def __init__(self, device: Gpu, cases: list[Case]) -> None:
        self.device = device
        pattern = np.random.default_rng(0).standard_normal(PATTERN, np.float32) * 0.03
        self.pool = max(SPREAD, *(case.weight_bytes for case in cases))
        self.weights = self._filled(pattern.astype(ml_dtypes.bfloat16), self.pool)
        left, result = max(case.m * case.k for case in cases), max(case.m * case.n for case in cases)
        self.a = {kind: self._filled((pattern * 33).astype(kind.numpy), left * kind.size) for kind in (BF16, F32)}
        self.x, self.out = self._filled(pattern, result * 4), device.allocate(result * 4)
        # Counters must stay zero, so plans without them have memory of their own.
        self.scratches = {zeroed: device.allocate(SCRATCH) for zeroed in (False, True)}
        device.clear(self.scratches[True], SCRATCH)

    def _filled(self, values: Any, size: int) -> int:
        """Memory with these values, over and over."""
        values = values[: -(-size // values.itemsize)]
        address = self.device.allocate(max(size, values.nbytes))
        self.device.upload(address, values)
        done = values.nbytes
        while done < size:
            step = min(done, size - done)
            self.device.copy(address + done, address, step)
            done += step
        return address

    def sizes(self, case: Case, kernel: MatmulKernel) -> dict[str, int]:
        words = {w: 0 for w in kernel.words} | dict.fromkeys(kernel.operands(), -1)
        words |= {"m": case.m, "n": case.n, "k": case.k, "batch0": 1, "batch1": 1, "a_row": case.k, "b_k": 1}
        return words | {"b_n": case.k, "x0_row": case.n, "y1_row": case.n}

    def seconds(self, case: Case, kernel: MatmulKernel, plan: KernelPlan) -> float:
        """Seconds of a launch, the median of several graphs."""
        device, sizes = self.device, self.sizes(case, kernel)
        functions = load_variants([(kernel, p.variant, p.shared) for p in plan.passes], device.target, device)
        copies = max(1, self.pool // case.weight_bytes)
        launches = []
        for copy in range(copies):
            start = self.weights + copy * case.weight_bytes
            places = {
                "a": self.a[kernel.dtype],
                "b": start,
                "b1": start + case.n * case.k * 2,
                "x0": self.x,
                "y1": self.out,
            }
            words = [places.get(w, sizes[w]) for w in kernel.words]
            launches.append(np.array([*words, self.scratches[plan.zeroed > 0], 0, 0], np.int64))
        assert len(launches[0]) == len(kernel.words) + len(EXTRA_WORDS)
        count = max(4, min(200, math.ceil(1e-3 / (case.weight_bytes / 4e12 + case.flops / 5e14 + 2e-6))))
        device.activate()
        with device.capture() as graphs:
            for i in range(count):
                for one in plan.passes:
                    function = functions[kernel.symbol, one.variant]
                    device.launch(function, one.grid, one.threads, one.shared, launches[i % copies])
        device.replay(graphs[0])
        events = [device.event()]
        for _ in range(5):
            device.replay(graphs[0])
            events.append(device.event())
        device.synchronize()
        times = sorted(device.seconds(a, b) for a, b in itertools.pairwise(events))
        device.destroy(graphs[0])
        return times[len(times) // 2] / count

    def bits(self, case: Case, kernel: MatmulKernel, plan: KernelPlan) -> bytes:
        """The first and last rows of the result for the first copy of the weights."""
        device, sizes = self.device, self.sizes(case, kernel)
        functions = load_variants([(kernel, p.variant, p.shared) for p in plan.passes], device.target, device)
        places = {"a": self.a[kernel.dtype], "b": self.weights, "b1": self.weights + case.n * case.k * 2, "x0": self.x}
        words = [(places | {"y1": self.out}).get(w, sizes[w]) for w in kernel.words]
        device.clear(self.out, case.m * case.n * 4)
        device.activate()
        for one in plan.passes:
            function = functions[kernel.symbol, one.variant]
            device.launch(
                function,
                one.grid,
                one.threads,
                one.shared,
                np.array([*words, self.scratches[plan.zeroed > 0], 0, 0], np.int64),
            )
        values = np.zeros((2, min(case.m, 16), case.n), np.float32)
        for part, row in zip(values, (0, case.m - values.shape[1]), strict=True):
            device.download(part, self.out + row * case.n * 4)
        return values.tobytes()


def plans(case: Case, kernel: MatmulKernel, words: dict[str, int], device: Gpu) -> dict[str, KernelPlan]:
    """The planner's own choice, and its rivals."""
    target, rivals = device.target, dict[str, KernelPlan]()

    def add(plan: KernelPlan | None) -> None:
        if plan is not None:
            one = plan.passes[-1]
            rivals.setdefault(f"{one.variant} {one.grid[0]}x{one.grid[1]} {one.threads}", plan)

    add(MatmulGenerator().plan(kernel, words, target))
    if case.m <= FEW:
        heights = (16, 32) if case.weights == 2 else (8, 16)
        for height, teams in [(height, teams) for height in heights for teams in (1, 2)]:
            add(plan_rows(kernel, words, target, choice=RowsChoice(height, teams)))
    if case.m >= FEW:
        choices = sorted(tile_choices(kernel, words, target), key=lambda c: c.seconds)
        choices = [c for c in choices if case.m >= LARGE or c.tile.rows <= 2 * case.m]
        groups = [c for c in choices if isinstance(c.tile, GroupTile)]
        alone = [c for c in choices if isinstance(c.tile, Tile)]
        best = {choice.tile.name: choice for choice in reversed(alone)}.values()  # of each tile, the best split
        for choice in (*groups[:GROUPS], *sorted(best, key=lambda c: c.seconds)[: 1 if case.m >= LARGE else RIVALS]):
            add(plan_tiles(kernel, words, target, choice=choice))
    return rivals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["0.6b", "8b"], choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 512, 4096])
    parser.add_argument("--seconds", type=float, default=80.0, help="stop after this time")
    parser.add_argument("--all", action="store_true", help="print every variant, not the best five")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, start, results, unequal = gpu(), time.perf_counter(), list[dict[str, Any]](), 0
    bench = Bench(device, list(cases(args.models, args.rows)))
    todo = [
        (case, narrow)
        for case in cases(args.models, args.rows)
        for narrow in ((False, True) if case.m > FEW else (False,))
    ]
    work = [(case, narrow, kernel := kernel_of(case, narrow), bench.sizes(case, kernel)) for case, narrow in todo]
    every = {
        entry(kernel, p.variant): (kernel, p.variant, p.shared)
        for case, _, kernel, words in work
        for plan in plans(case, kernel, words, device).values()
        for p in plan.passes
    }
    for case, _, kernel, words in work:  # the most shared memory of each
        for plan in plans(case, kernel, words, device).values():
            for p in plan.passes:
                name = entry(kernel, p.variant)
                every[name] = (kernel, p.variant, max(p.shared, every[name][2]))
    load_variants(list(every.values()), device.target, device)
    print(f"{device.name}: {len(every)} kernels compiled and loaded in {time.perf_counter() - start:.1f} s")
    print(f"{'model':6} {'part':8} {'m':>5} {'a':4} {'variant, grid, threads':34} {'us':>8} {'TB/s':>6} {'TFLOP/s':>8}")
    for case, _, kernel, words in work:
        if time.perf_counter() - start > args.seconds:
            print(f"stopped after {args.seconds:.0f} s")
            break
        lines, first = [], b""
        for number, (name, plan) in enumerate(plans(case, kernel, words, device).items()):
            bits = bench.bits(case, kernel, plan)
            first = first or bits
            unequal += bits != first
            seconds = bench.seconds(case, kernel, plan)
            lines.append((seconds, ("*" if number == 0 else " ") + name + (" UNEQUAL" if bits != first else "")))
        lines.sort()
        for rank, (seconds, name) in enumerate(lines):
            speed, rate = case.weight_bytes / seconds / 1e12, case.flops / seconds / 1e12
            results.append({"model": case.model, "part": case.part, "m": case.m, "a": str(kernel.dtype),
                            "variant": name, "us": seconds * 1e6, "TB/s": speed, "TFLOP/s": rate})  # fmt: skip
            if args.all or rank < RIVALS or name.startswith("*"):
                where = f"{case.model:6} {case.part:8} {case.m:5} {kernel.dtype!s:4} {name:34}"
                print(f"{where} {seconds * 1e6:8.2f} {speed:6.2f} {rate:8.1f}")
    print(f"{unequal} variants with other bits; {time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
