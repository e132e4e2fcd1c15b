"""The output folder of a job: a file per shard, a journal of what is finished, and in the end a manifest.

`manifest.json` says what the job is; a job with other settings is refused. A shard's file is written under a temporary
name, synchronised and renamed, and only then noted in the journal: whatever is killed, and whenever, the journal names
complete files only. One driver at a time holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from rlx.batch.inputs import Shard, Source
from rlx.batch.tasks import ShardResult, json_line
from rlx.engine.sampler import short_repr
from rlx.errors import BatchError, FormatError, RequestError
from rlx.fast_dataclass import dataclass
from rlx.formats.strict_json import parse_json

MANIFEST, JOURNAL, ERRORS, LOCK = "manifest.json", "journal.jsonl", "errors.jsonl", ".lock"
STAMPS = ".inputs.json"  # times of the input files, which spare reading them again; not part of the results
VERSION = 1
MAX_ENTRIES = 1 << 26


@dataclass(frozen=True)
class Part:
    """A finished shard: its file, and what is in it."""

    number: int
    input: str  # name of the input file
    first_line: int
    records: int  # rows and errors together: blank lines are no records
    rows: int  # results in the file
    errors: int
    tokens: int
    bytes: int
    digest: str  # of the file
    source_digest: str  # of the shard that was read

    @classmethod
    def of(cls, shard: Shard, result: ShardResult) -> Part:
        return cls(
            shard.number, shard.source.name, shard.first_line, result.records, result.rows, len(result.failures),
            result.tokens, len(result.output), digest_of(result.output), shard.digest,
        )  # fmt: skip


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def digest_of(data: bytes) -> str:
    return new_digest(data).hexdigest()


def check_folder(path: Path) -> None:
    """Raise RequestError unless a job can write to a folder: it is one of a job, empty, or not there yet."""
    with _writing(path):
        top = next(folder for folder in (path, *path.absolute().parents) if folder.exists() or folder.is_symlink())
        if not top.is_dir():
            raise RequestError(f"batch: {top} is not a folder", hint="results are several files: -o FOLDER")
        if not os.access(top, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(top))
        if top is not path or (path / MANIFEST).exists():
            return
        others = sorted(e.name for e in os.scandir(path) if e.name != JOURNAL and not e.name.startswith("."))
        if others:
            raise RequestError(f"batch: {path} has other files, such as {others[0]!r}", hint="an empty folder")


def check_job(path: Path, job: Mapping[str, Any]) -> None:
    """Raise unless a job can write to a folder; one that is there must be of the same job, as far as `job` tells."""
    check_folder(path)
    with _writing(path):
        manifest = read_manifest(path)
        if manifest is not None:
            _compare(path, {name: manifest["job"].get(name) for name in job}, job)
            with open(path / LOCK, "ab") as lock:
                _acquire(lock, path)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says of errors of the operating system which folder cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise RequestError(f"batch: {path} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _acquire(lock: IO[bytes], path: Path) -> None:
    """Hold the lock of a folder until the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise BatchError(f"batch: another job writes to {path}") from error


