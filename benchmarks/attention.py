"""Causal attention with grouped heads: rlx (f32, and over an f16 cache) against torch's scaled_dot_product_attention.

Prefill is a whole prompt. Decode is one token over the keys and values of all layers before it, one layer after the
other, so that long caches come from memory. Prints GFLOPS as median/best, how many times as fast rlx is as torch, how
fast caches are read, and fractions of the FMA peak measured in the same run; `--json` keeps every round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from ceilings import timed
from command import chosen, one_run, options, pair, print_rows
from gemm import fractions
from harness import Case, CaseResult, Library, Prepared, Result, compare, geometric_mean, print_end, print_heading

HEADS = ((9, 3, 64), (12, 2, 128))  # query heads, key heads, their size: those of SmolLM2-135M and Qwen2.5-1.5B
LENGTHS = (128, 1024, 4096)
LAYER_BYTES = 192 << 20  # of the f32 caches of a decode step: more than stays near the processor
OURS, HALF, PEER = "rlx", "rlx f16", "torch"
LIBRARIES = (
    Library(OURS, "attention:rlx_f32", ("rlx",)),
    Library(HALF, "attention:rlx_f16", ("rlx",)),
    Library(PEER, "attention:torch_sdpa", ("torch",)),
)

Tensors = tuple[np.ndarray, np.ndarray, np.ndarray]


def prefill_case(heads: int, kv_heads: int, size: int, length: int) -> Case:
    dims = {"queries": length, "keys": length, "heads": heads, "kv_heads": kv_heads, "size": size, "layers": 1}
    flops = 4.0 * heads * size * length * (length + 1) / 2  # of what the mask leaves
    bytes_ = 4.0 * length * size * (2 * heads + kv_heads)  # at least: keys and values may be halves
    return Case(f"prefill {heads}/{kv_heads}x{size} S={length}", dims, flops, bytes_)


def decode_case(heads: int, kv_heads: int, size: int, length: int) -> Case:
    layers = min(max(LAYER_BYTES // (8 * length * kv_heads * size), 1), 64)
    dims = {"queries": 1, "keys": length, "heads": heads, "kv_heads": kv_heads, "size": size, "layers": layers}
    flops, bytes_ = 4.0 * heads * size * length * layers, 4.0 * length * kv_heads * size * layers
    return Case(f"decode {heads}/{kv_heads}x{size} S={length}", dims, flops, bytes_)


def operands(case: Case) -> Tensors:
    """q, k, v `[seq, heads, size]`, the same in every process and layer; k and v are numbers that f16 has."""
    d, rng = case.dims, np.random.default_rng(0)
    q = rng.standard_normal((d["queries"], d["heads"], d["size"]), dtype=np.float32)
    k, v = (rng.standard_normal((d["keys"], d["kv_heads"], d["size"]), dtype=np.float32) for _ in range(2))
    return q, *(x.astype(np.float16).astype(np.float32) for x in (k, v))  # type: ignore[return-value]


def reference(case: Case) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in operands(case))
    result, group = np.empty(q.shape), q.shape[1] // k.shape[1]
    past = k.shape[0] - q.shape[0]
    for head in range(q.shape[1]):
        for at in range(0, q.shape[0], 512):
            rows = slice(at, min(at + 512, q.shape[0]))
            seen = past + rows.stop
            scores = q[rows, head] @ k[:seen, head // group].T / q.shape[2] ** 0.5
            scores[np.arange(seen) > past + np.arange(rows.start, rows.stop)[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            result[rows, head] = weights @ v[:seen, head // group] / weights.sum(axis=1, keepdims=True)
    return result


# -- libraries --------------------------------------------------------------------------------------------------------
def rlx_f32(case: Case, threads: int) -> Prepared:
    """The plain op for a prompt, the cache for a token."""
    return rlx_cached(case, threads, "f32") if case.dims["queries"] == 1 else rlx_plain(case, threads)


def rlx_f16(case: Case, threads: int) -> Prepared:
    return rlx_cached(case, threads, "f16")


def rlx_plain(case: Case, threads: int) -> Prepared:
    import rlx

    graph, arrays = rlx.Graph("attention"), operands(case)
    q, k, v = (graph.input(name, (1, "seq", *x.shape[1:])) for name, x in zip("qkv", arrays, strict=True))
    compiled = rlx.compile(graph.set_outputs(q.attention(k, v, mask_kind="causal")), threads=threads)
    feed = {name: x[None] for name, x in zip("qkv", arrays, strict=True)}
    return Prepared(lambda: compiled.run(feed), lambda: np.array(compiled.run(feed)[0][0]))


def rlx_cached(case: Case, threads: int, dtype: str) -> Prepared:
    import rlx

    d, (q, k, v) = case.dims, operands(case)
    graph, blocks = rlx.Graph("attention"), rlx.dim("blocks")
    query = graph.input("q", (1, "seq", d["heads"], d["size"]))
    at = graph.input("positions", (1, "seq"), "i32")
    keys = graph.state("keys", (1, d["kv_heads"], blocks, d["size"], 64), dtype)
    values = graph.state("values", (1, d["kv_heads"], blocks * 64, d["size"]), dtype)
    compiled = rlx.compile(graph.set_outputs(query.cached_attention(keys, values, at)), threads=threads)
    kind = np.float16 if dtype == "f16" else np.float32
    in_blocks = k.reshape(-1, 64, *k.shape[1:]).transpose(2, 0, 3, 1)[None].astype(kind)
    rows = v.transpose(1, 0, 2)[None].astype(kind)
    places = np.arange(d["keys"] - d["queries"], d["keys"], dtype=np.int32)[None]
    feeds = [
        {"q": q[None], "positions": places, "keys": in_blocks.copy(), "values": rows.copy()} for _ in range(d["layers"])
    ]

    def call() -> None:
        for feed in feeds:
            compiled.run(feed)

    return Prepared(call, lambda: np.array(compiled.run(feeds[-1])[0][0]))


def torch_sdpa(case: Case, threads: int) -> Prepared:
    """With grouped heads, or with keys and values stored once a query head, whichever is faster here."""
    import torch

    torch.set_num_threads(threads)
    d = case.dims
    q, k, v = (torch.from_numpy(x.transpose(1, 0, 2)[None].copy()) for x in operands(case))
    attend = torch.nn.functional.scaled_dot_product_attention
    causal, group = d["queries"] > 1, d["heads"] // d["kv_heads"]

    def over(grouped: bool) -> Callable[[], Any]:
        def stored(x: Any) -> list[Any]:
            return [x.clone() if grouped else x.repeat_interleave(group, dim=1) for _ in range(d["layers"])]

        layers = list(zip(stored(k), stored(v), strict=True))

        def call() -> Any:
            with torch.inference_mode():
                return [attend(q, a, b, is_causal=causal, enable_gqa=grouped) for a, b in layers][-1]

        return call

    calls: dict[str, Callable[[], Any]] = {"grouped": over(True), "stored by query head": over(False)}
    best = {name: min(timed(call) for _ in range(3)) for name, call in calls.items()}
    call = calls[min(best, key=best.__getitem__)]
    return Prepared(call, lambda: call()[0].transpose(0, 1).numpy(), note=min(best, key=best.__getitem__))


# -- table ------------------------------------------------------------------------------------------------------------
def row(result: Result, case: CaseResult) -> list[str]:
    roof = result.ceilings.roof(case.case) / 1e9
    cells = [case.case.name]
    cells += [pair(case.gflops(n), 0) if case.ok(n) else "-" for n in (PEER, OURS, HALF)]
    cells += [pair(case.ratio(n, PEER), 2) if case.ok(n) and case.ok(PEER) else "-" for n in (OURS, HALF)]
    cells.append(gigabytes(case))
    return [*cells, f"{roof:.0f}", *(fractions(case, n, result.ceilings.fma / 1e9) for n in (OURS, HALF))]


def gigabytes(case: CaseResult) -> str:
    """How fast keys and values are read in a decode step: f32, f16."""
    if case.case.dims["queries"] > 1:
        return "-"
    sizes = {OURS: 2 * case.case.bytes, HALF: case.case.bytes}
    return ", ".join(f"{size / case.timings[n].best / 1e9:.1f}" for n, size in sizes.items() if case.ok(n)) or "-"


def print_table(result: Result) -> None:
    print_heading(result)
    print("\nGFLOPS and ratios as median/best; a ratio above 1 means that rlx is faster\n")
    heading = ["case", PEER, OURS, HALF, f"{OURS}/{PEER}", f"{HALF}/{PEER}", "GB/s", "roof", "of FMA", "of FMA f16"]
    print_rows(heading, (row(result, case) for case in result.cases))
    print_end(result, summary(result))


def summary(result: Result) -> list[str]:
    if result.busy():
        return ["no summary: other programs had the processor in most rounds"]
    lines = []
    for name in (OURS, HALF):
        ratios = [c.ratio(name, PEER)[0] for c in result.cases if c.ok(name) and c.ok(PEER)]
        if ratios:
            mean = f"geometric mean of {len(ratios)} cases {geometric_mean(ratios):.2f}, lowest {min(ratios):.2f}"
            lines.append(f"{name} / {PEER}: {mean}")
    return lines or [f"no case has a valid number of both {OURS} and {PEER}"]


def main() -> int:
    parser = options(__doc__, threads=1, rounds=9)
    parser.add_argument("--cases", default="", metavar="REGEX", help='such as "decode .* S=4096$"; all unless given')
    args = parser.parse_args()
    kinds = (prefill_case, decode_case)
    cases = chosen((make(*heads, length) for make in kinds for heads in HEADS for length in LENGTHS), args.cases)
    result = compare(LIBRARIES, cases, threads=args.threads, rounds=args.rounds, reference=reference)
    print_table(result)
    return one_run(result, summary(result), args.json)


if __name__ == "__main__":
    sys.exit(main())
