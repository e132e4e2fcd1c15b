"""`rlx.Index`: vectors with ids and texts in a folder, and exact search over them.

Search runs one compiled kernel that multiplies and ranks in one pass over the mapped rows (the op `nearest_rows`). An
int8 index is searched in its codes, and the best of these are scored again with the f32 vectors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.arrays import Array
from rlx.engine.foreign_names import missing_attribute, search_hint
from rlx.errors import CapabilityError, FormatError, RequestError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.index.head import DTYPES, METRICS, Head
from rlx.index.store import Store, quantise, row_bytes
from rlx.ir.graph import Graph, Value
from rlx.ops.search import MAX_INT8, MAX_K
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import compile as compile_graph

if TYPE_CHECKING:
    from rlx.engine.embedding_model import EmbeddingModel

Id = int | str
QUERIES = 64  # searched in one pass over the rows
RESCORED = 16  # times k: rows of an int8 index that are scored again
LEAST_RESCORED = 128
NO_MODEL = "pass vectors, or name a model: Index.create(..., model=NAME), Index.open(..., model=NAME)"
COMPACTED = 8192  # rows that compaction copies at a time


@dataclass(frozen=True, slots=True)
class Hit:
    """A row that was found. The score of `l2` is minus the squared distance, so that higher is better everywhere."""

    score: float
    id: Id
    text: str | None = None
    metadata: Mapping[str, Any] | None = None
    row: int = -1


class Index:
    """An index in a folder. One process may write while others read; a reader sees new rows after `refresh()`."""

    def __init__(
        self, store: Store, threads: int | None = None, model: str | EmbeddingModel | None = None, **_: Any
    ) -> None:
        if not isinstance(store, Store):
            hint = f"rlx.Index.open({store!r}), or rlx.Index.create({store!r}, dim=...) for a new one"
            raise RequestError("Index: an index is opened or created", hint=hint)
        self._store = store
        self._threads = threads
        self._model = model
        self._compiled: dict[tuple[Any, ...], CompiledGraph] = {}

    # -- opening -------------------------------------------------------------------------------------------------------
    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, dim: int | None = None, dtype: str = "f32", metric: str = "cosine",
        model: str | EmbeddingModel | None = None, threads: int | None = None,
    ) -> Index:  # fmt: skip
        """Makes an index without rows in a new folder, open for writing.

        dtype: f32, f16 (half the memory), or int8 (a quarter is read, and the best are scored again in f32, which
        stays on disk). metric: cosine (vectors are normalised), dot or l2. model: the name of a model, or a loaded one,
        that embeds texts which are appended and searched for. dim: numbers per vector, by default those of the model.
        """
        if model is not None and not isinstance(model, str):
            _check_embeds(model, "Index.create")
        if dim is None:
            if model is None:
                raise RequestError("Index.create: there is neither dim nor model", hint="dim=384, or the model's name")
            model = _load(model, threads, "Index.create")
            dim = model.dim
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= MAX_INT8:
            raise RequestError(f"Index.create: dim is {dim!r}, expected an integer from 1 to {MAX_INT8}")
        for name, value, known in (("dtype", dtype, DTYPES), ("metric", metric, METRICS)):
            if value not in known:
                raise RequestError(f"Index.create: {name} is {value!r}, expected one of {', '.join(known)}")
        if model is not None and not isinstance(model, str) and model.dim != dim:
            raise RequestError(f"Index.create: dim is {dim}, {model.name} makes vectors of {model.dim}")
        stored = None if model is None else stored_name(model)
        return cls(Store.create(Path(path), Head(dim, dtype, metric, stored)), threads, model)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, write: bool = False, threads: int | None = None,
        model: str | EmbeddingModel | None = None,
    ) -> Index:  # fmt: skip
        """Opens an index. `model` embeds texts instead of the one that the index names: a name, or a loaded model."""
        if model is not None and not isinstance(model, str):
            _check_embeds(model, "Index.open")
        return cls(Store(Path(path), write=write), threads, model)

    def close(self) -> None:
        """Releases the lock of a writer. What was appended is on disk already."""
        self._store.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def refresh(self) -> None:
        """Reads what a writer has committed since."""
        self._store.refresh()

    # -- facts ---------------------------------------------------------------------------------------------------------
    @property
    def path(self) -> Path:
        return self._store.folder

    @property
    def dim(self) -> int:
        return self._store.head.dim

    @property
    def dtype(self) -> str:
        return self._store.head.dtype

    @property
    def metric(self) -> str:
        return self._store.head.metric

    @property
    def model(self) -> str | None:
        """The name of the model whose vectors these are."""
        return self._store.head.model

    @property
    def vectors(self) -> Array:
        """All rows, mapped and read-only, including deleted ones: `index.vectors[index.rows]` are the others."""
        return self._store.fixed["vectors"]

    @property
    def rows(self) -> Array:
        """The numbers of the rows that are not deleted, in rising order. A row keeps its number until `compact`."""
        return np.setdiff1d(np.arange(self._store.head.rows), self.deleted)

    @property
    def deleted(self) -> Array:
        """Rows that are deleted, in rising order."""
        return self._store.deleted

    def __len__(self) -> int:
        return self._store.head.rows - self._store.head.deleted

    def __contains__(self, id: object) -> bool:
        """Whether a row has this id; reads the ids of all rows."""
        return len(self._rows_with([id])) > 0

    def __iter__(self) -> Iterator[Id]:
        """The ids of all rows that are not deleted, in order."""
        return iter(self.ids())

    def __repr__(self) -> str:
        shape = f"{len(self)} x {self.dim} {self.dtype}"
        return f"<rlx.Index {str(self.path)!r}: {shape}, {self.metric}, model {self.model}>"

    def verify(self) -> None:
        """Reads all files and checks their digests."""
        self._store.verify()

    # -- writing -------------------------------------------------------------------------------------------------------
    def append(
        self, vectors: Any = None, ids: Sequence[Id] | None = None, texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:  # fmt: skip
        """Adds rows [count, dim]: all of them, on disk when it returns, or none.

        Without vectors, the model of the index embeds the texts. ids are all integers or all strings, and need not be
        unique; without any, the number of the row is its id.
        """
        if vectors is None:
            vectors = self._document_vectors(texts)
        elif _are_texts(vectors):
            how = "append(texts=[...], ids=[...]) embeds them" if self._model or self.model else NO_MODEL
            raise RequestError("append: these are texts, expected vectors", hint=how)
        rows = self._checked(vectors, "append")
        kind = self._kind_of_ids(ids, len(rows))
        for name, values in (("texts", texts), ("metadata", metadata)):
            if values is not None and len(values) != len(rows):
                raise ShapeError(f"append: {len(rows)} vectors and {len(values)} {name}")
        varying: dict[str, list[bytes | None]] = {}
        if ids is not None and kind == "str":
            varying["ids"] = [_encoded(str(i), "an id") for i in ids]
        if texts is not None:
            varying["texts"] = [_encoded(text) for text in texts]
        if metadata is not None:
            varying["metadata"] = [None if m is None else _json(m) for m in metadata]
        numbers = np.array([] if ids is None or kind != "int" else ids, np.int64)
        self._append(rows, numbers, varying, kind)

    def _append(self, rows: Array, numbers: Array, varying: Mapping[str, list[bytes | None]], kind: str) -> None:
        if self.metric == "cosine":
            rows = normalised(rows)
        fixed: dict[str, Array] = {"vectors": rows, "numbers": numbers.reshape(-1, 1)}
        if self.dtype == "int8":
            fixed["codes"], fixed["scales"] = quantise(rows)
            fixed["halves"] = np.square(rows).sum(1, keepdims=True) * np.float32(-0.5)
        elif self.dtype == "f16" and (np.abs(rows) > np.finfo(np.float16).max).any():
            raise RequestError("append: a number is too large for f16", hint='an index with dtype="f32" holds it')
        self._store.append(fixed, varying, kind)

    def _kind_of_ids(self, ids: Sequence[Id] | None, count: int) -> str:
        if ids is None:
            kind = "row"
        else:
            if len(ids) != count:
                raise ShapeError(f"append: {count} vectors and {len(ids)} ids")
            kinds = {"str" if isinstance(i, str) else "int" if _is_int(i) else type(i).__name__ for i in ids}
            if not kinds <= {"int", "str"} or len(kinds) > 1:
                raise RequestError(f"append: ids are {', '.join(sorted(kinds))}, expected integers or strings")
            kind = kinds.pop() if kinds else self._store.head.ids
            large = next((i for i in ids if kind == "int" and not _fits(i)), None)
            if large is not None:
                hint = "ids of any length are strings"
                raise RequestError(f"append: the id {large} needs more than 64 bits", hint=hint)
        head = self._store.head
        if head.rows and kind != head.ids:
            names = {"row": "row numbers", "int": "integers", "str": "strings"}
            hint = f"pass ids=[...] that are {names[head.ids]}" if head.ids != "row" else "append without ids"
            raise RequestError(
                f"append: ids are {names[kind]}, those of the {head.rows} rows before {names[head.ids]}", hint=hint
            )
        return kind

    def delete(self, ids: Iterable[Id]) -> int:
        """Deletes all rows with these ids; returns how many that were. `compact` gives their room back."""
        rows = self._rows_with([ids] if isinstance(ids, str) or _is_int(ids) else list(ids))
        self._store.delete(rows)
        return len(rows)

    def _rows_with(self, wanted: Sequence[Any]) -> Array:
        """The rows that have one of these ids."""
        alive = self.rows
        match self._store.head.ids:
            case "row":
                return np.intersect1d(alive, np.array([i for i in wanted if _is_int(i) and _fits(i)], np.int64))
            case "int":
                numbers = np.array([i for i in wanted if _is_int(i) and _fits(i)], np.int64)
                return alive[np.isin(self._store.fixed["numbers"][alive, 0], numbers)]
            case _:
                names = {i.encode("utf-8", "surrogatepass") for i in wanted if isinstance(i, str)}
                values = self._store.values("ids", alive.tolist())
                return alive[[value in names for value in values]] if len(alive) else alive

    def compact(self) -> None:
        """Rewrites the files without deleted rows. Ids stay; ids that were row numbers become integers."""
        head = self._store.head
        kind = "int" if head.ids == "row" else head.ids
        fresh = self._store.start_epoch(Head(head.dim, head.dtype, head.metric, head.model, ids=kind))
        alive = self.rows
        for at in range(0, len(alive), COMPACTED):
            rows = alive[at : at + COMPACTED]
            fixed = {name: np.array(column[rows]) for name, column in self._store.fixed.items()}
            fixed.setdefault("numbers", rows.reshape(-1, 1))
            varying = {name: self._store.values(name, rows.tolist()) for name in head.first}
            fresh.append(fixed, varying, kind)
        self._store.finish_epoch(fresh)

    # -- searching -----------------------------------------------------------------------------------------------------
    def search(self, queries: Any, k: int = 10, *, rescore: int | None = None, **unknown: Any) -> Any:
        """The k best rows for each query, best first: a list of `Hit`, or one list per query for several.

        Queries are texts or vectors, one or a list. `rescore` is how many rows of an int8 index are scored again.
        """
        for name in unknown:
            raise RequestError(f"search: no setting is called {name!r}", hint=search_hint(name))
        if _are_texts(queries):
            vectors = self.embed([queries] if isinstance(queries, str) else queries)
            single = isinstance(queries, str)
        else:
            vectors = np.asarray(queries, np.float32)
            single = vectors.ndim == 1
        scores, rows = self.search_rows(np.atleast_2d(vectors), k, rescore=rescore)
        hits = self._hits(scores, rows)
        return hits[0] if single else hits

    def search_rows(self, vectors: Any, k: int = 10, *, rescore: int | None = None) -> tuple[Array, Array]:
        """Scores and rows, both [queries, k]; -inf and -1 where there are fewer than k rows."""
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
            raise RequestError(f"search: k is {k!r}, expected an integer from 1 to {MAX_K}")
        if rescore is not None and (not _is_int(rescore) or rescore < k):
            raise RequestError(f"search: rescore is {rescore!r}, expected an integer from k, {k}")
        candidates = max(RESCORED * k, LEAST_RESCORED) if rescore is None else int(rescore)
        queries = self._checked(vectors, "search")
        if self.metric == "cosine":
            queries = normalised(queries)
        scores = np.empty((len(queries), k), np.float32)
        rows = np.empty((len(queries), k), np.int32)
        for at in range(0, len(queries), QUERIES):
            part = slice(at, at + QUERIES)
            scores[part], rows[part] = self._search(queries[part], k, min(candidates, MAX_K))
        return scores, rows

    def _search(self, queries: Array, k: int, candidates: int) -> tuple[Array, Array]:
        columns = self._store.fixed
        deletions = {} if not len(self.deleted) else {"offsets": self._deletions}
        if self.dtype != "int8":
            return self._run(queries, columns["vectors"], k, deletions)
        padded = np.zeros((len(queries), row_bytes(self.dim)), np.float32)
        padded[:, : self.dim] = queries
        more = {"scales": columns["scales"][:, 0]}
        if self.metric == "l2":
            halves = columns["halves"][:, 0]
            more["offsets"] = halves + self._deletions if deletions else halves
        else:
            more |= deletions
        _, among = self._run(padded, columns["codes"], candidates, more)
        return self._run(queries, columns["vectors"], k, {"among": among})

    @property
    def _deletions(self) -> Array:
        """What is added to the scores of rows: -inf for deleted ones."""
        key = self._store.head.deleted_digest, self._store.head.rows
        if key != getattr(self, "_deletions_key", None):
            offsets = np.zeros(self._store.head.rows, np.float32)
            offsets[self.deleted] = -np.inf
            self._deletions_array, self._deletions_key = offsets, key
        return self._deletions_array

    def _run(self, queries: Array, rows: Array, k: int, more: Mapping[str, Array]) -> tuple[Array, Array]:
        integers = rows.dtype == np.int8
        metric = "l2" if self.metric == "l2" and not integers else "dot"
        width = more["among"].shape[1] if "among" in more else 0
        key = rows.dtype.str, rows.shape[1], k, metric, width, *sorted(more)
        if key not in self._compiled:
            self._compiled[key] = compile_graph(_graph(rows, k, metric, more, width), threads=self._threads)
        scores, best = self._compiled[key].run({"queries": queries, "rows": rows, **more})
        return scores, best

    def embed(self, texts: Sequence[str]) -> Array:
        """Vectors of texts by the model of the index, as queries if the model knows a prompt for these."""
        model = self._loaded("search")
        return model.embed(list(texts), prompt=model.settings.query_prompt)

    def _document_vectors(self, texts: Sequence[str | None] | None) -> Array:
        """Vectors of texts that are appended without any."""
        if texts is None:
            raise RequestError(
                "append: there are neither vectors nor texts", hint="append(vectors), append(texts=[...])"
            )
        listed = [text for text in texts if isinstance(text, str)]
        if isinstance(texts, str) or len(listed) != len(texts):
            raise RequestError("append: without vectors, texts are a list of str", hint="append(texts=[...])")
        model = self._loaded("append")
        return model.embed(listed, prompt=model.settings.document_prompt)

    def _loaded(self, where: str) -> EmbeddingModel:
        """The model that embeds texts, loaded when the first text comes."""
        if self._model is None and self.model is None:
            raise RequestError(f"{where}: {self.path} does not say which model embeds texts", hint=NO_MODEL)
        self._model = model = _load(self._model or self.model or "", self._threads, where)
        if model.dim != self.dim:
            raise RequestError(f"{where}: {model.name} makes vectors of {model.dim}, the index has {self.dim}")
        return model

    # -- results -------------------------------------------------------------------------------------------------------
    def _hits(self, scores: Array, rows: Array) -> list[list[Hit]]:
        flat = rows[rows >= 0].tolist()
        records = iter(zip(self.ids(flat), self.texts(flat), self.metadata(flat), strict=True))
        return [
            [Hit(float(score), *next(records), int(row)) for score, row in zip(*of_query, strict=True) if row >= 0]
            for of_query in zip(scores, rows, strict=True)
        ]

    def ids(self, rows: Sequence[int] | None = None) -> list[Id]:
        """The ids of rows, by default of all that are not deleted."""
        numbers = self._live(rows, "ids")
        match self._store.head.ids:
            case "row":
                return list(numbers)
            case "int":
                return [int(i) for i in self._store.fixed["numbers"][numbers, 0]] if numbers else []
            case _:
                return [self._text(name, "ids") or "" for name in self._store.values("ids", numbers)]

    def texts(self, rows: Sequence[int] | None = None) -> list[str | None]:
        """The texts of rows, by default of all that are not deleted; None where there is none."""
        return [self._text(value, "texts") for value in self._store.values("texts", self._live(rows, "texts"))]

    def metadata(self, rows: Sequence[int] | None = None) -> list[dict[str, Any] | None]:
        """The metadata of rows, by default of all that are not deleted; None where there is none."""
        stored = self._store.values("metadata", self._live(rows, "metadata"))
        values = [self._text(value, "metadata") for value in stored]
        return [None if value is None else self._object(value) for value in values]

    def _live(self, rows: Sequence[int] | None, where: str) -> list[int]:
        """Numbers of rows, which must not be deleted; None stands for all."""
        numbers = self.rows if rows is None else np.array(list(rows), np.int64)
        outside = (numbers < 0) | (numbers >= self._store.head.rows)
        wrong = outside | np.isin(numbers, self.deleted)
        if wrong.any():
            row = int(numbers[wrong][0])
            what = "is deleted" if not outside[wrong][0] else f"is outside the {self._store.head.rows} rows"
            hint = "rows are numbered in the order of appending, index.rows are those that are not deleted"
            raise RequestError(f"{where}: row {row} {what}", hint=hint)
        return [int(row) for row in numbers]

    def _text(self, value: bytes | None, column: str) -> str | None:
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.path}: {column}: not UTF-8: {error}") from None

    def _object(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.path}: metadata: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise FormatError(f"{self.path}: metadata: expected an object, found {type(value).__name__}")
        return value

    def to_faiss(self) -> Any:
        """A faiss index (extra `search`) of the rows that are not deleted; its ids are row numbers.

        `IndexFlatIP` of normalised vectors for cosine, `IndexFlatIP` for dot, `IndexFlatL2` for l2.
        """
        try:
            import faiss
        except ImportError:
            raise CapabilityError("to_faiss: faiss is not installed", hint="pip install faiss-cpu") from None
        flat = faiss.IndexFlatL2(self.dim) if self.metric == "l2" else faiss.IndexFlatIP(self.dim)
        index = faiss.IndexIDMap(flat)
        alive = self.rows
        for at in range(0, len(alive), COMPACTED):
            rows = alive[at : at + COMPACTED]
            index.add_with_ids(np.array(self.vectors[rows], np.float32), rows.astype(np.int64))
        return index

    def _checked(self, vectors: Any, where: str) -> Array:
        """Vectors as f32 [count, dim], finite."""
        try:
            array = np.asarray(vectors)
            if array.dtype.kind not in "fiu":
                raise RequestError(f"{where}: vectors are {array.dtype}, expected numbers")
            array = np.ascontiguousarray(array, np.float32)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{where}: these are not vectors: {error}") from None
        if array.ndim != 2 or array.shape[1] != self.dim:
            raise ShapeError(f"{where}: vectors of shape {list(array.shape)}, expected [count, {self.dim}]")
        if not np.isfinite(array).all():
            bad = int(np.nonzero(~np.isfinite(array).all(1))[0][0])
            raise RequestError(f"{where}: vector {bad} has a number that is not finite")
        return array

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes: names of other libraries raise an explanation."""
            raise missing_attribute(self, name)


