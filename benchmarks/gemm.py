"""f32 matrix products of 25 shapes: rlx against NumPy, torch.mm and torch's prepacked oneDNN linear.

Prints GFLOPS as median/best, how many times as fast rlx is as each peer, and the fraction of the roof, that is of
min(FMA peak, intensity x read bandwidth) measured in the same run; `--json` keeps every round.
"""

from __future__ import annotations

import functools
import sys

import numpy as np
from ceilings import timed
from command import chosen, one_run, options, pair, print_rows
from harness import Case, CaseResult, Library, Prepared, Result, compare, geometric_mean, print_end, print_heading

WEIGHTS = ((384, 384), (384, 1536), (1536, 384), (2048, 2048), (2048, 8192))
ROWS = (1, 8, 32, 128, 512)
OURS = "rlx"
LIBRARIES = (
    Library(OURS, "gemm:rlx_gemm", ("rlx",)),
    Library("numpy", "gemm:numpy_matmul", ("numpy",)),
    Library("torch.mm", "gemm:torch_mm", ("torch",)),
    Library("oneDNN", "gemm:torch_onednn", ("torch",)),
)
PEERS = tuple(library.name for library in LIBRARIES if library.name != OURS)


def gemm_case(k: int, n: int, m: int) -> Case:
    return Case(f"{k}x{n} M={m}", {"m": m, "k": k, "n": n}, 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n))


def operands(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The same in every process. Weights are scaled so that results stay near 1 whatever k is."""
    m, k, n = case.dims["m"], case.dims["k"], case.dims["n"]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), dtype=np.float32)
    w = rng.standard_normal((k, n), dtype=np.float32) / np.float32(k**0.5)
    return x, w


def reference(case: Case) -> np.ndarray:
    x, w = operands(case)
    product: np.ndarray = x.astype(np.float64) @ w.astype(np.float64)
    return product


def rlx_gemm(case: Case, threads: int) -> Prepared:
    import rlx

    x, w = operands(case)
    k, n = w.shape
    graph = rlx.Graph("gemm")
    graph.set_outputs([graph.input("x", ("m", k)) @ graph.param("w", (k, n))])
    compiled = rlx.compile(graph, device="cpu", threads=threads)
    compiled.set_param("w", w)
    inputs = {"x": x}
    return Prepared(lambda: compiled.run(inputs), lambda: np.array(compiled.run(inputs)[0]))


def numpy_matmul(case: Case, threads: int) -> Prepared:
    x, w = operands(case)
    out = np.empty((x.shape[0], w.shape[1]), np.float32)
    return Prepared(lambda: np.matmul(x, w, out=out), lambda: out)


def torch_mm(case: Case, threads: int) -> Prepared:
    """torch.mm with the weight stored [in, out] or [out, in], whichever is faster here: it differs by shape."""
    import torch

    torch.set_num_threads(threads)
    x, w = map(torch.from_numpy, operands(case))
    stored = {"[in, out]": w, "[out, in]": w.T.contiguous().T}
    out = torch.empty(x.shape[0], w.shape[1])
    calls = {name: functools.partial(torch.mm, x, weight, out=out) for name, weight in stored.items()}
    for call in calls.values():
        call()
    best = {name: min(timed(call) for _ in range(9)) for name, call in calls.items()}
    choice = min(best, key=best.__getitem__)
    return Prepared(calls[choice], out.numpy, note=f"weight stored {choice}")


def torch_onednn(case: Case, threads: int) -> Prepared:
    """oneDNN's inner product on a weight packed for this number of rows, as torch.compile's freezing does."""
    import torch

    torch.set_num_threads(threads)
    x, w = map(torch.from_numpy, operands(case))
    packed = torch.ops.mkldnn._reorder_linear_weight(w.T.contiguous(), x.shape[0])
    linear = torch.ops.mkldnn._linear_pointwise

    def call() -> torch.Tensor:
        with torch.inference_mode():
            product: torch.Tensor = linear(x, packed, None, "none", [], "")
            return product

    return Prepared(call, lambda: call().numpy())


def row(result: Result, case: CaseResult) -> list[str]:
    """Cells of the table: shape, GFLOPS of each library, ratios to each peer, bound, fraction of the roof."""
    roof = result.ceilings.roof(case.case) / 1e9
    name, _space, rows = case.case.name.partition(" M=")
    cells = [name, rows]
    for library in (*PEERS, OURS):
        cells.append(pair(case.gflops(library), 0) if case.ok(library) else "-")
    for peer in PEERS:
        cells.append(pair(case.ratio(OURS, peer), 2) if case.ok(OURS) and case.ok(peer) else "-")
    cells.append(f"{roof:.0f} {'fma' if roof == result.ceilings.fma / 1e9 else 'mem'}")
    cells.append(fractions(case, OURS, roof))
    best_peer = case.best_peer(PEERS)
    cells.append(f"{fractions(case, best_peer, roof)} {best_peer}" if best_peer else "-")
    return cells


def fractions(case: CaseResult, library: str, roof: float) -> str:
    if not case.ok(library):
        return "-"
    median, best = case.gflops(library)
    return pair((median / roof, best / roof), 2)


def print_table(result: Result) -> None:
    print_heading(result)
    print("\nGFLOPS and ratios as median/best; a ratio above 1 means that rlx is faster\n")
    heading = ["KxN", "M", *PEERS, OURS, *(f"/{p}" for p in PEERS), "roof", f"{OURS}/roof", "best peer/roof"]
    print_rows(heading, (row(result, case) for case in result.cases))
    print_end(result, summary(result))


def summary(result: Result) -> list[str]:
    """Geometric mean against the best peer of each shape, and the worst shape."""
    if result.busy():
        return ["no summary: other programs had the processor in most rounds"]
    judged = [(c, peer) for c in result.cases if c.ok(OURS) and (peer := c.best_peer(PEERS))]
    if not judged:
        return [f"no shape has a valid number of both {OURS} and a peer"]
    ratios = [c.ratio(OURS, peer) for c, peer in judged]
    medians, bests = [r[0] for r in ratios], [r[1] for r in ratios]
    worst = medians.index(min(medians))
    shares = [c.gflops(OURS)[0] * 1e9 / result.ceilings.roof(c.case) for c, _peer in judged]
    means = f"{geometric_mean(medians):.3f} (median), {geometric_mean(bests):.3f} (best)"
    return [
        f"{OURS} / best peer of each shape, geometric mean of {len(judged)} of {len(result.cases)} shapes: {means}",
        f"worst shape: {judged[worst][0].case.name}, {pair(ratios[worst], 2)} against {judged[worst][1]}",
        f"fraction of the roof by median: geometric mean {geometric_mean(shares):.2f}, lowest {min(shares):.2f}",
    ]


def main() -> int:
    parser = options(__doc__, threads=1, rounds=15)
    parser.add_argument("--shapes", default="", metavar="REGEX", help='such as "384x.* M=1$"; all 25 unless given')
    args = parser.parse_args()
    cases = chosen((gemm_case(k, n, m) for k, n in WEIGHTS for m in ROWS), args.shapes)
    result = compare(LIBRARIES, cases, threads=args.threads, rounds=args.rounds, reference=reference)
    print_table(result)
    return one_run(result, summary(result), args.json)


if __name__ == "__main__":
    sys.exit(main())
