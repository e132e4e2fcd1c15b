"""Mixtures of experts: each token goes through the few feed-forwards that a router picks for it."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.errors import GraphError
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.ffn import SwiGlu, activate, linear
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value
from rlx.types import Size


@dataclass(frozen=True)
class MoeFfn(FlowStage):
    """Σ p · down(act(gate(x)) · up(x)) over the `chosen` likeliest of the experts; only those are computed.

    Weights of experts are stacked, `[experts, out, in]`, under `prefix.experts`. Probabilities are a softmax over all
    experts; with `normalise` those of the chosen ones are made to add up to 1.
    """

    prefix: str
    experts: int
    chosen: int
    normalise: bool = True
    intermediate_size: int | None = None  # checks the weights
    activation: str = "silu"
    router_key: str | None = None  # prefix.gate.weight unless given

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise GraphError(f"stage MoeFfn: {self.chosen} of {self.experts} experts cannot be chosen")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "MoeFfn")
        hidden, k = x.shape[-1], self.chosen
        rows = x.reshape(x.shape[0] * x.shape[1], hidden)
        count = rows.shape[0]
        odds = linear(ctx, rows, self.router_key or f"{self.prefix}.gate.weight", out=self.experts).softmax(axis=-1)
        odds, picked = odds.topk(k=k)  # [rows, k]
        if self.normalise:
            odds = odds / odds.sum(axis=-1, keepdims=True)
        picked = picked.reshape(count * k)
        order, place, _ = picked.group_rows(groups=self.experts)  # an expert reads its weights once for all its rows
        each, picked = rows.gather(order // k), picked.gather(order)
        gate = activate(self.project(ctx, each, "gate", picked, self.intermediate_size), self.activation)
        inner = gate * self.project(ctx, each, "up", picked, self.intermediate_size)
        out = self.project(ctx, inner, "down", picked, hidden).gather(place).reshape(count, k, hidden)
        return ctx.wrap((out * odds.reshape(count, k, 1)).sum(axis=1).reshape(x.shape))

    def project(self, ctx: FlowCtx, x: Value, name: str, picked: Value, out: Size | None) -> Value:
        key = f"{self.prefix}.experts.{name}_proj.weight"
        shape = None if out is None else (self.experts, x.shape[-1], out)
        return ctx.hir().one("grouped_matmul", x, ctx.load_param(key, transpose=True, shape=shape), picked)

    @property
    def path(self) -> str:
        return "ffn"


@dataclass(frozen=True)
class SharedMoeFfn(FlowStage):
    """A mixture of experts, and one more that all tokens go through as far as a gate lets them."""

    mixture: MoeFfn
    shared_size: int | None = None  # checks the weights

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x, prefix = ctx.wrap(ctx.need(value, "SharedMoeFfn")), self.mixture.prefix
        shared = SwiGlu.hf_mlp(
            f"{prefix}.shared_expert", intermediate_size=self.shared_size, activation=self.mixture.activation
        )
        gate = linear(ctx, x.id, f"{prefix}.shared_expert_gate.weight", out=1).sigmoid()
        return ctx.wrap(self.mixture.emit(ctx, x).id + gate * shared.emit(ctx, x).id)

    @property
    def path(self) -> str:
        return "ffn"
