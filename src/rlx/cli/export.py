"""`rlx export MODEL -o FILE`: writes program, kernels and manifest to one file that loads without compiling.

`rlx run FILE`, `rlx embed -m FILE` and `rlx.load(FILE)` accept it like any model. With `--manifest`, MODEL is an
exported file: its digests are checked, and its manifest is printed.
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
    command = commands.add_parser("export", help="write a model to a file that loads without compiling")
    command.add_argument("model", metavar="MODEL", help="catalogue name, file, folder or org/name[:quant]")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the file to write (default: NAME{SUFFIX} in the current folder)",
    )
    command.add_argument("--weights", action="store_true", help="embed the weights, packed for the kernels")
    command.add_argument("--context", type=int, metavar="N", help="maximum tokens, prompt and answer together")
    command.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    command.add_argument("--manifest", action="store_true", help="show the manifest of an exported file")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.manifest:
        return show(Path(arguments.model))
    output = arguments.output or _default_output(arguments.model)
    if output.suffix != SUFFIX:
        raise UsageError(f"export: the output is {str(output)!r}, expected a name that ends in {SUFFIX}")
    if not output.parent.is_dir():
        raise UsageError(f"export: there is no folder {str(output.parent)!r}")
    from rlx.cli.loading import load

    hub.resolve(arguments.model)  # shows its own progress
    settings = {"context": arguments.context, "cache": arguments.cache}
    with console.status(f"exporting {arguments.model}"), load(arguments.model, **settings) as model:
        written = model.export(output, weights=arguments.weights)
    about = read_export(written).manifest
    parts = [
        show_size(written.stat().st_size), f"{len(about['kernels'])} kernels for {about['target']['name']}",
        "weights inside" if arguments.weights else f"weights stay in {about['model']['path']}",
    ]  # fmt: skip
    console.dim_note(console.join(parts))
    print(written)
    return 0


def _default_output(model: str) -> Path:
    path = Path(model)
    return Path((path.stem if path.is_file() else path.name).replace(":", "-") + SUFFIX)


def show(path: Path) -> int:
    """Print the manifest of an export, for any machine and version of rlx."""
    file = read_export(path)
    file.check(file.manifest["sections"])
    print(json.dumps(file.manifest, indent=1, ensure_ascii=False))
    return 0
