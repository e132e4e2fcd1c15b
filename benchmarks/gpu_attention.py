"""Attention kernels on a GPU: decode and prefill at the shape of Qwen3-8B, for every variant and number of workers.

    python benchmarks/gpu_attention.py

Launches kernels by themselves in CUDA graphs, one layer's cache after the other, so that caches come from memory.
Prints microseconds per launch, read speed of decode, TFLOP/s of prefill (of what the causal mask leaves), and whether
all variants of a case agree bit by bit. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from rlx.backends.cuda.attention import generator
from rlx.backends.cuda.gpu import Gpu, gpu
from rlx.backends.cuda.kernel_plan import KernelPlan, Pass
from rlx.backends.cuda.modules import load_variants
from rlx.dtypes import BF16, F32
from rlx.lir.kernels import AttentionKernel

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
DISTINCT_BYTES = 160 << 20  # of caches that launches rotate over: more than the L2 cache holds
KERNEL = AttentionKernel(
    F32, DIM, DIM, HEADS // KV_HEADS, "causal", 0, DIM**-0.5, 0.0, None, page=PAGE, cache_dtype=BF16, key_axes="sd"
)
Words = dict[str, int]


class Case:
    """Queries of a batch over the caches of several layers, on the GPU."""

    def __init__(self, device: Gpu, batch: int, queries: int, keys: int, capacity: int) -> None:
        self.device, self.batch, self.queries, self.keys = device, batch, queries, keys
        rng = np.random.default_rng(0)
        blocks = capacity // PAGE
        pages = batch * blocks
        self.pool_bytes = pages * KV_HEADS * PAGE * DIM * 2
        self.layers = max(1, min(64, DISTINCT_BYTES // (2 * batch * keys * KV_HEADS * DIM * 2)))
        numbers = rng.standard_normal((pages, KV_HEADS, PAGE, DIM), np.float32).astype(ml_dtypes.bfloat16)
        self.pools = [(self.upload(numbers), self.upload(numbers)) for _ in range(self.layers)]
        self.q = self.upload(rng.standard_normal((batch, queries, HEADS, DIM), np.float32))
        self.out = self.upload(np.zeros((batch, queries, HEADS, DIM), np.float32))
        positions = np.tile(np.arange(keys - queries, keys, dtype=np.int32), (batch, 1))
        self.positions = self.upload(positions)
        self.table = self.upload(rng.permutation(pages).astype(np.int32).reshape(batch, blocks))
        self.fault = self.upload(np.zeros(2, np.int32))
        row = HEADS * DIM
        head = PAGE * DIM
        self.words: Words = {
            "batch": batch, "q_len": queries, "capacity": capacity, "kv_heads": KV_HEADS, "pages": pages,
            "table_rows": batch, "q_batch": queries * row, "q_seq": row, "q_head": DIM, "out_batch": queries * row,
            "out_seq": row, "out_head": DIM, "k_page": KV_HEADS * head, "k_head": head, "k_seq": DIM,
            "v_page": KV_HEADS * head, "v_seq": DIM, "v_head": head, "positions_batch": queries, "table_row": blocks,
        }  # fmt: skip

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        address = self.device.allocate(array.nbytes)
        self.device.upload(address, np.ascontiguousarray(array))
        self._addresses = [*getattr(self, "_addresses", []), address]
        return address

    def free(self) -> None:
        for address in self._addresses:
            self.device.free(address)

    def launches(self, plan: KernelPlan, scratch: int) -> Iterator[Callable[[], None]]:
        """One launch per layer."""
        functions = load_variants([(KERNEL, p.variant, p.shared) for p in plan.passes], self.device.target, self.device)
        for k, v in self.pools:
            known = self.words | {"q": self.q, "k": k, "v": v, "out": self.out, "positions": self.positions}
            known["table"] = self.table
            words = np.array([*(known[w] for w in KERNEL.words), scratch, self.fault, 0], np.int64)
            for one in plan.passes:
                function = functions[KERNEL.symbol, one.variant]
                yield lambda f=function, p=one, w=words: self.device.launch(f, p.grid, p.threads, p.shared, w)  # type: ignore[misc]

    def measure(self, plan: KernelPlan, repeats: int) -> tuple[float, bytes]:
        """Seconds per layer, and the result of the last."""
        device = self.device
        scratch = device.allocate(plan.scratch + 256)
        device.clear(scratch, plan.zeroed)
        steps = list(self.launches(plan, scratch))
        with device.capture() as graphs:
            for step in steps:
                step()
        device.replay(graphs[0])
        device.synchronize()
        times = []
        for _ in range(repeats):
            start = device.event()
            device.replay(graphs[0])
            end = device.event()
            device.synchronize()
            times.append(device.seconds(start, end) / self.layers)
        result = np.zeros((self.batch, self.queries, HEADS, DIM), np.float32)
        device.download(result, self.out)
        fault = np.zeros(2, np.int32)
        device.download(fault, self.fault)
        assert not fault.any(), f"fault {fault}"
        device.destroy(graphs[0])
        device.free(scratch)
        return statistics.median(times), result.tobytes()


def plans(words: Mapping[str, int], device: Gpu) -> dict[str, KernelPlan]:
    """The plan of the generator, and others: tiles of rows, and splits with other numbers of workers."""
    target = device.target
    result = {"chosen": generator.AttentionGenerator().plan(KERNEL, words, target)}
    rows, units = words["q_len"] * KERNEL.group, words["batch"] * words["kv_heads"]
    kinds = ["rows", "rows_shared", *(["groups"] if generator.in_groups(KERNEL, target) else [])]
    for warps, kind in itertools.product((4, 8), kinds):
        if rows >= warps * 16:
            blocks = units * -(-rows // (warps * 16))
            queries, groups = kind == "rows_shared", kind == "groups"
            shared = generator.rows_shared(KERNEL, warps, target, queries=queries, groups=groups)
            name = f"{kind.split('_')[0]}_{warps * 16}" + "_shared" * queries
            result[name] = KernelPlan((Pass(name, (blocks, 1, 1), warps * 32, shared),))
    if rows <= 64:
        shared = generator.splits_shared(KERNEL, target)
        for resident in (1, 2, 4):
            wider = replace(target, processors=target.processors * resident, shared_bytes=shared + (9 << 10))
            for name in ("splits", "splits_early"):
                result[f"{name} x{resident}"] = generator.spread(KERNEL, name, words, wider, 1, shared)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    device = gpu()
    print(f"{device.name}, {HEADS}/{KV_HEADS} heads of {DIM}, f32 queries, bf16 cache in pages of {PAGE}")
    print(f"{'case':34} {'variant':16} {'grid':>12} {'us':>8} {'GB/s':>7} {'TFLOP/s':>8}  same bits")
    decode = [(1, 1, keys, capacity) for keys, capacity in ((512, 4352), (4096, 4352), (4096, 32768), (32768, 32768))]
    cases = [*decode, (8, 1, 512, 4352), (32, 1, 512, 1024), (1, 512, 512, 4352), (1, 4096, 4096, 4352)]
    for batch, queries, keys, capacity in cases:
        case = Case(device, batch, queries, keys, capacity)
        bits = None
        for name, plan in plans(case.words, device).items():
            seconds, result = case.measure(plan, repeats)
            bits = bits or result
            grid = "x".join(map(str, plan.passes[0].grid[:2]))
            pairs = batch * queries * (keys - (queries - 1) / 2)
            label = f"batch {batch}, queries {queries}, keys {keys}/{capacity}"
            variant = name if name != "chosen" else f"= {plan.passes[0].variant}"
            speed = batch * keys * KV_HEADS * DIM * 4 / seconds / 1e9
            rate = 4 * HEADS * DIM * pairs / seconds / 1e12
            same = "yes" if result == bits else "NO"
            print(f"{label:34} {variant:16} {grid:>12} {seconds * 1e6:8.2f} {speed:7.0f} {rate:8.1f}  {same}")
        case.free()


if __name__ == "__main__":
    main()
