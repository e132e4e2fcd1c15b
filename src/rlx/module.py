"""GraphModule: one module at any of three levels: blocks (HIR), ops (MIR) or a planned program (LIR).

It builds at the upper two levels, lowers, plans and prints every level; `rlx.compile` accepts it at each of them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from rlx.dtypes import DTypeLike
from rlx.errors import GraphError, RlxError, nearest
from rlx.hir.lower import lower
from rlx.ir import registry
from rlx.ir.builders import Builder, builder, is_op, op_names
from rlx.ir.graph import Graph, Value
from rlx.ir.op_methods import ModuleOps
from rlx.ir.provenance import stage as provenance
from rlx.ir.registry import HIR, LEAF, MIR
from rlx.lir.module import LirModule, count_of, lir_lines, plan_lir
from rlx.notebook import box, preformatted
from rlx.profile import CompileProfile, Fusion, FusionPolicy
from rlx.target import Target
from rlx.types import DimBinding, ShapeLike, Size, TensorType

Built = TypeVar("Built")


class GraphStage(enum.Enum):
    """The level of a module."""

    HIR = "hir"
    MIR = "mir"
    LIR = "lir"


# -- modules ----------------------------------------------------------------------------------------------------------
# Attributes of a planned module's graph that can be read; everything else on a Graph builds.
_READS = frozenset((
    "nodes", "inputs", "params", "outputs", "limits", "has", "users", "reachable", "symbols", "fingerprint", "text",
    "verify", "level", "copy",
))  # fmt: skip


class _Block(Builder):
    """The builder of a block, which only HIR modules have."""

    def __call__(self, module: GraphModule, /, *operands: Any, **attrs: Any) -> Any:
        results = module._blocks(self.__name__, *operands, **attrs)
        return results if len(results) != 1 else results[0]


@runtime_checkable
class WithWeights(Protocol):
    """A graph with its weights and compile profile, such as a built flow; accepted wherever a module is."""

    @property
    def module(self) -> Graph: ...

    @property
    def params(self) -> Mapping[str, Any]: ...

    @property
    def output_names(self) -> Sequence[str]: ...

    @property
    def profile(self) -> CompileProfile: ...


class GraphModule(ModuleOps):
    """A module at one of three levels. At HIR it builds with blocks, at MIR it is a `Graph`, at LIR it is planned."""

    def __init__(self, graph: Graph) -> None:
        if not isinstance(graph, Graph):
            raise GraphError(f"GraphModule: takes a Graph, found {type(graph).__name__}")
        self._graph = graph
        self._lir: LirModule | None = None
        self._policy = FusionPolicy.DIRECT

    # -- constructors --
    @classmethod
    def define(cls, name: str, build: Callable[[GraphModule], Any]) -> GraphModule:
        """Builds an HIR module with a function that takes it and returns the output value, or a tuple of them."""
        module = cls.hir(name)
        outputs = build(module)
        if outputs is not None:
            if not isinstance(outputs, (Value, tuple, list)):
                problem = f"the function returned a {type(outputs).__name__}, expected a value or several"
                raise GraphError(f"define {name!r}: {problem}")
            module.set_outputs(outputs)
        elif not module._graph.outputs:
            raise GraphError(f"define {name!r}: the function returned no value", hint="return the output, or a tuple")
        return module

    @classmethod
    def hir(cls, name: str) -> GraphModule:
        """An empty HIR module."""
        return cls(Graph(name, level=HIR))

    @classmethod
    def mir(cls, name: str) -> GraphModule:
        """An empty MIR module."""
        return cls(Graph(name))

    @classmethod
    def from_hir(cls, graph: Graph) -> GraphModule:
        """Wraps an HIR graph."""
        return cls(_at_level("from_hir", graph, HIR))

    @classmethod
    def from_mir(cls, graph: Graph) -> GraphModule:
        """Wraps an MIR graph."""
        return cls(_at_level("from_mir", graph, MIR))

    @classmethod
    def from_graph(cls, graph: Graph) -> GraphModule:
        """The same as `from_mir`."""
        return cls(_at_level("from_graph", graph, MIR))

    @classmethod
    def from_lir(cls, lir: LirModule) -> GraphModule:
        """Wraps a plan."""
        if not isinstance(lir, LirModule):
            raise GraphError(
                f"from_lir: takes an LirModule, found {type(lir).__name__}", hint="module.plan() makes one"
            )
        module = cls(lir.mir)
        module._lir = lir
        return module

    # -- properties --
    @property
    def name(self) -> str:
        """The name of the module's graph."""
        return self._graph.name

    @property
    def stage(self) -> GraphStage:
        """The module's level."""
        return GraphStage.LIR if self._lir is not None else GraphStage(self._graph.level)

    @property
    def fusion_policy(self) -> FusionPolicy | None:
        """How blocks will be lowered; None outside HIR."""
        return self._policy if self.stage is GraphStage.HIR else None

    def with_fusion_policy(self, policy: FusionPolicy) -> GraphModule:
        """Set how blocks will be lowered; returns the module."""
        self._need("with_fusion_policy", GraphStage.HIR)
        self._policy = Fusion(policy=policy).policy
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphModule):
            return False
        same = self.stage is other.stage and self.fusion_policy is other.fusion_policy
        return same and self._graph == other._graph and (self._lir is None) == (other._lir is None)

    def __hash__(self) -> int:
        return hash((self.stage, self._graph))

    # -- building --
    def block(self, name: str, build: Callable[[GraphModule], Built]) -> Built:
        """Calls `build` in a named scope: nodes it adds carry the path `name`, nested with dots. Returns its result."""
        self._need("block", GraphStage.HIR, GraphStage.MIR)
        with provenance(name):
            return build(self)

    named = block

    def input(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Value:
        """A tensor passed to each run."""
        return self._open("input").input(name, shape, dtype)

    def param(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Value:
        """A weight: set once and kept for all runs."""
        return self._open("param").param(name, shape, dtype)

    def state(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = "f32") -> Value:
        """Memory passed to each run and updated in place."""
        return self._open("state").state(name, shape, dtype)

    def constant(self, data: Any, dtype: DTypeLike | None = None) -> Value:
        """Numbers embedded in the module."""
        return self._open("constant").constant(data, dtype)

    def set_outputs(self, outputs: Iterable[Value] | Value) -> GraphModule:
        """Set the module's outputs; returns the module."""
        self._open("set_outputs").set_outputs(outputs)
        return self

    def set_hir_outputs(self, outputs: Iterable[Value] | Value) -> GraphModule:
        """The same as `set_outputs`."""
        return self.set_outputs(outputs)

    def finish_hir(self, output: Iterable[Value] | Value) -> GraphModule:
        """Set the output and return the finished module."""
        return self.set_outputs(output)

    # -- blocks --
    def linear(
        self,
        x: Value,
        w: Value,
        bias: Value | None = None,
        *,
        activation: Any = None,
        out_shape: ShapeLike | None = None,
    ) -> Value:
        """activation(x @ w + bias)."""
        return self._block("linear", x, w, bias, activation=activation, out_shape=out_shape)

    def linear_fused(
        self, x: Value, w: Value, bias: Value, *, activation: Any = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """`linear` as a single MIR op under every fusion policy."""
        return self._block("linear_fused", x, w, bias, activation=activation, out_shape=out_shape)

    def shared_linear_pair(
        self, x: Value, w_first: Value, w_second: Value, *, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """x @ w_first and x @ w_second. `out_shape` is the shape of the first, or one per product."""
        first, second = self._blocks("shared_linear_pair", x, w_first, w_second, out_shape=out_shape)
        return first, second

    def swiglu_ffn(
        self, x: Value, up_w: Value, gate_w: Value, down_w: Value, *, out_shape: ShapeLike | None = None
    ) -> Value:
        """(silu(x @ gate_w) * (x @ up_w)) @ down_w."""
        return self._block("swiglu_ffn", x, up_w, gate_w, down_w, out_shape=out_shape)

    def residual_rms_norm(
        self, x: Value, residual: Value, gamma: Value, beta: Value | None = None, *, eps: float,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """rms_norm(x + residual)."""
        return self._block("residual_rms_norm", x, residual, gamma, beta, eps=eps, out_shape=out_shape)

    @builder
    def attention(
        self, q: Value, k: Value, v: Value, mask: Value | None = None, *, num_heads: int | None = None,
        head_dim: int | None = None, mask_kind: Any = None, scale: float | None = None, softcap: float | None = None,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """`attention_block` at HIR, which needs num_heads and head_dim; the op `attention` at MIR."""
        attrs = {"num_heads": num_heads, "head_dim": head_dim, "mask_kind": mask_kind, "scale": scale}
        return self._named_op("attention", q, k, v, mask, **attrs, softcap=softcap, out_shape=out_shape)

    @builder
    def rope(
        self, x: Value, cos: Value, sin: Value, positions: Value | None = None, *, head_dim: int | None = None,
        n_rot: int | None = None, style: str | None = None, out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """`rope_block` at HIR, which needs head_dim and takes n_rot; the op `rope`, which takes style, at MIR."""
        attrs = {"head_dim": head_dim, "n_rot": n_rot, "style": style, "out_shape": out_shape}
        return self._named_op("rope", x, cos, sin, positions, **attrs)

    def _named_op(self, name: str, *operands: Any, **attrs: Any) -> Value:
        """Adds an op that has another name as an HIR block; errors use the name that was called."""
        op = f"{name}_block" if self.stage is GraphStage.HIR else name
        attrs = {key: value for key, value in attrs.items() if value is not None}
        try:
            return self._open(name).one(op, *operands, **attrs)
        except RlxError as error:
            error.args = (str(error.args[0]).replace(op, name), *error.args[1:])
            error.__notes__ = [note.replace(op, name) for note in error.notes]
            raise

    def rms_norm(
        self, x: Value, gamma: Value | None = None, beta: Value | None = None, *, eps: float = 1e-6,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """x / √(mean of squares + eps) · gamma + beta."""
        return self._open("rms_norm").one("rms_norm", x, gamma, beta, eps=eps, out_shape=out_shape)

    def depthwise_conv1d_causal(
        self, x: Value, weight: Value, left_pad: Value, segments: Value | None = None, *, kernel_size: int,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """Filters each channel along the sequence; `left_pad` holds the tokens before, [batch, kernel_size - 1, C]."""
        graph = self._open("depthwise_conv1d_causal")
        attrs = {"kernel_size": kernel_size, "out_shape": out_shape}
        return graph.one("depthwise_conv1d_causal", x, weight, left_pad, segments, **attrs)

    def gated_delta_net(
        self, q: Value, k: Value, v: Value, g: Value, beta: Value, segments: Value | None = None, *, state_size: int,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """Linear attention with the gated delta rule."""
        graph = self._open("gated_delta_net")
        return graph.one("gated_delta_net", q, k, v, g, beta, segments, state_size=state_size, out_shape=out_shape)

    def gated_delta_net_carry(
        self, q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value, segments: Value | None = None, *,
        state_size: int, out_shape: Any = None,
    ) -> tuple[Value, Value]:  # fmt: skip
        """`gated_delta_net` from a carried state; also returns the state after the last token."""
        graph, attrs = self._open("gated_delta_net_carry"), {"state_size": state_size, "out_shape": out_shape}
        out, after = graph.apply("gated_delta_net_carry", q, k, v, g, beta, state, segments, **attrs)
        return out, after

    def dequant_matmul(
        self, x: Value, w: Value, scale: Value | None = None, zp: Value | None = None, *, scheme: Any,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """x times a quantised weight."""
        return self._open("dequant_matmul").dequant_matmul(x, w, scale, zp, scheme=scheme, out_shape=out_shape)

    def hir_mir(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> Any:
        """Adds any MIR op to an HIR module. Returns its result, or a tuple of them."""
        self._need("hir_mir", GraphStage.HIR)
        if registry.get(op).level != MIR or LEAF in registry.get(op).traits:
            raise GraphError(f"hir_mir: {op} is not an MIR op", hint=f"call module.{op}(...)")
        return self._graph.apply(op, *inputs, **attrs)

    def _blocks(self, op: str, *operands: Any, **attrs: Any) -> tuple[Value, ...]:
        if self.stage is not GraphStage.HIR:
            hint = "build blocks in GraphModule.hir(...) or GraphModule.define(...)"
            raise GraphError(f"{op}: is an HIR block, module {self.name!r} is at {self.stage.name}", hint=hint)
        return self._graph.build(op, operands, attrs).results

    def _block(self, op: str, *operands: Any, **attrs: Any) -> Value:
        return self._blocks(op, *operands, **attrs)[0]

    # -- levels --
    def lower(self) -> GraphModule:
        """Lowers HIR to MIR; a module at another level is returned unchanged."""
        return self if self.stage is not GraphStage.HIR else GraphModule(lower(self._graph, self._policy))

    def plan(self, target: Target | None = None, profile: CompileProfile | None = None) -> GraphModule:
        """Plans the module for a target (None: this machine); an LIR module is returned unchanged."""
        if self._lir is not None:
            return self
        if not self._graph.outputs:
            raise GraphError(f"plan: module {self.name!r} has no outputs", hint="call set_outputs([...])")
        from rlx.backends.base import backend

        chosen = target or backend("cpu").target()
        return GraphModule.from_lir(plan_lir(self._graph.verify(), chosen, self.profile(profile)))

    def profile(self, explicit: CompileProfile | None = None) -> CompileProfile:
        """The profile to compile with: the explicit one, else the default with the module's own fusion policy."""
        return (explicit or CompileProfile(Fusion(policy=self._policy))).in_environment()

    def into_mir(self) -> Graph:
        """The MIR graph: lowered from HIR, or the one an LIR module was planned from."""
        return self.lower()._graph

    def into_graph(self) -> Graph:
        """The same as `into_mir`."""
        return self.into_mir()

    def into_hir(self) -> Graph | None:
        """The HIR graph; None at another level."""
        return self._graph if self.stage is GraphStage.HIR else None

    def into_lir(self) -> LirModule | None:
        """The plan; None at another level."""
        return self._lir

    def as_hir(self) -> Graph | None:
        """The HIR graph; None at another level."""
        return self.into_hir()

    def as_hir_mut(self) -> Graph | None:
        """The same as `as_hir`: nodes added to that graph are part of the module."""
        return self.as_hir()

    def as_lir(self) -> LirModule | None:
        """The plan; None at another level."""
        return self._lir

    def as_mir(self) -> Graph | None:
        """The MIR graph at MIR and LIR; None at HIR."""
        return None if self.stage is GraphStage.HIR else self._graph

    def as_graph(self) -> Graph | None:
        """The same as `as_mir`."""
        return self.as_mir()

    # -- text --
    def __str__(self) -> str:
        """Text that `Graph.parse` reads back: the graph at this level; at LIR, the MIR that was planned."""
        return self._graph.text()

    def __repr__(self) -> str:
        graph = self._graph
        return f"<module {self.name!r} {self.stage.value}: {len(graph.nodes)} nodes, {len(graph.outputs)} outputs>"

    def _repr_html_(self) -> str:
        if self._lir is None:
            return self._graph._repr_html_()
        return box(repr(self)[1:-1], preformatted(self._lir.main.text().split("\n")))

    def inspect(self, sizes: Mapping[str, int] | DimBinding | None = None) -> str:
        """The level as text, with counts; at LIR also fusion and arena, planned for `sizes` if present."""
        known = sizes.as_dict() if isinstance(sizes, DimBinding) else dict(sizes or {})
        return "\n".join(lir_lines(self._lir, known) if self._lir is not None else self._graph_lines())

    def _graph_lines(self) -> list[str]:
        graph = self._graph
        lines = [_head(self.stage.value, graph)]
        if self.stage is GraphStage.HIR:
            lines[0] += f", fusion {self._policy.value}"
        lines += _counts(graph)
        return [*lines, "", graph.text(origins=True)]

    # -- reading as a graph --
    def __len__(self) -> int:
        return len(self._read("len").nodes)

    def __bool__(self) -> bool:
        return True  # regardless of its length

    if not TYPE_CHECKING:  # type checkers use the stubs

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            name = registry.current_name(name)
            if not is_op(name) and name not in _READS and not hasattr(Graph, name):
                known = [*registry.OPS, *(n for n in dir(GraphModule) if not n.startswith("_"))]
                raise AttributeError(f"GraphModule has no attribute {name!r}. {nearest(name, known) or ''}".strip())
            if is_op(name) and registry.OPS[name].level == HIR:
                return MethodType(_Block(registry.OPS[name]), self)
            return getattr(self._read(name) if name in _READS else self._open(name), name)

    def __dir__(self) -> list[str]:
        """The attributes available at this level: ops while it can be built, graph attributes once it reads as one."""
        names = {*object.__dir__(self)}
        if self.stage is not GraphStage.LIR:
            names |= {*op_names(), *(name for name in dir(Graph) if not name.startswith("_") and name not in _READS)}
        return sorted(names if self.stage is GraphStage.HIR else names | _READS)

    def _read(self, call: str) -> Graph:
        if self.stage is GraphStage.HIR:
            hint = "call lower() first; as_hir() is its graph"
            raise GraphError(f"{call}: module {self.name!r} is at HIR and does not read as a graph", hint=hint)
        return self._graph

    def _open(self, call: str) -> Graph:
        """The graph, if it can still be built."""
        if self.stage is GraphStage.LIR:
            raise GraphError(
                f"{call}: module {self.name!r} is at LIR, it is planned already", hint="build at HIR or MIR"
            )
        return self._graph

    def _need(self, call: str, *stages: GraphStage) -> None:
        if self.stage not in stages:
            wanted = " or ".join(s.name for s in stages)
            raise GraphError(f"{call}: expected a module at {wanted}, {self.name!r} is at {self.stage.name}")


def _at_level(where: str, graph: Graph, level: str) -> Graph:
    if not isinstance(graph, Graph) or graph.level != level:
        actual = f"one at {graph.level}" if isinstance(graph, Graph) else type(graph).__name__
        raise GraphError(f"{where}: takes a graph at {level}, found {actual}")
    return graph


# -- inspection -------------------------------------------------------------------------------------------------------
def _head(level: str, graph: Graph) -> str:
    leaves = f"{count_of(len(graph.inputs), 'input')}, {count_of(len(graph.params), 'param')}"
    nodes, outputs = count_of(len(graph.nodes), "node"), count_of(len(graph.outputs), "output")
    return f"{level} @{graph.name}: {nodes} ({leaves}), {outputs}"


def _counts(graph: Graph) -> list[str]:
    """Counts of each block and op, the symbols, and the bytes of the weights."""
    lines = []
    for title, level in (("blocks", HIR), ("ops", MIR)):
        uses = Counter(n.op for n in graph.nodes if n.definition.level == level and LEAF not in n.definition.traits)
        if uses:
            shown = ", ".join(f"{op} {count}" for op, count in sorted(uses.items(), key=lambda x: (-x[1], x[0])))
            lines.append(f"  {title}: {shown}")
    if graph.symbols():
        lines.append(f"  symbols: {', '.join(graph.symbols())}")
    weights: Size = 0
    for node in graph.params:
        weights = weights + node.types[0].bytes
    lines.append(f"  weights: {weights} bytes")
    return lines
