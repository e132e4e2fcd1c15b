"""State that stages share while a flow is built: the flow value, and values stored by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from rlx.dtypes import dtype
from rlx.errors import GraphError, nearest
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Value
from rlx.ir.op_methods import FlowValueOps
from rlx.ir.operators import Operators
from rlx.ir.provenance import here
from rlx.ops.attention import split_mask
from rlx.runtime.kv_spec import KvCacheSpec, table_name
from rlx.types import Size, dim, sym

Shape = tuple[Size, ...]
MAIN_ROPE = "rope"  # the default name of RoPE tables


def _by_value(name: str) -> Callable[..., Any]:
    """Return a method of `FlowValue` that forwards to its graph value."""

    def method(self: FlowValue, *operands: Any, **settings: Any) -> Any:
        return _flowing(getattr(self.id, name)(*operands, **settings))

    method.__name__ = name
    return method


@dataclass(frozen=True, slots=True)
class FlowValue(FlowValueOps, Operators):
    """The value passed from stage to stage, with its shape.

    It has the operators and ops of its graph value, `id`, and they return flow values: `value * 2`,
    `value.softmax(axis=-1)`.
    """

    id: Value
    shape: Shape

    @classmethod
    def of(cls, value: Value) -> FlowValue:
        """A graph value, ready to flow."""
        return cls(value, value.shape)

    def __rlx_value__(self) -> Value:
        """Return the graph value, for ops that take it as an operand."""
        return self.id

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in FlowValue.__slots__:
                raise AttributeError(name)
            member = getattr(self.id, name)
            if not callable(member):
                return _flowing(member)
            return functools.wraps(member)(lambda *operands, **attrs: _flowing(member(*operands, **attrs)))

    def __dir__(self) -> list[str]:
        return sorted({*FlowValueOps.__dir__(self), *(name for name in dir(Value) if not name.startswith("_"))})

    def operate(self, op: str, *operands: Any) -> FlowValue:
        """Apply a Python operator to the graph value."""
        return FlowValue.of(self.id.graph.one(op, *operands))

    # NumPy dispatches `np.tanh(value)` and `array + value` here
    __array_ufunc__, __array_function__ = _by_value("__array_ufunc__"), _by_value("__array_function__")
    __getitem__, __setitem__ = _by_value("__getitem__"), _by_value("__setitem__")
    # raise: there is no number while the graph is built
    __bool__, __int__, __float__ = _by_value("__bool__"), _by_value("__int__"), _by_value("__float__")
    __iter__ = _by_value("__iter__")


def _flowing(result: Any) -> Any:
    """Wrap the result of an op as flow values, also in lists and tuples."""
    if isinstance(result, (list, tuple)):
        return type(result)(map(_flowing, result)) if type(result) in (list, tuple) else result
    return FlowValue.of(result) if isinstance(result, Value) else result


@dataclass(frozen=True, slots=True)
class CacheBindings:
    """The runtime-owned cache: pools of keys and values per layer, tables of their pages, and recurrent states."""

    graph: Graph
    spec: KvCacheSpec
    windows: dict[int, int] = field(default_factory=dict)  # by layer, once it has attended
    tables: dict[int, Value] = field(default_factory=dict)  # page tables, by window
    states: dict[str, tuple[int, ...]] = field(default_factory=dict)  # recurrent states, shape per sequence
    lengths: list[tuple[int, bool]] = field(default_factory=list)  # (limit, grows) of RoPE tables by length
    token_rows: Value | None = None  # for ragged tokens: the sequence of each

    def attend(
        self, layer: int, q: Value, k: Value, v: Value, positions: Value, *, mask_kind: str,
        **rotation_and_scale: Any,
    ) -> Value:  # fmt: skip
        """Append keys and values of the tokens at these positions to a layer's cache, then attend over it.

        Further arguments are operands and attributes of the block `cached_self_attention`. A layer with a sliding
        window has a ring buffer, in which new positions overwrite old ones.
        """
        if layer in self.windows or not 0 <= layer < self.spec.layers:
            problem = "attends twice" if layer in self.windows else f"is not one of its {self.spec.layers}"
            raise GraphError(f"kv_cache: layer {layer} {problem}", hint="layer_idx counts the layers from 0")
        window = self.windows[layer] = split_mask(mask_kind)[1]
        table, keys, values = self.leaves(layer, window)
        axes = {"key_axes": self.spec.axes("keys"), "value_axes": self.spec.axes("values")}
        operands = q, k, v, keys, values, positions, table
        how = {"mask_kind": mask_kind, "token_rows": self.token_rows} | axes | rotation_and_scale
        return self.graph.one("cached_self_attention", *operands, **how)

    @property
    def next_layer(self) -> int:
        """The first layer that has not attended yet."""
        return next(i for i in range(self.spec.layers + 1) if i not in self.windows)

    @property
    def sequences(self) -> Size:
        """How many sequences the cache holds: one per batch entry, or as many as ragged tokens have rows."""
        return sym.BATCH if self.token_rows is None else dim("rows")

    def leaves(self, layer: int, window: int) -> tuple[Value, Value, Value]:
        """Return the page table shared by layers with this window, and the layer's pools of keys and values."""
        spec, kind, pages = self.spec, dtype(self.spec.dtype), dim(f"pages{window}" if window else "pages")
        if window not in self.tables:
            blocks = dim(f"ring{window}" if window else "blocks")
            self.tables[window] = self.graph.input(table_name(window), (self.sequences, blocks), "i32")
        keys = self.graph.state(f"keys.{layer}", spec.pool_shape("keys", pages), kind)
        values = self.graph.state(f"values.{layer}", spec.pool_shape("values", pages), kind)
        return self.tables[window], keys, values

    def state(self, name: str, shape: tuple[int, ...]) -> Value:
        """A recurrent state `[sequences, *shape]`, for an op that carries it on: that op writes it in place."""
        if name in self.states:
            raise GraphError(f"kv_cache: there is a state {name!r} already", hint="each layer has names of its own")
        self.states[name] = shape
        return self.graph.state(name, (self.sequences, *shape))

    @property
    def bound(self) -> KvCacheSpec:
        """The cache spec that the layers need, known after they were emitted."""
        windows = tuple(self.windows.get(i) for i in range(self.spec.layers))
        return replace(self.spec, windows=windows, states=tuple(self.states.items()), lengths=tuple(self.lengths))


