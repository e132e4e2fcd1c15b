"""Editing and capturing values while a model generates: what runs in place of the model's own graph.

Edits are compiled into the graph (`graph_edits`), and captured values are extra outputs. Keys and values depend on
edits, so each set of edits and numbers has a namespace of its own in the prefix cache. With captures nothing comes from
the prefix cache: every token runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.page_pool import PagePool
from rlx.fast_dataclass import dataclass
from rlx.free_memory import require
from rlx.runtime.compiled import CompiledGraph
from rlx.types import sym

if TYPE_CHECKING:  # imported for the first edit: a warm start builds no graph
    from rlx.engine.edits import Edit
    from rlx.engine.language_model import LanguageModel
    from rlx.inspect.call_report import CallRecorder

Execute = Callable[[Mapping[str, Any]], list[Any]]


@dataclass(frozen=True)
class Execution:
    """How the decoder of a request runs: a graph, the function that runs it, and the pool of pages."""

    compiled: CompiledGraph
    execute: Execute | None  # None: `compiled.run`
    pool: PagePool
    digest: str = ""  # of edits and their numbers: a namespace of the prefix cache
    captures: Captures | None = None


class Captures:
    """The captured values of one sequence, call by call."""

    def __init__(self, outputs: Mapping[str, int], batched: Iterable[str]) -> None:
        self._outputs = outputs  # name -> index among the outputs of the graph
        self._batched = frozenset(batched)  # [batch, seq, ...]; others have a row per picked token
        self._calls: list[tuple[Array, Array, dict[str, Array]]] = []

    def record(self, inputs: Mapping[str, Any], outputs: Sequence[Any]) -> None:
        """Add the values of a call of one row; padding has a negative position."""
        positions = np.array(inputs["positions"][0])
        picked = positions[np.asarray(inputs["last_token_idx"])]
        values = {name: np.asarray(outputs[at]) for name, at in self._outputs.items()}
        require("captured values", sum(array.nbytes for array in values.values()), hint="fewer tokens or stages")
        rows = {name: a[0][positions >= 0] if name in self._batched else a for name, a in values.items()}
        self._calls.append((positions[positions >= 0], picked, rows))

    def arrays(self, prompt: int) -> dict[str, Array]:
        """Values by stage: `[tokens, ...]`, or, after the last-token gather, one row per generated token."""
        results: dict[str, Array] = {}
        for name in self._outputs:
            every = name in self._batched
            # a later call replaces what an earlier one computed for the same position (longrope prefills again)
            rows = {
                int(position): row
                for positions, picked, values in self._calls
                for position, row in zip(positions if every else picked, values[name], strict=True)
                if every or position >= prompt - 1
            }
            results[name] = np.stack([rows[position] for position in sorted(rows)]) if rows else np.zeros(0, np.float32)
        return results


@dataclass(frozen=True)
class EditedGraph:
    """A decoder with edits and captures compiled in."""

    compiled: CompiledGraph
    outputs: Mapping[str, int]  # captured values: name -> index

    def captures(self) -> Captures | None:
        """An empty record of captured values; None if nothing is captured."""
        if not self.outputs:
            return None
        types = self.compiled.signature.outputs
        return Captures(self.outputs, [name for name, at in self.outputs.items() if types[at].shape[0] == sym.BATCH])


def run_of(compiled: CompiledGraph, recorder: CallRecorder | None) -> Execute:
    """The function that runs a graph: its own, or one that records times."""
    return compiled.run if recorder is None else functools.partial(recorder.run, compiled)


def execution(
    model: LanguageModel, edit: Mapping[str, Edit] | None, capture: Iterable[str] | str | None,
    recorder: CallRecorder | None = None,
) -> Callable[[], Execution]:  # fmt: skip
    """Returns a function that creates the execution of a sequence, or of several if nothing is captured."""
    if not edit and not capture:
        compiled = model.compiled
        plain = Execution(compiled, None if recorder is None else run_of(compiled, recorder), model.caches)
        return lambda: plain
    from rlx.engine.capture import checked_patterns, is_captured
    from rlx.engine.edits import checked_edits
    from rlx.engine.graph_edits import GraphEdits
    from rlx.engine.sampling_graph import with_sampler

    patterns = checked_patterns(capture, "generate")
    built = model.graphs.bases.get_or_make(frozenset(patterns), lambda: model.build_graph(patterns))
    edits = GraphEdits.of(built, checked_edits(edit))

    def make() -> EditedGraph:
        edits.check()
        edited = with_sampler(edits.inserted(built), model.vocab_size, feeds=model.runs_behind)
        wanted = {name: i for i, name in enumerate(built.output_names) if is_captured(name, patterns)}
        return EditedGraph(model.compile_graph(edited), wanted)

    graph = model.graphs.interventions.get_or_make((frozenset(patterns), edits.key), make)
    digest = f"{edits.key} {edits.digest}"
    pool, numbers, run = model.caches, edits.numbers, run_of(graph.compiled, recorder)

    def start() -> Execution:
        captures = graph.captures()

        def execute(inputs: Mapping[str, Any]) -> list[Any]:
            outputs = run({**inputs, **numbers})
            if captures is not None:
                captures.record(inputs, outputs)
            return outputs

        return Execution(graph.compiled, execute, pool, digest, captures)

    return start
