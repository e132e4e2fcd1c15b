"""Generation: prompts in chunks through the decoder, then one compiled call a token.

The bits of a sequence do not depend on its neighbours in the batch, on chunking or on reuse of a cached prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.engine.kvcache import KvCache
from rlx.engine.sampler import Sampler, Sampling
from rlx.errors import RequestError
from rlx.flow.flow import KvCacheSpec
from rlx.runtime.compiled import CompiledGraph

Array = np.ndarray[Any, Any]
CHUNK = 512  # prompt tokens of one call


@dataclass
class Decoder:
    """A compiled decoder and the cache of one batch of sequences."""

    compiled: CompiledGraph
    cache: KvCache
    context: int

    @classmethod
    def start(cls, compiled: CompiledGraph, spec: KvCacheSpec, batch: int, context: int) -> Decoder:
        return cls(compiled, KvCache(spec, batch, context), context)

    def feed(self, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Array:
        """Logits after the last token of each row; row i begins at position starts[i]. Empty rows give garbage."""
        longest = max(len(row) for row in tokens)
        result: Array | None = None
        for at in range(0, longest, CHUNK):
            pieces = [row[at : at + CHUNK] for row in tokens]
            logits = self._step(pieces, [s + at for s in starts])
            if result is None:
                result = logits
            for i, piece in enumerate(pieces):
                if piece:
                    result[i] = logits[i]
        assert result is not None
        return result

    def _step(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> Array:
        width = max(len(row) for row in rows)
        tokens = np.zeros((len(rows), width), np.int32)
        positions = np.full((len(rows), width), -1, np.int32)
        last = np.zeros(len(rows), np.int32)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[i, : len(row)] = row
            positions[i, : len(row)] = np.arange(start, start + len(row))
            last[i] = i * width + max(len(row) - 1, 0)
        self.cache.reserve(int(positions.max()) + 1)
        inputs = {"tokens": tokens, "positions": positions, "last_token_idx": last, **self.cache.arrays}
        return self.compiled.run(inputs)[0]


@dataclass
class Growing:
    """One sequence while it grows."""

    seen: list[int]  # the prompt, then what was generated
    prompt: int  # tokens of the prompt
    sampler: Sampler


def generate_tokens(
    decoder: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int, stop_ids: frozenset[int]
) -> Iterator[list[tuple[int, int]]]:
    """Steps of a batch: after each, (row, token) for the rows that go on. Closing the iterator stops the work."""
    for prompt in prompts:
        if not prompt:
            raise RequestError("generate: a prompt has no tokens")
        if len(prompt) >= decoder.context:
            raise RequestError(
                f"generate: the prompt has {len(prompt)} tokens, the context holds {decoder.context}",
                hint="shorten the prompt or load the model with a larger context=",
            )
    rows = [Growing(list(p), len(p), Sampler(sampling)) for p in prompts]
    logits = decoder.feed(prompts, [0] * len(rows))
    live = set(range(len(rows)))
    while live:
        step = []
        for i in sorted(live):
            row = rows[i]
            token = row.sampler.pick(logits[i], row.seen)
            row.seen.append(token)
            step.append((i, token))
            made = len(row.seen) - row.prompt
            if token in stop_ids or made >= max_tokens or len(row.seen) >= decoder.context:
                live.discard(i)
        yield step
        if live:
            feed = [row.seen[-1:] if i in live else [] for i, row in enumerate(rows)]
            logits = decoder.feed(feed, [len(row.seen) - 1 for row in rows])
