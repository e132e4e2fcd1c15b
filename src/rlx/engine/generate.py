"""Generation: prompts in chunks through the decoder, then one compiled call a token.

The bits of a sequence do not depend on its neighbours in the batch, on chunking or on reuse of a cached prefix, so the
loop is free to arrange the work: prompts of similar length are read together, and a sequence that ends makes room for
the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.kvcache import SPARE, CacheStore, KvCache
from rlx.engine.sampler import Sampler, log_probabilities, most_likely, shown
from rlx.formats.tokenizer import Stream
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.kv_cache import KvCacheSpec

CHUNK = 256  # prompt tokens of one call: more are hardly quicker, and an interrupt waits for the end of one
ROWS = 8  # sequences that grow at the same time
WASTE = 1.25  # how much longer rows may become by padding when prompts are read together

log = logging.getLogger("rlx.generate")


class Cancelled(Exception):
    """Another thread has closed the stream."""


@dataclass(slots=True)
class Cancel:
    """Tells a decoder to stop. Nobody waits for it, so it needs no lock, which a fork could leave locked."""

    wanted: bool = False


class Decoder:
    """A compiled decoder and the cache of one batch of sequences."""

    def __init__(self, compiled: CompiledGraph, cache: KvCache, cancel: Cancel | None = None) -> None:
        self.compiled = compiled
        self.cache = cache
        self._cancel = Cancel() if cancel is None else cancel
        self._step: tuple[Any, dict[str, Any]] = (None, {})  # what it was made for, and the inputs of a step

    @classmethod
    def start(cls, compiled: CompiledGraph, spec: KvCacheSpec, batch: int, context: int) -> Decoder:
        """With an empty cache."""
        return cls(compiled, KvCache(spec, batch, context, compiled.allocator))

    def feed(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], first: int = 0) -> Array:
        """Logits `[row, vocab]` after the last token of each row; row i begins at position starts[i].

        Rows are those of the cache from `first` on. An empty row gives garbage.
        """
        tokens, starts = self._with_others(tokens, starts, first)
        lengths = [start + len(row) for row, start in zip(tokens, starts, strict=True)]
        longest = max(len(row) for row in tokens)
        chunk = max(min(CHUNK // len(tokens), SPARE), 1)
        result: Array | None = None
        for at in range(0, longest, chunk):
            pieces = [row[at : at + chunk] for row in tokens]
            width = max(len(piece) for piece in pieces)
            picked = [i * width + max(len(piece) - 1, 0) for i, piece in enumerate(pieces)]
            begins = [s + at for s in starts]
            logits = self.run(pieces, begins, np.array(picked, np.int32), first, lengths=lengths)[0]
            self.compiled.drop_table_pages()
            if result is None:
                result = logits
            for i, piece in enumerate(pieces):
                if piece:
                    result[i] = logits[i]
        assert result is not None
        return result

    def _with_others(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], first: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
        """With the earlier tokens of rows that grow beyond a length where all keys turn by other frequencies."""
        spec = self.cache.spec
        if not spec.lengths:
            return tokens, starts
        rows, begins = list(tokens), list(starts)
        for i, (row, start) in enumerate(zip(tokens, starts, strict=True)):
            if start and row and spec.must_read_again(start, start + len(row)):
                rows[i], begins[i] = [*self.cache.tokens[first + i][:start], *row], 0
        return rows, begins

    def run(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], picked: Array, first: int = 0,
        more: Mapping[str, Any] | None = None, lengths: Sequence[int] | None = None,
    ) -> list[Array]:  # fmt: skip
        """One call: the outputs for these tokens, with logits for the `picked` ones of rows × longest row.

        `more` are inputs that only this graph has. `lengths` are those of the sequences by which RoPE goes, where it
        depends on them: as far as the tokens of this call go, unless given.
        """
        ends = [start + len(row) for row, start in zip(rows, starts, strict=True)]
        lengths = ends if lengths is None else lengths
        width = max(len(row) for row in rows)
        tokens = np.zeros((len(rows), width), np.int32)
        positions = np.full((len(rows), width), -1, np.int32)
        self.cache.reserve(max((end for row, end in zip(rows, ends, strict=True) if row), default=0))
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[i, : len(row)] = row
            positions[i, : len(row)] = np.arange(start, start + len(row))
            self.cache.going_to_write(first + i, start, start + len(row), lengths[i])
            del self.cache.tokens[first + i][start:]
        states = self.cache.rows(first, first + len(rows))
        given = {"tokens": tokens, "positions": positions, "last_token_idx": picked}
        if self.cache.spec.lengths:
            given["lengths"] = np.array(lengths, np.int32)
        outputs = self._call({**given, **states, **(more or {})}, first, first + len(rows))
        for i, row in enumerate(rows):
            self.cache.tokens[first + i] += row
        return outputs

    def _call(self, inputs: Mapping[str, Any], first: int, end: int) -> list[Array]:
        if self._cancel.wanted:
            raise Cancelled
        try:
            return [np.asarray(output) for output in self.compiled.run(inputs)]
        except BaseException:
            self.cache.interrupted(first, end)
            raise

    def step(self, tokens: Sequence[int], first: int = 0) -> Array:
        """Logits `[row, vocab]` after one more token for each row; -1 leaves a row out. The quick way of `feed`."""
        rows = self.cache.tokens[first : first + len(tokens)]
        if self.cache.spec.lengths:
            again = [
                i
                for i, row in enumerate(rows)
                if tokens[i] >= 0 and self.cache.spec.must_read_again(len(row), len(row) + 1)
            ]
            if again:
                return self._step_reading_again(tokens, again, first)
        self.cache.reserve(max(len(row) for token, row in zip(tokens, rows, strict=True) if token >= 0) + 1)
        key = (first, len(tokens), self.cache.blocks)
        if self._step[0] != key:
            shape, count = (len(tokens), 1), len(tokens)
            given: dict[str, Any] = {"tokens": np.zeros(shape, np.int32), "positions": np.zeros(shape, np.int32)}
            given["last_token_idx"] = np.arange(count, dtype=np.int32)
            if self.cache.spec.lengths:
                given["lengths"] = np.zeros(count, np.int32)
            self._step = key, given | self.cache.rows(first, first + count)
        inputs = self._step[1]
        for i, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            if token >= 0:
                self.cache.going_to_write(first + i, len(row), len(row) + 1)
            inputs["tokens"][i, 0] = max(token, 0)
            inputs["positions"][i, 0] = -1 if token < 0 else len(row)
            if self.cache.spec.lengths:
                inputs["lengths"][i] = len(row) + 1
        logits = self._call(inputs, first, first + len(tokens))[0]
        for token, row in zip(tokens, rows, strict=True):
            if token >= 0:
                row.append(token)
        return logits

    def _step_reading_again(self, tokens: Sequence[int], again: Sequence[int], first: int) -> Array:
        """A step in which rows have become so long that all their keys turn by other frequencies (longrope)."""
        others = [-1 if i in again else token for i, token in enumerate(tokens)]
        read = {i: self.feed([[tokens[i]]], [len(self.cache.tokens[first + i])], first + i)[0] for i in again}
        some = next(iter(read.values()))
        logits = self.step(others, first) if max(others) >= 0 else np.empty((len(tokens), len(some)), some.dtype)
        for i, found in read.items():
            logits[i] = found
        return logits


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token, and which ones it found most likely, before sampling changed anything."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Growing:
    """One sequence while it grows: its prompt, what was picked, and the text of that up to a stop string."""

    def __init__(
        self, prompt: Sequence[int], sampler: Sampler, *, limit: int, vocab: int, stop: Sequence[str] = (),
        stop_ids: Iterable[int] = (), text: Stream | None = None, top: int = 0, asked: int | None = None,
    ) -> None:  # fmt: skip
        self.prompt = prompt
        self.made: list[int] = []
        self.sampler = sampler
        self.limit = limit  # of tokens to make
        self.asked = limit if asked is None else asked  # may be more than the context has room for
        self.vocab = vocab  # logits beyond it are padding
        self.text = ""
        self.logprobs: list[Logprob] | None = [] if top else None
        self.finish_reason = ""  # as long as it grows
        self.cached = 0  # tokens of the prompt that a cache had
        self.began = self.answered = self.ended = 0.0
        self._stop, self._stop_ids = stop, frozenset(stop_ids)
        self._stream, self._top = text, top
        self._held = ""  # may turn out to be the start of a stop string

    def begin(self, cached: int) -> None:
        self.cached = cached
        self.began = perf_counter()

    def close(self) -> None:
        """Its stream was closed; one that was still read has no answer, and took until now."""
        if self.began and not self.answered:
            self.ended = perf_counter()

    def accept(self, logits: Array) -> str:
        """Pick the next token; gives the text that is new and certain."""
        if not self.answered:
            self.answered = self.ended = perf_counter()
            if self.limit == 0:
                return self._end("length")
        logits = logits[: self.vocab]
        token = self.sampler.pick(logits)
        self.made.append(token)
        if self.logprobs is not None:
            self.logprobs.append(_logprob(logits, token, self._top))
        self.ended = perf_counter()
        if token in self._stop_ids:
            return self._end("stop")
        piece = "" if self._stream is None else self._stream.push(token)
        if self._stop and piece:
            piece = self._held + piece
            found = [at for at in map(piece.find, self._stop) if at >= 0]
            if found:
                self._held, self._stream = piece[: min(found)], None
                return self._end("stop")
            kept = max(_overlap(piece, s) for s in self._stop)
            piece, self._held = piece[: len(piece) - kept], piece[len(piece) - kept :]
        self.text += piece
        return piece + self._end("length") if len(self.made) >= self.limit else piece

    def _end(self, reason: str) -> str:
        self.finish_reason = reason
        if reason == "length" and self.asked > self.limit:
            made = f"{self.limit} token{'s' * (self.limit != 1)}"
            log.warning("the context is full: the text was cut after %s, max_tokens is %s", made, shown(self.asked))
        last = self._held + ("" if self._stream is None else self._stream.flush())
        self.text += last
        return last


def _overlap(text: str, stop: str) -> int:
    """How long the end of `text` is that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _logprob(logits: Array, token: int, count: int) -> Logprob:
    values = log_probabilities(logits)
    return Logprob(token, float(values[token]), [(i, float(values[i])) for i in most_likely(values, count)])


