"""Values of a graph by stage path: what `capture=` and `edit=` name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlx.errors import RequestError, nearest
from rlx.flow.patterns import matches
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import LEAF
from rlx.runtime.kv_spec import KvCacheSpec as KvCacheSpec

OUT = ".out"  # optional suffix of a stage path: `layers.3.out` is `layers.3`


def stage_values(module: Graph) -> dict[str, Value]:
    """Return the value of each stage by path, in the order in which stages end: parts before the stage they belong to.

    For parts of stages the value is the last node built under the path.
    """
    values: dict[str, Value] = {}
    for node in module.nodes:
        if node.origin.stage and LEAF not in node.definition.traits:
            parts = node.origin.stage.split(".")
            for n in range(len(parts), 0, -1):
                values[".".join(parts[:n])] = node[0]
    values |= module.stages
    return dict(sorted(values.items(), key=lambda item: (item[1].node.id, -item[0].count("."))))


def matching(values: Mapping[str, Value], pattern: str) -> dict[str, Value]:
    """Return the stages that a pattern matches; `layers.3.out` is the same as `layers.3`."""
    matched = {path: value for path, value in values.items() if matches(path, pattern)}
    if not matched and pattern.endswith(OUT):
        plain = pattern.removesuffix(OUT)
        matched = {path + OUT: value for path, value in values.items() if matches(path, plain)}
    return matched


def stage_hint(pattern: str, paths: Sequence[str]) -> str | None:
    """Return a hint for a pattern that matches no path: the range of a number that is too large, or close paths."""
    parts = pattern.split(".")
    for i, part in enumerate(parts):
        begin = ".".join(parts[:i])
        numbers = [
            int(p[i]) for path in paths if (p := path.split("."))[:i] == parts[:i] and len(p) > i and p[i].isdigit()
        ]
        if part.isdigit() and numbers and int(part) > max(numbers):
            return f"{begin} are 0 to {max(numbers)}"
    return nearest(pattern, paths)


def matched_stages(module: Graph, patterns: Sequence[str], outputs: Iterable[str]) -> dict[str, Value]:
    """Return the stages that patterns match; a pattern may also match an existing output."""
    values = stage_values(module) if patterns else {}
    captured: dict[str, Value] = {}
    for pattern in patterns:
        matched = matching(values, pattern)
        if not matched and not any(matches(name, pattern) for name in outputs):
            hint = stage_hint(pattern, [*values, *outputs])
            raise RequestError(f"capture: no stage of {module.name!r} matches {pattern!r}", hint=hint)
        captured |= matched
    return captured
