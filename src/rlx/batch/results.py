"""The results of a job, read from its folder: rows in the order of the input, whoever computed them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.batch.folder import ERRORS, JOURNAL, MANIFEST, digest_of, read_manifest
from rlx.errors import BatchError, FormatError


class Results:
    """A finished job. Iterating gives one mapping per result; `vectors` are those of `embed` as one array."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise FormatError(f"{self.folder}: there is no {MANIFEST}")
        if (self.folder / JOURNAL).exists() or "shards" not in manifest:
            raise BatchError(f"{self.folder}: the job is not finished", hint="run its command again")
        self.manifest: Mapping[str, Any] = manifest

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of records, rows (results), errors, tokens and shards."""
        return dict(self.manifest["counts"])

    @property
    def files(self) -> list[Path]:
        """The files with results, in order."""
        return [self.folder / shard["file"] for shard in self.manifest["shards"]]

    def __len__(self) -> int:
        return self.counts["rows"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = [source["name"] for source in self.manifest["job"]["inputs"]]
        for path in self.files:
            if path.suffix == ".npy":
                for row in np.load(path, mmap_mode="r", allow_pickle=False):
                    yield {"file": names[row["file"]], "line": int(row["line"]), "vector": np.array(row["vector"])}
            else:
                with open(path, "rb") as lines:
                    yield from map(json.loads, lines)

    def errors(self) -> Iterator[dict[str, Any]]:
        """Lines without a result: file, line, id and error. Those of OpenAI's batch API have its members too."""
        path = self.folder / ERRORS
        if path.exists():
            with open(path, "rb") as lines:
                yield from map(json.loads, lines)

    def tables(self) -> Iterator[Array]:
        """The structured arrays of `embed` (file, line, vector), mapped, one per shard."""
        for path in self.files:
            if path.suffix != ".npy":
                raise BatchError(f"{path}: expected a NumPy file", hint="batch embed with format npy writes them")
            if path.stat().st_size:
                yield np.load(path, mmap_mode="r", allow_pickle=False)

    def vectors(self) -> Array:
        """All vectors of `embed`, `[rows, dim]`, in memory. Without any shard, dim is unknown, and 0."""
        tables = [table["vector"] for table in self.tables()]
        return np.concatenate(tables) if tables else np.empty((0, 0), np.float32)

    def verify(self) -> None:
        """Read all files and compare their digests with the manifest; raises FormatError for the first that differs."""
        expected = {path: shard["digest"] for shard, path in zip(self.manifest["shards"], self.files, strict=True)}
        expected[self.folder / ERRORS] = self.manifest.get("errors_digest")
        for path, digest in expected.items():
            actual = digest_of(path.read_bytes()) if path.exists() else None
            if actual != digest:
                raise FormatError(f"{path}: its digest is {actual}, the manifest has {digest}")

    def __repr__(self) -> str:
        counts = self.counts
        return f"<results {str(self.folder)!r}: {counts['rows']} rows, {counts['errors']} errors>"