def normalised(vectors: Array) -> Array:
    """Vectors of length 1; zeros stay zeros."""
    wide = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.where(norms > 0, wide / np.where(norms > 0, norms, 1), 0).astype(np.float32)


def _graph(rows: Array, k: int, metric: str, more: Mapping[str, Array], width: int) -> Graph:
    """A search as a graph; the numbers of queries and rows are known at run time."""
    g = Graph("search")
    dim = rows.shape[1]
    kind = {"i1": "i8", "f2": "f16", "f4": "f32"}[rows.dtype.str[1:]]
    operands: list[Value | None] = [g.input("queries", ("queries", dim)), g.input("rows", ("rows", dim), kind)]
    shapes = {"scales": ("rows",), "offsets": ("rows",), "among": ("queries", width)}
    for name, shape in shapes.items():
        operands.append(g.input(name, shape, "i32" if name == "among" else "f32") if name in more else None)
    return g.set_outputs(list(g.apply("nearest_rows", *operands, k=k, metric=metric)))


def _load(model: str | EmbeddingModel, threads: int | None, where: str) -> EmbeddingModel:
    """A model, or the one with a name, if it embeds texts."""
    from rlx.engine.load import load

    loaded = load(model, threads=threads) if isinstance(model, str) else model
    _check_embeds(loaded, where)
    return loaded


