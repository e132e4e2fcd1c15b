"""Capturing and editing values inside a model: graphs with extra outputs, and graphs split at edited stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.arrays import Array
from rlx.engine.edits import Edit, EditedModel, checked_edits, split_at_stages
from rlx.engine.sampler import short_repr
from rlx.errors import RequestError
from rlx.flow.patterns import matches
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.engine.model import Model
    from rlx.flow.built import BuiltModel


def captured_values(
    model: Model, capture: Iterable[str] | str | None, edit: Mapping[str, Edit] | None,
    values: Callable[[CompiledGraph, Mapping[str, Array]], list[Array]],
) -> dict[str, Array]:  # fmt: skip
    """The values of stages whose paths match the patterns; `values` runs a graph that has them as outputs."""
    compiled = model.compiled
    patterns = checked_patterns(capture, "run")
    if edit:
        edits = checked_edits(edit)
        results = _edit_graphs(model, patterns, list(edits)).run(edits, values)
    else:
        built, compiled = _capture_graph(model, patterns) if patterns else (model.built, compiled)
        outputs = values(compiled, {})
        results = dict(zip(built.output_names[: len(outputs)], outputs, strict=True))
    return {n: v for n, v in results.items() if not patterns or is_captured(n, patterns)}


def check_not_traced(tokens: Any) -> None:
    """Raise for traced tokens: `run` computes at once."""
    from rlx.functional.tracers import Traced

    if isinstance(tokens, Traced):
        hint = "model.apply(params, tokens) is part of a traced function, and takes edit= and capture= too"
        raise RequestError(f"run: tokens are {tokens!r}, a traced array", hint=hint)


def checked_patterns(capture: Iterable[str] | str | None, where: str) -> list[str]:
    """Check the `capture` argument: one pattern of stage paths, or several."""
    capture = () if capture is None else capture
    patterns = list(capture) if isinstance(capture, Iterable) and not isinstance(capture, str) else [capture]
    if not all(isinstance(pattern, str) for pattern in patterns):
        number = next((p for p in patterns if isinstance(p, int)), None)
        hint = 'capture=["layers.*.attn"]; model.stages lists the paths'
        hint = hint if number is None else f'the residual stream after a layer is capture="layers.{number}"'
        raise RequestError(f"{where}: capture is {short_repr(capture)}, expected patterns of stage paths", hint=hint)
    return patterns


def is_captured(name: str, patterns: Sequence[str]) -> bool:
    """Whether an output of a graph is one of the captured stages; `layers.3.out` is also called `layers.3`."""
    return any(matches(name, pattern) for pattern in patterns)


def _capture_graph(model: Model, patterns: Sequence[str]) -> tuple[BuiltModel, CompiledGraph]:
    def make() -> tuple[BuiltModel, CompiledGraph]:
        built = model.build_graph(patterns)
        return built, model.compile_graph(built)

    return model.graphs.captures.get_or_make(frozenset(patterns), make)


def _edit_graphs(model: Model, patterns: Sequence[str], edited: Sequence[str]) -> EditedModel:
    key = frozenset(patterns), tuple(edited)
    return model.graphs.edits.get_or_make(
        key, lambda: split_at_stages(model.build_graph(patterns), edited, model.compile_graph)
    )
