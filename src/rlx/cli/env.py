"""`rlx env`: what rlx sees of this machine, for bug reports and doubts."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version

import rlx
from rlx import target
from rlx.backends.cache import current
from rlx.backends.cpu.pool import default_threads, shared
from rlx.backends.cpu.toolchain import llvm_version


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("env", help="show versions, the target, threads and the cache")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen, store = target.host(), current()
    threads = shared(default_threads())
    rows = {
        "rlx": rlx.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "numpy": version("numpy"),
        "llvmlite": f"{version('llvmlite')} (LLVM {llvm_version()})",
        "processor": _processor(),
        "target": f"{chosen.name} ({chosen.vector_bytes * 8}-bit vectors)",
        "runs": ", ".join(t.name for t in target.supported()),
        "threads": f"{threads.threads}" + (f" ({threads.why_single})" if threads.why_single else ""),
        "cache": f"{store.folder}" + ("" if store.writable else " (read only)")
        if store.folder
        else f"none: {store.why}",
    }
    for name, value in rows.items():
        print(f"{name:10} {value}")
    return 0


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
