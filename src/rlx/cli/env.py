"""`rlx env`: versions, target, threads and cache, for bug reports."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version

import rlx
from rlx.backends.base import available, backend
from rlx.backends.cache_folder import current
from rlx.errors import CapabilityError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("env", help="show versions, the target, threads and the cache")
    command.set_defaults(run=run)


def _cuda() -> str:
    """The GPUs, or why there are none."""
    try:
        facts = backend("cuda").describe()
    except CapabilityError as error:
        return f"none: {error}"
    return ", ".join(facts.values())


def run(arguments: argparse.Namespace) -> int:
    store = current()
    rows = {
        "rlx": rlx.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "numpy": version("numpy"),
        **backend("cpu").describe(),
        "cuda": _cuda(),
        "cache": f"{store.folder}" + ("" if store.writable else " (read only)")
        if store.folder
        else f"none: {store.why}",
        "devices": ", ".join(available()),
    }
    for name, value in rows.items():
        print(f"{name:10} {value}")
    return 0
