"""Feed-forward stages: SwiGLU, GeGLU and GELU."""

from __future__ import annotations

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import gated_ffn, linear
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.hir.activations import check_known


@dataclass(frozen=True)
class SwiGlu(FlowStage):
    """Gated feed-forward: `y = (silu(x @ gateᵀ) · (x @ upᵀ)) @ downᵀ`, or with another activation."""

    gate_key: str
    up_key: str
    down_key: str
    intermediate_size: int | None = None  # checks the shapes of the weights, and `init` needs it
    bias: bool = False  # each weight has a bias, under the key that ends in `bias`
    activation: str = "silu"

    @classmethod
    def hf_mlp(
        cls, prefix: str, *, intermediate_size: int | None = None, bias: bool = False, activation: str = "silu"
    ) -> SwiGlu:
        """Uses Hugging Face's weight names of a Llama feed-forward; `prefix` is such as `model.layers.0.mlp`."""
        before, _, last = prefix.rpartition(".")
        if last.isdecimal() and not before.endswith("experts"):  # an expert is a feed-forward with a number
            raise GraphError(
                f"SwiGlu.hf_mlp: {prefix!r} is a layer, expected its feed-forward", hint=f"hf_mlp('{prefix}.mlp')"
            )
        gate, up, down = (f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down"))
        return cls(gate, up, down, intermediate_size, bias, activation)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x, keys = ctx.need(value, type(self).__name__), (self.gate_key, self.up_key, self.down_key)
        inner = self.intermediate_size
        return ctx.wrap(gated_ffn(ctx, x, keys, activation=self.activation, bias=self.bias, inner=inner))

    @property
    def path(self) -> str:
        return "ffn"


@dataclass(frozen=True)
class GeGlu(SwiGlu):
    """Gemma's feed-forward: `y = (gelu(x @ gateᵀ) · (x @ upᵀ)) @ downᵀ`, with the tanh approximation of GELU."""

    activation: str = "gelu_pytorch_tanh"

    @classmethod
    def hf_mlp(
        cls, prefix: str, *, intermediate_size: int | None = None, bias: bool = False,
        activation: str = "gelu_pytorch_tanh",
    ) -> GeGlu:  # fmt: skip
        """Uses Hugging Face's weight names of a Gemma feed-forward; `prefix` is the layer, such as `model.layers.0`."""
        if prefix.endswith(".mlp") or prefix == "mlp":
            layer = prefix.removesuffix("mlp").removesuffix(".")
            raise GraphError(
                f"GeGlu.hf_mlp: {prefix!r} is a feed-forward, expected its layer", hint=f"hf_mlp('{layer}')"
            )
        gate, up, down = (f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        return cls(gate, up, down, intermediate_size, bias, activation)


@dataclass(frozen=True)
class GeluFfn(FlowStage):
    """Feed-forward with biases: `y = gelu(x @ intermediate_wᵀ + intermediate_b) @ output_wᵀ + output_b`."""

    intermediate_w: str
    intermediate_b: str
    output_w: str
    output_b: str
    approx_gelu: bool = False  # the tanh approximation, whatever `activation` says
    intermediate_size: int | None = None  # checks the shapes of the weights, and `init` needs it
    activation: str = "gelu"

    @classmethod
    def hf_bert(cls, prefix: str, *, intermediate_size: int | None = None, activation: str = "gelu") -> GeluFfn:
        """Uses Hugging Face's weight names of a BERT feed-forward; `prefix` is the layer, such as `encoder.layer.0`."""
        inner, outer = f"{prefix}.intermediate.dense", f"{prefix}.output.dense"
        keys = (f"{inner}.weight", f"{inner}.bias", f"{outer}.weight", f"{outer}.bias")
        return cls(*keys, intermediate_size=intermediate_size, activation=activation)

    @classmethod
    def dinov2(cls, prefix: str, *, intermediate_size: int | None = None, activation: str = "gelu") -> GeluFfn:
        """Uses the weight names of DINOv2; `prefix` is the layer, such as `blocks.0`. Its GELU is exact, as in BERT."""
        inner, outer = f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        keys = (f"{inner}.weight", f"{inner}.bias", f"{outer}.weight", f"{outer}.bias")
        return cls(*keys, intermediate_size=intermediate_size, activation=activation)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GeluFfn")
        activation = "gelu_tanh" if self.approx_gelu else self.activation
        check_known(activation)
        keys = self.intermediate_w, self.intermediate_b
        inner = linear(ctx, x, *keys, out=self.intermediate_size, activation=activation)
        return ctx.wrap(linear(ctx, inner, self.output_w, self.output_b, out=x.shape[-1]))

    @property
    def path(self) -> str:
        return "ffn"
