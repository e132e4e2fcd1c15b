"""Page tables: the pages of the pools that hold the positions of each sequence."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlx.arrays import Array

NONE = -1  # no page yet


class PageTable:
    """The pages of a batch of sequences in the layers of one window. Rows share pages until one of them writes.

    Each row owns a run of consecutive pages, so a sequence is contiguous unless it shares pages.
    """

    def __init__(self, rows: int) -> None:
        self.numbers: Array = np.zeros((rows, 0), np.int32)  # as kernels read them
        self._pages: list[list[int]] = [[] for _ in range(rows)]  # the same as lists, which are faster to index
        self._users: list[int] = []  # reference count per page
        self._run = 0  # pages per row
        self._touched: set[int] = set()

    @property
    def blocks(self) -> int:
        return len(self._pages[0])

    @property
    def pages(self) -> int:
        return len(self._users)

    @property
    def touched(self) -> int:
        """Number of pages ever written."""
        return len(self._touched)

    def grow(self, blocks: int, run: int) -> None:
        """Grow to `blocks` blocks and `run` pages per row (`run` >= `blocks`); pages keep their numbers."""
        self._run = run
        self._users += [0] * (len(self._pages) * run - self.pages)
        for row in self._pages:
            row += [NONE] * (blocks - len(row))
        self.numbers = np.array(self._pages, np.int32).reshape(len(self._pages), blocks)

    def page(self, row: int, block: int) -> int:
        """The page of a block, or NONE."""
        return self._pages[row][block]

    def make_private(self, row: int, block: int) -> tuple[int, int] | None:
        """Give a block that is about to be written its own page; returns (old, new) if it shared one."""
        page = self._pages[row][block]
        if page != NONE and self._users[page] == 1:
            return None
        new = row * self._run + block
        if self._users[new]:  # another row shares it
            new = self._users.index(0)
        self._touched.add(new)
        self._put(row, block, new)
        return None if page == NONE else (page, new)

    def share(self, row: int, other: int, blocks: Iterable[int]) -> None:
        """Make a row reference these blocks of another row, and no others."""
        pages = {block: self._pages[other][block] for block in blocks}
        for block in range(self.blocks):
            self._put(row, block, pages.get(block, NONE))

    def release(self, row: int) -> None:
        """Release the pages of a row."""
        self.share(row, row, ())

    def _put(self, row: int, block: int, page: int) -> None:
        old = self._pages[row][block]
        if page != NONE:
            self._users[page] += 1
        if old != NONE:
            self._users[old] -= 1
        self._pages[row][block] = self.numbers[row, block] = page
