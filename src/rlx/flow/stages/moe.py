"""Mixtures of experts: a router picks a few feed-forwards per token."""

from __future__ import annotations

from typing import Any

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import gated_weights, stored_weight
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value


@dataclass(frozen=True)
class MoeFfn(FlowStage):
    """Mixture of experts: `y = Σ pₑ · downₑ(silu(gateₑ(x)) · upₑ(x))` over the top `chosen` experts of each token.

    `p = softmax(x @ routerᵀ)`; with `normalise`, the probabilities of the chosen experts are scaled to sum to 1.
    Expert weights are stacked, `[experts, out, in]`, under `prefix.experts`. Only chosen experts are computed.
    """

    prefix: str
    experts: int
    chosen: int
    normalise: bool = True
    intermediate_size: int | None = None  # checks the shapes of the weights
    activation: str = "silu"
    router_key: str | None = None  # `prefix.gate.weight` unless given

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise GraphError(f"stage MoeFfn: {self.chosen} of {self.experts} experts cannot be chosen")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "MoeFfn")
        return ctx.wrap(ctx.hir().one("moe_ffn", x, *self.weights(ctx, x), **self.attrs))

    def weights(self, ctx: FlowCtx, x: Value) -> list[Value]:
        """Read the router's weight and those of the experts: gate, up and down."""
        router = self.router_key or f"{self.prefix}.gate.weight"
        weights = [stored_weight(ctx, router, x.shape[-1], x, self.experts)]
        sizes = {"gate": self.intermediate_size, "up": self.intermediate_size, "down": x.shape[-1]}
        for name, out in sizes.items():
            width = x.shape[-1] if name != "down" else weights[1].shape[1]
            shape = None if out is None else (self.experts, width, out)
            weights.append(ctx.stored_param(f"{self.prefix}.experts.{name}_proj.weight", True, shape=shape))
        return weights

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the block."""
        return {"chosen": self.chosen, "normalise": self.normalise, "activation": self.activation}

    @property
    def path(self) -> str:
        return "ffn"


@dataclass(frozen=True)
class SharedMoeFfn(FlowStage):
    """Mixture of experts plus a gated expert for all tokens: `y = mixture(x) + sigmoid(x @ gateᵀ) · swiglu(x)`."""

    mixture: MoeFfn
    shared_size: int | None = None  # checks the shapes of the shared expert's weights

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x, prefix = ctx.need_sequence(value, "SharedMoeFfn"), self.mixture.prefix
        router = stored_weight(ctx, f"{prefix}.shared_expert_gate.weight", x.shape[-1], x, 1)
        weights = self.mixture.weights(ctx, x)
        keys = (f"{prefix}.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down"))
        shared, _ = gated_weights(ctx, x, tuple(keys), inner=self.shared_size)
        return ctx.wrap(ctx.hir().one("moe_ffn", x, *weights, router, *shared, **self.mixture.attrs))

    @property
    def path(self) -> str:
        return "ffn"
