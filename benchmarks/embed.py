"""Sentences to vectors by all-MiniLM-L6-v2 in f32: rlx against sentence-transformers, ONNX Runtime and OpenVINO.

The work is the test set of STS-B, 2,758 sentences, tokenisation and pooling included: `all` at once, the `distinct`
ones at once (rlx computes equal texts once, its peers do not), and `one` at a time. Prints sentences a second as
median/best and how many times as fast rlx is as each peer; `--json` keeps every round. Peers may live in another
environment.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from embed_engines import CHECKED
from harness import CaseResult, Library, Result, compare, print_heading, write_json
from scipy.special import erf
from worker import Case

SINGLE = 60  # sentences one at a time in a round
ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[2] / "shared" / "assets"))
OURS = "rlx"
PEERS = {
    "sentence-transformers": ("embed_engines:sentence_transformers", ("sentence_transformers", "torch")),
    "onnxruntime": ("embed_engines:onnxruntime", ("onnxruntime", "tokenizers")),
    "openvino": ("embed_engines:openvino", ("openvino", "tokenizers")),
}
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
        self.bytes = 4.0 * self.layers * layers

    def flops(self, texts: list[str]) -> float:
        """Of the matrix products of each distinct sentence, once."""
        lengths = np.array([len(row) for row in self.tokenizer.encode_batch(set(texts))], np.float64)
        return float(2 * lengths.sum() * self.bytes / 4 + 4 * (lengths**2).sum() * self.dim * self.layers)

    def vector(self, text: str) -> Array:
        tokens = self.tokenizer.encode(text)
        tables = [self.weights[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type")]
        x = self.norm(tables[0][tokens] + tables[1][: len(tokens)] + tables[2][0], "embeddings.LayerNorm")
        for i in range(self.layers):
            layer = f"encoder.layer.{i}"
            x = self.norm(x + self.attention(x, f"{layer}.attention"), f"{layer}.attention.output.LayerNorm")
            inner = self.linear(x, f"{layer}.intermediate.dense")
            inner = inner * (1 + erf(inner / np.sqrt(2))) / 2
            x = self.norm(x + self.linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        mean: Array = x.mean(0)
        return mean / np.linalg.norm(mean)

    def attention(self, x: Array, name: str) -> Array:
        q, k, v = (
            self.linear(x, f"{name}.self.{n}").reshape(len(x), self.heads, -1).swapaxes(0, 1)
            for n in ("query", "key", "value")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        seen = (scores / scores.sum(-1, keepdims=True)) @ v
        return self.linear(seen.swapaxes(0, 1).reshape(x.shape), f"{name}.output.dense")

    def linear(self, x: Array, name: str) -> Array:
        found: Array = x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return found

    def norm(self, x: Array, name: str) -> Array:
        found: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + self.eps)
        return found * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def sentences(path: Path) -> dict[str, list[str]]:
    """The texts of each case, from a CSV file whose first two columns are sentences."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    everything = [row[0] for row in rows] + [row[1] for row in rows]
    distinct = list(dict.fromkeys(everything))
    step = max(1, len(distinct) // SINGLE)
    return {"all": everything, "distinct": distinct, "one": distinct[::step][:SINGLE]}


def run(model: Path, texts: Mapping[str, list[str]], python: str, threads: int, rounds: int) -> Result:
    encoder = Encoder(model)
    libraries = [Library(OURS, "embed_engines:rlx", ("rlx",))]
    libraries += [Library(name, factory, packages, python) for name, (factory, packages) in PEERS.items()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "model").symlink_to(model.resolve())
        cases = []
        for name, some in texts.items():
            (folder / f"{name}.json").write_text(json.dumps(some), encoding="utf-8")
            flops = encoder.flops(some) / (len(some) if name == "one" else 1)
            cases.append(Case(name, {"sentences": len(some)}, flops, encoder.bytes, scratch))

        def reference(case: Case) -> Array:
            return np.stack([encoder.vector(text) for text in texts[case.name][:CHECKED]])

        return compare(libraries, cases, threads=threads, rounds=rounds, reference=reference)


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


def ratios(case: CaseResult) -> dict[str, tuple[float, float]]:
    """How many times as fast rlx is as each peer, and as the best of them."""
    if not case.ok(OURS):
        return {}
    found = {peer: case.ratio(OURS, peer) for peer in PEERS if case.ok(peer)}
    best = case.best_peer(list(PEERS))
    return found | ({"best peer": found[best]} if best else {})


def print_table(result: Result) -> None:
    print_heading(result)
    print("\nsentences a second, or milliseconds of one, and how many times as fast rlx is, as median/best\n")
    heading = ["case", "sentences", OURS, *PEERS, *(f"/{peer}" for peer in PEERS), "/best peer", "rlx/roof"]
    print("| " + " | ".join(heading) + " |\n|" + "---|" * len(heading))
    for case in result.cases:
        found = ratios(case)
        cells = [case.case.name, str(case.case.dims["sentences"]), *(rate(case, name) for name in (OURS, *PEERS))]
        cells += ["{:.2f}/{:.2f}".format(*found[name]) if name in found else "-" for name in (*PEERS, "best peer")]
        roof = result.ceilings.roof(case.case) / 1e9
        cells.append("/".join(f"{g / roof:.2f}" for g in case.gflops(OURS)) if case.ok(OURS) else "-")
        print("| " + " | ".join(cells) + " |")
    print()
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def to_json(result: Result) -> dict[str, Any]:
    content = result.to_json()
    for case in content["cases"]:
        del case["subject"]  # a temporary folder
    return content | {"times_as_fast": {case.case.name: ratios(case) for case in result.cases}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="minilm-l6 of the catalogue unless given")
    parser.add_argument("--sentences", type=Path, default=ASSETS / "text" / "stsb-en-test.csv", metavar="CSV")
    parser.add_argument("--cases", nargs="+", choices=("all", "distinct", "one"), default=["all", "distinct", "one"])
    parser.add_argument("--python", default=os.environ.get("RLX_PEERS_PYTHON", sys.executable), metavar="PATH",
                        help="interpreter that has the peers; RLX_PEERS_PYTHON unless given")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    if args.model is None:
        from rlx.hub.pull import resolve

        args.model = resolve("minilm-l6").path.parent
    texts = {name: some for name, some in sentences(args.sentences).items() if name in args.cases}
    runs, problems = [], 0
    for threads in args.threads:
        result = run(args.model, texts, args.python, threads, args.rounds)
        print_table(result)
        problems += len(result.problems())
        runs.append(to_json(result))
        if args.json:
            write_json(args.json, {"runs": runs})  # after each: a long run that is broken off is not lost
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
