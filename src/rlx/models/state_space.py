"""Configuration shared by the state-space decoders, Mamba 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats import TensorFile
from rlx.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Ignorable, ModelConfig, check_activation, key


@dataclass(frozen=True)
class StateSpaceConfig(ModelConfig):
    """Fields shared by Mamba 1 and 2."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = {"ssm.dt_b_c_rms": (False,), "expert_count": (0,)}
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"rates": True}

    dim: int = key(gguf="embedding_length", hf="hidden_size")
    layers: int = key(gguf="block_count", hf="num_hidden_layers", maximum=MAX_LAYERS)
    vocab: int = key(hf="vocab_size")
    inner_given: int | None = key(gguf="ssm.inner_size", default=None)
    grows: float = key(hf="expand", default=2.0)  # by this factor, if the inner size is absent
    kernel: int = key(gguf="ssm.conv_kernel", hf="conv_kernel", default=4, maximum=64)
    eps: float = key(gguf="attention.layer_norm_rms_epsilon", hf="layer_norm_epsilon", default=1e-5)
    bias: bool = key(hf="use_bias", default=False)
    conv_bias: bool = key(hf="use_conv_bias", default=True)
    activation: str = key(hf="hidden_act", default="silu")
    rates: bool = False  # GGUF stores -exp(A_log) instead of A_log

    @property
    def inner(self) -> int:
        return self.inner_given or int(self.grows * self.dim)

    @property
    def context(self) -> int:
        """Unbounded: a state takes any number of tokens."""
        return MAX_POSITIONS

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {"rates": True, "conv_bias": "blk.0.ssm_conv1d.bias" in file, "bias": "blk.0.ssm_in.bias" in file}

    def gguf_only_settings(self) -> dict[str, Any]:
        # llama.cpp requires the first three in every model
        nothing = {"context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0}
        return {**nothing, "ssm.inner_size": self.inner}

    def check(self, where: str) -> None:
        check_activation(where, self.activation)
        if not 1 <= self.inner <= MAX_SIZE:
            raise FormatError(f"{where}: layers are {self.inner} wide inside; expected 1 to {MAX_SIZE}")

    def omitted_weights(self) -> tuple[str, ...]:
        has = {"in_proj.bias": self.bias, "out_proj.bias": self.bias, "conv1d.bias": self.conv_bias}
        return tuple(f"backbone.layers.{{i}}.mixer.{name}" for name, on in has.items() if not on)