def grow(decoder: Decoder, sequences: Sequence[Growing], store: CacheStore) -> Iterator[tuple[Growing, str]]:
    """Grow sequences in the rows of a cache; (sequence, new text) for each token. Closing the iterator stops the work.

    A cache of one row holds what is known of the prompt already; rows of a batch are filled from the store.
    """
    waiting = deque(sorted(sequences, key=lambda s: -len(s.prompt)))
    rows: list[Growing | None] = [None] * decoder.cache.batch
    while True:
        for first, group in _admit(rows, waiting, decoder.cache, store):
            logits = decoder.feed([s.prompt[s.cached :] for s in group], [s.cached for s in group], first)
            for i, sequence in enumerate(group):
                yield sequence, sequence.accept(logits[i])
        live = [(row, s) for row, s in enumerate(rows) if s is not None and not s.finish_reason]
        rows = [None] * len(rows)
        for row, sequence in live:
            rows[row] = sequence
        if live:
            first = live[0][0]
            logits = decoder.step([-1 if s is None else s.made[-1] for s in rows[first : live[-1][0] + 1]], first)
            for row, sequence in live:
                yield sequence, sequence.accept(logits[row - first])
        elif not waiting:
            return


def _admit(
    rows: list[Growing | None], waiting: deque[Growing], cache: KvCache, store: CacheStore
) -> Iterator[tuple[int, list[Growing]]]:
    """Give free rows to those who wait: (first row, sequences), neighbours with about as much to read each."""
    first, group = 0, list[Growing]()
    for row, taken in enumerate(rows):
        if taken is not None or not waiting:
            continue
        sequence = waiting.popleft()
        rows[row] = sequence
        if group and cache.gains(sequence.prompt, [s.prompt for s in group]):
            yield first, group  # its beginning can then be copied instead of read
            group = []
        sequence.begin(store.fill(cache, row, sequence.prompt) if len(rows) > 1 else len(cache.tokens[row]))
        lengths = [len(s.prompt) - s.cached for s in (*group, sequence)]
        if group and (row != first + len(group) or max(lengths) * len(lengths) > WASTE * sum(lengths)):
            yield first, group
            group = []
        first = first if group else row
        group.append(sequence)
    if group:
        yield first, group
