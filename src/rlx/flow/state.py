"""What stages share while a flow is built: the value that flows, and the things that were set aside by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlx.ir.graph import Value
from rlx.types import Size


@dataclass(frozen=True, slots=True)
class FlowValue:
    """The value that flows from stage to stage, with its shape."""

    id: Value
    shape: tuple[Size, ...]

    @classmethod
    def of(cls, value: Value) -> FlowValue:
        return cls(value, value.shape)


@dataclass(frozen=True, slots=True)
class CacheBindings:
    """The runtime-owned KV cache: one keys and one values leaf a layer."""

    keys: list[Value]
    values: list[Value]


@dataclass
class FlowState:
    """Shared by the stages of one flow."""

    rope_cos: Value | None = None
    rope_sin: Value | None = None
    rope_style: str = "halves"
    embed_weight: Value | None = None  # [vocab, hidden], for a tied head
    cache: CacheBindings | None = None
    inputs: dict[str, Value] = field(default_factory=dict)  # graph inputs beside the main tensor
    loaded_params: dict[str, Value] = field(default_factory=dict)
