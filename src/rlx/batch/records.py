"""Records of a shard: the members that a line has, its place and its id. Bad lines become failures."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.batch.inputs import DELIMITERS, FIELD, MAX_RECORD, QUOTED, REFUSED, Shard, Source, csv_rows, scan_quotes
from rlx.engine.sampler import short_repr
from rlx.errors import FormatError, RequestError, shortened
from rlx.fast_dataclass import dataclass
from rlx.formats.strict_json import parse_json

MAX_ID = 1024  # characters
MAX_VALUES = 1 << 16  # of JSON per line
MESSAGE = 500  # characters


def digest_of_line(source: Source, line: int, name: str | int | None) -> str:
    """What ids in OpenAI's form end with. It follows from the place of a line, so that every run gives the same."""
    text = f"{source.number} {line} {name}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Failure:
    """A line that has no result. `in_openai_form`: it is one of OpenAI's batch API, and its error has that form."""

    line: int
    message: str
    id: str | int | None = None
    in_openai_form: bool = False

    def members(self, source: Source) -> dict[str, Any]:
        place = {"file": source.name, "line": self.line}
        if self.in_openai_form:
            own = f"batch_req_{digest_of_line(source, self.line, self.id)}"
            error = {"code": "invalid_request", "message": self.message}
            return place | {"id": own, "custom_id": self.id, "response": None, "error": error}
        named = {} if self.id is None else {"id": self.id}
        return place | named | {"error": self.message}


@dataclass(frozen=True)
class Record:
    """A line that was read. `url` is that of a line in the form of OpenAI's batch API, whose body are the members."""

    line: int
    members: Mapping[str, Any]
    id: str | int | None = None
    url: str | None = None

    def failure(self, error: Exception) -> Failure:
        return Failure(self.line, shortened(str(error), MESSAGE), self.id, self.url is not None)

    def text(self, name: str) -> str:
        """A member that is a text; raises RequestError if it is missing, or no text."""
        value = self.members.get(name)
        if not isinstance(value, str):
            what = f"found {short_repr(value)}" if name in self.members else f"there are {_names(self.members)}"
            raise RequestError(f"{name}: expected a text, {what}")
        return value


def read_records(shard: Shard, field: str, *, check_ids: bool = True) -> Iterator[Record | Failure]:
    """The records of a shard; `field` is the member that a plain line of text stands for.

    Blank lines of JSONL files and empty ones of tables are passed over. Without `check_ids`, an id that is neither text
    nor whole number is ignored instead of a failure: it is for results that have no ids.
    """
    if shard.too_long:
        quoted = shard.source.kind in DELIMITERS
        why = ": is a quote never closed?" if quoted else ""
        yield Failure(shard.first_line, f"the record has more than {MAX_RECORD} bytes{why}")
        return
    for line, raw in _raw_records(shard):
        if not (raw if shard.source.kind in DELIMITERS else raw.strip()) and shard.source.kind != "text":
            continue
        try:
            yield _record(shard, line, raw, field, check_ids)
        except (RequestError, FormatError, csv.Error) as error:
            yield Failure(line, shortened(str(error), MESSAGE))
        except UnicodeDecodeError as error:
            yield Failure(line, f"not UTF-8 text: byte {raw[error.start]:#04x} at {error.start}")


def _raw_records(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """The lines of a shard with their numbers, without line ends; records of a CSV file may have several lines."""
    lines = shard.data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # after the last line end
    first, parts, state = shard.first_line, list[bytes](), FIELD
    for number, line in enumerate(lines, shard.first_line):
        parts.append(line)
        state = scan_quotes(line, shard.source.kind, state)
        if state != QUOTED or number - shard.first_line == len(lines) - 1:
            yield first, b"\n".join(parts).removesuffix(b"\r")
            first, parts, state = number + 1, [], FIELD


def _record(shard: Shard, line: int, raw: bytes, field: str, check_ids: bool) -> Record | Failure:
    text = raw.decode()
    match shard.source.kind:
        case "text":
            return Record(line, {field: text})
        case "csv" | "tsv":
            row = next(csv_rows([text], shard.source.kind))
            if len(row) != len(shard.columns):
                raise RequestError(f"the record has {len(row)} fields, the file {len(shard.columns)} columns")
            return _identified(line, dict(zip(shard.columns, row, strict=True)), check_ids)
        case _:
            if shard.source.kind == "parquet" and raw.startswith(REFUSED):
                raise RequestError(text.removeprefix(REFUSED.decode()))
            value = parse_json(raw, Path(f"line {line}"), max_values=MAX_VALUES)
            if isinstance(value, str):
                return Record(line, {field: value})
            if not isinstance(value, dict):
                raise RequestError(f"expected an object or a text, found {short_repr(value)}")
            if "custom_id" not in value or "body" not in value:
                return _identified(line, value, check_ids)
            try:
                return _openai(line, value)
            except RequestError as error:
                name = value["custom_id"]
                known = name if isinstance(name, str) and len(name) <= MAX_ID else None
                return Failure(line, shortened(str(error), MESSAGE), known, in_openai_form=True)


def _identified(line: int, members: Mapping[str, Any], check_ids: bool) -> Record:
    try:
        return Record(line, members, _checked_id(members.get("id"), "id"))
    except RequestError:
        if check_ids:
            raise
        return Record(line, members)


def _openai(line: int, members: Mapping[str, Any]) -> Record:
    """A line of OpenAI's batch API: `custom_id`, `method`, `url` and the `body` of a request."""
    name, body = _checked_id(members["custom_id"], "custom_id"), members["body"]
    if not isinstance(name, str):
        raise RequestError(f"custom_id: expected a text, found {short_repr(name)}")
    if not isinstance(body, dict):
        raise RequestError(f"body: expected an object, found {short_repr(body)}")
    url, method = members.get("url"), members.get("method", "POST")
    if not isinstance(url, str) or method != "POST":
        raise RequestError(f"expected POST and a url, found {short_repr(method)} and {short_repr(url)}")
    unknown = set(members) - {"custom_id", "method", "url", "body"}
    if unknown:
        raise RequestError(f"unknown members: {', '.join(sorted(unknown))[:200]}")
    return Record(line, body, name, url)


def _checked_id(value: Any, name: str) -> str | int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    if value is None or is_number or (isinstance(value, str) and len(value) <= MAX_ID):
        return value  # type: ignore[no-any-return]
    raise RequestError(f"{name}: expected a text of at most {MAX_ID} characters or a number, found {short_repr(value)}")


def _names(members: Mapping[str, Any]) -> str:
    return shortened(", ".join(members) or "no members", 200)
