"""`rlx embed [TEXT or FILE ...]`: vectors of texts and of the lines of files, or a ranked search over them.

A file or folder that exists is read; image files are for vision models and are passed on by name.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx import hub
from rlx.arrays import Array
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.cli.loading import load
from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.vision_model import VisionModel
from rlx.errors import CapabilityError, RequestError

DEFAULT = "minilm-l6"
MAX_BYTES = 256 << 20  # of all files of texts and stdin together
MANY = 256  # texts, from which on a bar is drawn
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # what models call the prompt of what is searched
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".npy")
TEXTS = (".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".log")
# Begins like a path, ends like a folder, or has a file name with a suffix behind a slash; not the address of a page.
_PATH = re.compile(r"(?!.*://)((\.{0,2}|~)/.+|.+/|.+/[^/]+\.[A-Za-z][A-Za-z0-9]{0,7})")
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("embed", help="vectors of texts, or a search over lines")
    command.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="texts, or files and folders to read; images; without any, lines of stdin",
    )
    command.add_argument("-m", "--model", default=DEFAULT, help=f"catalogue name, file, folder, org/name ({DEFAULT})")
    command.add_argument(
        "--file", metavar="FILE", action="append",
        help=f"one text per line, or a folder of such files, up to {MAX_BYTES >> 20} MiB in all; - is stdin",
    )  # fmt: skip
    command.add_argument("--out", type=Path, metavar="FILE.npy", help="write the vectors here, a row a text")
    command.add_argument("--query", metavar="TEXT", help="rank the texts by how close they are to this one")
    command.add_argument("--top", type=int, default=10, metavar="N", help="with --query: how many to show (10)")
    command.add_argument("--prompt", metavar="NAME", help="put this prompt of the model before each text")
    command.add_argument(
        "--no-truncate", action="store_true", help="refuse texts that are too long instead of cutting them"
    )
    command.add_argument("--batch-size", type=int, metavar="N", help="texts computed at a time")
    command.add_argument(
        "--precision", choices=("auto", "f32", "int8"), default="auto", help="int8: matrix products in 8-bit integers"
    )
    command.add_argument("--threads", type=int, metavar="N", help="of the pool; all usable cores if not given")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    places = read_texts(arguments.texts, arguments.file)
    texts = [place.text for place in places]
    with opened(arguments.model, arguments.threads, arguments.precision) as model:
        begin = time.perf_counter()
        vectors = vectors_of(model, texts, arguments)
        found: dict[str, Any] = {"model": model.name, _what(model): len(texts), "dim": model.dim}
        if arguments.out is not None:
            save(arguments.out, vectors)
            found["out"] = str(arguments.out)
        if arguments.query is not None:
            found["results"] = ranked(model, arguments.query, places, vectors, arguments.top)
        elif arguments.out is None:
            found["vectors"] = vectors
        seconds = time.perf_counter() - begin
        show(found, len(texts), as_json=arguments.json)
        say_timings(model, len(texts), seconds)
    return 0


# -- arguments -------------------------------------------------------------------------------------------------------
def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be before anything is fetched or computed."""
    for option in ("top", "threads", "batch_size"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UsageError(f"embed: --{option.replace('_', '-')} is {value}, expected a number from 1")
    out: Path | None = arguments.out
    if out is None:
        return
    if out.suffix != ".npy":
        raise UsageError(f"embed: --out is {str(out)!r}, expected a name that ends in .npy")
    if not out.parent.is_dir():
        raise UsageError(f"embed: --out: there is no folder {str(out.parent)!r}")
    if out.exists() and not out.is_file():
        raise UsageError(f"embed: --out: {str(out)!r} is no regular file")


@dataclass(frozen=True)
class Place:
    """A text and where it stands: in a line of a file, or among all texts where it is in none."""

    text: str
    line: int
    file: str | None = None

    def __str__(self) -> str:
        return "" if self.file is None else f"{self.file}:{self.line}"


def read_texts(texts: Sequence[str], files: Sequence[str] | None) -> list[Place]:
    """The texts of the command line, the lines of the files among them, then those of `files` or of stdin."""
    found: list[Place] = []
    reader = _Reader()
    for text in texts:
        if _is_path(text):
            found += reader.lines_of(text)
        elif _is_missing(text):
            raise UsageError(f"embed: {text!r} is written like a path, and nothing is there", hint=_as_text(text))
        else:
            found.append(Place(text, len(found) + 1))
    if not files:
        if texts:
            return found
        if sys.stdin is None or console.is_terminal(sys.stdin):
            raise UsageError("embed: there are no texts", hint="rlx embed 'a text' or rlx embed --file lines.txt")
        files = ["-"]
    for file in files:
        found += reader.lines_of(file) if file != "-" else reader.lines_of_stdin(len(found))
    return found


def _is_path(text: str) -> bool:
    """Whether a word of the command line is a file or folder to read: there is one, and it is no image."""
    try:
        return Path(text).exists() and Path(text).suffix.lower() not in IMAGES
    except (OSError, ValueError):  # too long for a name, or with a null in it
        return False


def _is_missing(text: str) -> bool:
    """Whether a word can only be meant as the path of a file or folder, and there is none. Models look for images."""
    if _is_image(text) or any(c.isspace() for c in text):
        return False
    if _PATH.fullmatch(text) is None and not text.lower().endswith(TEXTS):
        return False
    try:
        return not Path(text).exists()
    except (OSError, ValueError):  # too long for a name, or with a null in it
        return False


def _is_image(text: str) -> bool:
    return text.lower().endswith(IMAGES) and not any(c.isspace() for c in text)


def _as_text(word: str) -> str:
    return f"to embed it as a text, give it on stdin: echo {shlex.quote(word)} | rlx embed"


class _Reader:
    """Reads lines of files and of stdin, of all of them together no more than `MAX_BYTES`."""

    def __init__(self) -> None:
        self.size = 0  # of the texts so far

    def lines_of(self, name: str) -> list[Place]:
        """The lines of a file, or of all files of a folder that are text."""
        path = Path(name)
        if not path.is_dir():
            return self._lines_of_file(name)
        if any((path / model).exists() for model in MODEL_FILES):
            raise UsageError(f"embed: {name} is the folder of a model", hint=f"rlx embed -m {name} ...")
        found: list[Place] = []
        others = 0
        for file in sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")):
            try:
                found += self._lines_of_file(str(file))
            except UsageError as error:
                if not isinstance(error.__cause__, UnicodeDecodeError):
                    raise
                others += 1
        if others:
            console.note(f"{name}: {others} file{'s' * (others != 1)} passed over: not UTF-8 text")
        return found

    def lines_of_stdin(self, before: int) -> list[Place]:
        """The lines of stdin, counted from the texts before it."""
        return [Place(text, before + i + 1) for i, text in enumerate(self._lines("-"))]

    def _lines_of_file(self, name: str) -> list[Place]:
        return [Place(text, i + 1, name) for i, text in enumerate(self._lines(name))]

    def _lines(self, name: str) -> list[str]:
        where = "stdin" if name == "-" else name
        try:
            with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as source:
                data = console.read_at_most(source, MAX_BYTES, f"embed: {where}", before=self.size)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise UsageError(f"embed: {where} cannot be read: {getattr(error, 'strerror', error)}") from error
        texts = lines(data, where)
        self.size += len(data)  # a file that is no text is passed over and takes no room
        return texts


def lines(data: bytes, where: str) -> list[str]:
    """The lines of a UTF-8 text; empty ones count, so that rows are lines.

    >>> lines(b"one\\r\\n\\ntwo", "x.txt")
    ['one', '', 'two']
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"embed: {where}, line {line}: not UTF-8 text: byte {data[error.start]:#04x}",
            hint="convert it first, for example with iconv",
        ) from error
    found = [line.removesuffix("\r") for line in text.split("\n")]
    return found if found[-1] else found[:-1]


# -- a model ---------------------------------------------------------------------------------------------------------
def opened(name: str, threads: int | None, precision: str = "auto") -> EmbeddingModel | VisionModel:
    """The model, fetched if it is absent, with a line while it loads."""
    hub.resolve(name)  # draws a bar of its own
    with console.status(f"loading {name}"):
        model = load(name, threads=threads, precision=precision)
    if not isinstance(model, (EmbeddingModel, VisionModel)):
        model.close()
        raise CapabilityError(f"embed: {name} is a decoder: it writes text", hint=f"rlx run -m {name} -p '...'")
    return model


def vectors_of(model: EmbeddingModel | VisionModel, texts: Sequence[str], arguments: argparse.Namespace) -> Array:
    """The vectors of texts; for a vision model these are the names of image files."""
    if isinstance(model, VisionModel):
        if arguments.prompt is not None:
            raise UsageError(f"embed: {model.name} reads images, which have no --prompt")
        return model.encode_image(list(texts), **({"batch_size": n} if (n := arguments.batch_size) else {}))
    image = next(filter(_is_image, arguments.texts), None)
    if image is not None:
        raise UsageError(f"embed: {image!r} names an image, and {model.name} reads texts", hint=_as_text(image))
    return model.embed(
        texts, prompt=_document_prompt(model, arguments), batch_size=arguments.batch_size,
        truncate=not arguments.no_truncate, show_progress=len(texts) >= MANY,
    )  # fmt: skip


def _what(model: EmbeddingModel | VisionModel) -> str:
    return "images" if isinstance(model, VisionModel) else "texts"


def _document_prompt(model: EmbeddingModel, arguments: argparse.Namespace) -> str | None:
    if arguments.prompt is not None or arguments.query is None:
        given: str | None = arguments.prompt
        return given
    return next((name for name in DOCUMENT_PROMPTS if name in model.settings.prompts), None)


def ranked(
    model: EmbeddingModel | VisionModel, query: str, places: Sequence[Place], vectors: Array, top: int
) -> list[dict[str, Any]]:
    """The texts closest to the query, closest first. What several lines say comes once, empty lines not at all."""
    if isinstance(model, VisionModel):
        scores = vectors / np.linalg.norm(vectors, axis=1, keepdims=True) @ model.encode_image(query, normalize=True)
    else:
        prompt = "query" if "query" in model.settings.prompts else None
        scores = model.similarity(vectors, model.embed(query, prompt=prompt))
    first = {place.text: i for i, place in reversed(list(enumerate(places))) if place.text.strip()}
    order = sorted(first.values(), key=lambda i: (-scores[i], i))
    found: list[dict[str, Any]] = []
    for i in order[:top]:
        place = places[i]
        named = {} if place.file is None else {"file": place.file}
        found.append({"score": round(float(scores[i]), 6), **named, "line": place.line, "text": place.text})
    return found


# -- results ---------------------------------------------------------------------------------------------------------
def save(path: Path, vectors: Array) -> None:
    """Write a .npy file whole or not at all."""
    target = Path(os.path.realpath(path))  # through a link, not in its place
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                np.save(file, vectors)
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise RequestError(f"embed: {path} cannot be written: {error.strerror}") from error


def show(found: dict[str, Any], count: int, *, as_json: bool) -> None:
    """Results on stdout: ranked lines, or a vector a line."""
    vectors = found.get("vectors")
    if as_json:
        data = found if vectors is None else found | {"vectors": [_numbers(row) for row in vectors]}
        console.write(json.dumps(data, ensure_ascii=False) + "\n")
    elif "results" in found:
        for result in found["results"]:
            place = f"{result['file']}:{result['line']}  " if "file" in result else ""
            console.write(f"{result['score']:.4f}  {place}{result['text']}\n")
    elif vectors is not None:
        for row in vectors:
            console.write(json.dumps(_numbers(row)) + "\n")
    if "out" in found:
        console.note(f"{count} vectors of {found['dim']} numbers in {found['out']}")


def say_timings(model: EmbeddingModel | VisionModel, count: int, seconds: float) -> None:
    """One grey line at the end."""
    spent = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
    what = _what(model)
    rate = f"{count} {what} {spent} {count / seconds:.0f}/s" if count != 1 else f"1 {what[:-1]} {spent}"
    how = f"{model.pooling} of {model.dim}" if isinstance(model, EmbeddingModel) else f"{model.dim} numbers"
    threads = f"{model.threads} thread{'s' if model.threads > 1 else ''}"
    console.aside(console.joined([rate, how, model.target, threads]))


def _numbers(row: Array) -> list[float]:
    """As few digits as give the same f32 again."""
    return [float(f"{value:.9g}") for value in row]
