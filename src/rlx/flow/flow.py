"""ModelFlow: a model as a sequence of stages; BuiltModel: its graph and weights.

ModelFlow("llama").input("tokens", (BATCH, SEQ), "i32").token_embed().repeat_layers(...).final_norm(eps).lm_head(...)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from rlx.arrays import Array
from rlx.dtypes import F32, DType, DTypeLike
from rlx.errors import BindError, GraphError, RequestError, nearest, shortened
from rlx.flow.context import FlowCtx
from rlx.flow.emit import Emit
from rlx.flow.init import Initialiser, Rules, WantedWeights, as_initialiser, make
from rlx.flow.layers import StageList
from rlx.flow.patterns import check_names_matched, matches
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.embed import LmHead
from rlx.flow.stages.structure import Sequence as StageSequence
from rlx.flow.stages.structure import edit_stage, emit_all
from rlx.flow.state import CacheBindings, FlowState, FlowValue, Shape
from rlx.flow.tree import stage_lines
from rlx.flow.weights import LayeredWeights, MapWeights, WeightSource, as_source, unchecked
from rlx.ir.graph import Graph, Value
from rlx.ir.provenance import Origin, here
from rlx.ir.registry import HIR, LEAF, MIR
from rlx.ir.rewrite import copy_graph, live_copy
from rlx.module import GraphModule
from rlx.notebook import box, preformatted, table
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.compiled import output_names as unnamed
from rlx.runtime.kv_spec import KvCacheSpec as KvCacheSpec
from rlx.runtime.session import Session
from rlx.target import KvLayout
from rlx.types import ShapeLike, TensorType, dim, sym, tensor

if TYPE_CHECKING:
    from rlx.runtime.variants import ModelExecutionConfig, ModelVariant


Extension = Callable[[Emit, FlowValue], Mapping[str, Value | FlowValue] | None]
OUT = ".out"  # optional suffix of a stage path: `layers.3.out` is `layers.3`


class Params(Mapping[str, Array]):
    """The weights of a built graph by name: computed by stages, or loaded lazily from the source."""

    def __init__(self, graph: Graph, computed: Mapping[str, Array], source: WeightSource) -> None:
        self.computed = computed
        self.source = source
        types = {node.attrs["name"]: node.types[0] for node in graph.params}
        self._types = {name: type_ for name, type_ in types.items() if name in computed or source.has(name)}

    def __getitem__(self, name: str) -> Array:
        if name not in self._types:
            raise KeyError(name)
        return self.computed[name] if name in self.computed else self.source.array(name)

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def __repr__(self) -> str:
        return f"<params: {len(self._types)} weights>"

    def _repr_html_(self) -> str:
        rows = [(name, str(type_)) for name, type_ in self._types.items()]
        return box(f"{len(rows)} weights", table(("name", "type"), rows))


@dataclass(frozen=True)
class BuiltModel:
    """A graph, its weights, the names of its outputs and its compile profile."""

    module: Graph  # at HIR, or at MIR once it is lowered
    params: Params
    output_names: list[str]
    cache: KvCacheSpec | None = None
    profile: CompileProfile = field(default_factory=CompileProfile)
    flow: ModelFlow | None = field(default=None, compare=False)  # that it was built from
    skips_dropout: bool = False  # it has dropout, and was not built for training

    def __repr__(self) -> str:
        inputs = ", ".join(node.attrs["name"] for node in self.module.inputs)
        named = zip(self.output_names, self.module.outputs, strict=True)
        outputs = ", ".join(f"{name}: {value.type}" for name, value in named)
        return f"<built {self.module.name!r}: {inputs} -> {shortened(outputs, 120)}, {len(self.params)} weights>"

    @classmethod
    def from_hir(
        cls, module: Graph | GraphModule, params: Mapping[str, Any] | None = None,
        output_names: Sequence[str] | None = None, profile: CompileProfile | None = None,
    ) -> BuiltModel:  # fmt: skip
        """Wrap a HIR graph built by hand and its weights; outputs are named output, output.1 ... by default."""
        graph = module.as_hir() if isinstance(module, GraphModule) else module
        return cls._of("from_hir", graph, HIR, params, output_names, profile)

    @classmethod
    def from_graph(
        cls, graph: Graph | GraphModule, params: Mapping[str, Any] | None = None,
        output_names: Sequence[str] | None = None, profile: CompileProfile | None = None,
    ) -> BuiltModel:  # fmt: skip
        """Wrap a MIR graph built by hand and its weights; see `from_hir`."""
        mir_graph = graph.as_graph() if isinstance(graph, GraphModule) else graph
        return cls._of("from_graph", mir_graph, MIR, params, output_names, profile)

    @classmethod
    def _of(
        cls, where: str, graph: Graph | None, level: str, params: Mapping[str, Any] | None,
        output_names: Sequence[str] | None, profile: CompileProfile | None,
    ) -> BuiltModel:  # fmt: skip
        if not isinstance(graph, Graph) or graph.level != level:
            actual = graph.level.upper() if isinstance(graph, Graph) else "another level"
            raise GraphError(f"{where}: the graph is at {actual}, expected {level.upper()}")
        count = len(graph.outputs)
        names = unnamed(count) if output_names is None else list(output_names)
        if len(names) != count or not names:
            raise GraphError(f"{where}: {len(names)} names for {count} outputs")
        source = MapWeights(params)
        weights = Params(graph, {}, source)
        for name in params or {}:
            if name not in weights:
                hint = nearest(name, [node.attrs["name"] for node in graph.params])
                raise BindError(f"{where}: no param of {graph.name!r} is called {name!r}", hint=hint)
        return cls(graph, weights, _distinct(names), profile=profile or CompileProfile())

    @property
    def primary_shape(self) -> Shape:
        """The shape of the main output."""
        return self.module.outputs[0].shape

    @property
    def typed_params(self) -> list[tuple[str, bytes, DType]]:
        """Weights not stored as f32, including packed ones: name, bytes and dtype."""
        kinds = {node.attrs["name"]: node.types[0].dtype for node in self.module.params}
        return [(n, a.tobytes(), kinds[n]) for n, a in self.params.items() if kinds[n] is not F32]

    @property
    def unused_weights(self) -> list[str]:
        """Weights of the source that no stage asked for."""
        return [name for name in iter(self.params.source.keys()) if name not in self.params]

    def with_extra_outputs(self, side: SideOutputs) -> BuiltModel:
        """Return the model with pushed side outputs as extra outputs: `[logits, k0, v0, ...]`."""
        pushed = side.drain()
        for name, value in pushed:
            if value.graph is not self.module:
                raise GraphError(f"extra output {name!r}: is not of this build of {self.module.name!r}")
        names = _distinct([*self.output_names, *(name for name, _ in pushed)])
        copy = copy_graph(self.module)
        wanted = [*self.module.outputs, *(value for _, value in pushed)]
        copy.set_outputs([copy.nodes[value.node.id][value.index] for value in wanted])
        return replace(self, module=copy, output_names=names)

    def into_hir(self) -> GraphModule:
        """Return the graph as a HIR module, with the profile's fusion policy."""
        if self.module.level != HIR:
            raise GraphError(
                f"into_hir: {self.module.name!r} is at {self.module.level.upper()}", hint="use into_graph()"
            )
        return GraphModule.from_hir(self.module).with_fusion_policy(self.profile.fusion.policy)

    def into_graph(self) -> Graph:
        """Return the graph at MIR."""
        return self.into_hir().into_graph() if self.module.level == HIR else self.module

    def into_parts(self) -> tuple[GraphModule, Mapping[str, Array]]:
        """Return the HIR module and the weights."""
        return self.into_hir(), self.params

    def into_graph_parts(self) -> tuple[Graph, Mapping[str, Array]]:
        """Return the MIR graph and the weights."""
        return self.into_graph(), self.params

    def lower(self) -> BuiltModel:
        """Return the model at MIR."""
        return replace(self, module=self.into_graph())

    def with_execution_config(self, config: ModelExecutionConfig | ModelVariant) -> BuiltModel:
        """Return the model for one variant: its sizes in place of symbols, and the configuration's profile."""
        from rlx.runtime.variants import ModelExecutionConfig, ModelVariant  # few programs need it

        if isinstance(config, ModelVariant):
            config = ModelExecutionConfig(config, self.profile)
        if not isinstance(config, ModelExecutionConfig):
            hint = "such as rlx.ModelExecutionConfig.prefill(batch, seq)"
            raise GraphError(f"with_execution_config: found a {type(config).__name__}", hint=hint)
        return replace(self, module=config.specialise(self.module), profile=config.profile)

    def as_function(self, params: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """Return the model as a function of its inputs, with its own weights or others; see `ModelFlow.as_function`."""
        if self.flow is None:
            raise GraphError(f"as_function: {self.module.name!r} was not built from a flow")
        own = {name: self.params[name] for name in self.params if name not in self.params.computed}
        return self.flow.as_function(own if params is None else params)

    def cut(self, inputs: Mapping[str, Value], wanted: Mapping[str, Value]) -> BuiltModel:
        """Return the part of the graph after some values, which become inputs by name; `wanted` are its outputs.

        Original inputs and states stay, needed or not, so that all parts of a model are run in the same way.
        """
        names = {value: name for name, value in inputs.items()}
        part = live_copy(self.module, list(wanted.values()), keep=("input", "state"), cut=names, made_by="cut")
        return replace(self, module=part, output_names=list(wanted))

    def compile(
        self, device: str = "cpu", *, threads: int | None = None, profile: CompileProfile | None = None
    ) -> CompiledGraph:
        """Compile the graph and set its weights."""
        return Session(device, threads=threads).compile(self, profile=profile)


@dataclass(frozen=True)
class ModelFlow(StageList):
    """Stages in order, inputs and outputs. Every method returns a longer flow; nothing is changed in place."""

    name: str
    inputs: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    stages: tuple[FlowStage, ...] = ()
    output_name: str = "output"
    cache: KvCacheSpec | None = field(default=None)
    layout: KvLayout | None = None  # of the cache
    is_ragged: bool = False  # tokens are [tokens], with the row of each
    extra_names: tuple[str, ...] = ()
    side: tuple[SideOutputs, ...] = ()
    extensions: tuple[Extension, ...] = ()
    initialisers: Rules = ()
    init_patterns: tuple[str, ...] = ()  # of initialisers that must match a weight
    compile_profile: CompileProfile = field(default_factory=CompileProfile)
    places: tuple[Origin, ...] = field(default=(), compare=False, repr=False)

    def __repr__(self) -> str:
        inputs = ", ".join(name for name, _, _ in self.inputs)
        return f"<flow {self.name!r}: {len(self.stages)} stages from {inputs or 'no input'} to {self.output_name}>"

    def __str__(self) -> str:
        """The stages as a short tree, with their paths."""
        inputs = ", ".join(f"{name}: {tensor(shape, kind)}" for name, shape, kind in self.inputs)
        return "\n".join(
            [f"flow {self.name!r}: {inputs or 'no input'}", *stage_lines(self.stages), f"-> {self.output_name}"]
        )

    def _repr_html_(self) -> str:
        return box(repr(self)[1:-1], preformatted(str(self).splitlines()))

    # -- assembling --
    def with_stages(self, stages: Iterable[FlowStage]) -> Self:
        """The same flow with other stages."""
        stages = tuple(stages)
        return replace(self, stages=stages, places=self.places_of(stages))

    def input(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Self:
        """Declare a graph input; the first one is the initial value. A type in place of the shape gives both."""
        if any(name == other for other, _, _ in self.inputs):
            raise GraphError(f"flow {self.name!r}: has an input {name!r} already")
        try:
            type_ = tensor(shape, dtype)
        except GraphError as error:
            error.add_note(f"  of input {name!r} of flow {self.name!r}")
            raise
        return replace(self, inputs=(*self.inputs, (name, type_.shape, type_.dtype.name)))

    def lm_head(self, vocab: int, hidden: int, *, tied: bool) -> Self:
        """Append the language model head and name the output `logits`."""
        return self.stage(LmHead(vocab, hidden, tie_word_embeddings=tied)).output("logits")

    def output(self, name: str) -> Self:
        """Set the name of the main output, which is the last value."""
        return replace(self, output_name=name)

    def outputs(self, *names: str) -> Self:
        """Name the main output, and add further outputs: values that stages have named, and streams.

        The first name is for the main output, the last value; it must not be the name of another value.
        """
        if not names:
            raise GraphError(f"flow {self.name!r}: an output needs a name")
        return replace(self, output_name=names[0], extra_names=tuple(names[1:]))

    def with_extra_outputs(self, side: SideOutputs) -> Self:
        """Add the values that stages push to `side` as extra outputs."""
        return replace(self, side=(*self.side, side))

    def with_extensions(self, *extensions: Extension) -> Self:
        """Add functions that run after the last stage: `f(emit, output)` returns extra outputs by name."""
        return replace(self, extensions=(*self.extensions, *extensions))

    def kv_cache(self, layers: int, kv_heads: int = 0, head_dim: int = 0) -> Self:
        """Give layers a cache owned by the runtime: keys and values, or, without heads, only recurrent states."""
        return replace(self, cache=KvCacheSpec(layers, kv_heads, head_dim))

    def ragged(self) -> Self:
        """Take tokens of any sequences of the cache in one call: `[tokens]` in place of `[batch, seq]`.

        The first input and `positions` are `[tokens]`, and another input `rows` `[tokens]` has the sequence of each:
        its row in tables and recurrent states. Tokens of a sequence are in order, those of different ones may
        interleave. Values are `[1, tokens, ...]`.
        """
        if self.cache is None or not self.inputs:
            missing = "input" if self.cache is not None else "cache"
            raise GraphError(f"flow {self.name!r}: has no {missing}, so its tokens have no rows", hint="call kv_cache")
        (first, shape, kind), *others = self.inputs
        batched = [name for name, other, _ in others if sym.BATCH in other or sym.SEQ in other]
        if shape != (sym.BATCH, sym.SEQ) or batched:
            name, actual = (batched[0], "a batch") if batched else (first, f"shape {shape}")
            raise GraphError(f"flow {self.name!r}: input {name!r} has {actual}, expected tokens [batch, seq] alone")
        tokens = (dim("tokens"),)
        inputs = ((first, tokens, kind), ("rows", tokens, "i32"), *others)
        return replace(self, inputs=inputs, is_ragged=True)

    def cache_dtype(self, name: str) -> Self:
        """Set the dtype of the cache: keys and values are rounded to it before attention."""
        if self.cache is None:
            raise GraphError(f"flow {self.name!r}: has no cache, so it has no type")
        return replace(self, cache=replace(self.cache, dtype=name))

    def cache_layout(self, layout: KvLayout) -> Self:
        """Set the cache layout of the backend that runs the model (`Target.kv_layout`); the CPU's by default."""
        if self.cache is None:
            raise GraphError(f"flow {self.name!r}: has no cache, so it has no layout")
        return replace(self, layout=layout)

    def profile(self, profile: CompileProfile | str) -> Self:
        """Set the compile profile: a profile, or the name of a preset."""
        return replace(self, compile_profile=CompileProfile.preset(profile) if isinstance(profile, str) else profile)

    def profile_file(self, path: str | os.PathLike[str]) -> Self:
        """Set the compile profile from a TOML file."""
        return self.profile(CompileProfile.from_toml(path))

    def edit(self, pattern: str, f: Callable[[FlowStage], FlowStage | None]) -> Self:
        """Replace the stages at paths that match a pattern: `edit("layers.*", f)` replaces each by `f(stage)`.

        `*` matches anything but a dot, `**` anything. If `f` returns None, the stage is removed. A stage without a path
        is addressed by its class name.
        """
        seen: list[str] = []
        edits: list[FlowStage] = []

        def visit(path: str, stage: FlowStage) -> FlowStage | None:
            seen.append(path)
            if not matches(path, pattern):
                return None
            new = f(stage)
            if new is not None and not isinstance(new, FlowStage):
                kind = type(new).__name__
                raise GraphError(f"edit {path!r}: its function returned a {kind}, expected a stage or None")
            edits.append(StageSequence(()) if new is None else new)
            return edits[-1]

        stages = tuple(edit_stage(stage, visit) for stage in self.stages)
        if not edits:
            raise GraphError(f"edit: no stage of {self.name!r} matches {pattern!r}", hint=nearest(pattern, seen))
        place, old = here(), self.places_of(self.stages)
        # a stage that contains others keeps its place
        places = (place if any(stage is new for new in edits) else at for stage, at in zip(stages, old, strict=True))
        return replace(self, stages=stages, places=tuple(places))

    # -- building --
    def build(
        self, weights: WeightSource | Mapping[str, Any] | None = None, capture: str | Sequence[str] = (), *,
        strict: bool | None = None, training: bool = False,
    ) -> BuiltModel:  # fmt: skip
        """Build the graph of this flow with these weights; dropout is only part of it with `training`.

        Unused weights are logged as a warning, an error with `strict=True` and ignored with `strict=False`. `capture`
        is a pattern of stage paths, or several, such as `layers.*.attn`; the values of matching stages become outputs
        too. `*` matches anything but a dot, `**` anything.
        """
        if not self.inputs:
            raise GraphError(f"flow {self.name!r}: has no input")
        source = as_source(weights)
        graph = Graph(self.name, level=HIR)
        ctx = Emit(graph, weights=source, profile=self.compile_profile, state=FlowState(training=training))
        for name, shape, kind in self.inputs:
            ctx.input(name, shape, kind)
        if self.cache is not None:
            layout = self.layout or Session().target.kv_layout
            rows = ctx.flow_input("rows").id if self.is_ragged else None
            ctx.state.cache = CacheBindings(graph, replace(self.cache, layout=layout), token_rows=rows)
        value: FlowValue | None = ctx.flow_input(self.inputs[0][0])
        if self.is_ragged and value is not None:
            value = value.reshape(1, *value.shape)
        value = emit_all(ctx, self.stages, value, self.places_of(self.stages))
        if ctx.state.residuals:
            saved = ctx.state.residuals[-1].id
            path = ctx.state.residual_stages.get(saved)
            where = f" in stage {path!r}" if path else ""
            hint = "each residual_save needs a residual_add"
            raise GraphError(f"flow {self.name!r}: residual {saved!r} was saved{where} and never added", hint=hint)
        main = ctx.need(value, self.name)
        outputs = [(self.output_name, main), *self._extra(ctx, main)]
        _distinct([name for name, _ in outputs])
        patterns = (capture,) if isinstance(capture, str) else capture
        captured = _captured(graph, patterns, dict(outputs))
        if captured.get(self.output_name, main) is not main:
            raise RequestError(
                f"capture: {self.output_name!r} is a stage of {self.name!r} and the name of its main output",
                hint="flow.output(name) gives the output another name",
            )
        all_outputs = {**dict(outputs), **captured, **dict(outputs)}  # outputs come first, and take precedence
        graph.set_outputs(list(all_outputs.values()))
        cache = None if ctx.state.cache is None else ctx.state.cache.bound
        built = BuiltModel(
            graph, Params(graph, ctx.params, source), list(all_outputs), cache, self.compile_profile, self,
            skips_dropout=ctx.state.dropouts > 0 and not training,
        )  # fmt: skip
        if strict is not False:
            self._check_used(built, source, strict)
        return built

    def _check_used(self, built: BuiltModel, source: WeightSource, strict: bool | None) -> None:
        """Raise if weights are unused (`strict`), or log those of sources that were not checked."""
        unused = built.unused_weights if strict else [name for name in unchecked(source) if name not in built.params]
        if not unused:
            return
        count = f"{len(unused)} weights are" if unused[1:] else "1 weight is"
        shown = ", ".join(shortened(repr(name), 80) for name in unused[:4]) + (", ..." if unused[4:] else "")
        problem = f"flow {self.name!r}: {count} not used: {shown}"
        if strict:
            raise BindError(problem, hint=nearest(unused[0], built.params))
        import logging  # lazy: rarely needed

        logging.getLogger("rlx.flow").warning("%s; build(weights, strict=False) silences this", problem)

    def build_with(
        self, weights: WeightSource | Mapping[str, Any] | None, packed: Mapping[str, Any], capture: Sequence[str] = ()
    ) -> BuiltModel:
        """Build with some weights replaced; arrays of blocks stay packed."""
        return self.build(LayeredWeights(MapWeights(packed), as_source(weights)), capture)

    def initialised(self, rules: Mapping[str, Initialiser | float], *, strict: bool = True) -> Self:
        """Add rules for `init`, by patterns of weight names: the first match wins, later calls take precedence.

        In patterns of weight names, `*` matches anything, dots included, in upper or lower case. A pattern that matches
        no weight is an error in `init`, unless `strict=False`.
        """
        new_rules = tuple((pattern, as_initialiser(rule)) for pattern, rule in rules.items())
        patterns = (*self.init_patterns, *(rules if strict else ()))
        return replace(self, initialisers=(*new_rules, *self.initialisers), init_patterns=patterns)

    def init(self, key: Any, *, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Array]:
        """Random f32 weights by name, for `build`: `flow.build(flow.init(rlx.random.key(0)))`.

        The flow of a model family is initialised like its published implementation. Otherwise norm scales are 1,
        biases 0, weights of `load_param(..., init=...)` as declared, and everything else normal with a standard
        deviation of 0.02; `initialised` changes these rules. `shapes` has the shapes of weights whose stages do not
        know them.
        """
        wanted = WantedWeights(shapes)
        try:
            self.build(wanted)
        except Exception:
            wanted.check_shapes()  # a weight of unknown shape is the likelier cause
            raise
        wanted.check_shapes()
        wanted.check()
        check_names_matched("init", self.init_patterns, wanted.asked)
        return make(wanted.asked, key, self.initialisers, wanted.declared)

    def as_function(self, params: Mapping[str, Any], *, training: bool = False) -> Callable[..., Any]:
        """Return the flow as a function of its inputs, in order or by name, for `rlx.grad`, `jvp`, `vmap` and `jit`.

        `params` are weights by name, arrays or traced ones: `rlx.grad(lambda p: flow.as_function(p)(x).sum())(params)`
        is the gradient with respect to the weights. It is a function of entire sequences: without the flow's KV cache,
        and with logits of all tokens. Quantised weights are dequantised. Several outputs are a dict by name.
        """
        from rlx.flow.as_function import flow_function  # imports all transforms

        return flow_function(self, params, training=training)

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
        for extend in self.extensions:
            emit = Emit.of(ctx)
            extra = extend(emit, emit.wrap(main))
            if not isinstance(extra, Mapping | None):
                kind = type(extra).__name__
                raise GraphError(
                    f"flow {self.name!r}: an extension returned a {kind}, expected outputs by name, or None"
                )
            yield from ((name, emit.wrap(value).id) for name, value in (extra or {}).items())


def _distinct(names: list[str]) -> list[str]:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise GraphError(f"outputs: two are called {name!r}")
    return names


def stage_values(module: Graph) -> dict[str, Value]:
    """Return the value of each stage by path; for parts of stages, the last node built under the path."""
    values: dict[str, Value] = {}
    for node in module.nodes:
        if node.origin.stage and LEAF not in node.definition.traits:
            parts = node.origin.stage.split(".")
            for n in range(len(parts), 0, -1):
                values[".".join(parts[:n])] = node[0]
    return values | module.stages


def matching(values: Mapping[str, Value], pattern: str) -> dict[str, Value]:
    """Return the stages that a pattern matches; `layers.3.out` is the same as `layers.3`."""
    matched = {path: value for path, value in values.items() if matches(path, pattern)}
    if not matched and pattern.endswith(OUT):
        plain = pattern.removesuffix(OUT)
        matched = {path + OUT: value for path, value in values.items() if matches(path, plain)}
    return matched


def _captured(module: Graph, patterns: Sequence[str], outputs: Iterable[str]) -> dict[str, Value]:
    """Return the stages that patterns match; a pattern may also match an existing output."""
    values = stage_values(module) if patterns else {}
    captured: dict[str, Value] = {}
    for pattern in patterns:
        matched = matching(values, pattern)
        if not matched and not any(matches(name, pattern) for name in outputs):
            raise RequestError(
                f"capture: no stage of {module.name!r} matches {pattern!r}", hint=nearest(pattern, [*values, *outputs])
            )
        captured |= matched
    return captured
