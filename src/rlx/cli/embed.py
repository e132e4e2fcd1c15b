"""`rlx embed [TEXT or FILE ...]`: vectors of texts, of the lines of files or of whole files, or a search over them.

Arguments that are existing files or folders are read; image files are passed to vision models by name. Results go to
stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from rlx import hub
from rlx.arrays import Array
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.cli.loading import DEVICE_HELP, load
from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.vision_model import VisionModel
from rlx.errors import CapabilityError, RequestError
from rlx.fast_dataclass import dataclass

DEFAULT = "minilm-l6"
MAX_BYTES = 256 << 20  # of all text files and stdin together
MAX_NAME, MAX_ENTRIES = 255, 1000  # a word longer than that is no path; entries of this folder that it may resemble
SHOWN = 100  # characters of a whole file in a list of results
MANY = 256  # texts that need a progress bar
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".npy")
TEXTS = (".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".log")
# Starts like a path, ends in a slash, or has a slash and a file suffix; not a URL.
_PATH = re.compile(r"(?!.*://)((\.{0,2}|~)/.+|.+/|.+/[^/]+\.[A-Za-z][A-Za-z0-9]{0,7})")
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("embed", help="vectors of texts, or a search over lines")
    command.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="texts, or files and folders of which every line is a text; images; without any, lines of stdin",
    )
    command.add_argument("-m", "--model", default=DEFAULT, help=f"catalogue name, file, folder, org/name ({DEFAULT})")
    command.add_argument(
        "--file", metavar="FILE", action="append",
        help=f"one text per line, or a folder of such files, up to {MAX_BYTES >> 20} MiB in all; - is stdin",
    )  # fmt: skip
    command.add_argument("--whole-files", action="store_true", help="a file is one text, not one per line")
    command.add_argument(
        "--out", type=Path, metavar="FILE.npy",
        help="write the vectors here: a row per text as they are read, folders sorted by name (--json lists them)",
    )  # fmt: skip
    command.add_argument("--query", metavar="TEXT", help="rank the texts by similarity to this one")
    command.add_argument("--top", type=int, default=10, metavar="N", help="with --query: how many to show (10)")
    command.add_argument("--prompt", metavar="NAME", help="prepend this prompt of the model to each text")
    command.add_argument(
        "--no-truncate", action="store_true", help="reject texts that are too long instead of truncating them"
    )
    command.add_argument("--batch-size", type=int, metavar="N", help="texts per batch")
    command.add_argument(
        "--precision",
        choices=("auto", "f32", "int8"),
        default="auto",
        help="int8: weights and activations in 8-bit integers",
    )
    command.add_argument("--device", default="cpu", help=DEVICE_HELP)
    command.add_argument("--threads", type=int, metavar="N", help="number of threads (default: all usable cores)")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    places = read_texts(arguments.texts, arguments.file, whole_files=arguments.whole_files)
    texts = [place.text for place in places]
    if arguments.query is not None and not texts:
        raise UsageError("embed: there are no texts to rank", hint="rlx embed FOLDER --query 'a question'")
    with open_model(arguments.model, arguments.threads, arguments.precision, arguments.device) as model:
        begin = time.perf_counter()
        vectors = vectors_of(model, texts, arguments)
        report: dict[str, Any] = {"model": model.name, _unit_name(model): len(texts), "dim": model.dim}
        if arguments.out is not None:
            save(arguments.out, vectors)
            report["out"] = str(arguments.out)
            report["rows"] = [place.members for place in places]
        if arguments.query is not None:
            report["results"] = rank(model, arguments.query, places, vectors, arguments.top)
        elif arguments.out is None:
            report["vectors"] = vectors
        seconds = time.perf_counter() - begin
        show(report, len(texts), as_json=arguments.json)
        print_timings(model, len(texts), seconds)
    return 0


# -- arguments -------------------------------------------------------------------------------------------------------
def _check(arguments: argparse.Namespace) -> None:
    """Check the arguments before anything is downloaded or computed."""
    for option in ("top", "threads", "batch_size"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UsageError(f"embed: --{option.replace('_', '-')} is {value}, expected a number from 1")
    if arguments.query is not None and not arguments.query.strip():
        raise UsageError("embed: --query is empty", hint="rlx embed FOLDER --query 'a question'")
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
    """A text and its line in a file, or its number among the texts of the command line. A whole file has no line."""

    text: str
    line: int | None
    file: str | None = None

    @property
    def members(self) -> dict[str, Any]:
        """File and line, as far as there are some."""
        named = {"file": self.file, "line": self.line}
        return {name: value for name, value in named.items() if value is not None}


def read_texts(texts: Sequence[str], files: Sequence[str] | None, *, whole_files: bool = False) -> list[Place]:
    """Texts of the command line, with paths replaced by the lines of the files, then the lines of `files` or stdin."""
    places: list[Place] = []
    reader = _Reader(whole_files)
    for text in texts:
        if _is_path(text):
            places += reader.lines_of(text)
        elif _is_missing(text):
            raise UsageError(f"embed: {text!r} is written like a path, and nothing is there", hint=_as_text(text))
        else:
            similar = _similar_path(text)
            if similar is not None:
                console.note(f"embed: {text!r} is embedded as a text; did you mean {similar}?")
            places.append(Place(text, len(places) + 1))
    if not files:
        if texts:
            return places
        if sys.stdin is None or console.is_terminal(sys.stdin):
            raise UsageError("embed: there are no texts", hint="rlx embed 'a text' or rlx embed --file lines.txt")
        files = ["-"]
    for file in files:
        places += reader.lines_of(file) if file != "-" else reader.lines_of_stdin(len(places))
    return places


def _is_path(text: str) -> bool:
    """Whether an argument is an existing file or folder, and not an image."""
    try:
        return Path(text).exists() and Path(text).suffix.lower() not in IMAGES
    except (OSError, ValueError):  # too long for a name, or contains a null byte
        return False


def _is_missing(text: str) -> bool:
    """Whether an argument looks like a path that does not exist. Images are checked by the model."""
    if _is_image(text) or any(c.isspace() for c in text):
        return False
    try:
        is_path = _PATH.fullmatch(text) or text.lower().endswith(TEXTS) or ("/" in text and Path(text).parent.is_dir())
        return bool(is_path) and not Path(text).exists()
    except (OSError, ValueError):  # too long for a name, or contains a null byte
        return False


def _similar_path(text: str) -> str | None:
    """A file or folder whose name is like a word of the command line; None for other texts."""
    if len(text) > MAX_NAME or any(c.isspace() for c in text):
        return None
    first, slash, rest = text.partition("/")
    try:
        names = [entry.name for entry in itertools.islice(os.scandir("."), MAX_ENTRIES)]
    except OSError:
        return None
    name = next(iter(difflib.get_close_matches(first, names, 1, 0.75)), None)
    if name is None or name == text:
        return None
    path = Path(name + slash + rest) if (Path(name) / rest).exists() else Path(name)
    return f"the {'folder' if path.is_dir() else 'file'} {str(path)!r}"


def _is_image(text: str) -> bool:
    return text.lower().endswith(IMAGES) and not any(c.isspace() for c in text)


def _as_text(word: str) -> str:
    return f"to embed it as a text, give it on stdin: echo {shlex.quote(word)} | rlx embed"


class _Reader:
    """Reads lines of files and stdin, or whole files, up to `MAX_BYTES` in total."""

    def __init__(self, whole_files: bool = False) -> None:
        self.whole_files = whole_files
        self.size = 0  # of the texts so far

    def lines_of(self, name: str) -> list[Place]:
        """The lines of a file, or of all text files of a folder."""
        path = Path(name)
        if not path.is_dir():
            return self._lines_of_file(name)
        if any((path / model).exists() for model in MODEL_FILES):
            raise UsageError(f"embed: {name} is the folder of a model", hint=f"rlx embed -m {name} ...")
        places: list[Place] = []
        skipped = 0
        for file in sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")):
            try:
                places += self._lines_of_file(str(file))
            except UsageError as error:
                if not isinstance(error.__cause__, UnicodeDecodeError):
                    raise
                skipped += 1
        if skipped:
            console.note(f"{name}: {skipped} file{'s' * (skipped != 1)} passed over: not UTF-8 text")
        return places

    def lines_of_stdin(self, before: int) -> list[Place]:
        """The lines of stdin, numbered after the texts before it."""
        return [Place(text, before + i + 1) for i, text in enumerate(self._lines("-"))]

    def _lines_of_file(self, name: str) -> list[Place]:
        texts = self._lines(name)
        if self.whole_files:
            return [Place("\n".join(texts), None, name)]
        return [Place(text, i + 1, name) for i, text in enumerate(texts)]

    def _lines(self, name: str) -> list[str]:
        where = "stdin" if name == "-" else name
        try:
            with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as source:
                data = console.read_at_most(source, MAX_BYTES, f"embed: {where}", before=self.size)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise UsageError(f"embed: {where} cannot be read: {getattr(error, 'strerror', error)}") from error
        texts = lines(data, where)
        self.size += len(data)  # files that are not text do not count
        return texts


def lines(data: bytes, where: str) -> list[str]:
    """The lines of a UTF-8 text, including empty ones, so that row numbers are line numbers.

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
    rows = [line.removesuffix("\r") for line in text.split("\n")]
    return rows if rows[-1] else rows[:-1]


