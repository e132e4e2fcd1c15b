"""The prefix tree against a list of sequences: the longest common prefix, and what is evicted."""

from __future__ import annotations

import random
from collections import Counter

from rlx.engine.prefix_tree import Node, PrefixTree

PAGE = 4


class Users:
    """A tree whose pages are counted."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()
        self.tree = PrefixTree(PAGE, self._share, self._release, self._bytes)
        self.next_page = 0

    def _share(self, window: int, page: int) -> int:
        self.count[page] += 1
        return page

    def _release(self, window: int, page: int) -> None:
        self.count[page] -= 1

    def _bytes(self, node: Node) -> int:
        return len(node.pages)

    def insert(self, key: str, tokens: list[int]) -> None:
        blocks = range(-(-len(tokens) // PAGE))
        self.tree.insert((key,), tokens, {0: {block: self.next_page + block for block in blocks}})
        self.next_page += len(blocks)


def longest(sequences: list[list[int]], tokens: list[int]) -> int:
    shared = [0]
    for other in sequences:
        same = [a == b for a, b in zip(other, tokens, strict=False)]
        shared.append(same.index(False) if False in same else len(same))
    return max(shared)


def test_matches_are_the_longest_common_prefixes_of_all_that_was_inserted() -> None:
    draw = random.Random(0)
    for _ in range(60):
        users, inserted = Users(), dict[str, list[list[int]]](a=[], b=[])
        for _ in range(draw.randrange(1, 25)):
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
            key = draw.choice("ab")
            path, count = users.tree.match((key,), tokens)
            assert count == longest(inserted[key], tokens) and len(path) == -(-count // PAGE)
            assert [t for node in path for t in node.tokens][:count] == tokens[:count]
            users.insert(key, tokens)
            inserted[key].append(tokens)
            assert users.tree.match((key,), tokens)[1] == len(tokens)
        assert users.tree.nbytes == sum(users.count.values()) == len(users.tree)
        users.tree.clear()
        assert users.tree.nbytes == 0 and not any(users.count.values()) and not len(users.tree)


def test_the_leaf_that_was_used_least_recently_goes_first() -> None:
    users = Users()
    for tokens in ([1] * 8, [1] * 4 + [2] * 4, [3] * 4):
        users.insert("a", tokens)
    path, _ = users.tree.match(("a",), [1] * 8)
    users.tree.touch(path[-1])
    remaining = []
    while users.tree.evict():
        remaining.append([users.tree.match(("a",), t)[1] for t in ([1] * 8, [1] * 4 + [2] * 4, [3] * 4)])
    assert remaining == [[8, 4, 4], [8, 4, 0], [4, 4, 0], [0, 0, 0]]


def test_a_longer_page_replaces_its_beginning() -> None:
    users = Users()
    users.insert("a", [1, 2])
    users.insert("a", [1, 2, 3])
    users.insert("a", [1])
    assert len(users.tree) == 1 and users.tree.match(("a",), [1, 2, 3, 4])[1] == 3
    assert [page for page, count in users.count.items() if count] == [1]