class OutputFolder:
    """The folder of a job that runs. Use it in `with`: it holds a lock."""

    def __init__(self, path: Path, job: Mapping[str, Any], suffix: str) -> None:
        self.path, self.suffix = path, suffix
        self._job = dict(job)
        self.parts: dict[int, Part] = {}  # finished ones
        self._journal: IO[bytes] | None = None

    def __enter__(self) -> Self:
        check_folder(self.path)  # before the lock is written
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "ab")
        try:
            _acquire(self._lock, self.path)
            self._resume()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.close()
        self._lock.close()  # releases it

    @property
    def is_finished(self) -> bool:
        return not (self.path / JOURNAL).exists() and (self.path / MANIFEST).exists()

    def part_path(self, number: int) -> Path:
        return self.path / f"part-{number:06d}{self.suffix}"

    # -- resuming --
    def _resume(self) -> None:
        manifest = read_manifest(self.path)
        if manifest is None:
            (self.path / JOURNAL).touch()  # before the manifest: without it the job would count as finished
            self._write_manifest({})
        else:
            _compare(self.path, manifest["job"], self._job)
        if self.is_finished:
            assert manifest is not None
            self.parts = {part.number: part for part in _parts(manifest, self.path)}
            return
        self._journal = journal = open(self.path / JOURNAL, "r+b")  # noqa: SIM115  closed by __exit__
        end = 0
        for place, part, _ in _entries(journal, self.path / JOURNAL):
            end = place
            file = self.part_path(part.number)
            if not file.is_file() or file.stat().st_size != part.bytes:
                raise FormatError(f"{file}: it is missing or changed, it was {part.bytes} bytes", hint="another folder")
            self.parts[part.number] = part
        journal.truncate(end)  # what was written last may be torn
        journal.seek(end)

    def check_source(self, shard: Shard) -> bool:
        """Whether a shard is finished; raises if its input has changed since."""
        part = self.parts.get(shard.number)
        if part is not None and part.source_digest != shard.digest:
            raise BatchError(
                f"batch: {shard} has changed since it was finished: its digest was {part.source_digest}, "
                f"is {shard.digest}",
                hint="a new output folder",
            )
        return part is not None

    def check_finished(self, sources: Sequence[Source], shards: Iterable[Shard]) -> None:
        """Raise BatchError if the input of a finished job has changed; it is read only if its times have."""
        stamps = [list(source.stamp) for source in sources]
        with contextlib.suppress(OSError, ValueError):
            if json.loads((self.path / STAMPS).read_bytes()) == stamps:
                return
        count = 0
        for shard in shards:
            count += 1
            if not self.check_source(shard):
                raise BatchError(f"batch: {shard} was not there when the job was finished", hint="a new output folder")
        if count != len(self.parts):
            raise BatchError(
                f"batch: the input has {count} shards, it had {len(self.parts)} when the job was finished",
                hint="a new output folder",
            )
        self.write_stamps(sources)

    # -- writing --
    def write_stamps(self, sources: Sequence[Source]) -> None:
        """Note the times of input files, as they were before the files were read."""
        write_file(self.path / STAMPS, json.dumps([source.stamp for source in sources]).encode())

    def write(self, shard: Shard, result: ShardResult) -> Part:
        """Store the results of a shard: when this returns, they survive anything."""
        assert self._journal is not None
        part = Part.of(shard, result)
        write_file(self.part_path(shard.number), result.output)
        failures = [failure.members(shard.source) for failure in result.failures]
        self._journal.write(json_line(asdict(part) | {"failures": failures}))
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.parts[shard.number] = part
        return part

    def finish(self) -> dict[str, Any]:
        """Write the errors and the manifest, and remove the journal, which ends the job."""
        assert self._journal is not None
        offsets = dict[int, int]()
        begin = 0
        for end, part, failures in _entries(self._journal, self.path / JOURNAL):
            if failures:
                offsets[part.number] = begin
            begin = end

        digest = new_digest()

        def lines() -> Iterator[bytes]:
            assert self._journal is not None
            for number in sorted(offsets):
                self._journal.seek(offsets[number])
                for failure in json.loads(self._journal.readline())["failures"]:
                    line = json_line(failure)
                    digest.update(line)
                    yield line

        if offsets:
            write_file(self.path / ERRORS, lines())
        parts = [self.parts[number] for number in sorted(self.parts)]
        counts = {name: sum(getattr(p, name) for p in parts) for name in ("records", "rows", "errors", "tokens")}
        listed = [asdict(part) | {"file": self.part_path(part.number).name} for part in parts]
        errors = {"errors_digest": digest.hexdigest() if offsets else None}
        self._write_manifest({"counts": counts | {"shards": len(parts)}, **errors, "shards": listed})
        for entry in os.scandir(self.path):
            if entry.name.endswith(".tmp"):  # of a driver that was killed
                os.unlink(entry.path)
        (self.path / JOURNAL).unlink()
        sync_folder(self.path)
        return counts

    def _write_manifest(self, more: Mapping[str, Any]) -> None:
        text = json.dumps({"version": VERSION, "job": self._job, **more}, ensure_ascii=False, indent=1)
        write_file(self.path / MANIFEST, text.encode("utf-8", "surrogatepass") + b"\n")


def write_file(path: Path, data: bytes | Iterator[bytes]) -> None:
    """Write a file under a temporary name, synchronise it and rename it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        for piece in [data] if isinstance(data, bytes) else data:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading ---------------------------------------------------------------------------------------------------------
def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a job; None if there is none."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    manifest = parse_json(data, path, max_values=MAX_ENTRIES)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("job"), dict):
        raise FormatError(f"{path}: it is no manifest of a batch job")
    if manifest.get("version") != VERSION:
        raise FormatError(f"{path}: its version is {short_repr(manifest.get('version'))}, expected {VERSION}")
    return manifest


def _parts(manifest: Mapping[str, Any], folder: Path) -> Iterator[Part]:
    try:
        for entry in manifest["shards"]:
            yield Part(**{name: entry[name] for name in Part.__dataclass_fields__})
    except (LookupError, TypeError) as error:
        raise FormatError(f"{folder / MANIFEST}: its list of shards is broken: {error!r}") from error


def _entries(journal: IO[bytes], path: Path) -> Iterator[tuple[int, Part, list[Any]]]:
    """Entries of the journal: where each ends, the part, and the failures. The last line may be torn."""
    journal.seek(0)
    end = 0
    for line in journal:
        torn = not line.endswith(b"\n")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            entry = json.loads(line)
            part = Part(**{name: entry[name] for name in Part.__dataclass_fields__})
            if not torn:
                end += len(line)
                yield end, part, entry["failures"]
                continue
        if torn or not journal.read(1):
            return  # written when the driver was killed
        raise FormatError(f"{path}: broken at byte {end}", hint="another folder")


def _compare(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> None:
    """Raise BatchError if a job is not the one that the folder was made for, naming the first difference."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            _compare(path, old, new, f"{prefix}{name}.")
        elif isinstance(old, list) and isinstance(new, list) and any(isinstance(one, dict) for one in [*old, *new]):
            _compare(path, dict(_numbered(old)), dict(_numbered(new)), f"{prefix}{name}.")
        elif old != new:
            raise BatchError(
                f"batch: {path} was made with another {prefix}{name}: {short_repr(old)}, now {short_repr(new)}",
                hint="a new output folder, or the settings from before",
            )


def _numbered(values: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(i), value) for i, value in enumerate(values))
