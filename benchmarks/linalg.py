"""Factorisations and systems of equations, one matrix and batches of small ones: rlx against NumPy's LAPACK.

    python benchmarks/linalg.py --threads 2 --json benchmarks/results/linalg-2t.json

f32 unless `--f64`. LU is SciPy's `lu_factor`, the others are `numpy.linalg`. Prints microseconds as median/best and how
many times as fast rlx is; `--json` keeps every round. A call of rlx is a call of a jitted function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from command import chosen, one_run, options, pair, print_rows
from harness import Case, CaseResult, Library, Prepared, Result, compare, print_end, print_heading

OURS, PEER = "rlx", "numpy"
LIBRARIES = (Library(OURS, "linalg:rlx_linalg", ("rlx",)), Library(PEER, "linalg:numpy_linalg", ("numpy", "scipy")))
SIZES = (64, 128, 256, 512, 1024)
SMALL_SIZES, BATCH = (4, 8, 16, 32, 48), 1000
SPECTRAL_SIZES = (64, 128, 256)
# Operations of an n by n matrix, in units of n³.
FLOPS = {
    "cholesky": 1 / 3, "lu": 2 / 3, "solve": 2 / 3, "inv": 2.0, "det": 2 / 3, "qr": 8 / 3, "eigh": 4.0, "svd": 8.0,
}  # fmt: skip
SPECTRAL = ("eigh", "svd")
MAX_ERROR = 1e-3  # of the largest element: inverses of random matrices in f32
Array = np.ndarray[Any, Any]


def cases(wide: bool) -> list[Case]:
    """Each function on one matrix of each size, and on batches of small ones (LU aside: `det` is one)."""
    single = [(name, n, 1) for name in FLOPS for n in (SPECTRAL_SIZES if name in SPECTRAL else SIZES)]
    batched = [(name, n, BATCH) for name in FLOPS if name not in ("lu", *SPECTRAL) for n in SMALL_SIZES]
    return [_case(name, n, batch, wide) for name, n, batch in (*single, *batched)]


def _case(name: str, n: int, batch: int, wide: bool) -> Case:
    dims = {"n": n, "batch": batch, "wide": int(wide)}
    size = 8.0 if wide else 4.0
    title = f"{name} {n}" if batch == 1 else f"{name} {batch} x {n}"
    return Case(title, dims, FLOPS[name] * batch * n**3, 2 * size * batch * n**2, name)


def operands(case: Case) -> list[Array]:
    """The same in every process; cholesky and eigh get positive definite matrices.

    Of a thousand random matrices some are nearly singular: solutions in f32 are then far from those of NumPy, which
    computes them in f64. So batches of `solve` and `inv` get singular values from 0.5 to 2.
    """
    n, batch = case.dims["n"], case.dims["batch"]
    kind = np.float64 if case.dims["wide"] else np.float32
    lead = () if batch == 1 else (batch,)
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((*lead, n, n)) / n**0.5 + np.eye(n)
    if case.subject in ("cholesky", "eigh"):
        matrix = matrix @ np.swapaxes(matrix, -1, -2) + 0.1 * np.eye(n)
    if batch > 1 and case.subject in ("solve", "inv"):
        left, _, right = np.linalg.svd(matrix)
        matrix = left * rng.uniform(0.5, 2, (batch, 1, n)) @ right
    arrays = [matrix, rng.standard_normal((*lead, n, 1))] if case.subject == "solve" else [matrix]
    return [array.astype(kind) for array in arrays]


def checked(case: Case, result: Any, arrays: list[Array]) -> Array:
    """What must agree, whatever the signs and the order of rows: factors as their product, or their values."""
    match case.subject:
        case "lu":
            lu, order = (np.asarray(x) for x in result)
            product = (np.tril(lu, -1) + np.eye(len(lu), dtype=lu.dtype)) @ np.triu(lu)
            return np.asarray(product - arrays[0][order] + arrays[0])
        case "qr":
            return np.asarray(result[0] @ result[1])
        case "eigh":
            return np.asarray(result[0])
        case "svd":
            return np.asarray(result[1])
    return np.asarray(result)


def reference(case: Case) -> Array:
    arrays = [array.astype(np.float64) for array in operands(case)]
    if case.subject == "lu":
        return arrays[0]
    return checked(case, _numpy_call(case)(*arrays), arrays)


def _numpy_call(case: Case) -> Callable[..., Any]:
    import scipy.linalg

    def lu(matrix: Array) -> tuple[Array, Array]:
        factors, pivots = scipy.linalg.lu_factor(matrix, check_finite=False)
        return factors, pivots

    calls = {"lu": lu, "svd": lambda x: np.linalg.svd(x, full_matrices=False)}
    return calls.get(case.subject) or getattr(np.linalg, case.subject)  # type: ignore[no-any-return]


def numpy_linalg(case: Case, threads: int) -> Prepared:
    arrays, call = operands(case), _numpy_call(case)

    def output() -> Array:
        result = call(*arrays)
        if case.subject != "lu":
            return checked(case, result, arrays)
        order = np.arange(case.dims["n"])
        for row, other in enumerate(result[1]):
            order[[row, other]] = order[[other, row]]
        return checked(case, (result[0], order), arrays)

    return Prepared(lambda: call(*arrays), output)


def rlx_linalg(case: Case, threads: int) -> Prepared:
    import rlx
    import rlx.numpy as rnp

    calls: dict[str, Callable[..., Any]] = {
        "lu": lambda x: rlx.functional.lu(x)[::2],
        "svd": lambda x: rnp.linalg.svd(x, full_matrices=False),
    }
    arrays = operands(case)
    call = rlx.jit(calls.get(case.subject) or getattr(rnp.linalg, case.subject))
    return Prepared(lambda: call(*arrays), lambda: checked(case, call(*arrays), arrays))


def row(case: CaseResult) -> list[str]:
    cells = [case.case.name]
    for name in (PEER, OURS):
        timing = case.timings.get(name)
        cells.append(pair((timing.median * 1e6, timing.best * 1e6), 1) if timing and case.ok(name) else "-")
    both = case.ok(OURS) and case.ok(PEER)
    return [*cells, pair(case.ratio(OURS, PEER), 2) if both else "-"]


def print_table(result: Result) -> None:
    print_heading(result)
    print("\nmicroseconds and ratios as median/best; a ratio above 1 means that rlx is faster\n")
    print_rows(["case", PEER, OURS, f"{OURS}/{PEER}"], map(row, result.cases))
    print_end(result, summary(result))


def summary(result: Result) -> list[str]:
    """The slowest case of each group."""
    if result.busy():
        return ["no summary: other programs had the processor in most rounds"]
    judged = [c for c in result.cases if c.ok(OURS) and c.ok(PEER)]
    groups = {
        "one matrix": [c for c in judged if c.case.dims["batch"] == 1 and c.case.subject not in SPECTRAL],
        "batches": [c for c in judged if c.case.dims["batch"] > 1],
        "eigh and svd": [c for c in judged if c.case.subject in SPECTRAL],
    }
    lines = []
    for title, members in groups.items():
        if members:
            worst = min(members, key=lambda c: c.ratio(OURS, PEER)[0])
            lines.append(f"{title}: at least {pair(worst.ratio(OURS, PEER), 2)} times as fast, at {worst.case.name}")
    return lines


def main() -> int:
    parser = options(__doc__, threads=2, rounds=7)
    parser.add_argument("--cases", default="", metavar="REGEX", help='such as "^qr 64$"; all unless given')
    parser.add_argument("--f64", action="store_true", help="in f64")
    args = parser.parse_args()
    selected = chosen(cases(args.f64), args.cases)
    result = compare(
        LIBRARIES, selected, threads=args.threads, rounds=args.rounds, reference=reference, max_error=MAX_ERROR
    )
    print_table(result)
    return one_run(result, summary(result), args.json)


if __name__ == "__main__":
    sys.exit(main())
