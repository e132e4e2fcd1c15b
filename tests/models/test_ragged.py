"""Ragged flows: tokens of any sequences in one call have the bits of each sequence alone, in every decoder family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_llama import difference
from test_golden import NAMES, TOLERANCE, Golden

from rlx.errors import GraphError, KernelError
from rlx.flow import ModelFlow
from rlx.flow.built import BuiltModel
from rlx.models.load import open_checkpoint
from rlx.types import sym

Array = np.ndarray[Any, Any]
ROWS, BLOCKS = 3, 2  # sequences of the cache, pages of each


class Cache:
    """A compiled flow and its cache: pools, tables and states of all sequences."""

    def __init__(self, built: BuiltModel) -> None:
        assert built.cache is not None
        self.f, spec = built.compile(threads=1), built.cache
        names = [node.attrs["name"] for node in built.module.inputs]
        self.ragged = "rows" in names
        pages = np.arange(ROWS * BLOCKS, dtype=np.int32).reshape(ROWS, BLOCKS)
        self.tables = {name: pages for name in names if name.startswith("table")}
        self.states = {name: np.zeros((ROWS, *shape), np.float32) for name, shape in spec.states}
        self.pools = {
            name: np.zeros(spec.pool_shape(name.split(".")[0], pages.size), np.float32)
            for name in names
            if name.startswith(("keys.", "values."))
        }

    def forward(self, tokens: Array, positions: Array, rows: Array) -> Array:
        """Logits of tokens: in one call, or sequence by sequence where the flow is rectangular."""
        if self.ragged:
            return self.run(slice(None), tokens=tokens, positions=positions, rows=rows)
        result = np.zeros((len(tokens), 0), np.float32)
        for row in np.unique(rows[positions >= 0]):
            own = (rows == row) & (positions >= 0)
            logits = self.run(slice(row, row + 1), tokens=tokens[own][None], positions=positions[own][None])
            result = np.zeros((len(tokens), logits.shape[-1]), np.float32) if not result.size else result
            result[own] = logits
        return result

    def run(self, which: slice, **tokens: Array) -> Array:
        memory = {name: x[which] for name, x in (self.tables | self.states).items()}
        last = np.arange(tokens["tokens"].size, dtype=np.int32)
        (logits,) = self.f.run({**tokens, **memory, **self.pools, "last_token_idx": last})
        return np.asarray(logits).reshape(last.size, -1)


def caches(name: str, folder: Path) -> tuple[Golden, Cache, Cache]:
    golden = Golden(name)
    checkpoint = open_checkpoint(golden.folder(folder))
    flow = checkpoint.family.flow(checkpoint.config, 64, checkpoint.rope_factors)
    return golden, Cache(flow.ragged().build(checkpoint.weights)), Cache(flow.build(checkpoint.weights))


@pytest.mark.parametrize("name", NAMES)
def test_ragged_tokens_have_the_bits_of_each_sequence_alone(name: str, tmp_path: Path) -> None:
    """Two texts in calls of unequal pieces, decode steps among them, while a third sequence has no tokens."""
    golden, ragged, alone = caches(name, tmp_path)
    rng, texts = np.random.default_rng(0), dict(zip((2, 0), golden.rows, strict=True))
    logits: dict[int, list[Array]] = {row: [] for row in texts}
    ends = dict.fromkeys(texts, 0)
    for first, second in ((5, 0), (1, 3), (1, 1), (99, 99)):
        taken = {row: texts[row][ends[row] : ends[row] + n] for row, n in ((2, first), (0, second))}
        rows = np.repeat([2, 0, -7], [len(taken[2]), len(taken[0]), 2])  # padding has no row
        rows = rng.permutation(rows).astype(np.int32)
        tokens, positions = np.zeros_like(rows), np.full_like(rows, -1)
        for row, piece in taken.items():
            tokens[rows == row] = piece
            positions[rows == row] = np.arange(ends[row], ends[row] + len(piece))
            ends[row] += len(piece)
        actual, wanted = (cache.forward(tokens, positions, rows) for cache in (ragged, alone))
        for row in texts:
            np.testing.assert_array_equal(actual[rows == row], wanted[rows == row])
            logits[row].append(actual[rows == row])
    for (row, text), exact in zip(texts.items(), golden.logits, strict=True):
        assert ends[row] == len(text)
        assert difference(np.concatenate(logits[row]), exact) < TOLERANCE
    for state, after in ragged.states.items():
        np.testing.assert_array_equal(after, alone.states[state])
        assert not after[1].any()


@pytest.mark.parametrize("name", ("mamba", "qwen3_next"))
@pytest.mark.parametrize("bad", (-1, ROWS))
def test_a_token_of_a_sequence_that_does_not_exist_is_an_error(name: str, bad: int, tmp_path: Path) -> None:
    _, ragged, _ = caches(name, tmp_path)
    with pytest.raises(KernelError, match=r"row .* outside"):
        ragged.forward(np.int32([1, 2]), np.int32([0, 0]), np.int32([0, bad]))


def test_a_flow_that_cannot_be_ragged_says_why() -> None:
    flow = ModelFlow("f").input("tokens", (sym.BATCH, sym.SEQ), "i32")
    with pytest.raises(GraphError, match="'f': has no cache"):
        flow.ragged()
    with pytest.raises(GraphError, match=r"input 'x' has a batch"):
        flow.input("x", (sym.BATCH, 3)).kv_cache(1).ragged()
    with pytest.raises(GraphError, match=r"input 'tokens' has shape"):
        flow.kv_cache(1).ragged().ragged()
