"""The prefix cache: a tree of pages of earlier sequences, compared token by token.

A node is a page: up to `page` tokens, and the pages of each kind of layer that hold their keys and values. Only a leaf
may have fewer tokens; no node's tokens are the beginning of a sibling's. Trees of different namespaces share nothing
but the order of eviction.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from rlx.fast_dataclass import dataclass

Key = tuple[Any, ...]  # what keys and values depend on besides the tokens: namespace, RoPE frequencies
State = Mapping[str, Any]  # a recurrent state: arrays by name


@dataclass(eq=False)
class Node:
    """A page of a sequence."""

    tokens: tuple[int, ...]
    begin: int  # position of its first token
    parent: Node | None
    key: Key  # of its tree
    pages: dict[int, int] = field(default_factory=dict)  # by window; rings have only the newest ones
    states: dict[int, State] = field(default_factory=dict)  # checkpoints: number of tokens before -> state
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    order: list[tuple[int, ...]] = field(default_factory=list)  # the keys of `children`, sorted

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def state_bytes(self) -> int:
        return sum(array.nbytes for state in self.states.values() for array in state.values())

    def nearest(self, chunk: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that shares most of `chunk`, and how many tokens: a neighbour in sorted order."""
        at = bisect_left(self.order, chunk)
        neighbours = [self.children[key] for key in self.order[max(at - 1, 0) : at + 1]]
        shared = [(common(child.tokens, chunk), child) for child in neighbours]
        count, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        return (best, count) if count else (None, 0)


class PrefixTree:
    """Trees of pages by key, and the order in which their nodes were used.

    `share` and `release` count the users of pages; `nbytes` is what all nodes hold.
    """

    def __init__(
        self, page: int, share: Callable[[int, int], int], release: Callable[[int, int], None],
        bytes_of: Callable[[Node], int],
    ) -> None:  # fmt: skip
        self.page = page
        self.nbytes = 0
        self._share, self._release, self._bytes_of = share, release, bytes_of
        self._roots: dict[Key, Node] = {}
        self._used: OrderedDict[Node, None] = OrderedDict()  # children before their parents, so the first is a leaf

    def __len__(self) -> int:
        return len(self._used)

    @property
    def state_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum(node.state_bytes for node in self._used)

    def match(self, key: Key, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes that hold a beginning of `tokens`, and its length; the last node may hold only part of its page."""
        node, path, count = self._roots.get(key), list[Node](), 0
        while node is not None and count < len(tokens):
            chunk = tuple(tokens[count : count + self.page])
            child = node.children.get(chunk)
            shared = len(chunk)
            if child is None:
                child, shared = node.nearest(chunk)
                if child is None:
                    break
            path.append(child)
            count += shared
            node = child if shared == self.page else None
        return path, count

    def insert(
        self, key: Key, tokens: Sequence[int], pages: Mapping[int, Mapping[int, int]],
        states: Mapping[int, State] | None = None,
    ) -> None:  # fmt: skip
        """Add a sequence: its pages by window and block, and checkpoints by number of tokens."""
        states = {} if states is None else states
        node = self._roots.setdefault(key, Node((), 0, None, key))
        for begin in range(0, len(tokens), self.page):
            chunk = tuple(tokens[begin : begin + self.page])
            child = node.children.get(chunk)
            if child is None:
                near, shared = node.nearest(chunk)
                if near is not None and shared == len(chunk):  # part of a page that is there already
                    child = near
                else:
                    child = self._add(node, chunk, near if near is not None and shared == len(near.tokens) else None)
            before = self._bytes_of(child)
            for window, blocks in pages.items():
                page = blocks.get(begin // self.page)
                if page is not None and window not in child.pages and len(child.tokens) == len(chunk):
                    child.pages[window] = self._share(window, page)
            for at, state in states.items():
                if begin < at <= begin + len(chunk):
                    child.states.setdefault(at, state)
            self.nbytes += self._bytes_of(child) - before
            node = child
        self.touch(node)

    def _add(self, parent: Node, chunk: tuple[int, ...], shorter: Node | None) -> Node:
        """A new child. `shorter` is a leaf with the beginning of its page, which is no longer needed."""
        child = Node(chunk, parent.end, parent, parent.key)
        parent.children[chunk] = child
        insort(parent.order, chunk)
        self._used[child] = None
        if shorter is not None:
            child.states |= shorter.states
            self._drop(shorter)
        self.nbytes += self._bytes_of(child)
        return child

    def touch(self, node: Node) -> None:
        """Mark a node and its ancestors as used, ancestors last: a leaf is evicted before its parent."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            self._used.move_to_end(at)
            at = at.parent

    def evict(self) -> bool:
        """Drop the leaf that was used least recently; False if there is none."""
        if not self._used:
            return False
        self._drop(next(iter(self._used)))
        return True

    def clear(self) -> None:
        while self.evict():
            pass
        self._roots.clear()

    def _drop(self, node: Node) -> None:
        assert not node.children and node.parent is not None
        self.nbytes -= self._bytes_of(node)
        for window, page in node.pages.items():
            self._release(window, page)
        del self._used[node], node.parent.children[node.tokens]
        del node.parent.order[bisect_left(node.parent.order, node.tokens)]
        if node.parent.parent is None and not node.parent.children:
            self._roots.pop(node.key, None)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])
