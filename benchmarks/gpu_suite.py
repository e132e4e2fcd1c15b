"""All tests that need a GPU in one call, and compute-sanitizer over the ops: prints a short table.

    python benchmarks/gpu_suite.py --json benchmarks/results/gpu-suite.json     # under 9 minutes on 16 cores
    pytest --update tests/test_docs_figures.py                                  # puts the table into docs/gpu.md

Tests run in several processes that share the GPU. Under compute-sanitizer each of them runs every op of its share in
every element type, until the time is up; the table says how many cases there were time for. RLX_ASSETS is the folder
that has stories260K.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SECTIONS = {  # test module -> what it compares
    "tests.backends.cuda.test_gpu_ops": "every op, sample and element type against NumPy and SciPy",
    "tests.transforms.test_gpu_gradients": "gradients of every op against NumPy",
    "tests.backends.cuda.test_gpu_matmul": "matmuls against NumPy; the same bits for any number of rows",
    "tests.backends.cuda.test_gpu_attention": "attention against NumPy; the same bits for any batch, chunks and pages",
    "tests.models.test_gpu_families": "every family against transformers (f32) and the CPU (bf16)",
    "tests.engine.test_gpu_generation": "generation against the CPU: tokens, bits, bounds of bf16",
    "tests.ops.test_gpu_random": "random bits, uniform and normal numbers against the CPU",
    "tests.backends.cuda.test_gpu_runtime": "results, training, loops, faults, DLPack",
    "tests.cli.test_gpu_commands": "rlx env, run, bench, verify and inspect",
}
TOOLS = ("memcheck", "racecheck")


def versions() -> dict[str, str]:
    from rlx.backends.base import backend

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    known = {"gpu": name, "driver": driver, **backend("cuda").versions(), "python": platform.python_version()}
    return known | {"commit": os.environ.get("RLX_COMMIT") or commit.stdout.strip()}


# -- tests -----------------------------------------------------------------------------------------------------------
def run_tests(tests: list[str], processes: int, seconds: float) -> list[dict[str, Any]]:
    """Runs everything that has the mark gpu; a row per section."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        parallel = ["-p", "xdist", "-n", str(processes)] if processes > 1 else []
        options = ["-m", "gpu", "-q", "--tb=short", f"--junitxml={report}", *parallel]
        alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other packages' plugins warn, which is an error
        begin = time.monotonic()
        running = subprocess.Popen([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=alone)
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"the tests did not end within {seconds:.0f} s", flush=True)
            running.send_signal(signal.SIGINT)  # it writes the report of those that have run
            running.wait()
        print(f"tests took {time.monotonic() - begin:.0f} s", flush=True)
        return list(rows_of(report)) if report.exists() else []


def rows_of(report: Path) -> Iterator[dict[str, Any]]:
    cases = list(xml.parse(report).iter("testcase"))
    for module, about in SECTIONS.items():
        own = [case for case in cases if case.get("classname") == module]
        failed = [
            case.get("name") for case in own if case.find("failure") is not None or case.find("error") is not None
        ]
        skipped = sum(case.find("skipped") is not None for case in own)
        seconds = sum(float(case.get("time") or 0) for case in own)
        yield {
            "what": about, "cases": len(own), "failed": len(failed), "skipped": skipped, "seconds": round(seconds),
            "failures": failed,
        }  # fmt: skip


# -- compute-sanitizer -----------------------------------------------------------------------------------------------
def sanitize(tool: str, processes: int, seconds: float) -> dict[str, Any]:
    """Runs ops under a tool of compute-sanitizer, each process its share."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
    limit = ["--seconds", str(seconds)]
    begin = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shares = [subprocess.Popen([*command, "--ops", f"{i}/{processes}", *limit], **pipes) for i in range(processes)]
    outputs = []
    for share in shares:
        try:
            outputs.append(share.communicate(timeout=max(seconds + 60 - (time.monotonic() - begin), 1))[0])
        except subprocess.TimeoutExpired:
            share.kill()
            outputs.append(f"{share.communicate()[0]}\nran out of time")
    ran = sum(int(line.split()[1]) for text in outputs for line in text.splitlines() if line.startswith("CASES "))
    every = sum(int(line.split()[3]) for text in outputs for line in text.splitlines() if line.startswith("CASES "))
    bad = [text for share, text in zip(shares, outputs, strict=True) if share.returncode]
    for text in bad[:3]:
        print(text[-3000:], flush=True)
    about = f"compute-sanitizer {tool} over ops: {ran} of {every} cases"
    took = round(time.monotonic() - begin)
    return {"what": about, "cases": ran, "failed": len(bad), "skipped": every - ran, "seconds": took, "failures": []}


def run_ops(share: str, seconds: float) -> None:
    """The cases of one process: each launch by itself, so that a tool sees every kernel once."""
    sys.path.insert(0, str(ROOT / "tests"))
    import numpy as np
    from sample_graphs import element_types, sample_graph, user_ops

    import rlx

    number, count = map(int, share.split("/"))
    cases = [(op.name, name) for op in user_ops() for name in element_types(op)][number::count]
    begin, ran = time.monotonic(), 0
    for op, name in cases:
        if time.monotonic() - begin > seconds:
            break
        case = sample_graph(op, name)
        for output in rlx.compile(case.graph, "cuda").run(case.inputs):  # the tests look at the values
            np.asarray(output)
        ran += 1
    print(f"CASES {ran} of {len(cases)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14))
    parser.add_argument("--test-seconds", type=float, default=330, help="most time of the tests")
    parser.add_argument("--seconds", type=float, default=60, help="time of each tool of compute-sanitizer; 0: none")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files or folders of tests (all)")
    parser.add_argument("--json", type=Path, help="write the results")
    parser.add_argument("--ops", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ops:
        run_ops(arguments.ops, arguments.seconds)
        return 0
    begin = time.monotonic()
    results: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions()}
    results["rows"] = run_tests(arguments.tests, arguments.processes, arguments.test_seconds)
    if arguments.seconds:
        results["rows"] += [sanitize(tool, arguments.processes, arguments.seconds) for tool in TOOLS]
    results["seconds"] = round(time.monotonic() - begin)
    for row in results["rows"]:
        counts = f"{row['failed']:4} of {row['cases']:5} failed, {row['skipped']:4} skipped, {row['seconds']:5} s"
        print(f"{counts}  {row['what']}")
        for name in row["failures"][:20]:
            print(f"       {name}")
    print(f"{results['seconds']} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(row["failed"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
