"""`rlx show NAME`: files, hashes, licence and location of a model, and the header of its weights. Offline."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from rlx.cli.models import facts
from rlx.errors import FormatError
from rlx.hub import Entry, ModelFiles, locate
from rlx.hub.catalogue import find
from rlx.hub.pull import model_folder
from rlx.hub.store import file_sha256, show_size

_LONG = 100  # characters; of longer header values, such as chat templates, only the length is shown


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("show", help="show a model: files, hashes, licence, header")
    command.add_argument("name", metavar="NAME", help="a catalogue name, org/name[:quant], a file or a folder")
    command.add_argument("--check", action="store_true", help="compare the hashes of the files with the catalogue")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    files = locate(arguments.name)
    entry = files.entry if files else find(arguments.name)
    info = describe(arguments.name, entry, files)
    if arguments.check and files:
        _add_hashes(info, files)
    if arguments.json:
        print(json.dumps(info, indent=2, default=str))
    else:
        print("\n".join(_lines(info)))
    wrong = [f["name"] for f in info["files"] if f.get("found_sha256", f.get("sha256")) != f.get("sha256")]
    if wrong:
        raise FormatError(f"{info['name']}: not as in the catalogue: {', '.join(wrong)}", hint="rlx rm, then rlx pull")
    return 0


def describe(name: str, entry: Entry | None, files: ModelFiles | None) -> dict[str, Any]:
    """All that is known of a model without network access."""
    info: dict[str, Any] = {"name": files.name if files else name, "present": files is not None}
    if entry is not None:
        info = facts(entry, files)
    elif files is not None:
        info["source"], info["size"], info["folder"] = files.source, files.size, str(files.folder)
        info["revision"] = files.revision
    info.setdefault("files", [])
    if files is None:
        info["hint"] = f"rlx pull {name}"
        if entry is not None:
            info["would_be_in"] = str(model_folder(entry))
        return info
    if entry is None:
        info["files"] = [{"name": _relative(f, files.folder), "size": f.stat().st_size} for f in files.files]
    info["header"] = header(files.path)
    return info


def header(path: Path) -> dict[str, Any]:
    """The header of a weights file: format, tensors, metadata."""
    from rlx.formats import open_tensors

    with open_tensors(path) as file:
        entries = [file.entry(n) for n in file.names]
        stored = Counter(str(e.storage) for e in entries)
        plain = {k: v for k, v in file.metadata.items() if isinstance(v, (bool, int, float, str))}
        long = {k: f"({len(v)} characters)" for k, v in plain.items() if isinstance(v, str) and len(v) > _LONG}
        return {
            "format": file.format,
            "tensors": len(file),
            "elements": sum(e.size for e in entries),
            "stored_as": dict(stored.most_common()),
            "metadata": plain | long,
        }


def _add_hashes(info: dict[str, Any], files: ModelFiles) -> None:
    for row, path in zip(info["files"], files.files, strict=True):
        hashed = file_sha256(path)
        row["found_sha256"] = hashed
        row.setdefault("sha256", hashed)


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _lines(info: dict[str, Any]) -> list[str]:
    lines = [info["name"] + (f": {info['about']}" if "about" in info else "")]
    for key in ("kind", "family", "licence", "origin", "revision", "aliases"):
        value = info.get(key)
        if value:
            lines.append(f"  {key:9} {', '.join(value) if isinstance(value, list) else value}")
    packages = info.get("packages", [])
    if packages:
        more = f" and {len(packages) - 1} more" if len(packages) > 1 else ""
        first = packages[0]
        size = show_size(info["download_size"])
        lines.append(f"  {'package':9} {first['project']} {first['version']} ({first['registry']}){more}, {size}")
    where = info.get("folder") or f"not here: {info['hint']}"
    lines += [f"  {'where':9} {where}", "", "files"]
    for file in info["files"]:
        checked = "" if "found_sha256" not in file else "  ok" if file["found_sha256"] == file["sha256"] else "  WRONG"
        lines.append(f"  {file['name']}  {show_size(file['size'])}" + checked)
        if "sha256" in file:
            lines.append(f"    sha256 {file['sha256']}")
    if "header" in info:
        lines += ["", *_header_lines(info["header"])]
    return lines


def _header_lines(header: dict[str, Any]) -> list[str]:
    stored = ", ".join(f"{count} {storage}" for storage, count in header["stored_as"].items())
    lines = [f"{header['format']}: {header['tensors']} tensors ({stored}), {header['elements'] / 1e6:.1f} M elements"]
    return lines + [f"  {key} = {value}" for key, value in header["metadata"].items()]
