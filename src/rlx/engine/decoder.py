"""One prefill or decode call of the compiled model; the decode loop that makes these calls is `Scheduler.step`.

Each call also samples and returns tokens; logits are copied only if they are needed. The bits of a sequence do not
depend on its neighbours in the batch, on chunking or on reuse of a cached prefix, so `scheduler.Scheduler` is free to
arrange the work.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Enqueued
from rlx.engine.call_sizes import chunk_tokens
from rlx.engine.interventions import Execute
from rlx.engine.kv_cache import PENDING, KvCache, aligned
from rlx.engine.page_pool import PagePool
from rlx.engine.sampler import BatchSampling, operand_input
from rlx.errors import CapabilityError
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.kv_spec import KvCacheSpec

if TYPE_CHECKING:
    pass

Inputs = Mapping[str, Array]


class Pick(NamedTuple):
    """The next token of a row, as the graph picked it, and where its logits are."""

    token: int  # -1: no logit was finite
    logprob: float  # by the logits alone; NaN unless the sampler asks for it
    batch_logits: Any  # [row, vocab], on the device
    row: int

    @property
    def logits(self) -> Array:
        """Logits `[vocab]`, copied to the host if they are on a device."""
        logits: Array = np.asarray(self.batch_logits)[self.row]
        return logits


class DecodeStep:
    """A decode step that may still be under way on the device. `picks` waits for it."""

    def __init__(self, run: Enqueued, rows: abc.Sequence[list[int]], feeds: bool) -> None:
        self._run = run
        self._rows = [(row, len(row)) for row in rows]  # tokens of the cache, and how many there were before
        self.next_input = run.outputs[-3] if feeds else None  # the input `tokens` of the next step, in device memory

    def picks(self) -> list[Pick]:
        """The next token of each row; raises what went wrong on the device."""
        tokens, logprobs = self._run.read()
        pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return [Pick(token, logprob, self._run.outputs[0], row) for row, (token, logprob) in enumerate(pairs)]

    def undo(self) -> None:
        """Forget the tokens that the step fed, and later ones: it failed."""
        for row, length in self._rows:
            del row[length:]


class Decoder:
    """A compiled decoder and the cache of one batch of sequences."""

    def __init__(self, compiled: CompiledGraph, cache: KvCache, execute: Execute | None = None) -> None:
        """`execute` runs the graph on inputs; the default is `compiled.run`."""
        self.compiled = compiled
        self.cache = cache
        self._execute = execute
        self.samples = operand_input("uniform") in compiled.input_types
        self.feeds = self.samples and compiled.target.runs_behind  # a step may start before the tokens are known
        self.sampled_outputs = (2 + self.feeds) * self.samples  # the last outputs, after those of the model
        self._greedy: dict[int, Inputs] = {}  # rows -> inputs of the sampler for calls without `sampling`
        # the inputs of a decode step, and the rows, capacity, pools and sampling that they are for
        self.step_inputs: dict[str, Any] = {}
        self._step_rows: tuple[int, ...] = ()
        self._step_sampling: Inputs | None = None

    @classmethod
    def start(cls, compiled: CompiledGraph, spec: KvCacheSpec, batch: int, context: int) -> Decoder:
        """A decoder with an empty cache."""
        return cls(compiled, PagePool(spec, context, compiled.allocator).new(batch))

    def prefill(
        self, tokens: abc.Sequence[abc.Sequence[int]], offsets: abc.Sequence[int], first: int = 0,
        sampling: Inputs | None = None,
    ) -> list[Pick]:  # fmt: skip
        """The next token of each row; row i begins at position offsets[i].

        Rows are those of the cache from `first` on. The pick of an empty row is undefined. The default is greedy.
        """
        tokens, offsets = self._with_recomputed(tokens, offsets, first)
        lengths = [start + len(row) for row, start in zip(tokens, offsets, strict=True)]
        longest = max(len(row) for row in tokens)
        chunk = aligned(chunk_tokens(self.compiled.target, self.cache.spec) // len(tokens), self.cache.spec)
        picks: list[Pick] = []
        for at in range(0, longest, chunk):
            pieces = [row[at : at + chunk] for row in tokens]
            width = max(len(piece) for piece in pieces)
            picked = [i * width + max(len(piece) - 1, 0) for i, piece in enumerate(pieces)]
            begins = [s + at for s in offsets]
            places = np.array(picked, np.int32)
            outputs = self.run(pieces, begins, places, first, lengths=lengths, sampling=sampling, pads=True)
            latest = self.picks(outputs)
            ended = zip(picks or latest, latest, pieces, strict=True)
            picks = [new if piece else old for old, new, piece in ended]
        return picks

    def _check_samples(self) -> None:
        if not self.samples:
            raise CapabilityError(f"generate: the main output of {self.compiled.name} is not logits [rows, vocab]")

    def picks(self, outputs: abc.Sequence[Any]) -> list[Pick]:
        """The next token of each row, of the outputs of a call."""
        self._check_samples()
        tokens, logprobs, logits = np.asarray(outputs[-2]).tolist(), np.asarray(outputs[-1]).tolist(), outputs[0]
        return [Pick(token, logprobs[row], logits, row) for row, token in enumerate(tokens)]

    def _sampling(self, rows: int) -> Inputs:
        """Inputs of the sampler for greedy rows."""
        if not self.samples:
            return {}
        if rows not in self._greedy:
            self._greedy = {rows: BatchSampling().draw([None] * rows)}
        return self._greedy[rows]

    def _with_recomputed(
        self, tokens: abc.Sequence[abc.Sequence[int]], offsets: abc.Sequence[int], first: int
    ) -> tuple[abc.Sequence[abc.Sequence[int]], abc.Sequence[int]]:
        """Prepend the cached tokens of rows that reach a length at which all keys need other RoPE frequencies."""
        spec = self.cache.spec
        if not spec.lengths:
            return tokens, offsets
        rows, begins = list(tokens), list(offsets)
        for i, (row, start) in enumerate(zip(tokens, offsets, strict=True)):
            if start and row and spec.must_prefill_again(start, start + len(row)):
                rows[i], begins[i] = [*self.cache.tokens[first + i][:start], *row], 0
        return rows, begins

    def run(
        self, rows: abc.Sequence[abc.Sequence[int]], offsets: abc.Sequence[int], picked: Array, first: int = 0,
        more: Mapping[str, Any] | None = None, lengths: abc.Sequence[int] | None = None,
        sampling: Inputs | None = None, pads: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Run the decoder once. Returns its outputs for these tokens, with logits at `picked` places of padded rows.

        `more` are additional inputs of this graph. `lengths` are the sequence lengths that RoPE uses, if it depends on
        them; by default the ends of the rows. With `pads`, values of tokens may have more columns than the longest row.
        """
        ends = [start + len(row) for row, start in zip(rows, offsets, strict=True)]
        lengths = ends if lengths is None else lengths
        width = longest = max(len(row) for row in rows)
        if pads and not self.cache.spec.states:  # the way of the delta rule depends on the width
            width = self.compiled.target.padded(longest)
            picked = picked // longest * width + picked % longest
        tokens = np.zeros((len(rows), width), np.int32)
        positions = np.full((len(rows), width), -1, np.int32)
        for i, (row, start) in enumerate(zip(rows, offsets, strict=True)):
            tokens[i, : len(row)] = row
            positions[i, : len(row)] = np.arange(start, start + len(row))
        inputs = {"tokens": tokens, "positions": positions, "last_token_idx": picked}
        if self.cache.spec.lengths:
            inputs["lengths"] = np.array(lengths, np.int32)
        inputs |= self._sampling(len(picked)) if sampling is None else sampling
        self.cache.reserve(max((end for row, end in zip(rows, ends, strict=True) if row), default=0))
        for i, (start, end) in enumerate(zip(offsets, ends, strict=True)):
            self.cache.prepare_write(first + i, start, end, lengths[i])
            del self.cache.tokens[first + i][start:]
        with self.cache.pool.calling():
            states = self.cache.rows(first, first + len(rows))
            outputs = self._call({**inputs, **states, **(more or {})}, first, first + len(rows))
        self.compiled.drop_table_pages()
        for i, row in enumerate(rows):
            self.cache.tokens[first + i] += row
        return outputs

    def run_ragged(
        self, rows: abc.Sequence[int], tokens: abc.Sequence[abc.Sequence[int]], sampling: Inputs | None = None
    ) -> list[Pick]:
        """The next token of rows that get different numbers of tokens each, in one call and without padding.

        Every token is a row of the batch with the page table of its sequence: a call appends all keys before it reads
        them. Only for models without recurrent states whose RoPE does not depend on the length.
        """
        cache = self.cache
        begins = [len(cache.tokens[row]) for row in rows]
        counts = [len(piece) for piece in tokens]
        cache.reserve(max(begin + count for begin, count in zip(begins, counts, strict=True)))
        for row, begin, count in zip(rows, begins, counts, strict=True):
            cache.prepare_write(row, begin, begin + count)
        positions = [np.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
        inputs = {
            "tokens": np.concatenate(tokens).astype(np.int32)[:, None],
            "positions": np.concatenate(positions).astype(np.int32)[:, None],
            "last_token_idx": np.cumsum(counts, dtype=np.int32) - np.int32(1),
        }
        inputs |= self._sampling(len(rows)) if sampling is None else sampling
        with cache.pool.calling():
            outputs = self._call({**inputs, **cache.token_rows(np.repeat(rows, counts))}, 0, cache.batch)
        self.compiled.drop_table_pages()
        for row, piece in zip(rows, tokens, strict=True):
            cache.tokens[row] += piece
        return self.picks(outputs)

    def _call(self, inputs: Mapping[str, Any], first: int, end: int) -> list[Any]:
        try:
            return self.compiled.run(inputs) if self._execute is None else self._execute(inputs)
        except BaseException:
            self.cache.discard_interrupted(first, end)
            raise

    def decode(self, tokens: abc.Sequence[int], first: int = 0, sampling: Inputs | None = None) -> list[Pick]:
        """The next token after one more token per row; -1 skips a row. Faster than `prefill`."""
        sampling = self._sampling(len(tokens)) if sampling is None else sampling
        recomputed = self._recomputed(tokens, first)
        if recomputed:
            return self._decode_recomputing(tokens, recomputed, first, sampling)
        return self.start_step(tokens, first, sampling).picks()

    def _recomputed(self, tokens: abc.Sequence[int], first: int) -> list[int]:
        """Rows that reach a length at which all their keys need other RoPE frequencies."""
        if not self.cache.spec.lengths:
            return []
        lengths = [len(row) for row in self.cache.tokens[first : first + len(tokens)]]
        again = self.cache.spec.must_prefill_again
        return [i for i, n in enumerate(lengths) if tokens[i] >= 0 and again(n, n + 1)]

    def can_start(self, tokens: abc.Sequence[int], first: int) -> bool:
        """Whether `start_step` takes these rows."""
        return self._execute is None and not self._recomputed(tokens, first)

    def start_step(
        self, tokens: abc.Sequence[int], first: int, sampling: Inputs, before: DecodeStep | None = None
    ) -> DecodeStep:
        """Start a decode step, which may still be under way when this returns.

        With the step `before`, whose tokens are not known yet, these are fed, and `tokens` only says which rows take
        part.
        """
        self._check_samples()
        cache = self.cache
        rows = cache.tokens[first : first + len(tokens)]
        positions = [len(row) if token >= 0 else -1 for token, row in zip(tokens, rows, strict=True)]
        cache.reserve(max(positions) + 1)
        for i, position in enumerate(positions):
            if position >= 0:
                cache.prepare_write(first + i, position, position + 1)
        with cache.pool.calling():
            inputs = self._fill_step(tokens, positions, first, sampling)
            if before is not None:
                inputs = {**inputs, "tokens": before.next_input}
            step = DecodeStep(self._enqueue(inputs, first, first + len(tokens)), rows, self.feeds)
        for token, row in zip(tokens, rows, strict=True):
            if token >= 0:
                row.append(token if before is None else PENDING)
        return step

    def _enqueue(self, inputs: Mapping[str, Any], first: int, end: int) -> Enqueued:
        read = (-2, -1)
        if self._execute is not None:
            return Enqueued(self._call(inputs, first, end), read)
        try:
            return self.compiled.enqueue(inputs, read)
        except BaseException:
            self.cache.discard_interrupted(first, end)
            raise

    def _fill_step(
        self, tokens: abc.Sequence[int], positions: abc.Sequence[int], first: int, sampling: Inputs
    ) -> dict[str, Any]:
        """Inputs of a decode step, in arrays that steps reuse."""
        key = (first, len(tokens), self.cache.blocks, self.cache.pool.version)
        if self._step_rows != key or self._step_sampling is not sampling:
            shape, count = (len(tokens), 1), len(tokens)
            inputs: dict[str, Any] = {"tokens": np.zeros(shape, np.int32), "positions": np.zeros(shape, np.int32)}
            inputs["last_token_idx"] = np.arange(count, dtype=np.int32)
            if self.cache.spec.lengths:
                inputs["lengths"] = np.zeros(count, np.int32)
            self.step_inputs = inputs | dict(sampling) | self.cache.rows(first, first + count)
            self._step_rows, self._step_sampling = key, sampling
        inputs = self.step_inputs
        inputs["tokens"][:, 0] = tokens
        inputs["positions"][:, 0] = positions
        if min(tokens) < 0:
            np.maximum(inputs["tokens"], 0, out=inputs["tokens"])
        if self.cache.spec.lengths:
            inputs["lengths"][:] = [len(row) + 1 for row in self.cache.tokens[first : first + len(tokens)]]
        return inputs

    def _decode_recomputing(
        self, tokens: abc.Sequence[int], recomputed: abc.Sequence[int], first: int, sampling: Inputs
    ) -> list[Pick]:
        """A decode step in which rows reach a length at which all their keys need other RoPE frequencies (longrope)."""
        picks: dict[int, Pick] = {}
        for i in recomputed:
            of_row = {name: array[i : i + 1] for name, array in sampling.items()}
            picks[i] = self.prefill([[tokens[i]]], [len(self.cache.tokens[first + i])], first + i, of_row)[0]
        others = [-1 if i in recomputed else token for i, token in enumerate(tokens)]
        if max(others) < 0:
            return [picks.get(i, picks[recomputed[0]]) for i in range(len(tokens))]
        return [picks.get(i, pick) for i, pick in enumerate(self.decode(others, first, sampling))]
