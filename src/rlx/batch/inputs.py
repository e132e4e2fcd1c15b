"""Input files of a batch job, cut into shards of raw records.

Where a shard ends depends on the content of the file alone: never on the number of workers. Files are read once, in
order, a record at a time; workers parse the records (`records.py`). Nothing in a file is trusted: a record that is too
long becomes a shard of its own without data, which the worker reports.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import IO, Any

from rlx.errors import CapabilityError, FormatError, RequestError
from rlx.fast_dataclass import dataclass

KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".log": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
FORMATS = ("text", "jsonl", "csv", "tsv", "parquet")
MAX_RECORD = 4 << 20  # bytes; longer ones are reported
MAX_COLUMNS = 4096
DELIMITERS = {"csv": ",", "tsv": "\t"}
BOM = b"\xef\xbb\xbf"
ROWS = 1024  # of a Parquet file per read
REFUSED = b"!"  # begins a line that says why a row of a Parquet file cannot be read


@dataclass(frozen=True)
class Source:
    """An input file. `name` is the path as it was given."""

    number: int
    name: str
    kind: str
    gzipped: bool
    size: int  # bytes on disk
    stamp: tuple[int, ...] = ()  # changes whenever the file does: times of change, and inode


@dataclass(frozen=True)
class Shard:
    """Consecutive records of one file, as bytes."""

    number: int
    source: Source
    first_line: int  # of the file, counted from 1; of a Parquet file: the row
    records: int
    data: bytes = field(repr=False)
    columns: tuple[str, ...] = ()  # of a CSV file
    too_long: bool = False  # one record that was not kept
    position: int = 0  # bytes of the file read so far, for progress

    @property
    def digest(self) -> str:
        """Of everything that the results depend on."""
        head = f"{self.source.number} {self.source.kind} {self.first_line} {self.columns} {self.too_long}\n"
        return hashlib.blake2b(head.encode(errors="surrogatepass") + self.data, digest_size=16).hexdigest()

    def __str__(self) -> str:
        return f"shard {self.number} ({self.source.name}, {self.records} records from line {self.first_line})"


def find_sources(paths: Sequence[str | Path], kind: str | None = None) -> list[Source]:
    """The files to read, in order; folders stand for the files in them that have a known suffix, sorted by name."""
    if isinstance(paths, (str, Path)):
        paths = [paths]
    if kind is not None and kind not in FORMATS:
        raise RequestError(f"batch: no input format is called {kind!r}", hint=f"known: {', '.join(FORMATS)}")
    names = [name for path in paths for name in _files(str(path))]
    if not names:
        raise RequestError("batch: there are no input files")
    places = [os.path.realpath(name) for name in names]
    for i, name in enumerate(names):
        if places[i] in places[:i]:
            raise RequestError(f"batch: {name} is among the inputs twice")
    sources = [_source(i, name, kind) for i, name in enumerate(names)]
    if any(source.kind == "parquet" for source in sources):
        _pyarrow()
    return sources


def _files(name: str) -> list[str]:
    if not os.path.isdir(name):
        return [name]
    inner = sorted(entry.path for entry in os.scandir(name) if entry.is_file() and _suffixes(entry.path)[0] in KINDS)
    if not inner:
        raise RequestError(f"batch: {name} has no files with a known suffix", hint=f"known: {', '.join(KINDS)}, .gz")
    return inner


def _suffixes(name: str) -> tuple[str, bool]:
    """The suffix that tells the format, and whether `.gz` comes after it."""
    path = Path(name)
    gzipped = path.suffix.lower() == ".gz"
    return (path.with_suffix("") if gzipped else path).suffix.lower(), gzipped


def _source(number: int, name: str, kind: str | None) -> Source:
    suffix, gzipped = _suffixes(name)
    kind = kind or KINDS.get(suffix)
    try:
        status = os.stat(name)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise RequestError(f"batch: {name} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"batch: {name} is no regular file", hint="a job reads its inputs again when it is resumed")
    if kind is None:
        raise RequestError(
            f"batch: {name}: the suffix {suffix!r} does not tell the format", hint="--input-format text, jsonl, csv ..."
        )
    if kind == "parquet" and gzipped:
        raise RequestError(f"batch: {name}: Parquet files are compressed inside, .gz is not read")
    stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    return Source(number, name, kind, gzipped, status.st_size, stamp)


def check_sources(sources: Iterable[Source], wanted: Sequence[str]) -> None:
    """Raise RequestError if a file cannot be opened, FormatError if a table has none of the columns that are read."""
    for source in sources:
        try:
            columns = _columns(source)
        except OSError as error:
            raise RequestError(f"batch: {source.name} cannot be read: {error.strerror or error}") from error
        if columns is not None and not set(wanted) & set(columns):
            shown = ", ".join(columns[:12])
            raise FormatError(
                f"{source.name}: no column is called {' or '.join(wanted)}, it has: {shown}", hint="--field NAME"
            )


def _columns(source: Source) -> Sequence[str] | None:
    """The columns of a table; None for other files, of which the beginning is read."""
    if source.kind == "parquet":
        return list(_parquet(source).schema_arrow.names)
    with _opened(source) as (file, _):
        if source.kind in DELIMITERS:
            return _header(file, source)[0]
        file.read(1)
    return None


# -- cutting ---------------------------------------------------------------------------------------------------------
def cut(
    sources: Iterable[Source], records: int, size: int, columns: Sequence[str] = ()
) -> Generator[Shard, None, None]:
    """Shards of at most so many records, that end at the first record beyond so many bytes.

    `columns` are those that are read of Parquet files.
    """
    number = 0
    for source in sources:
        raw = _parquet_records(source, columns) if source.kind == "parquet" else _text_records(source)
        with contextlib.closing(raw):
            for shard in _cut_file(source, raw, records, size, number):
                yield shard
                number = shard.number + 1


@dataclass
class _Raw:
    """A record as bytes, with its line end; None if it is too long."""

    line: int
    data: bytes | None
    position: int
    columns: tuple[str, ...] = ()


def _cut_file(source: Source, raw: Iterator[_Raw], records: int, size: int, number: int) -> Iterator[Shard]:
    parts, first, total, last = list[bytes](), 1, 0, _Raw(1, b"", 0)

    def shard(too_long: bool = False) -> Shard:
        data, count = b"".join(parts), 1 if too_long else len(parts)
        return Shard(number, source, first, count, data, last.columns, too_long, last.position)

    for record in raw:
        if parts and (record.data is None or len(parts) >= records or total >= size):
            yield shard()
            number += 1
            parts, total = [], 0
        if not parts:
            first = record.line
        last = record
        if record.data is None:
            yield shard(too_long=True)
            number += 1
            continue
        parts.append(record.data)
        total += len(record.data)
    if parts:
        yield shard()


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The content of a file, and the file itself, whose position shows the progress."""
    try:
        with open(source.name, "rb") as file:
            if source.gzipped:
                with gzip.open(file, "rb") as content:
                    yield io.BufferedReader(content, 1 << 18), file
            else:
                yield file, file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{source.name}: not a complete gzip file: {error}") from error


