"""Perplexity on WikiText-2's test part: what a model loses, or not, by how it is computed here.

The file is tokenised once and cut into windows of 512 tokens without overlap; the first token of a window becomes BOS
where the model wants one. Tokens 257 to 511 of each window are scored, as llama.cpp's perplexity tool does, and besides
all of them. Over the first 40 windows the result is compared with llama.cpp's own on the same file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import command, describe_machine, timestamp, write_json

WINDOW = 512
FIRST = WINDOW // 2  # the first position whose next token is scored
WINDOWS = 40
# llama.cpp 0.3.36, over WINDOWS windows
LLAMA_CPP = {"smollm2-135m": 23.586, "qwen2.5-coder-1.5b": 13.193, "gemma3-270m": 17.224}
GATE = 0.005  # how far from llama.cpp, relatively
ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[2] / "shared" / "assets"))


@dataclass
class Scores:
    """Sums over the windows so far."""

    windows: int = 0
    scored: list[float] = field(default_factory=list)  # mean negative log probability of each window's scored tokens
    everything: list[float] = field(default_factory=list)  # and of all its tokens but the first
    hits: int = 0  # tokens, of all but the first, that were the likeliest ones
    seconds: float = 0.0

    def add(self, logits: np.ndarray, tokens: np.ndarray, seconds: float) -> None:
        """Take in [window, vocab] logits: row i is about token i + 1."""
        rows = logits[:-1]
        top = rows.max(axis=1)
        # The sum of a row is made in f64: vocabularies are large, and a window has few rows.
        total = np.log(np.exp(rows - top[:, None]).sum(axis=1, dtype=np.float64)) + top
        losses = total - rows[np.arange(len(rows)), tokens[1:]]
        self.windows += 1
        self.scored.append(float(losses[FIRST:].mean()))
        self.everything.append(float(losses.mean()))
        self.hits += int((rows.argmax(axis=1) == tokens[1:]).sum())
        self.seconds += seconds

    def result(self) -> dict[str, Any]:
        return {
            "windows": self.windows,
            "tokens": self.windows * (WINDOW - 1 - FIRST),
            "perplexity": float(np.exp(np.mean(self.scored))),
            "perplexity_of_all": float(np.exp(np.mean(self.everything))),
            "top1_of_all": self.hits / (self.windows * (WINDOW - 1)),
            "tokens_per_second": self.windows * WINDOW / self.seconds,
        }


def measure(name: str, text: str, windows: int, threads: int | None) -> dict[str, Any]:
    import rlx

    scores = Scores()
    with rlx.load(name, threads=threads, context=WINDOW, offline=True) as model:
        tokenizer = model.tokenizer
        tokens = np.array(tokenizer.encode(text, add_special=False))
        for at in range(windows):
            window = tokens[at * WINDOW : (at + 1) * WINDOW].copy()
            window[: len(tokenizer.prefix)] = tokenizer.prefix  # what the model expects before any text
            begin = time.perf_counter()
            logits = model.logits(window.tolist())
            scores.add(logits, window, time.perf_counter() - begin)
            print(f"{name}: {at + 1} of {windows}: {scores.result()['perplexity']:.4f}", file=sys.stderr)
    result = {"model": name, "tokens_in_file": len(tokens)} | scores.result()
    if windows == WINDOWS and name in LLAMA_CPP:
        result |= {"llama_cpp": LLAMA_CPP[name], "from_llama_cpp": result["perplexity"] / LLAMA_CPP[name] - 1}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(LLAMA_CPP), metavar="NAME", help="pulled before")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--text", type=Path, default=ASSETS / "text" / "wiki.test.raw")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    results = [measure(name, text, args.windows, args.threads) for name in args.models]
    print("| model | windows | perplexity | from llama.cpp | over all | top-1 over all | tok/s |\n" + "|---" * 7 + "|")
    for r in results:
        gap = f"{r['from_llama_cpp']:+.2%}" if "from_llama_cpp" in r else "-"
        cells = [r["model"], str(r["windows"]), f"{r['perplexity']:.4f}", gap, f"{r['perplexity_of_all']:.4f}"]
        cells += [f"{r['top1_of_all']:.4f}", f"{r['tokens_per_second']:.0f}"]
        print("| " + " | ".join(cells) + " |")
    if args.json:
        machine = describe_machine() | {"date": timestamp(), "command": command()}
        write_json(args.json, {"machine": machine, "models": results})
    return 1 if any(abs(r.get("from_llama_cpp", 0.0)) > GATE for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
