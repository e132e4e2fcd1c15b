"""The vectors of a finished job as an index for `rlx search`, with the texts and where they come from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlx.arrays import Array
from rlx.batch.embed_task import Embed
from rlx.batch.folder import sync_folder
from rlx.batch.records import Record, read_records
from rlx.batch.results import Results
from rlx.engine.sampler import short_repr
from rlx.errors import BatchError, RequestError
from rlx.index.head import DTYPES
from rlx.index.index import Index, normalised, stored_name

if TYPE_CHECKING:
    from rlx.batch.job import Job


def check_index(job: Job, path: Path, dtype: str) -> Embed:
    """Raise if the vectors of a job cannot become an index there, as far as that is known before the job has run."""
    task = job.task
    if not isinstance(task, Embed) or task.format != "npy":
        raise RequestError("batch: an index is made of vectors in NumPy files", hint="batch embed with format npy")
    if dtype not in DTYPES:
        raise RequestError(f"batch: no index has vectors of {dtype!r}", hint=f"known: {', '.join(DTYPES)}")
    if not path.parent.is_dir():
        raise RequestError(f"batch: the index {path}: there is no folder {path.parent}")
    if path.exists():
        with Index.open(path) as existing:
            model = existing.model if existing.model is None else stored_name(existing.model)
            for name, before, now in (("dtype", existing.dtype, dtype), ("model", model, stored_name(task.model))):
                if before != now:
                    raise _other_index(path, f"its {name} is {before}, that of the job {now}")
    return task


def build_index(job: Job, results: Results, path: Path, dtype: str = "f32") -> None:
    """Write an index of all vectors, in the order of the input; ids are `file:line`.

    It is built beside its place and renamed, so that it is there completely or not at all. One that is there is left
    as it is if it has the rows of the job, and nothing else; any other is an error.
    """
    task = check_index(job, path, dtype)
    rows = _rows(job, results, task)
    if path.exists():
        _compare(path, rows, len(results))
        return
    temporary = path.with_name(f".{path.name}.tmp")
    if temporary.exists():
        shutil.rmtree(temporary)  # of a driver that was killed
    index: Index | None = None
    for vectors, ids, texts in rows:
        if index is None:
            index = Index.create(temporary, dim=vectors.shape[1], dtype=dtype, model=task.model)
        index.append(vectors, ids, texts)
    if index is None:
        raise BatchError("batch: there is nothing to put into an index: the job has no vectors")
    index.close()
    os.rename(temporary, path)
    sync_folder(path.parent)


def _rows(job: Job, results: Results, task: Embed) -> Iterator[tuple[Array, list[str], list[str]]]:
    """Vectors, ids and texts of each shard that has some."""
    for shard, part, file in zip(job.shards(), results.manifest["shards"], results.files, strict=True):
        if part["source_digest"] != shard.digest:
            raise BatchError(
                f"batch: {shard} has changed since it was embedded: its digest was {part['source_digest']}, "
                f"is {shard.digest}", hint="a new output folder",
            )  # fmt: skip
        if not part["rows"]:
            continue
        table = np.load(file, mmap_mode="r", allow_pickle=False)
        records = read_records(shard, task.main_field, check_ids=task.writes_ids)
        texts = {record.line: record for record in records if isinstance(record, Record)}
        lines = table["line"].tolist()
        ids = [f"{shard.source.name}:{line}" for line in lines]
        yield np.ascontiguousarray(table["vector"]), ids, [texts[line].text(task.main_field) for line in lines]


def _compare(path: Path, rows: Iterator[tuple[Array, list[str], list[str]]], count: int) -> None:
    """Raise BatchError unless an index has these rows, and no others."""
    with Index.open(path) as existing:
        if len(existing.vectors) != count or len(existing) != count:
            raise _other_index(path, f"it has {len(existing)} rows, the job {count}")
        at = 0
        for vectors, ids, texts in rows:
            places = range(at, at + len(ids))
            stored = zip(existing.ids(places), existing.texts(places), strict=True)
            for row, before, now in zip(places, stored, zip(ids, texts, strict=True), strict=True):
                if before != now:
                    raise _other_index(path, f"row {row} is {short_repr(before)}, of the job {short_repr(now)}")
            expected = normalised(vectors).astype(existing.vectors.dtype)
            if existing.metric != "cosine" or not np.array_equal(existing.vectors[at : at + len(ids)], expected):
                raise _other_index(path, f"the vectors of rows {at} to {at + len(ids) - 1} are not those of the job")
            at += len(ids)


def _other_index(path: Path, difference: str) -> BatchError:
    return BatchError(
        f"batch: the index {path} is of another job: {difference}", hint="another name for the index, or delete it"
    )
