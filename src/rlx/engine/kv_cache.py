"""The KV cache of a batch of sequences: rows of page tables over a pool of pages, and recurrent states.

Kernels update it in place. Rows with a common prefix share its pages until one of them writes (copy on write). A layer
with a sliding window has a ring of the window plus `SPARE` positions. Recurrent states (`[rows, ...]`) have a fixed
size; the delta rule accumulates tokens in chunks that begin where a call begins, so prompts of models with states are
cut only at multiples of `CUT`, and the prefix cache has copies of their states there (checkpoints). A state reached by
decoding is never reused. If RoPE depends on the sequence length, only keys with the frequencies of the new length are
reused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.page_pool import SMALLER, PagePool, Retired
from rlx.engine.page_table import NONE, PageTable
from rlx.engine.prefix_tree import Key, State
from rlx.free_memory import require
from rlx.runtime.kv_spec import KvCacheSpec, table_name

CUT = 64  # prompts of models with recurrent states are cut at multiples of it, a multiple of the delta rule's chunk
PENDING = -1  # in place of a token
CHECKPOINT = 512  # tokens between checkpoints; one more is at the last cut of a prompt


class KvCache:
    """Keys, values and recurrent states of a batch of sequences, and their tokens.

    The last token of a row may be `PENDING`: a call feeds it whose number the host does not know yet.
    """

    def __init__(self, pool: PagePool, rows: int) -> None:
        self.pool = pool
        self.spec: KvCacheSpec = pool.spec
        self.batch = rows
        self.blocks = 0
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._tables = {window: PageTable(rows) for window in pool.pages}
        # per row: runs of keys (end, RoPE frequencies), if RoPE depends on length
        self._rope_runs: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(rows)]
        self._published = [0] * rows  # tokens that the prefix cache has in pages of the row
        self._writable = [0] * rows  # a row may append up to this position without asking again
        self._checkpoints: list[dict[int, State]] = [{} for _ in range(rows)]
        shapes = {name: (rows + (rows > 1), *shape) for name, shape in self.spec.states}  # one more, to swap rows
        require("recurrent states", sum(map(math.prod, shapes.values())) * 4, hint="a smaller batch")
        self._states = {name: pool.memory.zeros(shape, np.dtype(np.float32)) for name, shape in shapes.items()}
        self.reserve(1)
        weakref.finalize(self, _retire_all, pool, self._tables).atexit = False

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all rows."""
        return sum(state.nbytes for state in self._states.values())

    def reserve(self, tokens: int) -> None:
        """Widen the tables for sequences of this length."""
        needed = self.spec.layout.blocks(tokens)
        if needed <= self.blocks:
            return
        blocks = min(max(needed, 2 * self.blocks, 4), self.pool.max_blocks)
        if self.pool.limit is None:
            require("KV cache", self.pool.bytes_for(blocks * self.spec.layout.page), hint=SMALLER)
        for window, table in self._tables.items():
            table.grow(min(blocks, self.pool.table_blocks(window)))
        self.blocks = blocks

    def prepare_write(self, row: int, start: int, end: int, length: int | None = None) -> None:
        """Prepare to write positions `start` .. `end` of a row, which overwrites the oldest positions of rings.

        `length` is the sequence length that RoPE uses: `end`, unless more of the prompt follows. Raises PoolFull.
        """
        if start == end:
            return
        if end <= self._writable[row] and 0 < start == len(self.tokens[row]):
            return
        if self.spec.lengths:
            self._record_rope(row, start, end, self.spec.rope_of_length(end if length is None else length))
        assert not self._states or start in (0, len(self.tokens[row])), "a recurrent state cannot be rewound"
        if start == 0:
            for name in self._states:
                self.pool.memory.clear(self._state(name, row))
        page = self.spec.layout.page
        last = -(-end // page)
        for window, table in self._tables.items():
            for block in range(max(start // page, last - table.blocks), last):
                if not self._may_write(row, window, block, start):
                    self._renew(row, window, block, start)
        self._writable[row] = 0 if self.spec.lengths else last * page

    def _may_write(self, row: int, window: int, block: int, start: int) -> bool:
        """Whether a row may write its page of a block from position `start` on."""
        table = self._tables[window]
        slot = block % table.blocks
        page = table.pages[row][slot]
        if page == NONE:
            return False
        if self.pool.pages[window].users[page] == 1:
            return True
        # A page of its own that the prefix cache also has: positions after the published ones are still its own.
        return slot in table.own[row] and start >= self._published[row] and block * self.spec.layout.page < start

    def _renew(self, row: int, window: int, block: int, start: int) -> None:
        """Give a block its own page, with the positions before `start`."""
        table = self._tables[window]
        slot = block % table.blocks
        with self.pool.changing():
            old, new = table.pages[row][slot], self.pool.take(window)
            if old != NONE:
                if block * self.spec.layout.page < start:
                    self.pool.copy(window, old, new)
                self.pool.pages[window].release(old)
            table.put(row, slot, new, own=True)

    def _record_rope(self, row: int, start: int, end: int, rope: tuple[int, ...]) -> None:
        runs = self._rope_runs[row]
        if runs and runs[-1][0] > start:
            runs = self._rope_runs[row] = _cut_runs(runs, start)
        if runs and runs[-1][1] == rope:
            runs.pop()
        runs.append((end, rope))

    def _state(self, name: str, row: int) -> Any:
        return self.pool.memory.part(self._states[name], row)

    def discard_interrupted(self, first: int, end: int) -> None:
        """Forget the rows of an interrupted call if there are recurrent states, which may be at any token."""
        if self._states:
            for row in self.tokens[first:end]:
                row.clear()

    def rows(self, first: int, end: int) -> dict[str, Any]:
        """Decoder inputs for rows `first` .. `end`: pools, page tables, recurrent states."""
        part = self.pool.memory.part
        states = {name: part(state, slice(first, end)) for name, state in self._states.items()}
        tables = {table_name(window): table.numbers[first:end] for window, table in self._tables.items()}
        return self.pool.buffers | states | tables

    def token_rows(self, rows: Array) -> dict[str, Any]:
        """Decoder inputs for a batch in which each token is a row: pools, and the page table of each token's row."""
        assert not self._states
        return self.pool.buffers | {table_name(window): table.numbers[rows] for window, table in self._tables.items()}

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a == b:
            return
        for table in self._tables.values():
            table.swap(a, b)
        lists: tuple[list[Any], ...] = (
            self.tokens, self._rope_runs, self._published, self._writable, self._checkpoints
        )  # fmt: skip
        for rows in lists:
            rows[a], rows[b] = rows[b], rows[a]
        copy, spare = self.pool.memory.copy, self.batch
        for name in self._states:
            for source, target in ((a, spare), (b, a), (spare, b)):
                copy(self._state(name, source), self._state(name, target))

    # -- the prefix cache --
    def restore(self, row: int, tokens: Sequence[int], namespace: Key, length: int | None = None) -> int:
        """Begin a row with the longest cached prefix of `tokens[:-1]`; returns its length. Raises PoolFull.

        `length` is the sequence length that RoPE uses, by default that of `tokens`.
        """
        rope = self.spec.rope_of_length(len(tokens) if length is None else length)
        page, copied = self.spec.layout.page, 0
        self.release(row)
        with self.pool.changing():
            path, count = self.pool.find((*namespace, rope), tokens[: len(tokens) - 1])
            self.reserve(count)
            for window, table in self._tables.items():
                pages = self.pool.pages[window]
                for block in range(max(len(path) - table.blocks, 0), len(path)):
                    if window in path[block].pages:
                        table.put(row, block % table.blocks, pages.share(path[block].pages[window]), own=False)
            for name in self._states if count else ():
                self.pool.memory.copy(path[-1].states[count][name], self._state(name, row))
            copied = count % page
        self.tokens[row] = list(tokens[:count])
        if count and self.spec.lengths:
            self._rope_runs[row] = [(count, rope)]
        if copied:  # the last page now, so that a full pool is noticed before there is more to undo
            try:
                for window in self._tables:
                    self._renew(row, window, count // page, count)
            except BaseException:
                self.release(row)
                raise
        return count

    def keep_state(self, row: int) -> None:
        """Copy the recurrent state of a row for the prefix cache, if it is at a cut of a prompt."""
        count = len(self.tokens[row])
        if self._states and count and count % CUT == 0:
            memory, state = self.pool.memory, dict[str, Any]()
            for name, shape in self.spec.states:
                state[name] = memory.zeros(shape, np.dtype(np.float32))
                memory.copy(self._state(name, row), state[name])
            self._checkpoints[row][count] = state

    def publish(self, row: int, namespace: Key) -> None:
        """Add the tokens of a row to the prefix cache; the row goes on."""
        count, rope = self._reusable(row)
        if count:
            with self.pool.changing():
                key, tokens = (*namespace, rope), self.tokens[row][:count]
                self.pool.publish(key, tokens, self._held(row), self._checkpoints[row])
            self._published[row] = max(self._published[row], count)
            self._writable[row] = 0

    def _reusable(self, row: int) -> tuple[int, tuple[int, ...]]:
        """How many tokens of a row other prompts can reuse, and their RoPE frequencies.

        With recurrent states those up to a checkpoint: numbers that decoding computed differ from those of a prompt.
        """
        tokens = len(self.tokens[row])
        if self._states:
            tokens = max((at for at in self._checkpoints[row] if at <= tokens), default=0)
        if not self.spec.lengths:
            return tokens, ()
        end, rope = self._rope_runs[row][0] if self._rope_runs[row] else (0, ())
        return min(end, tokens), rope

    def _held(self, row: int) -> dict[int, dict[int, int]]:
        """The pages of a row by window and block; rings have the newest ones."""
        held, end = dict[int, dict[int, int]](), self.spec.layout.blocks(len(self.tokens[row]))
        for window, table in self._tables.items():
            blocks = range(max(end - table.blocks, 0), end)
            held[window] = {b: page for b in blocks if (page := table.pages[row][b % table.blocks]) != NONE}
        return held

    def resolve(self, row: int, token: int) -> None:
        """Set the pending token of a row, if it has one."""
        if self.tokens[row][-1:] == [PENDING]:
            self.tokens[row][-1] = token

    def release(self, row: int, namespace: Key | None = None) -> None:
        """Empty a row; with a namespace its tokens go to the prefix cache, but for a pending one. Never waits."""
        if self.tokens[row][-1:] == [PENDING]:
            del self.tokens[row][-1]
        count, rope = self._reusable(row)
        if namespace is not None and count:
            key: Key | None = (*namespace, rope)
            held, tokens, states = self._held(row), self.tokens[row][:count], self._checkpoints[row]
        else:
            key, held, tokens, states = None, {}, [], {}
        pages = {window: table.clear(row) for window, table in self._tables.items()}
        self.tokens[row], self._rope_runs[row] = [], []
        self._published[row], self._writable[row], self._checkpoints[row] = 0, 0, {}
        if any(pages.values()):
            self.pool.retire(Retired(pages, key, tokens, held, states))

    def page_bytes(self, rows: Sequence[int]) -> int:
        """Bytes of the pages that these rows hold, each counted once."""
        size = 0
        for window, table in self._tables.items():
            held = {page for row in rows for page in table.pages[row] if page != NONE}
            size += len(held) * self.pool.pages[window].page_bytes
        return size


def aligned(count: int, spec: KvCacheSpec) -> int:
    """A number of prompt tokens per call, rounded down to a cut if there are recurrent states."""
    return max(count // CUT * CUT, CUT) if spec.states else max(count, 1)


def last_cut(tokens: Sequence[int]) -> int:
    """The last position before the end of a prompt at which it may be cut and its state reused."""
    return max(len(tokens) - 1, 0) // CUT * CUT


def _retire_all(pool: PagePool, tables: dict[int, PageTable]) -> None:
    pool.retire(Retired({window: [p for row in t.pages for p in row if p != NONE] for window, t in tables.items()}))


def _cut_runs(runs: Sequence[tuple[int, tuple[int, ...]]], count: int) -> list[tuple[int, tuple[int, ...]]]:
    """The runs (end, RoPE frequencies) of the first `count` tokens."""
    begins = [0, *(end for end, _ in runs)]
    return [(min(end, count), rope) for begin, (end, rope) in zip(begins, runs, strict=False) if begin < count]
