"""`rlx search INDEX QUERY`: the rows of an index that are most similar to a text, by the model that it names."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.errors import FormatError
from rlx.index.head import DTYPES
from rlx.index.head import NAME as HEAD
from rlx.index.index import Hit, Index


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("search", help="search an index of vectors for a text")
    command.add_argument(
        "index", type=Path, metavar="INDEX", help="index, as rlx batch embed --index or rlx.Index makes it"
    )
    command.add_argument("query", nargs="?", metavar="QUERY", help="text to search for")
    command.add_argument("-k", type=int, default=10, metavar="N", help="how many rows to show (10)")
    command.add_argument("--vector", type=Path, metavar="FILE.npy", help="search for this vector instead of a text")
    command.add_argument("--rescore", type=int, metavar="N", help="rows of an int8 index that are scored again in f32")
    command.add_argument("-m", "--model", help="embed the query with this model, not with the one that the index names")
    command.add_argument("--verify", action="store_true", help="check the digests of all files, and search for nothing")
    command.add_argument("--threads", type=int, metavar="N", help="number of threads (default: all usable cores)")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.verify and (arguments.query is None) == (arguments.vector is None):
        raise UsageError("search: expected a query or --vector", hint=f'rlx search {arguments.index} "a text"')
    for name, value in (("-k", arguments.k), ("--threads", arguments.threads), ("--rescore", arguments.rescore)):
        if value is not None and value < 1:
            raise UsageError(f"search: {name} is {value}, expected a number from 1")
    _check_place(arguments.index)
    with Index.open(arguments.index, threads=arguments.threads) as index:
        if arguments.verify:
            index.verify()
            console.note(f"{arguments.index}: all digests fit: {_facts(index)}")
            return 0
        vector = _query(index, arguments)
        begin = time.perf_counter()
        hits = index.search(vector, arguments.k, rescore=arguments.rescore)
        seconds = time.perf_counter() - begin
        _show(index, arguments, hits)
        console.dim_note(console.join([f"{seconds * 1e3:.1f} ms", _facts(index)]))
    return 0


def _check_place(path: Path) -> None:
    """Say what makes an index, or searches without one, if there is none at this place."""
    if (path / HEAD).is_file():
        return
    if not path.exists():
        raise UsageError(
            f"search: there is no {path}", hint="rlx batch embed TEXTS -o OUT --index INDEX makes an index"
        )
    text = shlex.quote(str(path))
    if path.suffix == ".npy":
        hint = "rlx batch embed TEXTS -o OUT --index INDEX makes an index of texts, rlx.Index.create one of vectors"
    else:
        hint = (
            f"rlx embed {text} --query '...' searches texts, rlx batch embed {text} -o OUT --index INDEX makes an index"
        )
    raise FormatError(f"search: {path} is not an index: there is no {HEAD} in it", hint=hint)


def _query(index: Index, arguments: argparse.Namespace) -> Any:
    """The vector to search for."""
    if arguments.vector is not None:
        try:
            return np.load(arguments.vector, allow_pickle=False).reshape(-1)
        except (OSError, ValueError, EOFError) as error:
            raise UsageError(f"search: {arguments.vector} is no file of a vector: {error}") from None
    from rlx.cli.embed import open_model
    from rlx.engine.embedding_model import EmbeddingModel

    name = arguments.model or index.model
    if name is None:
        return index.embed([arguments.query])[0]  # says what is missing
    with open_model(name, arguments.threads) as model:
        if not isinstance(model, EmbeddingModel):
            raise UsageError(f"search: {name} reads images, not texts")
        return Index.open(index.path, model=model).embed([arguments.query])[0]


def _facts(index: Index) -> str:
    assert index.dtype in DTYPES
    return f"{len(index):,} x {index.dim} {index.dtype}, {index.metric}"


def _show(index: Index, arguments: argparse.Namespace, hits: list[Hit]) -> None:
    if arguments.json:
        rows = [
            {"score": float(f"{hit.score:.9g}"), "id": hit.id, "row": hit.row}
            | ({} if hit.text is None else {"text": hit.text})
            | ({} if hit.metadata is None else {"metadata": dict(hit.metadata)})
            for hit in hits
        ]
        report = {"index": str(arguments.index), "model": index.model, "rows": len(index), "results": rows}
        print(json.dumps(report, ensure_ascii=False))
        return
    width = max((len(str(hit.id)) for hit in hits), default=0)
    for hit in hits:
        print(f"{hit.score:7.4f}  {hit.id!s:>{width}}  {_line(hit.text)}".rstrip())


def _line(text: str | None) -> str:
    """A text on one line, without control characters."""
    return "" if text is None else "".join(c if c.isprintable() else " " for c in text)
