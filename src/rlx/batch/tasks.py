"""What a worker does: a task is a model with its settings, and turns a shard into the bytes of its results.

The bytes depend on the shard, the settings and the fingerprint of the model, and on nothing else: not on the worker,
the number of threads, or the shards before it.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from rlx.batch.inputs import Shard
from rlx.batch.records import Failure, Record, digest_of_line, read_records
from rlx.engine.load import load
from rlx.errors import FormatError, RequestError
from rlx.fast_dataclass import dataclass

Item = TypeVar("Item")
Value = TypeVar("Value")
Beat = Callable[[], None]  # called after each batch of work: the worker makes progress
HEAD = 16 << 20  # bytes of each file of a model that the fingerprint covers, besides samples of all weights
WEIGHTS = (".safetensors", ".bin", ".npy", ".onnx", ".pt", ".h5")


@dataclass(frozen=True)
class ShardResult:
    """The results of a shard, as the bytes of a file."""

    output: bytes = field(repr=False)
    rows: int
    tokens: int
    failures: Sequence[Failure] = ()
    seconds: float = 0.0  # that the worker took
    records: int = 0  # that were read: all but blank lines


@dataclass(frozen=True)
class Task(ABC):
    """A verb, a model and their settings. Subclasses are pickled, so they hold plain values."""

    model: str
    load: Mapping[str, Any]  # settings of `rlx.load`
    field: str | None = None  # the member of a record that is read; None: what is usual for the verb

    verb: ClassVar[str]
    usual_field: ClassVar[str]
    kind: ClassVar[str]  # of model
    shard_records: ClassVar[int]
    shard_bytes: ClassVar[int]

    @property
    def main_field(self) -> str:
        return self.field or self.usual_field

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of tables that are read. Without the first, or another that can stand for it, nothing can be done."""
        return (self.main_field,)

    @property
    def suffix(self) -> str:
        """Of the files with results."""
        return ".jsonl"

    @property
    def writes_ids(self) -> bool:
        """Whether results have the ids of their records."""
        return True

    def settings(self) -> dict[str, Any]:
        """All settings that results depend on, for the manifest."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "model"}

    def open(self, threads: int | None = None) -> OpenTask:
        """Load the model and check the settings with it."""
        model = load(self.model, threads=threads, **self.load)
        if model.facts.kind != self.kind:
            kind = model.facts.kind
            model.close()
            raise RequestError(f"batch {self.verb}: {self.model} is a model of the kind {kind}, expected: {self.kind}")
        self.check(model)
        return OpenTask(self, model)

    @abstractmethod
    def check(self, model: Any) -> None:
        """Raise what is wrong with the settings for this model."""

    def for_index(self, model: Any) -> Self:
        """The task as it is if its results become an index."""
        return self

    @abstractmethod
    def results(self, model: Any, shard: Shard, records: Sequence[Record], beat: Beat) -> ShardResult:
        """The results of the records of a shard; calls `beat` after each batch of work."""


class OpenTask:
    """A task with its model loaded."""

    def __init__(self, task: Task, model: Any) -> None:
        self.task, self.model = task, model
        self.fingerprint = fingerprint(model)

    def run(self, shard: Shard, beat: Beat = lambda: None) -> ShardResult:
        began = time.perf_counter()
        records, failures = list[Record](), list[Failure]()
        for one in read_records(shard, self.task.main_field, check_ids=self.task.writes_ids):
            if isinstance(one, Record):
                records.append(one)
            else:
                failures.append(one)
        count = len(records) + len(failures)
        result = self.task.results(self.model, shard, records, beat)
        failures = sorted([*failures, *result.failures], key=lambda failure: failure.line)
        return replace(result, failures=failures, seconds=time.perf_counter() - began, records=count)

    def close(self) -> None:
        self.model.close()


def fingerprint(model: Any) -> str:
    """Everything that the bits of results depend on besides texts and settings."""
    digest = hashlib.blake2b(digest_size=16)
    path = model.checkpoint.path
    top = path if path.is_dir() else path.parent
    files = [path] if path.suffix in (".gguf", ".rlxp") else sorted(p for p in top.rglob("*") if p.is_file())
    for file in files:  # tokenizer, pooling, chat template; samples of weights are in the model's own digest
        if file.suffix not in WEIGHTS and not file.name.startswith("."):
            digest.update(f"{file.relative_to(top)} {file.stat().st_size}\n".encode(errors="surrogateescape"))
            with open(file, "rb") as content:
                digest.update(content.read(HEAD))
    own = str(model.fingerprint(0)).rpartition(", seed")[0]
    return f"{own}, context {model.context}, files {digest.hexdigest()}, numpy {np.__version__}"


def bisect(items: Sequence[Item], call: Callable[[Sequence[Item]], Sequence[Value]]) -> list[Value | Exception]:
    """The values of `call(items)`. If it refuses them, halves are tried, down to the items that are at fault."""
    if not items:
        return []
    try:
        return list(call(items))
    except (RequestError, FormatError) as error:
        if len(items) == 1:
            return [error]
    half = len(items) // 2
    return bisect(items[:half], call) + bisect(items[half:], call)


def prepare(
    records: Sequence[Record], read: Callable[[Record], Item]
) -> tuple[list[tuple[Record, Item]], list[Failure]]:
    """What `read` makes of each record, and the failures of those for which it raises.

    What raises for lack of memory or for files of the model is no fault of a record, and ends the job.
    """
    items, failures = list[tuple[Record, Item]](), list[Failure]()
    for record in records:
        try:
            items.append((record, read(record)))
        except (RequestError, FormatError) as error:
            failures.append(record.failure(error))
        except (MemoryError, OSError):
            raise
        except Exception as error:
            failures.append(record.failure(RequestError(f"{type(error).__name__}: {error}")))
    return items, failures


def place(shard: Shard, record: Record) -> dict[str, Any]:
    """The first members of a result: where its record is, and its id."""
    named = {} if record.id is None else {"id": record.id}
    return {"file": shard.source.name, "line": record.line, **named}


def openai_row(shard: Shard, record: Record, body: Mapping[str, Any]) -> dict[str, Any]:
    """A result in the form of OpenAI's batch API."""
    digest = digest_of_line(shard.source, record.line, record.id)
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
    return {"id": f"batch_req_{digest}", "custom_id": record.id, "response": response, "error": None}


def json_line(members: Mapping[str, Any]) -> bytes:
    text = json.dumps(members, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    """A setting as JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
