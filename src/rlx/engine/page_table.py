"""Page tables: the pages of the pools that hold the positions of each sequence."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from rlx.arrays import Array

NONE = -1  # no page yet


class Pages:
    """The pages of the layers of one window: reference counts, and which pages are free. The lowest is taken first."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes  # in all layers
        self.users: list[int] = []  # reference count per page that was ever taken
        self._free: list[int] = []  # a heap

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return len(self.users) - len(self._free)

    def next_page(self) -> int:
        """The page that `take` would return."""
        return self._free[0] if self._free else len(self.users)

    def take(self) -> int:
        """A free page, with one user."""
        if self._free:
            page = heappop(self._free)
            self.users[page] = 1
            return page
        self.users.append(1)
        return len(self.users) - 1

    def share(self, page: int) -> int:
        """Add a user to a page."""
        self.users[page] += 1
        return page

    def release(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            heappush(self._free, page)


class PageTable:
    """The pages of a batch of sequences in the layers of one window.

    A row may write a page that it took itself, or that nobody else uses. Its own page may also be in the prefix cache:
    then it only appends (`KvCache.published` says where).
    """

    def __init__(self, rows: int) -> None:
        self.numbers: Array = np.zeros((rows, 0), np.int32)  # as kernels read them
        self.pages: list[list[int]] = [[] for _ in range(rows)]  # the same as lists, which are faster to index
        self.own: list[set[int]] = [set() for _ in range(rows)]  # blocks whose page the row took itself

    @property
    def blocks(self) -> int:
        return int(self.numbers.shape[1])

    def grow(self, blocks: int) -> None:
        """Grow to `blocks` blocks per row."""
        for row in self.pages:
            row += [NONE] * (blocks - len(row))
        self.numbers = np.array(self.pages, np.int32).reshape(len(self.pages), blocks)

    def put(self, row: int, block: int, page: int, own: bool) -> None:
        """Set the page of a block; the caller counts its users."""
        self.pages[row][block] = self.numbers[row, block] = page
        if own:
            self.own[row].add(block)
        else:
            self.own[row].discard(block)

    def clear(self, row: int) -> list[int]:
        """Empty a row; returns the pages it had."""
        pages = [page for page in self.pages[row] if page != NONE]
        self.pages[row] = [NONE] * self.blocks
        self.numbers[row] = NONE
        self.own[row] = set()
        return pages

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self.pages[a], self.pages[b] = self.pages[b], self.pages[a]
        self.own[a], self.own[b] = self.own[b], self.own[a]
        self.numbers[[a, b]] = self.numbers[[b, a]]
