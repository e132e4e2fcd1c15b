"""Flow stages: the pieces that model families are written with."""

from rlx.flow.stages.base import FlowStage as FlowStage
from rlx.flow.stages.decoder import LlamaDecoder as LlamaDecoder
from rlx.flow.stages.decoder import Qwen3Decoder as Qwen3Decoder
from rlx.flow.stages.embed import Embed as Embed
from rlx.flow.stages.embed import GatherAdd as GatherAdd
from rlx.flow.stages.embed import GatherLastToken as GatherLastToken
from rlx.flow.stages.embed import LmHead as LmHead
from rlx.flow.stages.embed import RopeTables as RopeTables
from rlx.flow.stages.encoder import BertEncoderLayer as BertEncoderLayer
from rlx.flow.stages.ffn import ACTIVATIONS as ACTIVATIONS
from rlx.flow.stages.ffn import GeluFfn as GeluFfn
from rlx.flow.stages.ffn import SwiGlu as SwiGlu
from rlx.flow.stages.norm import LayerNorm as LayerNorm
from rlx.flow.stages.norm import RmsNorm as RmsNorm
from rlx.flow.stages.structure import Repeat as Repeat
