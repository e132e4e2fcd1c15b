"""Feed-forward stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlx.errors import CapabilityError, GraphError, ShapeError
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value
from rlx.ir.provenance import here
from rlx.types import Size, known_equal

# By the names of Hugging Face (`hidden_act`); those that have weights of their own (prelu, xielu) are no part of it.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("silu", "swish"), lambda x: x.silu()),
    **dict.fromkeys(("gelu", "gelu_python"), lambda x: x.gelu()),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_tanh"),
        lambda x: x.gelu_tanh(),
    ),
    "gelu_10": lambda x: x.gelu().maximum(-10.0).minimum(10.0),
    "quick_gelu": lambda x: x * (x * 1.702).sigmoid(),
    "relu": lambda x: x.relu(),
    "relu2": lambda x: x.relu() * x.relu(),
    "relu6": lambda x: x.relu().minimum(6.0),
    "leaky_relu": lambda x: x.maximum(x * 0.01),
    "hardswish": lambda x: x * (x + 3.0).relu().minimum(6.0) / 6.0,
    "mish": lambda x: x * softplus(x).tanh(),
    "sqrtsoftplus": lambda x: softplus(x).sqrt(),
    "laplace": lambda x: (((x - 0.707107) / (0.282095 * math.sqrt(2.0))).erf() + 1.0) * 0.5,
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "linear": lambda x: x,
}


def activate(x: Value, name: str) -> Value:
    """An activation by its name in configurations."""
    if name not in ACTIVATIONS:
        raise CapabilityError(f"activation {name!r} is not known", hint=f"known: {', '.join(sorted(ACTIVATIONS))}")
    result: Value = ACTIVATIONS[name](x)
    return result


def softplus(x: Value) -> Value:
    """log(1 + exp(x)), for small results too: log(1 + e) there is e, with what 1 + e has lost put back."""
    e = (-(abs(x))).exp()
    one = e + 1.0
    rest = one - 1.0
    graph = x.graph
    none = rest.equal(0.0)
    grown = graph.one("where", none, e, one.log() * e / graph.one("where", none, 1.0, rest))
    result: Value = x.maximum(0.0) + grown
    return result


def linear(
    ctx: FlowCtx, x: Value, weight_key: str, bias_key: str | None = None, *, out: Size | None = None,
    transpose: bool = True,
) -> Value:  # fmt: skip
    """x times a weight stored `[out, in]`, plus a bias. A weight of another shape is an error that names its key.

    Without `transpose` the weight is stored `[in, out]`.
    """
    shape = None if out is None else (x.shape[-1], out)
    weight = ctx.load_param(weight_key, transpose, shape=shape)
    if weight.rank == 2 and x.rank and known_equal(x.shape[-1], weight.shape[0]) is False:
        raise ShapeError(
            f"weight {weight_key!r}: takes vectors of {weight.shape[0]}, the value is {x.type}",
            hint=f"the weight is read as {'[out, in]' if transpose else '[in, out]'}: is it the transpose?",
            notes=[f"built at: {here()}"],
        )
    try:
        y = x @ weight
    except GraphError as error:
        error.add_note(f"  weight: {weight_key!r}")
        raise
    return y if bias_key is None else y + ctx.load_param(bias_key, shape=(weight.shape[-1],), init=0.0)


@dataclass(frozen=True)
class SwiGlu(FlowStage):
    """down(silu(gate(x)) · up(x)), or another activation of the gate. `intermediate_size` checks the weights."""

    gate_key: str
    up_key: str
    down_key: str
    intermediate_size: int | None = None
    bias: bool = False  # beside each weight
    activation: str = "silu"

    @classmethod
    def hf_mlp(
        cls, prefix: str, *, intermediate_size: int | None = None, bias: bool = False, activation: str = "silu"
    ) -> SwiGlu:
        """The names under which Hugging Face keeps the Llama feed-forward at `prefix`, such as `model.layers.0.mlp`."""
        before, _, last = prefix.rpartition(".")
        if last.isdecimal() and not before.endswith("experts"):  # an expert is a feed-forward with a number
            raise GraphError(
                f"SwiGlu.hf_mlp: {prefix!r} is a layer, expected its feed-forward", hint=f"hf_mlp('{prefix}.mlp')"
            )
        gate, up, down = (f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down"))
        return cls(gate, up, down, intermediate_size, bias, activation)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, type(self).__name__)
        gate = activate(self.project(ctx, x, self.gate_key, self.intermediate_size), self.activation)
        inner = gate * self.project(ctx, x, self.up_key, self.intermediate_size)
        return ctx.wrap(self.project(ctx, inner, self.down_key, x.shape[-1]))

    def project(self, ctx: FlowCtx, x: Value, key: str, out: Size | None) -> Value:
        return linear(ctx, x, key, key.removesuffix("weight") + "bias" if self.bias else None, out=out)

    @property
    def path(self) -> str:
        return "ffn"


@dataclass(frozen=True)
class GeGlu(SwiGlu):
    """down(gelu(gate(x)) · up(x)) with the tanh form of GELU: Gemma's feed-forward."""

    activation: str = "gelu_pytorch_tanh"

    @classmethod
    def hf_mlp(
        cls, prefix: str, *, intermediate_size: int | None = None, bias: bool = False,
        activation: str = "gelu_pytorch_tanh",
    ) -> GeGlu:  # fmt: skip
        """The names under which Hugging Face keeps the feed-forward of the layer at `prefix`, as `model.layers.0`."""
        if prefix.endswith(".mlp") or prefix == "mlp":
            layer = prefix.removesuffix("mlp").removesuffix(".")
            raise GraphError(
                f"GeGlu.hf_mlp: {prefix!r} is a feed-forward, expected its layer", hint=f"hf_mlp('{layer}')"
            )
        gate, up, down = (f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        return cls(gate, up, down, intermediate_size, bias, activation)


@dataclass(frozen=True)
class GeluFfn(FlowStage):
    """output(gelu(intermediate(x))). `intermediate_size` checks the weights."""

    intermediate_w: str
    intermediate_b: str
    output_w: str
    output_b: str
    approx_gelu: bool = False
    intermediate_size: int | None = None
    activation: str = "gelu"

    @classmethod
    def hf_bert(cls, prefix: str, *, intermediate_size: int | None = None, activation: str = "gelu") -> GeluFfn:
        """The names under which Hugging Face keeps a BERT feed-forward."""
        inner, outer = f"{prefix}.intermediate.dense", f"{prefix}.output.dense"
        keys = (f"{inner}.weight", f"{inner}.bias", f"{outer}.weight", f"{outer}.bias")
        return cls(*keys, intermediate_size=intermediate_size, activation=activation)

    @classmethod
    def dinov2(cls, prefix: str, *, intermediate_size: int | None = None, activation: str = "gelu") -> GeluFfn:
        """The names of a vision transformer's feed-forward. DINOv2's GELU is the exact one, as in BERT."""
        inner, outer = f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        keys = (f"{inner}.weight", f"{inner}.bias", f"{outer}.weight", f"{outer}.bias")
        return cls(*keys, intermediate_size=intermediate_size, activation=activation)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GeluFfn")
        inner = linear(ctx, x, self.intermediate_w, self.intermediate_b, out=self.intermediate_size)
        inner = activate(inner, "gelu_tanh" if self.approx_gelu else self.activation)
        return ctx.wrap(linear(ctx, inner, self.output_w, self.output_b, out=x.shape[-1]))

    @property
    def path(self) -> str:
        return "ffn"
