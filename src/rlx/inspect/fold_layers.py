"""Groups the lines of a level into a tree of stages, with repeated layers folded.

Of numbered siblings such as layers.0 ... layers.29, those with the same lines and the same data flow are folded: the
first is shown, the others are in a fold after it. Lines without stages are folded if a sequence of them repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rlx.fast_dataclass import dataclass

STAGE, FOLD, REPEATS, SECTION = "stage", "fold", "repeats", "section"
MAX_PERIOD = 256  # lines of a repeating sequence
MIN_HIDDEN = 8  # lines that a fold must hide
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a level: the ops it came from, its stage, and a key for comparing it with other lines."""

    text: str  # several lines for a node with a body
    sources: frozenset[int] = frozenset()
    stage: str = ""
    key: Hashable = None  # equal for equivalent lines; None: ignored in comparisons
    id: int = -1  # its number; `reads` are the numbers of its operands
    reads: tuple[int, ...] = ()
    declares: bool = False  # a declaration, whose order does not matter
    kernel: str = ""  # kernel symbol
    launch: int = -1
    seconds: float = 0.0
    place: str = ""  # source line
    mark: str = ""  # + or - in a diff


@dataclass(frozen=True, slots=True)
class Group:
    """A group of lines: a stage, a fold of equivalent stages, a fold of repeated lines, or a section."""

    name: str
    items: tuple[Item, ...]
    kind: str = STAGE
    note: str = ""
    is_open: bool = True
    kernel: str = ""
    sources: frozenset[int] = frozenset()  # of a group shown without its lines
    seconds: float = 0.0

    def lines(self) -> Iterator[Line]:
        """All lines inside."""
        return lines_of(self.items)

    @property
    def is_fold(self) -> bool:
        """Whether it holds copies of the item before it."""
        return self.kind in (FOLD, REPEATS)

    @property
    def title(self) -> str:
        return f"{self.name}: {self.note}" if self.note else self.name


Item = Line | Group


def lines_of(items: Sequence[Item]) -> Iterator[Line]:
    """All lines of a tree, in order."""
    for item in items:
        if isinstance(item, Line):
            yield item
        else:
            yield from item.lines()


def fold_lines(lines: Sequence[Line]) -> tuple[Item, ...]:
    """The tree of lines. Declarations at the beginning are grouped by stage; other lines keep their order."""
    paths = {line.stage: tuple(line.stage.split(".")) if line.stage else () for line in lines}
    count = next((i for i, line in enumerate(lines) if not line.declares), len(lines))
    while 0 < count < len(lines) and lines[count - 1].stage == lines[count].stage != "":  # do not split a stage
        count -= 1
    head, rest = lines[:count], lines[count:]
    tree = _Tree(paths)
    return (*tree.items(head, (), gather=True), *tree.items(rest, (), gather=False))


@dataclass(frozen=True)
class _Tree:
    paths: dict[str, tuple[str, ...]]

    def items(self, lines: Sequence[Line], path: tuple[str, ...], *, gather: bool) -> tuple[Item, ...]:
        depth = len(path)
        parts: list[tuple[str | None, list[Line]]] = []
        by_name: dict[str | None, list[Line]] = {}
        for line in lines:
            own = self.paths[line.stage]
            name = own[depth] if len(own) > depth else None
            if gather and name in by_name:
                by_name[name].append(line)
            elif parts and parts[-1][0] == name:
                parts[-1][1].append(line)
            else:
                parts.append((name, [line]))
                by_name[name] = parts[-1][1]
        kinds: dict[Hashable, list[int]] = {}
        for number, (name, inside) in enumerate(parts):
            if name is not None and _DIGITS.search(name):
                kinds.setdefault((_DIGITS.sub("#", name), _signature(inside)), []).append(number)
        followers = {members[0]: members[1:] for members in kinds.values() if len(members) > 1}
        hidden = {number for members in followers.values() for number in members}
        items: list[Item] = []
        for number, (name, inside) in enumerate(parts):
            if name is None:
                items += repeats(inside)
            elif number not in hidden:
                items.append(self.group(name, inside, path, gather=gather))
                if number in followers:
                    others = [self.group(*parts[n], path, gather=gather) for n in followers[number]]
                    first = ".".join((*path, name))
                    items.append(_fold(others, f"{len(others)} × like {first}"))
        return tuple(items)

    def group(self, name: str | None, lines: Sequence[Line], path: tuple[str, ...], *, gather: bool) -> Group:
        own = (*path, name or "")
        items = self.items(lines, own, gather=gather)
        return Group(".".join(own), items, note=_count_note(name or "", items))