def _text_records(source: Source) -> Generator[_Raw, None, None]:
    """Lines; of CSV files, records, whose quoted fields may have several lines."""
    quoted = source.kind in DELIMITERS
    with _opened(source) as (file, disk):
        columns, line = _header(file, source) if quoted else ((), 1)
        while piece := file.readline(MAX_RECORD + 1):
            if line == 1:
                piece = piece.removeprefix(BOM)
            begin, parts, size = line, [piece], len(piece)
            state = scan_quotes(piece, source.kind)
            while state == QUOTED or not piece.endswith(b"\n"):
                line += piece.endswith(b"\n")
                piece = file.readline(MAX_RECORD + 1)
                if not piece:
                    break
                state = scan_quotes(piece, source.kind, state)
                size += len(piece)
                if size > MAX_RECORD:
                    parts.clear()  # only its end is looked for
                else:
                    parts.append(piece)
            line += 1
            yield _Raw(begin, b"".join(parts) if size <= MAX_RECORD else None, disk.tell(), columns)


def _header(file: IO[bytes], source: Source) -> tuple[tuple[str, ...], int]:
    """The names of the columns of a CSV file, and the line after them."""
    data = file.readline(MAX_RECORD + 1).removeprefix(BOM)
    if scan_quotes(data, source.kind) == QUOTED:
        raise FormatError(f"{source.name}, line 1: expected names of columns, found a quote that is not closed")
    if len(data) > MAX_RECORD:
        raise FormatError(f"{source.name}: its first line has more than {MAX_RECORD} bytes, expected names of columns")
    try:
        names = next(csv_rows([data.decode()], source.kind), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"{source.name}, line 1: expected names of columns: {error}") from error
    if not names:
        raise FormatError(f"{source.name}: it is empty, expected names of columns in its first line")
    if len(names) > MAX_COLUMNS:
        raise FormatError(f"{source.name}: it has {len(names)} columns, expected at most {MAX_COLUMNS}")
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise FormatError(f"{source.name}, line 1: two columns are called {twice[:80]!r}")
    return tuple(names), 2


