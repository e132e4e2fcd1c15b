"""Exact vector search over a million rows of 384 numbers: rlx in f32, f16 and int8 with rescoring, and faiss.

    python benchmarks/search.py --folder DIR --prepare      # embeds and writes the indexes, some minutes, 5 GB
    python benchmarks/search.py --folder DIR --json benchmarks/results/search.json

Rows are MiniLM's vectors of lines, each with noise of half its length added, many times over; queries are vectors of
other lines. All search for the ten best with the same threads; rlx reads its rows from the mapped files of the index,
faiss (`IndexFlatIP`) has them in memory. A rate in GB/s counts the bytes of the rows that are scanned, once. Recall is
the share of the ten best of the exact search that the others find, over a thousand queries.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
from command import ASSETS, one_run, options, pair, print_rows
from harness import CaseResult, Library, Result, compare, print_end, print_heading
from worker import Case, Prepared

OURS, PEER = "rlx", "faiss"
ROWS, K = 1_000_000, 10
NOISE = 0.5
RECALL_QUERIES = 1000
BATCHES = (1, 32)
WRITTEN = 50_000  # rows at a time
BYTES = {"f32": 4, "f16": 2, "int8": 1}
LIBRARIES = (
    Library(OURS, "search:rlx_search", ("rlx", "numpy", "llvmlite")),
    Library(PEER, "search:faiss_search", ("faiss", "numpy")),
)


# -- data --------------------------------------------------------------------------------------------------------------
def lines() -> list[str]:
    """Lines of the assets' texts, without repetitions, in a fixed random order."""
    texts: dict[str, None] = {}
    for path in sorted((ASSETS / "text").glob("*.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            texts.update(dict.fromkeys(cell for row in csv.reader(file) for cell in row if len(cell) > 20))
    for line in (ASSETS / "text" / "wiki.test.raw").read_text(encoding="utf-8").splitlines():
        texts.update(dict.fromkeys(part.strip() for part in line.split(" . ") if len(part.strip()) > 20))
    order = np.random.default_rng(0).permutation(len(texts))
    everything = list(texts)
    return [everything[i] for i in order]


def prepare(folder: Path, count: int) -> None:
    """Writes the indexes and the queries; those of f16 and int8 have the same rows as f32."""
    import rlx

    folder.mkdir(parents=True, exist_ok=True)
    texts = lines()
    model = rlx.load("minilm-l6")
    assert isinstance(model, rlx.EmbeddingModel)
    vectors = model.embed(texts)
    queries, base = vectors[:RECALL_QUERIES], vectors[RECALL_QUERIES:]
    dim = vectors.shape[1]
    indexes = [rlx.Index.create(folder / dtype, dim=dim, dtype=dtype, model="minilm-l6") for dtype in BYTES]
    for at in range(0, count, WRITTEN):
        rng = np.random.default_rng(at + 1)
        rows = base[np.arange(at, min(at + WRITTEN, count)) % len(base)]
        noise = rng.standard_normal(rows.shape, np.float32) * np.float32(NOISE / dim**0.5)
        for index in indexes:
            index.append(rows + noise)
    for index in indexes:
        index.close()
    np.save(folder / "queries.npy", queries)
    print(f"{len(texts)} lines, {count} rows in {folder}", file=sys.stderr)


# -- libraries ---------------------------------------------------------------------------------------------------------
def queries_of(case: Case) -> np.ndarray:
    queries: np.ndarray = np.load(Path(case.subject).parent / "queries.npy")
    return queries[: case.dims["queries"]]


def rlx_search(case: Case, threads: int) -> Prepared:
    import rlx

    index, queries = rlx.Index.open(case.subject, threads=threads), queries_of(case)
    index.vectors.sum()  # reads the files
    return Prepared(lambda: index.search_rows(queries, K), output=lambda: index.search_rows(queries, K)[0])


def faiss_search(case: Case, threads: int) -> Prepared:
    import faiss

    import rlx

    if not case.subject.endswith("f32"):
        raise ValueError("its flat index of floats is compared")
    faiss.omp_set_num_threads(threads)
    with rlx.Index.open(case.subject) as ours:
        index = faiss.IndexFlatIP(ours.dim)
        for at in range(0, len(ours), WRITTEN):
            index.add(np.ascontiguousarray(ours.vectors[at : at + WRITTEN]))
    queries = queries_of(case)
    return Prepared(
        lambda: index.search(queries, K), output=lambda: index.search(queries, K)[0], note=faiss.__version__
    )


def reference(case: Case) -> np.ndarray:
    """The ten best scores in float64."""
    import rlx

    vectors, queries = rlx.Index.open(Path(case.subject).parent / "f32").vectors, queries_of(case).astype(np.float64)
    best = np.full((len(queries), 0), 0.0)
    for at in range(0, len(vectors), WRITTEN):
        best = np.sort(np.hstack([best, queries @ vectors[at : at + WRITTEN].astype(np.float64).T]))[:, -K:]
    return best[:, ::-1]


def recall(folder: Path, threads: int) -> dict[str, float]:
    """The share of the exact search's rows that the others find."""
    import rlx

    queries = np.load(folder / "queries.npy")
    exact, *others = (rlx.Index.open(folder / dtype, threads=threads).search_rows(queries, K)[1] for dtype in BYTES)
    shares = [np.mean([len(set(a) & set(b)) / K for a, b in zip(exact, rows, strict=True)]) for rows in others]
    return dict(zip(list(BYTES)[1:], map(float, shares), strict=True))


# -- report ------------------------------------------------------------------------------------------------------------
def cases(folder: Path) -> list[Case]:
    import rlx

    every = []
    for dtype, size in BYTES.items():
        with rlx.Index.open(folder / dtype) as index:
            rows, dim = len(index), index.dim
        for queries in BATCHES:
            every.append(
                Case(
                    f"{dtype}, {queries} quer{'y' if queries == 1 else 'ies'}",
                    {"queries": queries, "rows": rows, "dim": dim},
                    flops=2.0 * queries * rows * dim,
                    bytes=float(rows * (dim * size + 4 * (size == 1))),
                    subject=str(folder / dtype),
                    narrow=4.0 if size == 1 else 1.0,
                )
            )
    return every


def row(result: Result, case: CaseResult) -> list[str]:
    cells = [case.case.name]
    for name in (OURS, PEER):
        ok = case.ok(name)
        cells.append(pair((case.timings[name].median * 1e3, case.timings[name].best * 1e3), 1) if ok else "-")
    if not case.ok(OURS):
        return [*cells, "-", "-", "-"]
    rate = case.case.bytes / case.timings[OURS].median
    cells.append(f"{rate / 1e9:.1f} ({rate / result.ceilings.usual_dram:.2f})")
    cells.append(f"{case.gflops(OURS)[0]:.0f} ({case.gflops(OURS)[0] * 1e9 / result.ceilings.usual_fma:.2f})")
    return [*cells, pair(case.ratio(OURS, PEER), 2) if case.ok(PEER) else "-"]


def summary(result: Result, recalls: dict[str, float]) -> list[str]:
    times = {c.case.name: c.timings[OURS].median for c in result.cases if c.ok(OURS)}
    lines = [f"recall@{K} over {RECALL_QUERIES} queries: " + ", ".join(f"{n} {r:.4f}" for n, r in recalls.items())]
    for case in result.cases:
        name = case.case.name
        exact = name.replace("int8", "f32")
        if case.ok(OURS) and name.startswith("int8") and exact in times:
            lines.append(f"{name}: {times[exact] / times[name]:.2f} times as fast as f32")
        if case.ok(OURS) and case.ok(PEER):
            lines.append(f"{name}: {case.ratio(OURS, PEER)[0]:.2f} times as fast as faiss")
    return lines


def absent_where_not_asked(result: Result) -> None:
    """faiss is compared in f32 only."""
    for case in result.cases:
        if not case.case.name.startswith("f32"):
            case.timings.pop(PEER, None)


def main() -> int:
    parser = options(__doc__, threads=2, rounds=7)
    parser.add_argument("--folder", type=Path, required=True, help="of the indexes and queries")
    parser.add_argument("--prepare", action="store_true", help="write them, and measure nothing")
    parser.add_argument("--rows", type=int, default=ROWS, help="with --prepare")
    args = parser.parse_args()
    if args.prepare:
        prepare(args.folder, args.rows)
        return 0
    result = compare(LIBRARIES, cases(args.folder), threads=args.threads, rounds=args.rounds, reference=reference,
                     max_error=1e-3)  # fmt: skip
    absent_where_not_asked(result)
    recalls = recall(args.folder, args.threads)
    print_heading(result)
    print("\nmilliseconds and ratios as median/best; a ratio above 1 means that rlx is faster\n")
    heading = ["case", OURS, PEER, "GB/s (of DRAM)", "GFLOPS (of FMA)", f"{OURS}/{PEER}"]
    print_rows(heading, (row(result, case) for case in result.cases))
    lines_: list[Any] = summary(result, recalls)
    print_end(result, lines_)
    return one_run(result, lines_, args.json)


if __name__ == "__main__":
    sys.exit(main())
