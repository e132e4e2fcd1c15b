"""Elementwise ops, reductions and norms in f32: rlx against NumPy, torch, torch.compile and JAX.

    RLX_PEERS_PYTHON=... python benchmarks/elementwise.py --threads 2 --json benchmarks/results/elementwise-2t.json

Each on rows of 768 numbers that stay in a core's own cache, in the last cache that cores share, and in neither. Prints
gigabytes a second (operands and results, once each) as median/best, how many times as fast rlx is as each peer, and the
fraction of the read bandwidth of a buffer as large as the operands in the same run; `--json` keeps every round. Freed
memory is used again, else the pages of new results would be most of the time of libraries that do not see to it.
"""

from __future__ import annotations

import sys

from command import chosen, one_run, options, pair, print_rows
from elementwise_engines import WIDTH, WORKS, reference
from harness import CaseResult, Library, Result, compare, geometric_mean, print_end, print_heading
from worker import Case

ROWS = {"L2": 64, "L3": 1024, "DRAM": 16384}  # 0.4, 6 and 101 MB of one operand and one result
OURS = "rlx"
PEERS: dict[str, tuple[str, ...]] = {"numpy": ("numpy",), "torch": ("torch",), "torch.compile": ("torch",)}
ELSEWHERE = {"jax": ("jax",)}  # may live in another environment
NAMES = (*PEERS, *ELSEWHERE)


def make_case(name: str, place: str) -> Case:
    """The roof is reading the operands: an element counts as one operation, and writing may go on beside reading."""
    work, rows = WORKS[name], ROWS[place]
    read = 4 * WIDTH * (rows * work.matrices + work.vectors)
    written = 4 * (rows * WIDTH * work.results + WIDTH * work.row + rows * work.column)
    return Case(f"{name}, {place}", {"rows": rows, "bytes": read + written}, float(rows * WIDTH), float(read), name)


# -- table ------------------------------------------------------------------------------------------------------------
def rate(case: CaseResult, name: str, unit: float = 1e9, digits: int = 1) -> str:
    """Of operands and results, in gigabytes a second or another unit."""
    if not case.ok(name):
        return "-"
    timing, size = case.timings[name], case.case.dims["bytes"] / unit
    return pair((size / timing.median, size / timing.best), digits)


def row(result: Result, case: CaseResult) -> list[str]:
    bandwidth = result.ceilings.bandwidth(case.case.bytes)
    cells = [case.case.name, *(rate(case, name) for name in (*NAMES, OURS))]
    cells += [pair(case.ratio(OURS, name), 2) if case.ok(OURS) and case.ok(name) else "-" for name in NAMES]
    best = case.best_peer(NAMES)
    cells += [f"{bandwidth / 1e9:.0f}", rate(case, OURS, bandwidth, 2)]
    return [*cells, f"{rate(case, best, bandwidth, 2)} {best}" if best else "-"]


def print_table(result: Result) -> None:
    print_heading(result)
    print("\nGB/s and ratios as median/best; a ratio above 1 means that rlx is faster\n")
    heading = ["case", *NAMES, OURS, *(f"/{name}" for name in NAMES), "read", f"{OURS}/read", "best peer/read"]
    print_rows(heading, (row(result, case) for case in result.cases))
    print_end(result, summary(result))


def summary(result: Result) -> list[str]:
    """Against the best peer of each case: all of them, and those of each size."""
    if result.busy():
        return ["no summary: other programs had the processor in most rounds"]
    lines = []
    for place in ("", *ROWS):
        some = [c for c in result.cases if c.case.name.endswith(place) and c.ok(OURS)]
        ratios = {c.case.name: c.ratio(OURS, peer)[0] for c in some if (peer := c.best_peer(NAMES))}
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            mean = f"geometric mean of {len(ratios)} {geometric_mean(list(ratios.values())):.2f}"
            lines.append(f"{OURS} / best peer, {place or 'all'}: {mean}, lowest {ratios[worst]:.2f} ({worst})")
    return lines or [f"no case has a valid number of both {OURS} and a peer"]


def main() -> int:
    parser = options(__doc__, threads=1, rounds=7, peers="JAX")
    parser.add_argument("--cases", default="", metavar="REGEX", help='such as "norm, L2$"; all unless given')
    args = parser.parse_args()
    cases = chosen((make_case(name, place) for place in ROWS for name in WORKS), args.cases)
    libraries = [Library(OURS, "elementwise_engines:rlx", ("rlx",))]
    libraries += [Library(name, f"elementwise_engines:{name.replace('.', '_')}", need) for name, need in PEERS.items()]
    libraries += [Library(name, f"elementwise_engines:{name}", need, args.python) for name, need in ELSEWHERE.items()]
    result = compare(libraries, cases, threads=args.threads, rounds=args.rounds, reference=reference)
    print_table(result)
    return one_run(result, summary(result), args.json)


if __name__ == "__main__":
    sys.exit(main())
