"""Sentences to vectors by all-MiniLM-L6-v2: rlx against sentence-transformers, ONNX Runtime and OpenVINO.

In f32, or with `--precision int8` in 8-bit integers: ONNX Runtime's are dynamic as rlx's are, OpenVINO's are NNCF's,
calibrated on some of the sentences; then the table says how well each agrees with what people say of pairs.

The work is the test set of STS-B, 2,758 sentences, tokenisation and pooling included: `all` at once, the `distinct`
ones at once (rlx computes equal texts once, its peers do not), and `one` at a time. Prints sentences a second as
median/best and how many times as fast rlx is as each peer; `--json` keeps every round. Peers may live in another
environment.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from command import add_minilm, comparison, finished, minilm, options, print_rows, times_as_fast
from embed_engines import CHECKED
from harness import CaseResult, Library, Result, compare, print_heading
from scipy.special import erf
from worker import Case

SINGLE = 60  # sentences one at a time in a round
OURS = "rlx"
PEERS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "f32": {
        "sentence-transformers": ("sentence_transformers", ("sentence_transformers", "torch")),
        "onnxruntime": ("onnxruntime", ("onnxruntime", "tokenizers")),
        "openvino": ("openvino", ("openvino", "tokenizers")),
    },
    "int8": {
        "onnxruntime": ("onnxruntime_int8", ("onnxruntime", "onnx", "tokenizers", "torch")),
        "openvino": ("openvino_int8", ("openvino", "nncf", "tokenizers", "torch")),
    },
}
WEIGHT_BYTES = {"f32": 4.0, "int8": 1.0}
# How far an element may be from float64's, of the largest: NNCF's 8-bit vectors are far off, and still rank well.
MAX_ERROR = {"f32": 1e-5, "int8": 1.0}
NARROW = {"f32": 1.0, "int8": 4.0}  # VNNI multiplies four pairs of 8-bit numbers where an FMA multiplies one of f32
CALIBRATION = 300  # sentences, evenly spread
Array = np.ndarray[Any, Any]


class Encoder:
    """The model by the formulas of the paper, in float64; also how much work a sentence is at least."""

    def __init__(self, folder: Path) -> None:
        from rlx.formats import open_tensors
        from rlx.formats.tokenizer import Tokenizer

        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.dim, self.ffn, self.eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        file = open_tensors(folder)
        self.weights = {name: file.dequantised(name).astype(np.float64) for name in file.names}
        self.tokenizer = Tokenizer.from_json(folder / "tokenizer.json")
        layers = 4 * self.dim**2 + 2 * self.dim * self.ffn
        self.weights_read = float(self.layers * layers)

    def lengths(self, texts: list[str]) -> list[int]:
        """Tokens of each distinct sentence."""
        return [len(row) for row in self.tokenizer.encode_batch(set(texts))]

    def flops(self, tokens: Sequence[int] | Array) -> float:
        """Of the matrix products of texts that have so many tokens."""
        lengths = np.array(tokens, np.float64)
        return float(2 * lengths.sum() * self.weights_read + 4 * (lengths**2).sum() * self.dim * self.layers)

    def vector(self, text: str) -> Array:
        mean = self.mean(self.tokenizer.encode(text))
        vector: Array = mean / np.linalg.norm(mean)
        return vector

    def mean(self, tokens: Sequence[int]) -> Array:
        """Over the tokens of one text."""
        tables = [self.weights[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type")]
        x = self.norm(tables[0][tokens] + tables[1][: len(tokens)] + tables[2][0], "embeddings.LayerNorm")
        for i in range(self.layers):
            layer = f"encoder.layer.{i}"
            x = self.norm(x + self.attention(x, f"{layer}.attention"), f"{layer}.attention.output.LayerNorm")
            inner = self.linear(x, f"{layer}.intermediate.dense")
            inner = inner * (1 + erf(inner / np.sqrt(2))) / 2
            x = self.norm(x + self.linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        vector: Array = x.mean(0)
        return vector

    def attention(self, x: Array, name: str) -> Array:
        q, k, v = (
            self.linear(x, f"{name}.self.{n}").reshape(len(x), self.heads, -1).swapaxes(0, 1)
            for n in ("query", "key", "value")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        seen = (scores / scores.sum(-1, keepdims=True)) @ v
        return self.linear(seen.swapaxes(0, 1).reshape(x.shape), f"{name}.output.dense")

    def linear(self, x: Array, name: str) -> Array:
        result: Array = x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return result

    def norm(self, x: Array, name: str) -> Array:
        normalised: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + self.eps)
        return normalised * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def sentences(path: Path) -> tuple[dict[str, list[str]], list[float]]:
    """The texts of each case, and what people say of the pairs: a CSV file of two sentences and a number a line."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    everything = [row[0] for row in rows] + [row[1] for row in rows]
    distinct = list(dict.fromkeys(everything))
    step = max(1, len(distinct) // SINGLE)
    texts = {"all": everything, "distinct": distinct, "one": distinct[::step][:SINGLE]}
    return texts, [float(row[2]) for row in rows]


def shared_folder(folder: Path, model: Path, texts: Sequence[str]) -> None:
    """What processes make their files from."""
    (folder / "model").symlink_to(model.resolve())
    some = texts[:: max(1, len(texts) // CALIBRATION)]
    (folder / "calibration.json").write_text(json.dumps(some), encoding="utf-8")


def run(
    model: Path, texts: Mapping[str, list[str]], scores: Sequence[float], python: str, threads: int, rounds: int,
    precision: str,
) -> Result:  # fmt: skip
    encoder = Encoder(model)
    libraries = [Library(OURS, f"embed_engines:rlx{'' if precision == 'f32' else '_int8'}", ("rlx",))]
    for name, (function, packages) in PEERS[precision].items():
        libraries.append(Library(name, f"embed_engines:{function}", packages, python))
    size = WEIGHT_BYTES[precision] * encoder.weights_read
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shared_folder(folder, model, next(iter(texts.values())))
        (folder / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
        cases = []
        for name, some in texts.items():
            (folder / f"{name}.json").write_text(json.dumps(some), encoding="utf-8")
            flops = encoder.flops(encoder.lengths(some)) / (len(some) if name == "one" else 1)
            cases.append(Case(name, {"sentences": len(some)}, flops, size, scratch, NARROW[precision]))

        def reference(case: Case) -> Array:
            return np.stack([encoder.vector(text) for text in texts[case.name][:CHECKED]])

        return compare(
            libraries, cases, threads=threads, rounds=rounds, reference=reference, max_error=MAX_ERROR[precision]
        )


# ---------------------------------------------------------------------------------------------------------------------
# Printing.


def rate(case: CaseResult, library: str) -> str:
    """Sentences a second, or milliseconds of one, as median/best."""
    if not case.ok(library):
        return "-"
    timing = case.timings[library]
    if case.case.name == "one":
        return f"{timing.median * 1e3:.2f}/{timing.best * 1e3:.2f} ms"
    count = case.case.dims["sentences"]
    return f"{count / timing.median:.0f}/{count / timing.best:.0f}"


def print_table(result: Result, precision: str) -> None:
    print_heading(result)
    peers = list(PEERS[precision])
    print(f"\n{precision}: sentences a second or milliseconds of one; how many times as fast rlx is, as median/best\n")
    heading = ["case", "sentences", OURS, *peers, *(f"/{peer}" for peer in peers), "/best peer", "rlx/roof"]
    rows = []
    for case in result.cases:
        cells = [case.case.name, str(case.case.dims["sentences"]), *(rate(case, name) for name in (OURS, *peers))]
        rows.append(cells + comparison(result, case, OURS, peers))
    print_rows(heading, rows)
    print()
    for case in result.cases:
        notes = [f"{name}: {timing.note}" for name, timing in case.timings.items() if name in (OURS, *peers)]
        if case.case.name == "all":
            print(", ".join(notes))
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def to_json(result: Result, precision: str) -> dict[str, Any]:
    content = result.to_json()
    for case in content["cases"]:
        del case["subject"]  # a temporary folder
    ratios = {case.case.name: times_as_fast(case, OURS, list(PEERS[precision])) for case in result.cases}
    return {"precision": precision} | content | {"times_as_fast": ratios}


def main() -> int:
    parser = options(__doc__, threads=[1, 2], rounds=5, peers="the peers")
    add_minilm(parser, "what is embedded")
    parser.add_argument("--precision", choices=tuple(PEERS), default="f32")
    parser.add_argument("--cases", nargs="+", choices=("all", "distinct", "one"), default=["all", "distinct", "one"])
    args = parser.parse_args()
    model = minilm(args)
    texts, scores = sentences(args.sentences)
    texts = {name: some for name, some in texts.items() if name in args.cases}

    def runs() -> Iterator[tuple[Result, dict[str, Any]]]:
        for threads in args.threads:
            result = run(model, texts, scores, args.python, threads, args.rounds, args.precision)
            print_table(result, args.precision)
            yield result, to_json(result, args.precision)

    return finished(runs(), args.json)


if __name__ == "__main__":
    sys.exit(main())
