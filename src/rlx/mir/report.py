"""The fusion report: which ops were fused, which were not, and why."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field, replace

from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.notebook import box, fold, table


@dataclass(frozen=True, slots=True)
class Fusion:
    """One fusion: its kind, the fused ops, where they came from, and the HIR blocks they belong to."""

    kind: str
    ops: tuple[str, ...]
    where: str
    blocks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {' + '.join(self.ops)}" + (f"  ({self.where})" if self.where else "")


@dataclass(frozen=True, slots=True)
class Miss:
    """A fusion that did not happen, and the reason."""

    kind: str
    op: str
    why: str
    where: str
    blocks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.op}: {self.why}" + (f"  ({self.where})" if self.where else "")


@dataclass
class FusionReport:
    """All fusions and misses of one compilation, in pass order."""

    fused: list[Fusion] = field(default_factory=list)
    missed: list[Miss] = field(default_factory=list)
    separate: list[Miss] = field(default_factory=list)  # launch boundaries that no fusion could remove
    skipped: bool = False  # fusion is switched off in the profile

    def add(self, kind: str, nodes: list[Node]) -> None:
        """Record a fusion of these nodes."""
        blocks = tuple(dict.fromkeys(block for node in nodes for block in node.origin.blocks))
        self.fused.append(Fusion(kind, tuple(n.op for n in nodes), _where(nodes[-1]), blocks))

    def miss(self, kind: str, node: Node, why: str, ops: str = "") -> None:
        """Record a fusion that did not happen."""
        self.missed.append(Miss(kind, ops or node.op, why, _where(node), node.origin.blocks))

    def keep_separate(self, node: Node, why: str, ops: str) -> None:
        """Record why a node is in a launch of its own although no fusion was missed."""
        self.separate.append(Miss("separate", ops, why, _where(node), node.origin.blocks))

    def within(self, is_inside: Callable[[str], bool]) -> FusionReport:
        """Return the part of the report whose places are inside, as of a stage."""
        parts = {
            "fused": [f for f in self.fused if is_inside(f.where)],
            "missed": [m for m in self.missed if is_inside(m.where)],
            "separate": [m for m in self.separate if is_inside(m.where)],
        }
        return replace(self, **parts)  # type: ignore[arg-type]

    @property
    def apart(self) -> list[Miss]:
        """Deprecated: the old name of `separate`."""
        warnings.warn("FusionReport.apart is now called separate", DeprecationWarning, stacklevel=2)
        return self.separate

    def keep_apart(self, node: Node, why: str, what: str) -> None:
        """Deprecated: the old name of `keep_separate`."""
        warnings.warn("FusionReport.keep_apart is now called keep_separate", DeprecationWarning, stacklevel=2)
        self.keep_separate(node, why, what)

    @property
    def counts(self) -> dict[str, int]:
        """Number of fusions per kind."""
        return dict(sorted(Counter(f.kind for f in self.fused).items()))

    @property
    def by_block(self) -> dict[str, dict[str, int]]:
        """Number of fusions per kind and HIR block, then those that were `missed` and launches that are `separate`.

        What spans several blocks counts in each.
        """
        counts: dict[str, dict[str, int]] = {}
        entries = [(fusion.kind, fusion.blocks) for fusion in sorted(self.fused, key=lambda fusion: fusion.kind)]
        entries += [("missed", miss.blocks) for miss in self.missed]
        entries += [("separate", miss.blocks) for miss in self.separate]
        for kind, blocks in entries:
            for block in blocks:
                kinds = counts.setdefault(block, {})
                kinds[kind] = kinds.get(kind, 0) + 1
        return dict(sorted(counts.items()))

    def __repr__(self) -> str:
        return f"<fusion: {len(self.fused)} fused, {len(self.missed)} missed, {len(self.separate)} separate>"

    def _repr_html_(self) -> str:
        parts = [table(("fusion", "count"), list(self.counts.items()))] if self.fused else []
        for title, misses in (("missed", self.missed), ("separate", self.separate)):
            if misses:
                rows = [(m.kind, m.op, m.why, ", ".join(m.blocks), m.where) for m in misses]
                parts.append(fold(f"{title} {len(rows)}", table(("fusion", "op", "why", "blocks", "built at"), rows)))
        if self.fused:
            fused = [(f.kind, " + ".join(f.ops), ", ".join(f.blocks), f.where) for f in self.fused]
            parts.append(fold(f"fused {len(fused)}", table(("fusion", "ops", "blocks", "built at"), fused)))
        return box(repr(self)[1:-1], *parts)

    def __str__(self) -> str:
        lines = ["fusion is switched off (profile.fusion.skip)"] if self.skipped else []
        lines += [f"fused {len(self.fused)}", *(f"  {f}" for f in self.fused)]
        lines += [f"missed {len(self.missed)}", *(f"  {m}" for m in self.missed)]
        if self.separate:
            lines += [f"separate {len(self.separate)}", *(f"  {line}" for line in self.separate_lines())]
        if blocks := self.by_block:
            lines.append(f"blocks {len(blocks)}")
        for block, kinds in blocks.items():
            lines.append(f"  in {block}: " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
        return "\n".join(lines)

    def separate_lines(self) -> Iterator[str]:
        """One line per kind of launch boundary and reason, with the first place, and how many more there are."""
        places: dict[tuple[str, str], list[str]] = {}
        for miss in self.separate:
            places.setdefault((miss.op, miss.why), []).append(miss.where)
        for (ops, why), wheres in places.items():
            more = f", and {len(wheres) - 1} more" if len(wheres) > 1 else ""
            yield f"{ops}: {why}" + (f"  ({wheres[0]}{more})" if wheres[0] else "")


def _where(node: Node) -> str:
    """Where a node was built, without the pass that rewrote it last."""
    return str(replace(node.origin, made_by=""))
