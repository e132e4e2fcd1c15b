"""What stages share while a flow is built: the value that flows, and the things that were set aside by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlx.errors import GraphError, nearest
from rlx.ir.graph import Value
from rlx.types import Size

Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class FlowValue:
    """The value that flows from stage to stage, with its shape."""

    id: Value
    shape: Shape

    @classmethod
    def of(cls, value: Value) -> FlowValue:
        return cls(value, value.shape)


@dataclass(frozen=True, slots=True)
class CacheBindings:
    """The runtime-owned KV cache: one keys and one values leaf a layer."""

    keys: list[Value]
    values: list[Value]


@dataclass(frozen=True, slots=True)
class DecodeBindings:
    """The inputs of a decode step whose caller keeps the cache: one past K and one past V a layer."""

    cos: Value
    sin: Value
    mask: Value | None
    past_k: list[Value]
    past_v: list[Value]


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
    zero_beta: Value | None = None  # the first zero vector that `ZeroBeta` made
    embed_weight: Value | None = None  # [vocab, hidden], for a tied head
    hidden_shape: Shape | None = None  # of the first hidden state, after the token table
    cache: CacheBindings | None = None
    decode: DecodeBindings | None = None
    residuals: list[FlowValue] = field(default_factory=list)  # saved and not yet added, the last one on top
    streams: dict[str, FlowValue] = field(default_factory=dict)
    inputs: dict[str, tuple[Value, Shape]] = field(default_factory=dict)  # of the graph; the first one starts the flow
    named: dict[str, Value] = field(default_factory=dict)
    gdn: GdnInputSlots | None = None
    loaded_params: dict[str, Value] = field(default_factory=dict)

    @property
    def residual_skip(self) -> Value | None:
        """What `ResidualAdd` would add now."""
        return self.residuals[-1].id if self.residuals else None

    @property
    def residual_shape(self) -> Shape | None:
        """The shape of that."""
        return self.residuals[-1].shape if self.residuals else None

    def stream(self, name: str, where: str) -> FlowValue:
        """A stream; an error that says where it was wanted if nothing was stored under the name."""
        if name not in self.streams:
            raise GraphError(f"{where}: no stream is called {name!r}", hint=nearest(name, self.streams))
        return self.streams[name]

    def value(self, name: str, where: str) -> Value:
        """A named value; an error that says where it was wanted if there is none."""
        if name not in self.named:
            raise GraphError(f"{where}: no value is called {name!r}", hint=nearest(name, self.named))
        return self.named[name]
