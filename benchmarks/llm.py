"""Language models from GGUF files: rlx against llama-cpp-python, which may live in another environment.

Tokens a second of writing 128 tokens after a prompt of 32 and of reading 128 and 512, the time to load, the time of a
fresh process to its first token, and peak memory. Prints median/best, how many times as fast rlx is, and the share of
the memory bandwidth of the same run that reading the packed weights once a token takes; `--json` keeps every round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm_engines
from command import finished, options
from harness import CaseResult, Library, Result, compare, print_heading
from worker import Case

MODELS = ("smollm2-135m", "qwen2.5-coder-1.5b", "gemma3-270m")
OURS, PEER = "rlx", "llama.cpp"
NARROW = 4.0  # VNNI multiplies four pairs of 8-bit numbers where an FMA multiplies one of f32
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def model_file(name: str) -> Path:
    from rlx.hub.pull import resolve

    return resolve(name, offline=True).path


def cases(path: Path) -> list[Case]:
    """One token or one prompt each. Bytes are those of the packed weights, flops those of the matrix products."""
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    head = tensors.get(HEAD, tensors[EMBEDDING])
    layers = [tensor for name, tensor in tensors.items() if name not in (EMBEDDING, HEAD)]
    size = float(sum(int(tensor.n_bytes) for tensor in (*layers, head)))
    token = 2.0 * sum(int(tensor.n_elements) for tensor in layers if len(tensor.shape) == 2)
    last = 2.0 * int(head.n_elements)  # logits are needed after the last token only

    def case(name: str, kind: str, count: int, flops: float) -> Case:
        return Case(name, {kind: count}, flops, size, str(path), NARROW)

    return [
        case("write 128", "write", 128, token + last),
        case("read 128", "read", 128, 128 * token + last),
        case("read 512", "read", 512, 512 * token + last),
        case("load", "load", 1, 0.0),
        case("first token", "first", 1, 0.0),
    ]


def peak_bytes(library: Library, path: Path, threads: int, what: str = "memory") -> int | None:
    """The most memory a fresh process of the library has; None where it does not say."""
    script = [library.python, llm_engines.__file__, library.name, str(path), str(threads), what]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1]) * 1024 if done.returncode == 0 else None


# ---------------------------------------------------------------------------------------------------------------------
# Printing.


def rates(case: CaseResult, library: str) -> str:
    """Tokens a second, or milliseconds, as median/best."""
    if not case.ok(library):
        return "-"
    timing = case.timings[library]
    ((kind, count),) = case.case.dims.items()
    tokens = {"write": 1, "read": count}.get(kind)  # a timing of writing is that of one token
    if tokens is None:
        return f"{timing.median * 1e3:.0f}/{timing.best * 1e3:.0f} ms"
    return f"{tokens / timing.median:.1f}/{tokens / timing.best:.1f} tok/s"


def share(result: Result, case: CaseResult, library: str) -> str:
    """Of memory bandwidth for a token, of f32 multiply-adds for a prompt.

    The median of writing is over the shares of rounds, each of what memory gave in that very round: on shared machines
    bandwidth changes by half from minute to minute.
    """
    if not case.ok(library) or not case.case.flops:
        return ""
    timing = case.timings[library]
    if "write" not in case.case.dims:
        rate, limit = case.case.flops, result.ceilings.fma
        return f"{rate / timing.median / limit:.2f}/{rate / timing.best / limit:.2f} FMA"
    usual, best = dram_shares(result, case, library)
    return f"{usual:.2f}/{best:.2f} DRAM"


def dram_shares(result: Result, case: CaseResult, library: str) -> tuple[float, float]:
    """Of bandwidth: the median over rounds, and the best round of the best bandwidth in the run."""
    timing, probe = case.timings[library], case.timings["dram"]
    assert probe.work is not None
    rounds = zip(timing.seconds, probe.seconds, strict=True)
    usual = statistics.median(case.case.bytes / ours * theirs / probe.work for ours, theirs in rounds)
    return usual, case.case.bytes / timing.best / result.ceilings.dram


def print_table(name: str, result: Result, peaks: dict[str, int | None]) -> None:
    print(f"\n## {name}, {result.threads} thread(s)\n")
    print_heading(result)
    print(f"weights read a token: {result.cases[0].case.bytes / 1e6:.1f} MB; values as median/best\n")
    print("| | rlx | llama.cpp | times as fast | rlx of limit | llama.cpp of limit |\n|---|---|---|---|---|---|")
    for case in result.cases:
        both = case.ok(OURS) and case.ok(PEER)
        ratio = "{:.2f}/{:.2f}".format(*case.ratio(OURS, PEER)) if both else "-"
        shares = share(result, case, OURS), share(result, case, PEER)
        cells = [case.case.name, rates(case, OURS), rates(case, PEER), ratio, *shares]
        print("| " + " | ".join(cells) + " |")
    shown = [f"{peaks[name] / 1e6:.0f} MB" if peaks.get(name) else "-" for name in (OURS, PEER)]
    print(f"| peak memory | {shown[0]} | {shown[1]} | | | |\n")
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def to_json(name: str, path: Path, result: Result, peaks: dict[str, int | None]) -> dict[str, Any]:
    content = result.to_json()
    for case in content["cases"]:
        case["subject"] = path.name
    ratios = {c.case.name: c.ratio(OURS, PEER) for c in result.cases if c.ok(OURS) and c.ok(PEER)}
    shares = {c.case.name: dram_shares(result, c, OURS) for c in result.cases if c.ok(OURS) and "write" in c.case.dims}
    return {"model": name} | content | {"peak_bytes": peaks, "times_as_fast": ratios, "dram_shares": shares}


def main() -> int:
    parser = options(__doc__, threads=[1, 2], rounds=5, peers="llama-cpp-python")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="of the catalogue, pulled before")
    args = parser.parse_args()
    libraries = (
        Library(OURS, "llm_engines:rlx", ("rlx",)),
        Library(PEER, "llm_engines:llama_cpp", ("llama_cpp",), args.python),
    )

    def runs() -> Iterator[tuple[Result, dict[str, Any]]]:
        for name in args.models:
            path = model_file(name)
            for threads in args.threads:
                result = compare(libraries, cases(path), threads=threads, rounds=args.rounds)
                present = [x for x in libraries if not result.libraries[x.name].startswith("absent")]
                peaks = {library.name: peak_bytes(library, path, threads) for library in present}
                print_table(name, result, peaks)
                yield result, to_json(name, path, result, peaks)

    return finished(runs(), args.json)


if __name__ == "__main__":
    sys.exit(main())
