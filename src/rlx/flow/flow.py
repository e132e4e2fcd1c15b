"""ModelFlow: a model as a sequence of stages.

ModelFlow("llama").input("tokens", (BATCH, SEQ), "i32").token_embed().repeat_layers(...).final_norm(eps).lm_head(...)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Self

from rlx.arrays import Array
from rlx.dtypes import DTypeLike
from rlx.errors import BindError, GraphError, RequestError, nearest, shortened
from rlx.fast_dataclass import dataclass
from rlx.flow.built import BuiltModel, Params, distinct
from rlx.flow.context import FlowCtx
from rlx.flow.emit import Emit
from rlx.flow.init import Initialiser, Rules, WantedWeights, as_initialiser, make
from rlx.flow.layers import StageList
from rlx.flow.patterns import check_names_matched, matches
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.stage_values import matched_stages, stage_hint, stage_values
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.embed import LmHead
from rlx.flow.stages.structure import Sequence as StageSequence
from rlx.flow.stages.structure import edit_stage, emit_all
from rlx.flow.state import CacheBindings, FlowState, FlowValue
from rlx.flow.tree import stage_lines
from rlx.flow.weights import LayeredWeights, MapWeights, WeightSource, as_source, unchecked
from rlx.ir.graph import Graph, Value
from rlx.ir.provenance import Origin, added_at, here
from rlx.ir.registry import HIR
from rlx.kv_layout import KvLayout
from rlx.notebook import box, preformatted
from rlx.profile import CompileProfile
from rlx.runtime.kv_spec import KvCacheSpec as KvCacheSpec
from rlx.runtime.session import Session
from rlx.types import ShapeLike, TensorType, dim, sym, tensor

if TYPE_CHECKING:
    pass


Extension = Callable[[Emit, FlowValue], Mapping[str, Value | FlowValue] | None]


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
    input_places: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

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
        inputs = (*self.inputs, (name, type_.shape, type_.dtype.name))
        return replace(self, inputs=inputs, input_places={**self.input_places, name: here()})

    def lm_head(self, vocab: int, hidden: int, *, tied: bool) -> Self:
        """Append the language model head and name the output `logits`."""
        return self.stage(LmHead(vocab, hidden, tie_word_embeddings=tied)).output("logits")

    def output(self, name: str) -> Self:
        """Set the name of the main output, which is the last value."""
        return replace(self, output_name=name)

    def outputs(self, *names: str) -> Self:
        """Name the main output, and add further outputs: values that stages have named, streams, and stages by path.

        The first name is for the main output, the last value; it must not be the name of another value. A name that
        several stages use needs its path: `layers.0.conv`.
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
            with added_at(self.input_places.get(name, here()), sys._getframe()):
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
        self._check_mask(ctx.state, graph)
        main = ctx.need(value, self.name)
        outputs = [(self.output_name, main), *self._extra(ctx, main)]
        distinct([name for name, _ in outputs])
        patterns = (capture,) if isinstance(capture, str) else capture
        captured = matched_stages(graph, patterns, dict(outputs))
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

    def _check_mask(self, state: FlowState, graph: Graph) -> None:
        """Raise if no stage reads the padding mask that the flow declares."""
        if state.padding is None:
            return
        masks = state.padding, state.inputs[state.padding_input][0]
        readers = (node for node in graph.nodes if node is not state.padding.node)
        if not any(operand in masks for node in readers for operand in node.operands):
            raise GraphError(
                f"flow {self.name!r}: no stage reads the mask {state.padding_input!r} of attn_mask",
                hint="put attn_mask before the layers: attention after it does not see padding",
            )

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

        logging.getLogger("rlx.flow").warning("%s; strict=False silences this", problem)

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

    def as_function(
        self, params: Mapping[str, Any], *, training: bool = False, strict: bool | None = None
    ) -> Callable[..., Any]:
        """Return the flow as a function of its inputs, in order or by name, for `rlx.grad`, `jvp`, `vmap` and `jit`.

        Inputs that stages declare come after those of the flow. With `training`, dropout needs a random key, the input
        `dropout.key`. `strict` is about unused weights, as in `build`.

        `params` are weights by name, arrays or traced ones: `rlx.grad(lambda p: flow.as_function(p)(x).sum())(params)`
        is the gradient with respect to the weights. It is a function of entire sequences: without the flow's KV cache,
        and with logits of all tokens. Quantised weights are dequantised. Several outputs are a dict by name.
        """
        from rlx.flow.as_function import flow_function  # imports all transforms

        return flow_function(self, params, training=training, strict=strict)

    def _value(self, ctx: FlowCtx, name: str, known: Mapping[str, Value]) -> Value:
        """Return the value of a stream, of a name that one stage uses, or of a path."""
        named_at = ctx.state.named_at
        by_path = {path: value for values in named_at.values() for path, value in values.items()}
        values = stage_values(ctx.hir()) | by_path | dict(known)
        users = named_at.get(name, {})
        if known.get(name) not in users.values():
            users = {}  # a stage has replaced it, as the final state of a scan
        if name in values and (len(users) < 2 or name in users):
            return users.get(name, values[name])
        paths = [path for path in values if path.endswith(f".{name}")]
        problem = f"{len(paths)} values are called {name!r}" if users else f"no value is called {name!r}"
        listed = f"give the path: {', '.join(paths[:8])}" + (", ..." if paths[8:] else "")
        raise GraphError(f"flow {self.name!r}: {problem}", hint=listed if paths else stage_hint(name, list(values)))

    def _extra(self, ctx: FlowCtx, main: Value) -> Iterator[tuple[str, Value]]:
        known = {name: value.id for name, value in ctx.state.streams.items()} | ctx.state.named
        if known.get(self.output_name, main) is not main:
            raise GraphError(
                f"flow {self.name!r}: the main output is called {self.output_name!r}, and so is another value",
                hint=f'the first name of outputs is that of the main one: outputs("main", "{self.output_name}")',
            )
        yield from ((name, self._value(ctx, name, known)) for name in self.extra_names)
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