def _fold(groups: Sequence[Group], note: str) -> Group:
    closed = tuple(replace(group, is_open=False) for group in groups)
    return Group(span([group.name for group in groups]), closed, FOLD, note, is_open=False)


def _count_note(name: str, items: Sequence[Item]) -> str:
    """A note such as `30 × layer, 2 kinds` for numbered stages inside."""
    groups = [item for item in items if isinstance(item, Group) and item.kind in (STAGE, FOLD)]
    kinds = [g for g in groups if g.kind == STAGE and g.name.rpartition(".")[2].isdecimal()]
    copies = [each for g in groups if g.kind == FOLD for each in g.items]
    count = len({each.name for each in (*kinds, *copies) if isinstance(each, Group)})
    if not kinds or count < 2:
        return ""
    word = name.removesuffix("s") or name
    return f"{count} × {word}" + (f", {len(kinds)} kinds" if 1 < len(kinds) < count else "")


def _signature(lines: Sequence[Line]) -> Hashable:
    """A key that equivalent stages share: their lines, and which lines read which."""
    own = [line for line in lines if line.key is not None]
    number = {line.id: i for i, line in enumerate(own)}
    return tuple((line.key, tuple(number.get(r, -1) for r in line.reads)) for line in own)


def span(names: Sequence[str]) -> str:
    """Abbreviated names of stages.

    >>> span(["layers.1", "layers.2", "layers.3", "layers.7"])
    'layers.1-3, 7'
    """
    heads = {name.rpartition(".")[0] for name in names}
    last = [name.rpartition(".")[2] for name in names]
    if len(heads) > 1 or not all(part.isdecimal() for part in last):
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    runs: list[list[int]] = []
    for number in map(int, last):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    head = heads.pop()
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{head}.{shown}" if head else shown


# -- sequences that repeat ---------------------------------------------------------------------------------------------
def repeats(lines: Sequence[Line]) -> list[Item]:
    """Lines of one stage; of a sequence that occurs three times or more, all but the first are folded."""
    numbers: dict[Hashable, int] = {}
    keys = np.array([numbers.setdefault(line.key, len(numbers)) for line in lines])
    items: list[Item] = []
    begin = 0
    for first, period, count in _repeats(keys):
        items += lines[begin : first + period]
        others = [lines[first + i * period : first + (i + 1) * period] for i in range(1, count)]
        groups = [Group(f"repeat {i}", tuple(each), SECTION, is_open=False) for i, each in enumerate(others, 2)]
        copied = "the line above" if period == 1 else f"the {period} lines above"
        items.append(Group(f"{count - 1} × {copied}", tuple(groups), REPEATS, is_open=False))
        begin = first + period * count
    return [*items, *lines[begin:]]


def _repeats(keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    """Repeating sequences as (first, period, count), without overlaps; prefers those that hide the most lines."""
    candidates: list[tuple[int, int, int]] = []
    for period in range(1, min(MAX_PERIOD, len(keys) // 3) + 1):
        same = np.concatenate(([False], keys[period:] == keys[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, end in edges.reshape(-1, 2).tolist():
            count = (end - start) // period + 1
            if count >= 3 and (count - 1) * period >= MIN_HIDDEN:
                candidates.append((start, period, count))
    candidates.sort(key=lambda c: (-(c[2] - 1) * c[1], c[1]))
    used = np.zeros(len(keys), bool)
    chosen = []
    for first, period, count in candidates:
        section = slice(first, first + period * count)
        if not used[section].any():
            used[section] = True
            chosen.append((first, period, count))
    return sorted(chosen)


# -- text --------------------------------------------------------------------------------------------------------------
def tree_text(
    items: Sequence[Item], show: Callable[[Line], str], *, all_: bool = False, pad: str = ""
) -> Iterator[str]:
    """A tree as text, with titles of stages as comments. Folds show only their title, unless `all_`."""
    for item in items:
        if isinstance(item, Line):
            yield from (pad + text for text in show(item).split("\n"))
            continue
        yield f"{pad}# {item.title}"
        if all_ or not item.is_fold:
            yield from tree_text(item.items, show, all_=all_, pad=pad if item.is_fold else pad + "  ")
