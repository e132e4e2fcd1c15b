"""all-MiniLM-L6-v2 on token ids: rlx against torch.compile, ONNX Runtime, OpenVINO and JAX, in f32 and in int8.

Embedding, mask and pooling are part of the work, tokenisation is not. A case is a batch size and a width; in a batch,
texts are between half as long as that and that long, or all of it ("full"). Prints milliseconds as median/best and
how many times as fast rlx is as each peer. `--json` keeps every round. In int8, ONNX Runtime finds ranges as it runs,
as rlx does, and OpenVINO's model is NNCF's, calibrated on sentences.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from command import add_minilm, comparison, finished, minilm, options, print_rows, times_as_fast
from embed import MAX_ERROR, NARROW, WEIGHT_BYTES, Encoder, sentences, shared_folder
from encoder_engines import tokens_of
from harness import CaseResult, Library, Result, compare, geometric_mean, print_heading
from worker import Case

OURS = "rlx"
SHAPES = {  # texts, tokens of the longest, of the shortest at least
    "B1 S32": (1, 32, 32),
    "B1 S128": (1, 128, 128),
    "B32 S128": (32, 128, 64),
    "B32 S128 full": (32, 128, 128),
}
PEERS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "f32": {
        "torch.compile": ("torch_compile", ("torch", "transformers")),
        "onnxruntime": ("onnxruntime", ("onnxruntime", "torch", "transformers")),
        "openvino": ("openvino", ("openvino", "torch", "transformers")),
        "jax": ("jax", ("jax", "transformers")),
    },
    "int8": {
        "onnxruntime": ("onnxruntime_int8", ("onnxruntime", "onnx", "torch", "transformers")),
        "openvino": ("openvino_int8", ("openvino", "nncf", "torch", "transformers", "tokenizers")),
    },
}
Array = np.ndarray[Any, Any]


def cases(encoder: Encoder, names: Sequence[str], subject: str, precision: str) -> list[Case]:
    """FLOPs are those of the matrix products, without padding; bytes are those of the weights."""
    sized = []
    for name in names:
        batch, seq, shortest = SHAPES[name]
        size = WEIGHT_BYTES[precision] * encoder.weights_read
        case = Case(name, {"batch": batch, "seq": seq, "shortest": shortest}, 0, size, subject, NARROW[precision])
        sized.append(replace(case, flops=encoder.flops(tokens_of(case)[1].sum(1))))
    return sized


def run(args: argparse.Namespace, threads: int, precision: str) -> Result:
    encoder = Encoder(args.model)
    libraries = [Library(OURS, f"encoder_engines:rlx{'' if precision == 'f32' else '_int8'}", ("rlx",))]
    for name, (function, packages) in PEERS[precision].items():
        libraries.append(Library(name, f"encoder_engines:{function}", packages, args.python))

    def reference(case: Case) -> Array:
        tokens, mask = tokens_of(case)
        return np.stack([encoder.mean(row[: real.sum()]) for row, real in zip(tokens, mask, strict=True)])

    with tempfile.TemporaryDirectory() as scratch:
        shared_folder(Path(scratch), args.model, sentences(args.sentences)[0]["distinct"])
        wanted = cases(encoder, args.cases, scratch, precision)
        return compare(
            libraries, wanted, threads=threads, rounds=args.rounds, reference=reference, max_error=MAX_ERROR[precision]
        )


# ---------------------------------------------------------------------------------------------------------------------
# Printing.


def milliseconds(case: CaseResult, library: str) -> str:
    if not case.ok(library):
        return "-"
    timing = case.timings[library]
    return f"{timing.median * 1e3:.2f}/{timing.best * 1e3:.2f}"


def summary(result: Result, peers: Sequence[str]) -> float | None:
    """The geometric mean over the best peer, if every case has one."""
    best_ratios = [times_as_fast(case, OURS, peers).get("best peer") for case in result.cases]
    medians = [pair[0] for pair in best_ratios if pair is not None]
    return geometric_mean(medians) if len(medians) == len(best_ratios) and not result.busy() else None


def print_table(result: Result, precision: str) -> None:
    print(f"\n## {precision}, {result.threads} thread(s)\n")
    print_heading(result)
    peers = list(PEERS[precision])
    print("\nmilliseconds, and how many times as fast rlx is, as median/best\n")
    heading = ["case", OURS, *peers, *(f"/{peer}" for peer in peers), "/best peer", "rlx/roof", "rlx error"]
    rows = []
    for case in result.cases:
        cells = [case.case.name, *(milliseconds(case, name) for name in (OURS, *peers))]
        cells += comparison(result, case, OURS, peers)
        error = case.timings[OURS].error if OURS in case.timings else None
        rows.append([*cells, "-" if error is None else f"{error:.1e}"])
    print_rows(heading, rows)
    mean = summary(result, peers)
    print(f"\ngeometric mean over the best peer: {'-' if mean is None else f'{mean:.2f}'}\n")
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def to_json(result: Result, precision: str) -> dict[str, Any]:
    content, peers = result.to_json(), list(PEERS[precision])
    for case in content["cases"]:
        del case["subject"]  # a temporary folder
    ratios = {case.case.name: times_as_fast(case, OURS, peers) for case in result.cases}
    return {"precision": precision} | content | {"times_as_fast": ratios, "geometric_mean": summary(result, peers)}


def main() -> int:
    parser = options(__doc__, threads=[1, 2], rounds=9, peers="the peers")
    add_minilm(parser, "what OpenVINO's int8 is calibrated on")
    parser.add_argument("--precision", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--cases", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    args = parser.parse_args()
    args.model = minilm(args)

    def runs() -> Iterator[tuple[Result, dict[str, Any]]]:
        for precision in args.precision:
            for threads in args.threads:
                result = run(args, threads, precision)
                print_table(result, precision)
                yield result, to_json(result, precision)

    return finished(runs(), args.json)


if __name__ == "__main__":
    sys.exit(main())
