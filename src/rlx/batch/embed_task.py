"""The vectors of texts: a NumPy file per shard, or lines of JSON."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np

from rlx.arrays import Array
from rlx.batch.inputs import Shard
from rlx.batch.records import Record
from rlx.batch.tasks import Beat, ShardResult, Task, bisect, json_line, openai_row, place, prepare
from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.sampler import short_repr
from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass

FORMATS = ("npy", "jsonl")
MAX_INPUTS = 2048  # texts per line in OpenAI's form, as in its API


@dataclass(frozen=True)
class Embed(Task):
    """`prompt` names one of the model's prompts. Texts that are too long are cut unless `truncate` is False."""

    prompt: str | None = None
    truncate: bool = True
    format: str = "npy"

    verb: ClassVar[str] = "embed"
    usual_field: ClassVar[str] = "text"
    kind: ClassVar[str] = "encoder"
    shard_records: ClassVar[int] = 1024
    shard_bytes: ClassVar[int] = 1 << 20

    @property
    def suffix(self) -> str:
        return f".{self.format}"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.main_field, "id") if self.writes_ids else (self.main_field,)

    @property
    def writes_ids(self) -> bool:
        return self.format != "npy"

    def check(self, model: EmbeddingModel) -> None:
        if self.format not in FORMATS:
            raise RequestError(f"batch embed: no format is called {self.format!r}", hint=f"known: {', '.join(FORMATS)}")
        model.text_rows([""], prompt=self.prompt)

    def for_index(self, model: EmbeddingModel) -> Self:
        """With the model's prompt for documents, unless there is a prompt: `rlx search` uses the one for queries."""
        task = replace(self, prompt=model.settings.document_prompt if self.prompt is None else self.prompt)
        task.check(model)
        return task

    def results(self, model: EmbeddingModel, shard: Shard, records: Sequence[Record], beat: Beat) -> ShardResult:
        read, failures = prepare(records, lambda record: self._texts(record, model))
        texts = [text for _, inner in read for text in inner]
        rows = bisect(texts, lambda some: model.text_rows(some, prompt=self.prompt, truncate=self.truncate))
        accepted: list[tuple[Record, list[Any]]] = []
        at = 0
        for record, inner in read:
            own = rows[at : at + len(inner)]
            at += len(inner)
            error = next((row for row in own if isinstance(row, Exception)), None)
            if error is None:
                accepted.append((record, own))
            else:
                failures.append(record.failure(error))
        flat = [row for _, own in accepted for row in own]
        vectors = np.empty((0, model.dim), np.float32)
        if flat:
            vectors = model.embed_tokens(flat, on_batch=lambda _: beat())
        write = self._array if self.format == "npy" else self._lines
        output = write(model, shard, accepted, vectors)
        return ShardResult(output, len(accepted), sum(map(len, flat)), failures)

    def _texts(self, record: Record, model: EmbeddingModel) -> list[str]:
        """The texts of a record: one, or those of a line in OpenAI's form."""
        if record.url is None:
            return [record.text(self.main_field)]
        if self.format == "npy":
            raise RequestError("lines in OpenAI's form have results in that form: --format jsonl")
        if record.url != "/v1/embeddings":
            raise RequestError(f"url: expected /v1/embeddings, found {short_repr(record.url)}")
        body = record.members
        unknown = set(body) - {"input", "model", "encoding_format", "dimensions", "user"}
        if unknown:
            raise RequestError(f"body: unknown members: {', '.join(sorted(unknown))[:200]}")
        value = body.get("input")
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list)
            or not 0 < len(texts) <= MAX_INPUTS
            or not all(isinstance(t, str) for t in texts)
        ):
            raise RequestError(f"input: expected a text or 1 to {MAX_INPUTS} of them, found {short_repr(value)}")
        if body.get("dimensions") not in (None, model.dim):
            raise RequestError(f"dimensions: {short_repr(body['dimensions'])} is asked for, vectors have {model.dim}")
        if body.get("encoding_format", "float") not in ("float", "base64"):
            raise RequestError(
                f"encoding_format: expected float or base64, found {short_repr(body['encoding_format'])}"
            )
        return texts

    def _array(
        self, model: EmbeddingModel, shard: Shard, accepted: Sequence[tuple[Record, list[Any]]], vectors: Array
    ) -> bytes:
        """A structured array: number of the input file, line, vector."""
        table = np.empty(len(accepted), [("file", "<u4"), ("line", "<u8"), ("vector", "<f4", (model.dim,))])
        table["file"], table["line"] = shard.source.number, [record.line for record, _ in accepted]
        table["vector"] = vectors
        file = io.BytesIO()
        np.lib.format.write_array(file, table, version=(1, 0), allow_pickle=False)
        return file.getvalue()

    def _lines(
        self, model: EmbeddingModel, shard: Shard, accepted: Sequence[tuple[Record, list[Any]]], vectors: Array
    ) -> bytes:
        lines, at = list[bytes](), 0
        for record, rows in accepted:
            own = vectors[at : at + len(rows)]
            at += len(rows)
            if record.url is None:
                lines.append(json_line(place(shard, record) | {"vector": numbers(own[0])}))
            else:
                lines.append(json_line(openai_row(shard, record, _body(model, record.members, rows, own))))
        return b"".join(lines)


def _body(
    model: EmbeddingModel, body: Mapping[str, Any], rows: Sequence[Sequence[int]], vectors: Array
) -> dict[str, Any]:
    """The answer of /v1/embeddings."""
    as_text = body.get("encoding_format") == "base64"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(v.tobytes()).decode() if as_text else numbers(v),
        }
        for i, v in enumerate(vectors.astype("<f4"))
    ]
    count = sum(map(len, rows))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body.get("model") or model.name, "usage": usage}


def numbers(vector: Array) -> list[float]:
    """The numbers of an f32 vector with as few digits as tell them apart."""
    return [float(f"{number:.9g}") for number in vector.tolist()]
