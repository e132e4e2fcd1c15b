"""BuiltModel: what a flow builds. A graph, its weights by name, the names of its outputs, and its compile profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from rlx.arrays import Array
from rlx.dtypes import F32, DType
from rlx.errors import BindError, GraphError, nearest, shortened
from rlx.fast_dataclass import dataclass
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.state import Shape
from rlx.flow.weights import MapWeights, WeightSource
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import HIR, MIR
from rlx.ir.rewrite import copy_graph, live_copy
from rlx.module import GraphModule
from rlx.notebook import box, table
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.compiled import output_names as unnamed
from rlx.runtime.kv_spec import KvCacheSpec as KvCacheSpec
from rlx.runtime.session import Session

if TYPE_CHECKING:
    from rlx.flow.flow import ModelFlow
    from rlx.runtime.variants import ModelExecutionConfig, ModelVariant


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
        return f"<params: {self.counts}>"

    @property
    def counts(self) -> str:
        """How many weights there are, and how many tables that stages computed, such as those of RoPE."""
        computed = sum(name in self.computed for name in self._types)
        loaded = len(self._types) - computed
        return f"{loaded} weight{'s' * (loaded != 1)}" + (f", {computed} computed" if computed else "")

    def _repr_html_(self) -> str:
        rows = [(name, str(type_)) for name, type_ in self._types.items()]
        return box(self.counts, table(("name", "type"), rows))


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
        return f"<built {self.module.name!r}: {inputs} -> {shortened(outputs, 120)}, {self.params.counts}>"

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
        return cls(graph, weights, distinct(names), profile=profile or CompileProfile())

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
        names = distinct([*self.output_names, *(name for name, _ in pushed)])
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


def distinct(names: list[str]) -> list[str]:
    """Names of outputs, if no two are equal."""
    for i, name in enumerate(names):
        if name in names[:i]:
            raise GraphError(f"outputs: two are called {name!r}")
    return names