FIELD, PLAIN, QUOTED, CLOSED = range(4)  # at its beginning, in a plain one, in a quoted one, after a quote in one


def scan_quotes(piece: bytes, kind: str, state: int = FIELD) -> int:
    """The state of a CSV record after a piece of it, as csv.reader has it; without a table it is never QUOTED.

    A quote opens a field at its beginning only: in `5" nail` it is a character. After a line end, the record goes on
    if the state is QUOTED.

    >>> scan_quotes(b'a,"b\\n', "csv") == QUOTED, scan_quotes(b'5" nail,b\\n', "csv") == QUOTED
    (True, False)
    """
    if kind not in DELIMITERS or (state != QUOTED and b'"' not in piece):
        return FIELD if piece.endswith(DELIMITERS.get(kind, "\n").encode()) else PLAIN
    opening = f'{DELIMITERS[kind]}"'.encode()
    at = 0
    while at < len(piece):
        if state == QUOTED:
            at = piece.find(b'"', at) + 1
            if not at:
                return QUOTED
            state = CLOSED
        elif state == PLAIN:
            at = piece.find(opening, at) + 2
            if at == 1:
                return FIELD if piece.endswith(opening[:1]) else PLAIN
            state = QUOTED
        elif piece.startswith(b'"', at):  # begins a field, or is the second of a doubled quote
            at, state = at + 1, QUOTED
        else:
            state = PLAIN
    return state


def csv_rows(lines: Iterable[str], kind: str) -> Iterator[list[str]]:
    """Rows of a CSV or TSV text."""
    csv.field_size_limit(MAX_RECORD + 1)
    return iter(csv.reader(lines, delimiter=DELIMITERS[kind], strict=True))


# -- Parquet ---------------------------------------------------------------------------------------------------------
def _pyarrow() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CapabilityError("batch: Parquet files need pyarrow", hint="pip install pyarrow") from error
    return parquet


def _parquet(source: Source) -> Any:
    parquet = _pyarrow()
    try:
        return parquet.ParquetFile(source.name)
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        raise FormatError(f"{source.name}: not a Parquet file: {error}") from error


def _json_row(members: dict[str, Any]) -> bytes:
    parts = []
    for name, value in members.items():
        try:
            text = json.dumps(value, ensure_ascii=False, default=_decoded)
        except UnicodeDecodeError as error:
            return _refused(name, f"not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}")
        except TypeError as error:
            return _refused(name, str(error))
        parts.append(f"{json.dumps(name, ensure_ascii=False)}: {text}")
    return f"{{{', '.join(parts)}}}".encode("utf-8", "surrogatepass")


def _refused(name: str, reason: str) -> bytes:
    return REFUSED + f"{name}: {reason}".replace("\n", " ").encode(errors="replace")


def _decoded(value: Any) -> str:
    """The text of a binary value; Arrow has types besides those of JSON."""
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"expected a text, found a value of the type {type(value).__name__}")


def _parquet_records(source: Source, columns: Sequence[str]) -> Generator[_Raw, None, None]:
    """Rows as lines of JSON, with the columns that the job reads; of a row that is no JSON, why, after REFUSED."""
    with _parquet(source) as file:
        names = [name for name in columns if name in file.schema_arrow.names]
        total, row = max(file.metadata.num_rows, 1), 0
        try:
            for batch in file.iter_batches(ROWS, columns=names):
                for members in batch.to_pylist():
                    row += 1
                    data = _json_row(members)
                    fits = len(data) < MAX_RECORD
                    yield _Raw(row, data + b"\n" if fits else None, source.size * row // total)
        except (OSError, ValueError) as error:
            raise FormatError(f"{source.name}: broken after row {row}: {error}") from error
