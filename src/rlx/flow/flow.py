"""ModelFlow: a model as a line of stages, and what building it gives.

ModelFlow("llama").input("tokens", (BATCH, SEQ), "i32").token_embed().repeat_layers(...).final_norm(eps).lm_head(...)
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rlx.errors import GraphError, RequestError, nearest
from rlx.flow.context import Array, FlowCtx
from rlx.flow.layers import StageList
from rlx.flow.side import SideOutputs
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.embed import LmHead
from rlx.flow.stages.structure import Sequence as StageSequence
from rlx.flow.stages.structure import edited, emit_stage
from rlx.flow.state import CacheBindings, FlowValue, Shape
from rlx.flow.weights import MapWeights, WeightSource
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import HIR, LEAF
from rlx.ir.rewrite import rebuild
from rlx.module import GraphModule
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session
from rlx.types import ShapeLike, as_shape, dim, sym


@dataclass(frozen=True)
class KvCacheSpec:
    """The cache that a decoder needs: one keys and one values tensor a layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "f32"


class Params(Mapping[str, Array]):
    """The weights of a built graph by name: what stages made, and what the source has, loaded when it is asked for."""

    def __init__(self, graph: Graph, made: Mapping[str, Array], source: WeightSource) -> None:
        self.made = made
        self.source = source
        names = [node.attrs["name"] for node in graph.params]
        self._names = {name: None for name in names if name in made or source.has(name)}

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self.made[name] if name in self.made else self.source.array(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class BuiltModel:
    """A graph, its weights, the names of its outputs and the profile to compile it by."""

    module: Graph  # at HIR
    params: Params
    output_names: list[str]
    cache: KvCacheSpec | None = None
    profile: CompileProfile = field(default_factory=CompileProfile)

    @property
    def primary_shape(self) -> Shape:
        """The shape of the main output."""
        return self.module.outputs[0].shape

    def with_extra_outputs(self, side: SideOutputs) -> BuiltModel:
        """The same with what stages put aside as further outputs: `[logits, k0, v0, ...]`."""
        pushed = side.drain()
        for name, value in pushed:
            if value.graph is not self.module:
                raise GraphError(f"extra output {name!r}: is not of this build of {self.module.name!r}")
        names = _distinct([*self.output_names, *(name for name, _ in pushed)])
        copy = rebuild(self.module, lambda rewriter, node: None, made_by="")
        wanted = [*self.module.outputs, *(value for _, value in pushed)]
        copy.set_outputs([copy.nodes[value.node.id][value.index] for value in wanted])
        return replace(self, module=copy, output_names=names)

    def into_hir(self) -> GraphModule:
        """The graph as a module, with the profile's fusion policy."""
        return GraphModule.from_hir(self.module).with_fusion_policy(self.profile.fusion.policy)

    def into_graph(self) -> Graph:
        """The graph at MIR."""
        return self.into_hir().into_graph()

    def compile(
        self, device: str = "cpu", *, threads: int | None = None, profile: CompileProfile | None = None
    ) -> CompiledGraph:
        """Code with the weights in place."""
        compiled = Session(device, threads=threads).compile(self.module, profile=profile or self.profile)
        compiled.set_params({name: self.params[name] for name in compiled.param_types if name in self.params})
        return compiled


@dataclass(frozen=True)
class ModelFlow(StageList):
    """Stages in order, inputs and outputs. Every method returns a longer flow; nothing is changed in place."""

    name: str
    inputs: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    stages: tuple[FlowStage, ...] = ()
    output_name: str = "output"
    cache: KvCacheSpec | None = field(default=None)
    extra_names: tuple[str, ...] = ()
    side: tuple[SideOutputs, ...] = ()
    compile_profile: CompileProfile = field(default_factory=CompileProfile)

    # -- assembling --
    def with_stages(self, stages: Iterable[FlowStage]) -> Self:
        return replace(self, stages=tuple(stages))

    def input(self, name: str, shape: ShapeLike, dtype: str = "f32") -> Self:
        """A graph input; the first one starts the flow."""
        if any(name == other for other, _, _ in self.inputs):
            raise GraphError(f"flow {self.name!r}: has an input {name!r} already")
        return replace(self, inputs=(*self.inputs, (name, as_shape(shape), dtype)))

    def lm_head(self, vocab: int, hidden: int, *, tied: bool) -> Self:
        """Logits; that is the output's name then."""
        return self.stage(LmHead(vocab, hidden, tie_word_embeddings=tied)).output("logits")

    def output(self, name: str) -> Self:
        """What the main output, which is the last value, is called."""
        return replace(self, output_name=name)

    def outputs(self, *names: str) -> Self:
        """What the main output is called, and further outputs: values that stages have named, and streams.

        The first name is that of the main output, the last value, whatever it is; a name that a stage gave to another
        value cannot be it.
        """
        if not names:
            raise GraphError(f"flow {self.name!r}: an output needs a name")
        return replace(self, output_name=names[0], extra_names=tuple(names[1:]))

    def with_extra_outputs(self, side: SideOutputs) -> Self:
        """What stages put aside there while they emit become further outputs."""
        return replace(self, side=(*self.side, side))

    def kv_cache(self, layers: int, kv_heads: int, head_dim: int) -> Self:
        """Attention layers keep keys and values in a cache that the runtime owns."""
        return replace(self, cache=KvCacheSpec(layers, kv_heads, head_dim))

    def cache_dtype(self, name: str) -> Self:
        """Keys and values are rounded to this type before they are attended to."""
        if self.cache is None:
            raise GraphError(f"flow {self.name!r}: has no cache, so it has no type")
        return replace(self, cache=replace(self.cache, dtype=name))

    def profile(self, profile: CompileProfile | str) -> Self:
        """How it is compiled: a profile, or the preset of that name."""
        return replace(self, compile_profile=CompileProfile.preset(profile) if isinstance(profile, str) else profile)

    def profile_file(self, path: str | os.PathLike[str]) -> Self:
        """How it is compiled, by a TOML file."""
        return self.profile(CompileProfile.from_toml(path))

    def edit(self, pattern: str, f: Callable[[FlowStage], FlowStage | None]) -> Self:
        """The flow with other stages at the paths that match a pattern: `edit("layers.*", f)` puts `f(stage)` there.

        Where `f` gives None the stage is left out. A stage without a path goes by the name of its class.
        """
        seen: list[str] = []
        matched: list[str] = []

        def visit(path: str, stage: FlowStage) -> FlowStage | None:
            seen.append(path)
            if not fnmatch.fnmatchcase(path, pattern):
                return None
            matched.append(path)
            given = f(stage)
            if given is not None and not isinstance(given, FlowStage):
                raise GraphError(f"edit {path!r}: its function gave a {type(given).__name__}, expected a stage or None")
            return StageSequence(()) if given is None else given

        flow = self.with_stages(edited(stage, visit) for stage in self.stages)
        if not matched:
            raise GraphError(f"edit: no stage of {self.name!r} matches {pattern!r}", hint=nearest(pattern, seen))
        return flow

    # -- building --
    def build(self, weights: WeightSource | Mapping[str, Any] | None = None, capture: Sequence[str] = ()) -> BuiltModel:
        """The graph of this flow over these weights.

        `capture` has patterns of stage paths such as `layers.*.attn`; what they match become outputs too.
        """
        if not self.inputs:
            raise GraphError(f"flow {self.name!r}: has no input")
        source = MapWeights(weights) if weights is None or isinstance(weights, Mapping) else weights
        graph = Graph(self.name, level=HIR)
        ctx = FlowCtx(graph, weights=source, profile=self.compile_profile)
        for name, shape, kind in self.inputs:
            ctx.input(name, shape, kind)
        if self.cache is not None:
            ctx.state.cache = _bind_cache(graph, self.cache)
        value: FlowValue | None = ctx.flow_input(self.inputs[0][0])
        for stage in self.stages:
            value = emit_stage(ctx, stage, value)
        if ctx.state.residuals:
            saved = ctx.state.residuals[-1].id
            path = ctx.state.residual_stages.get(saved)
            where = f" in stage {path!r}" if path else ""
            hint = "each residual_save needs a residual_add"
            raise GraphError(f"flow {self.name!r}: residual {saved!r} was saved{where} and never added", hint=hint)
        main = ctx.need(value, self.name)
        outputs = [(self.output_name, main), *self._extra(ctx, main)]
        _distinct([name for name, _ in outputs])
        found = dict(outputs) | _captured(graph, capture, self.output_name)
        graph.set_outputs(list(found.values()))
        return BuiltModel(graph, Params(graph, ctx.params, source), list(found), self.cache, self.compile_profile)

    def _extra(self, ctx: FlowCtx, main: Value) -> Iterator[tuple[str, Value]]:
        known = {name: value.id for name, value in ctx.state.streams.items()} | ctx.state.named
        if known.get(self.output_name, main) is not main:
            raise GraphError(
                f"flow {self.name!r}: the main output is called {self.output_name!r}, and so is another value",
                hint=f'the first name of outputs is that of the main one: outputs("main", "{self.output_name}")',
            )
        for name in self.extra_names:
            if name not in known:
                raise GraphError(f"flow {self.name!r}: no value is called {name!r}", hint=nearest(name, known))
            yield name, known[name]
        for side in self.side:
            yield from side.drain()


def _distinct(names: list[str]) -> list[str]:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise GraphError(f"outputs: two are called {name!r}")
    return names


def stage_values(module: Graph) -> dict[str, Value]:
    """The value of each stage by its path: the last node that was built under it."""
    values: dict[str, Value] = {}
    for node in module.nodes:
        if node.origin.stage and LEAF not in node.definition.traits:
            parts = node.origin.stage.split(".")
            for n in range(len(parts), 0, -1):
                values[".".join(parts[:n])] = node[0]
    return values


def _captured(module: Graph, patterns: Sequence[str], output: str) -> dict[str, Value]:
    values = stage_values(module) if patterns else {}
    found: dict[str, Value] = {}
    for pattern in patterns:
        matched = [path for path in values if fnmatch.fnmatchcase(path, pattern)]
        if not matched and not fnmatch.fnmatchcase(output, pattern):
            raise RequestError(
                f"capture: no stage of {module.name!r} matches {pattern!r}", hint=nearest(pattern, [*values, output])
            )
        found |= {path: values[path] for path in matched}
    return found


def _bind_cache(graph: Graph, spec: KvCacheSpec) -> CacheBindings:
    blocks = dim("blocks")
    keys = [
        graph.state(f"keys.{i}", (sym.BATCH, spec.kv_heads, blocks, spec.head_dim, 64), spec.dtype)
        for i in range(spec.layers)
    ]
    values = [
        graph.state(f"values.{i}", (sym.BATCH, spec.kv_heads, blocks * 64, spec.head_dim), spec.dtype)
        for i in range(spec.layers)
    ]
    return CacheBindings(keys, values)
