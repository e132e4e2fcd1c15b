"""The vectors of a finished job as an index for `rlx search`, with the texts and where they come from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlx.batch.embed_task import Embed
from rlx.batch.folder import sync_folder
from rlx.batch.records import Record, read_records
from rlx.batch.results import Results
from rlx.errors import BatchError, RequestError
from rlx.index.index import Index

if TYPE_CHECKING:
    from rlx.batch.job import Job


def check_index(job: Job, path: Path) -> Embed:
    """Raise RequestError if the vectors of a job cannot become an index there."""
    if not isinstance(job.task, Embed) or job.task.format != "npy":
        raise RequestError("batch: an index is made of vectors in NumPy files", hint="batch embed with format npy")
    if not path.parent.is_dir():
        raise RequestError(f"batch: the index {path}: there is no folder {path.parent}")
    return job.task


def build_index(job: Job, results: Results, path: Path, dtype: str = "f32") -> None:
    """Write an index of all vectors, in the order of the input; ids are `file:line`.

    It is built beside its place and renamed, so that it is there completely or not at all. One that is there is left
    as it is if it has as many rows as the job.
    """
    task = check_index(job, path)
    if path.exists():
        with Index.open(path) as existing:
            if len(existing) != len(results) or existing.dtype != dtype:
                raise BatchError(
                    f"batch: {path} has {len(existing)} rows of {existing.dtype}, the job {len(results)} of {dtype}",
                    hint="another name for the index",
                )
        return
    temporary = path.with_name(f".{path.name}.tmp")
    if temporary.exists():
        shutil.rmtree(temporary)  # of a driver that was killed
    tables = results.tables()
    index: Index | None = None
    for shard, table in zip(job.shards(), tables, strict=True):
        if index is None:
            index = Index.create(temporary, dim=table["vector"].shape[1], dtype=dtype, model=task.model)
        texts = {record.line: record for record in read_records(shard, task.main_field) if isinstance(record, Record)}
        lines = table["line"].tolist()
        if lines:
            index.append(
                np.ascontiguousarray(table["vector"]), [f"{shard.source.name}:{line}" for line in lines],
                [texts[line].text(task.main_field) for line in lines],
            )  # fmt: skip
    if index is None:
        raise BatchError("batch: there is nothing to put into an index: the input has no records")
    index.close()
    os.rename(temporary, path)
    sync_folder(path.parent)
