"""`rlx export MODEL -o FILE`: program, kernels and manifest in one file, which starts without compiling anything.

`rlx run FILE`, `rlx embed -m FILE` and `rlx.load(FILE)` take it as they take a model. With `--manifest`, MODEL is such
a file: it is compared with its digests, and what is in it goes to stdout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rlx import hub
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.hub.store import show_size
from rlx.runtime.export import SUFFIX, read_export
from rlx.runtime.kv_spec import CACHE_HELP, CACHES


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("export", help="write a model to a file that starts without compiling")
    command.add_argument("model", metavar="MODEL", help="catalogue name, file, folder or org/name[:quant]")
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"the file to write; NAME{SUFFIX} here if not given"
    )
    command.add_argument("--weights", action="store_true", help="put the weights in, packed as the kernels read them")
    command.add_argument("--context", type=int, metavar="N", help="positions to make room for")
    command.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    command.add_argument("--manifest", action="store_true", help="show what an exported file holds")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.manifest:
        return show(Path(arguments.model))
    output = arguments.output or _named_after(arguments.model)
    if output.suffix != SUFFIX:
        raise UsageError(f"export: the output is {str(output)!r}, expected a name that ends in {SUFFIX}")
    if not output.parent.is_dir():
        raise UsageError(f"export: there is no folder {str(output.parent)!r}")
    from rlx.cli.loading import load

    hub.resolve(arguments.model)  # draws a bar of its own
    settings = {"context": arguments.context, "cache": arguments.cache}
    with console.status(f"exporting {arguments.model}"), load(arguments.model, **settings) as model:
        written = model.export(output, weights=arguments.weights)
    about = read_export(written).manifest
    parts = [
        show_size(written.stat().st_size), f"{len(about['kernels'])} kernels for {about['target']['name']}",
        "weights inside" if arguments.weights else f"weights stay in {about['model']['path']}",
    ]  # fmt: skip
    console.aside(console.joined(parts))
    print(written)
    return 0


def _named_after(model: str) -> Path:
    path = Path(model)
    return Path((path.stem if path.is_file() else path.name).replace(":", "-") + SUFFIX)


def show(path: Path) -> int:
    """The manifest of an export, whatever machine and version it is for."""
    file = read_export(path)
    file.check(file.manifest["sections"])
    print(json.dumps(file.manifest, indent=1, ensure_ascii=False))
    return 0
