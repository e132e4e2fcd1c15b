"""Page tables: which pages of the pools hold the positions of which sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
NONE = -1  # no page yet


class PageTable:
    """The pages of some sequences in the layers of one window. Rows may share pages until one of them writes there.

    There are rows · blocks pages, so that every row can have pages of its own.
    """

    def __init__(self, rows: int) -> None:
        self.numbers: Array = np.zeros((rows, 0), np.int32)  # as kernels read them
        self._pages: list[list[int]] = [[] for _ in range(rows)]  # the same, quicker to look at
        self._users: list[int] = []  # of each page
        self._free: list[int] = []  # the next one last

    @property
    def blocks(self) -> int:
        return len(self._pages[0])

    @property
    def pages(self) -> int:
        return len(self._users)

    def grow(self, blocks: int) -> None:
        """More blocks in every row; pages keep their numbers."""
        old = self.blocks
        more = range(self.pages, len(self._pages) * blocks)
        self._users += [0] * len(more)
        self._free = [*reversed(more), *self._free]
        for row in self._pages:
            row += [NONE] * (blocks - old)
        self.numbers = np.array(self._pages, np.int32)

    def page(self, row: int, block: int) -> int:
        """The page of a block, or NONE."""
        return self._pages[row][block]

    def own(self, row: int, block: int) -> tuple[int, int] | None:
        """Give a block that is about to be written a page of its own; (old, new) if it shared one."""
        page = self._pages[row][block]
        if page != NONE and self._users[page] == 1:
            return None
        new = self._free.pop()
        self._put(row, block, new)
        return None if page == NONE else (page, new)

    def share(self, row: int, other: int, blocks: Iterable[int]) -> None:
        """Let a row have these blocks of another row, and no others."""
        pages = {block: self._pages[other][block] for block in blocks}
        for block in range(self.blocks):
            self._put(row, block, pages.get(block, NONE))

    def release(self, row: int) -> None:
        """Give back the pages of a row."""
        self.share(row, row, ())

    def _put(self, row: int, block: int, page: int) -> None:
        old = self._pages[row][block]
        if page != NONE:
            self._users[page] += 1
        if old != NONE:
            self._users[old] -= 1
            if not self._users[old]:
                self._free.append(old)
        self._pages[row][block] = self.numbers[row, block] = page
