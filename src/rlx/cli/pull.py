"""`rlx pull NAME`: downloads a model and prints its path."""

from __future__ import annotations

import argparse

from rlx import hub
from rlx.hub.progress import say
from rlx.hub.store import show_size


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("pull", help="download a model")
    command.add_argument("names", nargs="*", metavar="NAME", help=f"a model name (default: {hub.DEFAULT})")
    command.add_argument("--revision", help="branch, tag or commit of a Hugging Face model")
    command.add_argument("--accept-licence", "--accept-license", action="store_true", help="accept the model's terms")
    command.add_argument("-q", "--quiet", action="store_true", help="do not show progress")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for name in arguments.names or [hub.DEFAULT]:
        files = hub.locate(name, revision=arguments.revision)
        if files is None or files.in_doubt:
            files = hub.resolve(
                name, accept_licence=arguments.accept_licence, revision=arguments.revision, quiet=arguments.quiet,
                unsupported=True,
            )  # fmt: skip
        else:
            say(f"{files.name}: already here, {show_size(files.size)}", quiet=arguments.quiet)
        if files.entry is not None and not files.entry.supported:
            say(f"{files.name}: rlx cannot run it yet: architecture {files.entry.family!r} is not supported")
        print(files.path)
    return 0
