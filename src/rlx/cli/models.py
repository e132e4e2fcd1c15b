"""`rlx models`: lists the models of the catalogue, and those downloaded from the Hugging Face hub."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rlx.cli import console
from rlx.hub import CATALOGUE, DEFAULT, Entry, ModelFiles, stored
from rlx.hub.store import show_size

COLUMNS = ("name", "kind", "size", "licence", "here", "about")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("models", help="list the models")
    command.add_argument("--json", action="store_true", help="all details, as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    here = {files.name: files for files in stored()}
    others = [files for files in here.values() if files.entry is None]
    if arguments.json:
        known = [facts(entry, here.get(entry.name)) for entry in CATALOGUE.values()]
        print(json.dumps(known + [_hub_facts(files) for files in others], indent=2))
        return 0
    rows = [_row(entry, here.get(entry.name)) for entry in CATALOGUE.values()]
    rows += [(f.name, "", show_size(f.size), "", "yes", "from the Hugging Face hub") for f in others]
    console.table(COLUMNS, rows, numbers=("size",))
    return 0


def _row(entry: Entry, files: ModelFiles | None) -> tuple[str, ...]:
    about = entry.about + (" (default)" if entry.name == DEFAULT else "")
    about += "" if entry.supported else f" (not supported yet: rlx has no {entry.family})"
    return entry.name, entry.kind, show_size(entry.size), entry.licence, "yes" if files else "no", about


def facts(entry: Entry, files: ModelFiles | None) -> dict[str, Any]:
    """The catalogue's entry of a model, and its folder."""
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "default": entry.name == DEFAULT,
        "about": entry.about,
        "kind": entry.kind,
        "family": entry.family,
        "supported": entry.supported,
        "licence": entry.licence,
        "terms": entry.terms.text if entry.terms else None,
        "origin": entry.origin,
        "source": "catalogue",
        "size": entry.size,
        "download_size": entry.download_size,
        "packages": [
            {"registry": a.registry, "project": a.project, "version": a.version, "size": a.size, "sha256": a.sha256}
            for a in entry.archives
        ],
        "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in entry.files],
        "present": files is not None,
        "folder": str(files.folder) if files else None,
    }


def _hub_facts(files: ModelFiles) -> dict[str, Any]:
    return {
        "name": files.name,
        "source": "hub",
        "size": files.size,
        "revision": files.revision,
        "files": [{"name": str(f.relative_to(files.folder)), "size": f.stat().st_size} for f in files.files],
        "present": True,
        "folder": str(files.folder),
    }