def _check_embeds(model: Any, where: str) -> None:
    from rlx.engine.embedding_model import EmbeddingModel

    if not isinstance(model, EmbeddingModel):
        message = f"{where}: {getattr(model, 'name', repr(model))} does not embed texts"
        raise CapabilityError(message, hint="a model such as minilm-l6, by its name or loaded")


def stored_name(model: str | EmbeddingModel) -> str:
    """What `rlx.load` takes to load this model again, from any folder: paths are absolute."""
    if isinstance(model, str):
        path = Path(model).expanduser()
        return str(path.resolve()) if path.exists() else model
    path = model.checkpoint.path
    return str(path.resolve()) if model.name == path.name else model.name


def _are_texts(values: Any) -> bool:
    listed = [values] if isinstance(values, str) else values
    return isinstance(listed, (list, tuple)) and len(listed) > 0 and all(isinstance(text, str) for text in listed)


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _fits(value: Any) -> bool:
    """Whether an integer has at most 64 bits."""
    return -(1 << 63) <= int(value) < 1 << 63


def _encoded(text: str | None, what: str = "a text") -> bytes | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise RequestError(f"append: {what} is {type(text).__name__}, expected str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"append: {what} cannot be written as UTF-8: {error}") from None


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RequestError(f"append: metadata is no JSON object: {error}") from None