@dataclass(frozen=True, slots=True)
class DecodeBindings:
    """The inputs of a decode step whose caller keeps the cache: one past K and one past V per layer."""

    cos: Value | None  # None if no layer has RoPE
    sin: Value | None
    mask: Value | None
    past_k: list[Value]
    past_v: list[Value]
    rows: bool = True  # cos and sin have one row per new token, not one per position
    style: str | None = None  # style of those rows, if it differs from that of the bound tables


@dataclass(frozen=True, slots=True)
class GdnInputSlots:
    """The inputs of a gated-delta-net scan: one stage publishes them, `GdnScan` reads them."""

    q: Value
    k: Value
    v: Value
    g: Value
    beta: Value


@dataclass
class FlowState:
    """Shared by the stages of one flow."""

    rope_cos: Value | None = None
    rope_sin: Value | None = None
    rope_style: str = "halves"
    rope_styles: dict[str, str] = field(default_factory=dict)  # by name of the tables, `rope` or `rope.local`
    rope_rows: Value | None = None  # the table row of each token, if it is not its position
    rope_per_token: bool = False  # `rope_cos` and `rope_sin` have one row per new token, not one per position
    zero_beta: Value | None = None  # the first zero vector of `ZeroBeta`
    embed_weight: Value | None = None  # [vocab, hidden], for a tied head
    hidden_shape: Shape | None = None  # of the first hidden state, after the token table
    cache: CacheBindings | None = None
    decode: DecodeBindings | None = None
    padding: Value | None = None  # padding mask [batch, seq] of all attention that follows, from an input
    padding_input: str = ""  # the name of that input
    residuals: list[FlowValue] = field(default_factory=list)  # stack of saved values not yet added
    residual_stages: dict[Value, str] = field(default_factory=dict)  # where each was saved, for errors
    streams: dict[str, FlowValue] = field(default_factory=dict)
    inputs: dict[str, tuple[Value, Shape]] = field(default_factory=dict)  # of the graph; the first is the first value
    named: dict[str, Value] = field(default_factory=dict)
    named_at: dict[str, dict[str, Value]] = field(default_factory=dict)  # by name, then by path of the stage and name
    gdn: GdnInputSlots | None = None
    loaded_params: dict[str, Value] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)  # of stages named by the user
    training: bool = False  # dropout is active
    dropouts: int = 0  # stages of dropout so far

    def bind_rope(
        self, cos: Value, sin: Value, style: str, cos_key: str, sin_key: str, rows: Value | None = None
    ) -> None:
        """Bind RoPE tables for the layers that follow; `rows` is the table row of each token if not its position."""
        name = cos_key.removesuffix(".cos")
        self.rope_cos, self.rope_sin, self.rope_style, self.rope_rows = cos, sin, style, rows
        self.rope_styles[name], self.rope_per_token = style, False
        self.named |= {cos_key: cos, sin_key: sin}
        self.named.pop(f"{name}.rows", None)
        if rows is not None:
            self.named[f"{name}.rows"] = rows

    def bind_rope_rows(self, cos: Value, sin: Value, style: str) -> None:
        """Bind RoPE rows, one per new token, in place of full tables, for the decode step that is bound next."""
        self.rope_cos, self.rope_sin, self.rope_style, self.rope_rows = cos, sin, style, None
        self.rope_per_token = True

    def style_of(self, rope: str) -> str:
        """Return the pairing style of the RoPE tables of this name."""
        return self.rope_styles.get(rope, self.rope_style)

    def claim(self, path: str) -> None:
        """Reserve a path for a named stage; raises if another stage has it."""
        if path in self.paths:
            raise GraphError(f"flow: two stages are called {path!r}", hint="give each a name of its own")
        self.paths.add(path)

    @property
    def residual_skip(self) -> Value | None:
        """The value `ResidualAdd` would add. Assigning replaces it, or pushes if there is none; None pops it."""
        return self.residuals[-1].id if self.residuals else None

    @residual_skip.setter
    def residual_skip(self, value: Value | FlowValue | None) -> None:
        if value is not None and not isinstance(value, (Value, FlowValue)):
            raise GraphError(f"residual_skip: {value!r} is not a value")
        del self.residuals[-1:]
        if value is not None:
            self.residuals.append(value if isinstance(value, FlowValue) else FlowValue.of(value))

    @property
    def residual_shape(self) -> Shape | None:
        """The shape of `residual_skip`."""
        return self.residuals[-1].shape if self.residuals else None

    def stream(self, name: str, where: str) -> FlowValue:
        """Return a stream; raises an error that names `where` if it does not exist."""
        if name not in self.streams:
            raise GraphError(f"{where}: no stream is called {name!r}", hint=nearest(name, self.streams))
        return self.streams[name]

    def set_named(self, name: str, value: Value) -> None:
        """Store a value under a name; stages at different paths may use the same one."""
        stage = here().stage
        path = stage if f".{stage}".endswith(f".{name}") else f"{stage}.{name}".lstrip(".")
        self.named[name] = value
        self.named_at.setdefault(name, {})[path] = value

    def value(self, name: str, where: str) -> Value:
        """Return a named value; raises an error that names `where` if it does not exist."""
        if name not in self.named:
            raise GraphError(f"{where}: no value is called {name!r}", hint=nearest(name, self.named))
        return self.named[name]