# -- a model ---------------------------------------------------------------------------------------------------------
def open_model(
    name: str, threads: int | None, precision: str = "auto", device: str = "cpu"
) -> EmbeddingModel | VisionModel:
    """Load the model, downloading it if necessary."""
    hub.resolve(name)  # shows its own progress
    with console.status(f"loading {name}"):
        model = load(name, threads=threads, precision=precision, device=device)
    if not isinstance(model, (EmbeddingModel, VisionModel)):
        model.close()
        raise CapabilityError(f"embed: {name} is a decoder: it writes text", hint=f"rlx run -m {name} -p '...'")
    return model


def vectors_of(model: EmbeddingModel | VisionModel, texts: Sequence[str], arguments: argparse.Namespace) -> Array:
    """The vectors of texts, or of image files for a vision model."""
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


def _unit_name(model: EmbeddingModel | VisionModel) -> str:
    return "images" if isinstance(model, VisionModel) else "texts"


def _document_prompt(model: EmbeddingModel, arguments: argparse.Namespace) -> str | None:
    if arguments.prompt is not None or arguments.query is None:
        prompt: str | None = arguments.prompt
        return prompt
    return model.settings.document_prompt


def rank(
    model: EmbeddingModel | VisionModel, query: str, places: Sequence[Place], vectors: Array, top: int
) -> list[dict[str, Any]]:
    """The texts most similar to the query, in order. Skips duplicates and empty lines."""
    if isinstance(model, VisionModel):
        scores = vectors / np.linalg.norm(vectors, axis=1, keepdims=True) @ model.encode_image(query, normalize=True)
    else:
        scores = model.similarity(vectors, model.embed(query, prompt=model.settings.query_prompt))
    first = {place.text: i for i, place in reversed(list(enumerate(places))) if place.text.strip()}
    order = sorted(first.values(), key=lambda i: (-scores[i], i))
    results: list[dict[str, Any]] = []
    for i in order[:top]:
        place = places[i]
        results.append({"score": round(float(scores[i]), 6), **place.members, "text": place.text})
    return results


