"""Embeddings: texts to vectors, pooled and normalised as the model's files say, in batches of similar length.

The bits of a text's vector depend on the text alone: not on its neighbours, the batch size or the number of threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, TypeGuard

import numpy as np

from rlx.arrays import Array
from rlx.engine.load_settings import whole
from rlx.engine.logs import warn
from rlx.engine.model import Model
from rlx.engine.sampler import shown
from rlx.errors import CapabilityError, FormatError, RequestError, nearest
from rlx.flow.flow import ModelFlow
from rlx.fork_safe_locks import cached_property
from rlx.hub.progress import progress_bar
from rlx.models.pooling import EmbedSettings, read_settings

TOKENS = 256  # of a batch for each thread, at most: activations stay in the caches, and threads seldom wait
ENOUGH = 128  # of a batch for each thread, to be as fast a token: from here on, a shorter text begins another batch
WINDOW = 8192  # texts that are tokenised and sorted at a time
LEAST = 1e-12  # what a length is divided by at least, as torch does it


class EmbeddingModel(Model):
    """An encoder: `embed` makes vectors of texts. Safe from several threads at once."""

    precisions = ("auto", "f32", "int8")

    def _flow(self) -> ModelFlow:
        from rlx.engine.build import model_flow

        return model_flow(self.checkpoint, self.context, self.cache_dtype, self.settings)

    def _hidden_flow(self) -> ModelFlow:
        return self.family.flow(self.checkpoint.config)

    # -- parts --
    @cached_property
    def settings(self) -> EmbedSettings:
        """What the model's files say of making vectors."""
        return read_settings(self.checkpoint)

    def _warn(self) -> None:
        super()._warn()
        if not self.settings.source:
            warn("rlx.embed", "%s: no file says how to pool: vectors are the mean over tokens", self.name)

    @property
    def pooling(self) -> str:
        """How token vectors become one: mean, cls, lasttoken, max, weightedmean or mean_sqrt_len_tokens."""
        return self.settings.kind

    @property
    def normalize(self) -> bool:
        """Whether vectors have length 1, unless a call asks for something else."""
        return self.settings.normalize

    @cached_property
    def limit(self) -> int:
        """Tokens of a text that the model reads, special ones counted; the rest is cut off."""
        limit = min(self.settings.limit or self.context, self.context)
        tokenizer = self.checkpoint.tokenizer  # token ids can be read without one
        ends = 0 if tokenizer is None else len(tokenizer.prefix) + len(tokenizer.suffix)
        if limit <= ends:
            what = f"texts have at most {limit} token{'s' * (limit != 1)}, of which {ends} are special"
            longest = self.facts.longest
            if min(self.settings.limit or longest, longest) > ends:
                raise RequestError(f"embed: {what}", hint="load the model with a larger context=")
            raise FormatError(f"{self.checkpoint.path}: {what}")
        return limit

    @property
    def dim(self) -> int:
        """How many numbers a vector has."""
        dense = self.settings.dense
        return dense[-1][-1] if dense else self.facts.dim

    # -- vectors --
    def embed(
        self, texts: str | Iterable[str], *, batch_size: int | None = None, normalize: bool | None = None,
        truncate: bool = True, prompt: str | None = None, show_progress: bool = False,
    ) -> Array:  # fmt: skip
        """The vector `[dim]` of a text, or the vectors `[texts, dim]` of several, as f32.

        Texts are cut to `limit` tokens, and a warning says how many were; with `truncate=False` that is an error.
        `prompt` names one of the model's own prompts (`settings.prompts`), to go before each text. `batch_size` texts
        are computed at a time, by default as many as are fast. `normalize` overrules the model's files.
        """
        listed = [texts] if isinstance(texts, str) else _checked(texts)
        unit = self._checked_request("embed", batch_size, normalize)
        before = self._prompt(prompt)
        vectors = np.empty((len(listed), self.dim), np.float32)
        cut = 0
        with _progress(len(listed), show_progress) as advance:
            for start in range(0, len(listed), WINDOW):
                rows = self._encode(listed[start : start + WINDOW], start, before, truncate)
                for i, row in enumerate(rows):
                    if len(row) > self.limit:
                        rows[i] = self._cut(row, start + i, truncate)
                        cut += 1
                found = self._embed_rows(rows, batch_size, advance)
                vectors[start : start + len(rows)] = _unit(found) if unit else found
        if cut:
            warn(
                "rlx.embed",
                "%d of %d texts were cut to the %d tokens that the model reads",
                cut,
                len(listed),
                self.limit,
            )
        return vectors[0] if isinstance(texts, str) else vectors

    def embed_tokens(
        self, rows: Iterable[Iterable[int]], *, batch_size: int | None = None, normalize: bool | None = None
    ) -> Array:
        """The vectors `[rows, dim]` of texts that are token ids already, special tokens among them, as f32.

        Rows are as long as their texts, at most `limit`: padding would be read as text. They are batched by length, as
        `embed` does it, so that hardly any padding is computed.
        """
        unit = self._checked_request("embed_tokens", batch_size, normalize)
        if isinstance(rows, Mapping) or not isinstance(rows, Iterable) or getattr(rows, "shape", None) == ():
            raise RequestError(f"embed_tokens: expected rows of token ids, found {type(rows).__name__}")
        listed = [self._checked_row(row, i) for i, row in enumerate(rows)]
        found = self._embed_rows(listed, batch_size, lambda count: None)
        return _unit(found) if unit else found

    def similarity(self, a: str | Iterable[str] | Array, b: str | Iterable[str] | Array) -> Any:
        """How close texts or vectors are: a number for two, a row or a table where a side has several."""
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
        """Whether vectors are to have length 1."""
        self._check_usable()
        if batch_size is not None and (whole(batch_size) or 0) < 1:
            raise RequestError(f"{verb}: batch_size is {shown(batch_size)}, expected a whole number from 1")
        if not isinstance(normalize, (bool, np.bool_, NoneType)):
            raise RequestError(f"{verb}: normalize is {shown(normalize)}, expected True, False or None")
        return self.normalize if normalize is None else bool(normalize)

    def _checked_row(self, row: Iterable[int], i: int) -> list[int]:
        if isinstance(row, str) or not isinstance(row, Iterable):
            # a text, a name in what a tokenizer of another library gives, or the ids of one text
            hint = "embed takes texts" if isinstance(row, str) else "one text is a row too: [[101, 102]]"
            raise RequestError(f"embed_tokens: row {i}: expected token ids, found {shown(row)}", hint=hint)
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
            raise RequestError(f"embed: prompt is {shown(name)}, expected the name of one")
        if name not in known:
            raise RequestError(f"embed: the model has no prompt {name!r}", hint=nearest(name, known) or "it has none")
        if known[name] and not self.settings.include_prompt:
            raise CapabilityError(
                f"embed: the model does not pool the tokens of prompt {name!r}, which rlx cannot leave out"
            )
        return known[name]

    def _encode(self, texts: Sequence[str], start: int, before: str, truncate: bool) -> list[list[int]]:
        if before or self.settings.lower:
            texts = [before + (text.lower() if self.settings.lower else text) for text in texts]
        enough = [self.tokenizer.clip_text(text, self.limit) for text in texts]
        if not truncate:
            for i, (text, beginning) in enumerate(zip(texts, enough, strict=True)):
                if len(beginning) < len(text):
                    raise self._too_many(start + i, f"more than {self.limit}")
        try:
            return self.tokenizer.encode_batch(enough)
        except RequestError as error:
            if start:
                error.add_note(f"  counted from text {start}")
            raise

    def _cut(self, row: Sequence[int], i: int, truncate: bool) -> list[int]:
        """A text's first tokens and what closes it."""
        if not truncate:
            raise self._too_many(i, f"{len(row)}")
        suffix = self.tokenizer.suffix
        return [*row[: self.limit - len(suffix)], *suffix]

    def _too_many(self, i: int, count: str) -> RequestError:
        return RequestError(
            f"embed: text {i} has {count} tokens, the model reads {self.limit}",
            hint="split the text, or have it cut with truncate=True",
        )

    def _embed_rows(self, rows: Sequence[Sequence[int]], size: int | None, advance: Callable[[int], None]) -> Array:
        """[rows, dim] vectors, not normalised. Equal rows are computed once; a row without tokens gives zeros."""
        first: dict[tuple[int, ...], int] = {}
        same = [first.setdefault(tuple(row), i) for i, row in enumerate(rows)]
        vectors = np.zeros((len(rows), self.dim), np.float32)
        for picked in batches({i: len(row) for row, i in first.items() if row}, size, self.threads):
            vectors[picked] = self._run_batch([rows[i] for i in picked])
            advance(len(picked))
        advance(len(rows) - len(first))
        return vectors[same]

    def _run_batch(self, rows: Sequence[Sequence[int]]) -> Array:
        shape = len(rows), max(map(len, rows))
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
            mask[i, : len(row)] = 1
        positions = np.repeat(np.arange(shape[1], dtype=np.int32)[None], shape[0], axis=0)
        given = {"tokens": tokens, "token_types": np.zeros_like(tokens), "positions": positions, "attention_mask": mask}
        compiled = self.compiled
        return np.asarray(compiled.run({name: given[name] for name in compiled.input_types})[0])


def batches(lengths: dict[int, int], size: int | None = None, threads: int = 1) -> Iterator[list[int]]:
    """Rows of similar length, longest first: `size` at a time, or as many as are fast with hardly any padding."""
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


def _are_vectors(side: Any) -> TypeGuard[Array]:
    return isinstance(side, np.ndarray) and side.dtype.kind == "f"


def _unit(vectors: Array) -> Array:
    found: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), LEAST)
    return found


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where it is a terminal; gives a function that takes how many more texts are done."""
    done = 0
    with progress_bar("embedding", total, of_bytes=False) if shown else contextlib.nullcontext() as tick:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if tick is not None:
                tick(done)

        yield advance
