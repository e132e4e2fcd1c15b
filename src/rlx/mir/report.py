"""What the fusion passes did, and what they left and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlx.ir.graph import Node
from rlx.notebook import box, fold, table


@dataclass(frozen=True, slots=True)
class Fusion:
    """One fusion: its kind, the ops that went in, where they came from, and the HIR blocks that they are parts of."""

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
    """All fusions and misses of one compilation, in the order of the passes."""

    fused: list[Fusion] = field(default_factory=list)
    missed: list[Miss] = field(default_factory=list)
    apart: list[Miss] = field(default_factory=list)  # neighbours that no kernel does together

    def add(self, kind: str, nodes: list[Node]) -> None:
        blocks = tuple(dict.fromkeys(block for node in nodes for block in node.origin.blocks))
        self.fused.append(Fusion(kind, tuple(n.op for n in nodes), str(nodes[-1].origin), blocks))

    def miss(self, kind: str, node: Node, why: str, what: str = "") -> None:
        self.missed.append(Miss(kind, what or node.op, why, str(node.origin), node.origin.blocks))

    def keep_apart(self, node: Node, why: str, what: str) -> None:
        self.apart.append(Miss("apart", what, why, str(node.origin), node.origin.blocks))

    @property
    def counts(self) -> dict[str, int]:
        """How many fusions there are of each kind."""
        return dict(sorted(Counter(f.kind for f in self.fused).items()))

    @property
    def by_block(self) -> dict[str, dict[str, int]]:
        """How many fusions of each kind there are in each HIR block; one across blocks counts in all of them."""
        found: dict[str, Counter[str]] = {}
        for fusion in self.fused:
            for block in fusion.blocks:
                found.setdefault(block, Counter())[fusion.kind] += 1
        return {block: dict(sorted(kinds.items())) for block, kinds in sorted(found.items())}

    def __repr__(self) -> str:
        return f"<fusion: {len(self.fused)} fused, {len(self.missed)} missed, {len(self.apart)} apart>"

    def _repr_html_(self) -> str:
        parts = [table(("fusion", "count"), list(self.counts.items()))] if self.fused else []
        for title, misses in (("missed", self.missed), ("apart", self.apart)):
            if misses:
                rows = [(m.kind, m.op, m.why, m.where) for m in misses]
                parts.append(fold(f"{title} {len(rows)}", table(("fusion", "op", "why", "built at"), rows)))
        if self.fused:
            rows = [(f.kind, " + ".join(f.ops), ", ".join(f.blocks), f.where) for f in self.fused]
            parts.append(fold(f"fused {len(rows)}", table(("fusion", "ops", "blocks", "built at"), rows)))
        return box(repr(self)[1:-1], *parts)

    def __str__(self) -> str:
        lines = [f"fused {len(self.fused)}", *(f"  {f}" for f in self.fused)]
        for block, kinds in self.by_block.items():
            lines.append(f"  in {block}: " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
        lines += [f"missed {len(self.missed)}", *(f"  {m}" for m in self.missed)]
        lines += [f"apart {len(self.apart)}", *(f"  {m}" for m in self.apart)] if self.apart else []
        return "\n".join(lines)
