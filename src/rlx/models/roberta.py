"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions are numbered from the padding row + 1.

GGUF files say `bert`: llama.cpp drops the rows up to and including the padding row on conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import BertEncoderLayer, FlowStage
from rlx.flow.state import FlowValue
from rlx.models.bert import WEIGHTS
from rlx.models.config import EncoderConfig, key
from rlx.models.family import family
from rlx.types import sym


@dataclass(frozen=True)
class Config(EncoderConfig):
    """RoBERTa's configuration. `max_position_embeddings` includes rows that no token uses."""

    HF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EncoderConfig.HF_IGNORABLE, "position_embedding_type": (None, "absolute"),
        "add_cross_attention": (None, False),
    }  # fmt: skip

    pad: int = key(hf="pad_token_id", default=1, minimum=0)
    types: int = key(hf="type_vocab_size", default=2)
    causal: bool = key(hf="is_decoder", default=False)  # causal attention

    @property
    def context(self) -> int:
        return self.positions - self.pad - 1

    def check(self, where: str) -> None:
        super().check(where)
        if self.context < 1:
            raise FormatError(f"{where}: {self.positions} rows of positions, of which the first is row {self.pad + 1}")


@family("roberta", kind="encoder", hf=["roberta", "xlm-roberta", "camembert"], config=Config, weights=WEIGHTS,
        prefixes=["roberta."])  # fmt: skip
def roberta(c: Config) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        return BertEncoderLayer(
            f"encoder.layer.{i}", c.dim, c.heads, c.head_dim, c.eps, intermediate_size=c.ffn, activation=c.activation,
            causal=c.causal,
        )  # fmt: skip

    return (
        ModelFlow("roberta").input("tokens", (sym.BATCH, sym.SEQ), "i32")
        .token_embed("embeddings.word_embeddings.weight", shape=(c.vocab, c.dim))
        .gather_add("token_types", "embeddings.token_type_embeddings.weight", rows=c.types)
        .stage(PaddedPositions("embeddings.position_embeddings.weight", c.pad, c.positions))
        .layer_norm("embeddings.LayerNorm", c.eps).repeat_layers(c.layers, layer)
    )  # fmt: skip


@dataclass(frozen=True)
class PaddedPositions(FlowStage):
    """Adds a table row per token: the n-th non-padding token uses row `pad` + n, padding uses row `pad`."""

    weight_key: str
    pad: int
    rows: int  # expected size of the table

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "PaddedPositions")
        real = ctx.flow_input("tokens").id.not_equal(self.pad).astype("i32")
        table = ctx.load_param(self.weight_key, shape=(self.rows, x.shape[-1]))
        return ctx.wrap(x + table.gather(real.cumsum(axis=1) * real + self.pad))

    @property
    def path(self) -> str:
        return "embed"
