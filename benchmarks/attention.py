"""Causal attention with grouped heads: rlx (f32, and over an f16 cache) against torch's scaled_dot_product_attention.

Prefill is a whole prompt. Decode is one token over the keys and values of all layers before it, one layer after the
other, so that long caches come from memory. With `--backward`, gradients of q, k and v of a prompt, and the prompt
itself. Prints GFLOPS as median/best, how many times as fast rlx is as torch, how fast caches are read, and fractions of
the FMA peak measured in the same run; `--json` keeps every round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ceilings import timed
from command import chosen, one_run, options, pair, print_rows
from gemm import fractions
from harness import Case, CaseResult, Library, Prepared, Result, compare, geometric_mean, print_end, print_heading

HEADS = ((9, 3, 64), (12, 2, 128))  # query heads, key heads, their size: those of SmolLM2-135M and Qwen2.5-1.5B
LENGTHS = (128, 1024, 4096)
TRAINING = (512, 1024, 2048)  # lengths with `--backward`
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


def backward_case(heads: int, kv_heads: int, size: int, length: int) -> Case:
    forward = prefill_case(heads, kv_heads, size, length)
    name = forward.name.replace("prefill", "backward")
    return Case(name, forward.dims | {"backward": 1}, 2.5 * forward.flops, 3 * forward.bytes)  # five products, not two


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


def cotangent(case: Case) -> np.ndarray:
    """The gradient of the result of a backward case."""
    d = case.dims
    return np.random.default_rng(1).standard_normal((d["queries"], d["heads"], d["size"]), dtype=np.float32)


def reference(case: Case) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in operands(case))
    if "backward" in case.dims:
        return flat(gradients(q, k, v, cotangent(case).astype(np.float64)))
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


def gradients(q: np.ndarray, k: np.ndarray, v: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    """Of q, k and v, with all weights of a head at hand."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    seen, scale = np.tri(q.shape[0], dtype=bool), q.shape[2] ** -0.5
    for head in range(q.shape[1]):
        own = head // (q.shape[1] // k.shape[1])
        scores = np.where(seen, q[:, head] @ k[:, own].T * scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        share = dy[:, head] @ v[:, own].T
        inner = weights * (share - (weights * share).sum(axis=1, keepdims=True)) * scale
        dq[:, head] = inner @ k[:, own]
        dk[:, own] += inner.T @ q[:, head]
        dv[:, own] += weights.T @ dy[:, head]
    return [dq, dk, dv]


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All elements in a row, so that several results are compared as one."""
    return np.concatenate([np.asarray(x).ravel() for x in arrays])


# -- libraries --------------------------------------------------------------------------------------------------------
def rlx_f32(case: Case, threads: int) -> Prepared:
    """The plain op for a prompt and its gradient, the cache for a token."""
    if "backward" in case.dims:
        return rlx_backward(case, threads)
    return rlx_cached(case, threads, "f32") if case.dims["queries"] == 1 else rlx_plain(case, threads)


def rlx_f16(case: Case, threads: int) -> Prepared:
    return rlx_cached(case, threads, "f16")


def rlx_plain(case: Case, threads: int) -> Prepared:
    import rlx

    graph, arrays = rlx.Graph("attention"), operands(case)
    q, k, v = (graph.input(name, (1, "seq", *x.shape[1:])) for name, x in zip("qkv", arrays, strict=True))
    compiled = rlx.compile(graph.set_outputs(q.attention(k, v, mask_kind="causal")), threads=threads)
    inputs = {name: x[None] for name, x in zip("qkv", arrays, strict=True)}
    return Prepared(lambda: compiled.run(inputs), lambda: np.array(compiled.run(inputs)[0][0]))


def rlx_backward(case: Case, threads: int) -> Prepared:
    """What a gradient runs after the forward pass, which leaves the result and the sums of the weights."""
    import rlx

    arrays = dict(zip("qkv", (x[None] for x in operands(case)), strict=True))
    graph = rlx.Graph("forward")
    q, k, v = (graph.input(name, x.shape) for name, x in arrays.items())
    forward = rlx.compile(graph.set_outputs(q.attention_lse(k, v, mask_kind="causal")), threads=threads)
    arrays |= dict(zip(("y", "lse"), (np.array(x) for x in forward.run(arrays)), strict=True))
    arrays["dy"] = cotangent(case)[None]
    graph = rlx.Graph("backward")
    at = {name: graph.input(name, x.shape) for name, x in arrays.items()}
    delta = (at["dy"] * at["y"]).sum(axis=-1).transpose(axes=(0, 2, 1))
    gradients = at["q"].attention_grad(at["k"], at["v"], at["dy"], at["lse"], delta, mask_kind="causal")
    backward = rlx.compile(graph.set_outputs(gradients), threads=threads)
    return Prepared(lambda: backward.run(arrays), lambda: flat(backward.run(arrays)))


def rlx_cached(case: Case, threads: int, dtype: str) -> Prepared:
    import rlx

    d, (q, k, v) = case.dims, operands(case)
    graph = rlx.Graph("attention")
    query = graph.input("q", (1, "seq", d["heads"], d["size"]))
    at, table = graph.input("positions", (1, "seq"), "i32"), graph.input("table", (1, "blocks"), "i32")
    layout, stored = rlx.Session().target.kv_layout, rlx.dtype(dtype)
    keys, values = (
        graph.state(of, layout.pool_shape(of, stored, rlx.dim("pages"), d["kv_heads"], d["size"]), dtype)
        for of in ("keys", "values")
    )
    axes = {"key_axes": layout.axes("keys", stored), "value_axes": layout.axes("values", stored)}
    attended = query.cached_attention(keys, values, at, table, **axes)
    compiled = rlx.compile(graph.set_outputs(attended), threads=threads)
    kind = np.float16 if dtype == "f16" else np.float32
    pages = {
        of: np.einsum(f"pshd->{layout.axes(of, stored)}", x.reshape(-1, layout.page, *x.shape[1:])).astype(kind)
        for of, x in (("keys", k), ("values", v))
    }
    places = {
        "positions": np.arange(d["keys"] - d["queries"], d["keys"], dtype=np.int32)[None],
        "table": np.arange(layout.blocks(d["keys"]), dtype=np.int32)[None],
    }
    inputs_by_layer = [
        {"q": q[None], **places, **{n: np.ascontiguousarray(x.copy()) for n, x in pages.items()}}
        for _ in range(d["layers"])
    ]

    def call() -> None:
        for inputs in inputs_by_layer:
            compiled.run(inputs)

    return Prepared(call, lambda: np.array(compiled.run(inputs_by_layer[-1])[0][0]))


def torch_sdpa(case: Case, threads: int) -> Prepared:
    """With grouped heads, or with keys and values stored once a query head, whichever is faster here."""
    import torch

    torch.set_num_threads(threads)
    if "backward" in case.dims:
        return torch_backward(case)
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


def torch_backward(case: Case) -> Prepared:
    """The backward pass alone; with grouped heads, or a key head a query head and no sums, whichever is faster."""
    import torch

    q, k, v = (torch.from_numpy(x.transpose(1, 0, 2)[None].copy()) for x in operands(case))
    dy = torch.from_numpy(cotangent(case).transpose(1, 0, 2)[None].copy())
    attend, group = torch.nn.functional.scaled_dot_product_attention, q.shape[1] // k.shape[1]

    def over(grouped: bool) -> Callable[[], Any]:
        sides = [q, *(x if grouped else x.repeat_interleave(group, dim=1) for x in (k, v))]
        leaves = [x.clone().requires_grad_() for x in sides]
        y = attend(*leaves, is_causal=True, enable_gqa=grouped)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    def output(name: str) -> np.ndarray:
        dq, *others = (x[0].transpose(0, 1).numpy() for x in calls[name]())
        return flat([dq, *(x.reshape(x.shape[0], k.shape[1], -1, x.shape[2]).sum(axis=2) for x in others)])

    calls = {"grouped": over(True), "stored by query head": over(False)}
    best = {name: min(timed(call) for _ in range(3)) for name, call in calls.items()}
    name = min(best, key=best.__getitem__)
    return Prepared(calls[name], lambda: output(name), note=name)


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
    lines += backward_lines(result)
    return lines or [f"no case has a valid number of both {OURS} and {PEER}"]


def backward_lines(result: Result) -> list[str]:
    """How many times as long as a forward pass its gradient takes."""
    valid = {c.case.name: c.timings[OURS].median for c in result.cases if c.ok(OURS)}
    pairs = [(name.replace("backward", "prefill"), name) for name in valid if name.startswith("backward")]
    times = [valid[b] / valid[f] for f, b in pairs if f in valid]
    if not times:
        return []
    return [f"{OURS} backward: {min(times):.2f} to {max(times):.2f} times as long as forward ({len(times)} cases)"]


def main() -> int:
    parser = options(__doc__, threads=1, rounds=9)
    parser.add_argument("--cases", default="", metavar="REGEX", help='such as "decode .* S=4096$"; all unless given')
    parser.add_argument("--backward", action="store_true", help="gradients, with prompts of the same lengths")
    args = parser.parse_args()
    kinds = (prefill_case, backward_case) if args.backward else (prefill_case, decode_case)
    lengths = TRAINING if args.backward else LENGTHS
    libraries = tuple(x for x in LIBRARIES if x.name != HALF) if args.backward else LIBRARIES
    cases = chosen((make(*heads, length) for make in kinds for heads in HEADS for length in lengths), args.cases)
    result = compare(libraries, cases, threads=args.threads, rounds=args.rounds, reference=reference)
    print_table(result)
    return one_run(result, summary(result), args.json)


if __name__ == "__main__":
    sys.exit(main())
