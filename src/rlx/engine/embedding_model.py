"""Embedding models: vectors of texts, pooled and normalised as the model's files say, in batches of similar length.

The bits of a vector depend only on its text, not on the other texts, the batch size or the number of threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from rlx.arrays import Array
from rlx.engine.foreign_names import embed_hint
from rlx.engine.interventions import run_of
from rlx.engine.load_settings import as_int
from rlx.engine.logs import warn
from rlx.engine.model import Model
from rlx.engine.sampler import short_repr
from rlx.errors import CapabilityError, FormatError, RequestError, nearest
from rlx.flow.flow import ModelFlow
from rlx.fork_safe_locks import cached_property
from rlx.hub.progress import progress_bar
from rlx.models.pooling import EmbedSettings, read_settings

if TYPE_CHECKING:
    from rlx.inspect.call_report import CallRecorder, CallReport

TOKENS = 256  # maximum per batch and thread: activations stay in cache, and threads rarely wait
ENOUGH = 128  # per batch and thread for full speed: beyond it, a shorter text starts a new batch
WINDOW = 8192  # texts tokenised and sorted together
MIN_NORM = 1e-12  # lower bound of the norm that vectors are divided by, as in torch


class EmbeddingModel(Model):
    """A text encoder: `embed` returns vectors of texts. Thread-safe."""

    precisions = ("auto", "f32", "int8")

    def unpatched_flow(self) -> ModelFlow:
        from rlx.engine.build import model_flow

        return model_flow(self.checkpoint, self.context, self.cache_dtype, self.settings)

    def hidden_flow(self) -> ModelFlow:
        return self.family.flow(self.checkpoint.config)

    # -- parts --
    @cached_property
    def settings(self) -> EmbedSettings:
        """Pooling, normalisation, limits and prompts from the model's files."""
        return read_settings(self.checkpoint)

    def warn_of_notes(self) -> None:
        super().warn_of_notes()
        if not self.settings.source:
            warn("rlx.embed", "%s: no file says how to pool: vectors are the mean over tokens", self.name)

    @property
    def pooling(self) -> str:
        """How token vectors are pooled: mean, cls, lasttoken, max, weightedmean or mean_sqrt_len_tokens."""
        return self.settings.kind

    @property
    def normalize(self) -> bool:
        """Whether vectors have unit length by default."""
        return self.settings.normalize

    @cached_property
    def limit(self) -> int:
        """Maximum tokens per text, including special ones; longer texts are truncated."""
        limit = min(self.settings.limit or self.context, self.context)
        tokenizer = self.checkpoint.tokenizer  # token ids can be read without one
        ends = 0 if tokenizer is None else len(tokenizer.prefix) + len(tokenizer.suffix)
        if limit <= ends:
            message = f"texts have at most {limit} token{'s' * (limit != 1)}, of which {ends} are special"
            longest = self.facts.longest
            if min(self.settings.limit or longest, longest) > ends:
                raise RequestError(f"embed: {message}", hint="load the model with a larger context=")
            raise FormatError(f"{self.checkpoint.path}: {message}")
        return limit

    @property
    def dim(self) -> int:
        """Size of a vector."""
        dense = self.settings.dense
        return dense[-1][-1] if dense else self.facts.dim

    def _size_text(self) -> str:
        return f"texts of up to {min(self.settings.limit or self.context, self.context)} tokens"

    # -- vectors --
    def embed(
        self, texts: str | Iterable[str], *, batch_size: int | None = None, normalize: bool | None = None,
        truncate: bool = True, prompt: str | None = None, show_progress: bool = False,
        trace: str | Path | None = None, **unknown: Any,
    ) -> Array:  # fmt: skip
        """The vector `[dim]` of a text, or the vectors `[texts, dim]` of several, as f32.

        Texts are truncated to `limit` tokens, with one warning for all of them; `truncate=False` makes it an error.
        `prompt` names one of the model's prompts (`settings.prompts`), which is prepended to each text. `batch_size`
        defaults to what is fastest. `normalize` overrides the model's files. `trace` is a file for a timeline of the
        whole call, for ui.perfetto.dev or chrome://tracing.
        """
        for name in unknown:
            raise RequestError(f"embed: no setting is called {name!r}", hint=embed_hint(name))
        listed = [texts] if isinstance(texts, str) else _checked(texts)
        unit = self._checked_request("embed", batch_size, normalize)
        prefix = self._prompt(prompt)

        def call(recorder: CallRecorder | None) -> Array:
            with _progress(len(listed), show_progress) as advance:
                return self._embed_texts(listed, prefix, batch_size, unit, truncate, advance, recorder)

        vectors = self._recorded(trace, "embed", call)
        return vectors[0] if isinstance(texts, str) else vectors

    def _embed_texts(
        self, listed: Sequence[str], prefix: str, batch_size: int | None, unit: bool, truncate: bool,
        advance: Callable[[int], None], recorder: CallRecorder | None,
    ) -> Array:  # fmt: skip
        vectors = np.empty((len(listed), self.dim), np.float32)
        cut = 0
        for start in range(0, len(listed), WINDOW):
            with contextlib.nullcontext() if recorder is None else recorder.span("tokenizing"):
                rows = self._encode(listed[start : start + WINDOW], start, prefix, truncate)
            for i, row in enumerate(rows):
                if len(row) > self.limit:
                    rows[i] = self._truncate(row, start + i, truncate)
                    cut += 1
            pooled = self._embed_rows(rows, batch_size, advance, recorder)
            vectors[start : start + len(rows)] = _unit(pooled) if unit else pooled
        if cut:
            warn(
                "rlx.embed",
                "%d of %d texts were cut to the %d tokens that the model reads",
                cut,
                len(listed),
                self.limit,
            )
        return vectors

    def report(self, texts: str | Iterable[str] | None = None, *, batch_size: int | None = None) -> CallReport:
        """Where the time of `embed(texts)` goes: kernels and stages, tokenizing, Python.

        The call is made twice, and the second one is timed. Without texts, 8 rows of 32 random tokens are embedded.
        """
        self._checked_request("report", batch_size, None)
        if texts is None:
            random = np.random.default_rng(0).integers(0, self.facts.vocab, (8, min(32, self.limit))).tolist()
            return self._measured("embed", lambda recorder: self._embed_rows(random, None, _ignore, recorder))
        listed, prefix = [texts] if isinstance(texts, str) else _checked(texts), self._prompt(None)

        def call(recorder: CallRecorder) -> None:
            self._embed_texts(listed, prefix, batch_size, self.normalize, True, _ignore, recorder)

        return self._measured("embed", call)

    def embed_tokens(
        self, rows: Iterable[Iterable[int]], *, batch_size: int | None = None, normalize: bool | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> Array:  # fmt: skip
        """The vectors `[rows, dim]` of token ids, which include special tokens, as f32.

        Rows must be unpadded, with at most `limit` tokens. They are batched by length, as in `embed`, so that little
        padding is computed. `on_batch` is called with the number of rows after each batch.
        """
        unit = self._checked_request("embed_tokens", batch_size, normalize)
        if isinstance(rows, Mapping) or not isinstance(rows, Iterable) or getattr(rows, "shape", None) == ():
            raise RequestError(f"embed_tokens: expected rows of token ids, found {type(rows).__name__}")
        listed = [self._checked_row(row, i) for i, row in enumerate(rows)]
        pooled = self._embed_rows(listed, batch_size, on_batch or _ignore)
        return _unit(pooled) if unit else pooled

    def text_rows(self, texts: Sequence[str], *, truncate: bool = True, prompt: str | None = None) -> list[list[int]]:
        """The token ids that `embed` computes for texts, which `embed_tokens` takes."""
        rows = self._encode(_checked(texts), 0, self._prompt(prompt), truncate)
        return [self._truncate(row, i, truncate) if len(row) > self.limit else row for i, row in enumerate(rows)]

    def checked_row(self, row: Iterable[int], i: int) -> list[int]:
        """Token ids of a text as a list; raises if they are not ids of the vocabulary, or too many."""
        return self._checked_row(row, i)

    def similarity(self, a: str | Iterable[str] | Array, b: str | Iterable[str] | Array) -> Any:
        """Similarity of texts or vectors: a number for two, a vector or matrix if a side has several."""
        first, second = (side if _are_vectors(side) else self.embed(side) for side in (a, b))
        if not (1 <= first.ndim <= 2 and 1 <= second.ndim <= 2 and first.shape[-1] == second.shape[-1]):
            raise RequestError(
                f"similarity: the sides have the shapes {list(first.shape)} and {list(second.shape)}",
                hint=f"expected [n] or [rows, n] with the same n, which is {self.dim} for texts",
            )
        match self.settings.similarity:
            case "cosine":
                first, second = _unit(first), _unit(second)
            case "dot":
                pass
            case other:
                raise CapabilityError(f"similarity: the model's files ask for {other!r}", hint="known: cosine, dot")
        scores = np.tensordot(first, second, axes=(-1, -1))
        return scores if scores.ndim else float(scores)

    # -- inside --
    def _checked_request(self, verb: str, batch_size: int | None, normalize: bool | None) -> bool:
        """Check the arguments; returns whether to normalise."""
        self.check_usable()
        if batch_size is not None and (as_int(batch_size) or 0) < 1:
            raise RequestError(f"{verb}: batch_size is {short_repr(batch_size)}, expected a whole number from 1")
        if not isinstance(normalize, (bool, np.bool_, NoneType)):
            raise RequestError(f"{verb}: normalize is {short_repr(normalize)}, expected True, False or None")
        return self.normalize if normalize is None else bool(normalize)

    def _checked_row(self, row: Iterable[int], i: int) -> list[int]:
        if isinstance(row, str) or not isinstance(row, Iterable):
            # a text, a key of another library's tokenizer output, or the ids of a single text
            hint = "embed takes texts" if isinstance(row, str) else "one text is a row too: [[101, 102]]"
            raise RequestError(f"embed_tokens: row {i}: expected token ids, found {short_repr(row)}", hint=hint)
        ids = self.token_ids(row, f"embed_tokens: row {i}")
        if len(ids) > self.limit:
            raise RequestError(
                f"embed_tokens: row {i} has {len(ids)} tokens, the model reads {self.limit}",
                hint="leave padding out, and cut the text before its last special token",
            )
        return ids

    def _prompt(self, name: str | None) -> str:
        name = self.settings.default_prompt if name is None else name
        if name is None:
            return ""
        known = self.settings.prompts
        if not isinstance(name, str):
            raise RequestError(f"embed: prompt is {short_repr(name)}, expected the name of one")
        if name not in known:
            raise RequestError(f"embed: the model has no prompt {name!r}", hint=nearest(name, known) or "it has none")
        if known[name] and not self.settings.include_prompt:
            raise CapabilityError(
                f"embed: the model does not pool the tokens of prompt {name!r}, which rlx cannot leave out"
            )
        return known[name]

    def _encode(self, texts: Sequence[str], start: int, prefix: str, truncate: bool) -> list[list[int]]:
        if prefix or self.settings.lower:
            texts = [prefix + (text.lower() if self.settings.lower else text) for text in texts]
        clipped = [self.tokenizer.clip_text(text, self.limit) for text in texts]
        if not truncate:
            for i, (text, beginning) in enumerate(zip(texts, clipped, strict=True)):
                if len(beginning) < len(text):
                    raise self._too_many(start + i, f"more than {self.limit}")
        try:
            return self.tokenizer.encode_batch(clipped)
        except RequestError as error:
            if start:
                error.add_note(f"  counted from text {start}")
            raise

    def _truncate(self, row: Sequence[int], i: int, truncate: bool) -> list[int]:
        """The first tokens of a text, with its special suffix."""
        if not truncate:
            raise self._too_many(i, f"{len(row)}")
        suffix = self.tokenizer.suffix
        return [*row[: self.limit - len(suffix)], *suffix]

    def _too_many(self, i: int, count: str) -> RequestError:
        return RequestError(
            f"embed: text {i} has {count} tokens, the model reads {self.limit}",
            hint="split the text, or have it cut with truncate=True",
        )

    def _embed_rows(
        self, rows: Sequence[Sequence[int]], size: int | None, advance: Callable[[int], None],
        recorder: CallRecorder | None = None,
    ) -> Array:  # fmt: skip
        """Vectors `[rows, dim]`, not normalised. Equal rows are computed once; an empty row returns zeros."""
        first: dict[tuple[int, ...], int] = {}
        same = [first.setdefault(tuple(row), i) for i, row in enumerate(rows)]
        vectors = np.zeros((len(rows), self.dim), np.float32)
        for batch in batches({i: len(row) for row, i in first.items() if row}, size, self.threads):
            vectors[batch] = self._run_batch([rows[i] for i in batch], recorder)
            advance(len(batch))
        advance(len(rows) - len(first))
        return vectors[same]

    def _run_batch(self, rows: Sequence[Sequence[int]], recorder: CallRecorder | None = None) -> Array:
        shape = len(rows), max(map(len, rows))
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
            mask[i, : len(row)] = 1
        positions = np.repeat(np.arange(shape[1], dtype=np.int32)[None], shape[0], axis=0)
        inputs = {
            "tokens": tokens,
            "token_types": np.zeros_like(tokens),
            "positions": positions,
            "attention_mask": mask,
        }
        compiled = self.compiled
        return np.asarray(run_of(compiled, recorder)({name: inputs[name] for name in compiled.input_types})[0])


def batches(lengths: dict[int, int], size: int | None = None, threads: int = 1) -> Iterator[list[int]]:
    """Batches of rows of similar length, longest first: `size` per batch, or the fastest size with little padding."""
    batch: list[int] = []
    for row in sorted(lengths, key=lengths.__getitem__, reverse=True):
        width = lengths[batch[0]] if batch else 0
        tokens = len(batch) * width
        full = tokens + width > TOKENS * threads or (tokens >= ENOUGH * threads and lengths[row] < width)
        if batch and (full if size is None else len(batch) == size):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _checked(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, (bytes, dict)) or not isinstance(texts, Iterable) or getattr(texts, "shape", None) == ():
        raise RequestError(f"embed: expected a text or a list of texts, found {type(texts).__name__}")
    listed = list(texts)
    for i, text in enumerate(listed):
        if not isinstance(text, str):
            raise RequestError(f"embed: text {i}: expected str, found {type(text).__name__}")
    return listed


def _ignore(count: int) -> None:
    """Show no progress."""


def _are_vectors(side: Any) -> TypeGuard[Array]:
    return isinstance(side, np.ndarray) and side.dtype.kind == "f"


def _unit(vectors: Array) -> Array:
    unit: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), MIN_NORM)
    return unit


@contextlib.contextmanager
def _progress(total: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal; yields a function that takes the number of newly finished texts."""
    done = 0
    with progress_bar("embedding", total, of_bytes=False) if enabled else contextlib.nullcontext() as tick:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if tick is not None:
                tick(done)

        yield advance