# -- results ---------------------------------------------------------------------------------------------------------
def save(path: Path, vectors: Array) -> None:
    """Write a .npy file atomically."""
    target = Path(os.path.realpath(path))  # write through a symbolic link, do not replace it
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


def show(report: dict[str, Any], count: int, *, as_json: bool) -> None:
    """Print results: ranked lines, or one vector per line."""
    vectors = report.get("vectors")
    if as_json:
        data = report if vectors is None else report | {"vectors": [_numbers(row) for row in vectors]}
        console.write(json.dumps(data, ensure_ascii=False) + "\n")
    elif "results" in report:
        for result in report["results"]:
            place = ":".join(str(result[name]) for name in ("file", "line") if name in result) + "  "
            text = result["text"] if "line" in result else shorten(result["text"], SHOWN, placeholder=" ...")
            console.write(f"{result['score']:.4f}  {place if 'file' in result else ''}{text}\n")
    elif vectors is not None:
        for row in vectors:
            console.write(json.dumps(_numbers(row)) + "\n")
    if "out" in report:
        console.note(f"{count} vectors of {report['dim']} numbers in {report['out']}")


def print_timings(model: EmbeddingModel | VisionModel, count: int, seconds: float) -> None:
    """Print timings, as a grey line."""
    spent = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
    unit_name = _unit_name(model)
    rate = f"{count} {unit_name} {spent} {count / seconds:.0f}/s" if count != 1 else f"1 {unit_name[:-1]} {spent}"
    shape = f"{model.dim} numbers" + (f", {model.pooling} pooling" if isinstance(model, EmbeddingModel) else "")
    threads = f"{model.threads} thread{'s' if model.threads > 1 else ''}"
    console.dim_note(console.join([rate, shape, model.target, threads]))


def _numbers(row: Array) -> list[float]:
    """Numbers with enough digits to recover the f32 exactly."""
    return [float(f"{value:.9g}") for value in row]
