"""The two uses of a decoder's flow: text generation with a cache, and functions of entire sequences without one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlx.errors import GraphError
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.embed import GatherLastToken, LmHead
from rlx.flow.stages.parts import AttnMask
from rlx.ops.attention import parse_mask
from rlx.types import sym

if TYPE_CHECKING:
    from rlx.flow.built import BuiltModel
    from rlx.flow.flow import ModelFlow

INPUTS = ("tokens", "positions", "last_token_idx", "rows", "lengths")  # that a decoder's runtime sets


def _picks_tokens(stage: FlowStage) -> bool:
    """Whether a stage selects tokens by the input `last_token_idx`."""
    return isinstance(stage, GatherLastToken) and stage.index is None and stage.batch is None


def for_sequences(flow: ModelFlow) -> ModelFlow:
    """Return the flow of entire sequences from their first token: without a cache, with logits of all tokens."""
    stages = tuple(stage for stage in flow.stages if not _picks_tokens(stage))
    return replace(flow.with_stages(stages), cache=None, layout=None)


def for_generation(flow: ModelFlow, built: BuiltModel) -> ModelFlow:
    """Return the flow that generates text: with a KV cache, and logits of selected tokens only.

    `built` is a build of it, which shows its attention. What the flow has already is left as it is, except padding
    masks: with a cache, padding has negative positions.
    """
    if not flow.inputs or flow.inputs[0][0] != "tokens" or flow.inputs[0][1] != (sym.BATCH, sym.SEQ):
        shown = f"{flow.inputs[0][0]!r} of shape {flow.inputs[0][1]}" if flow.inputs else "absent"
        raise GraphError(
            f"load: the first input of flow {flow.name!r} is {shown}, expected tokens [batch, seq]",
            hint='ModelFlow(name).input("tokens", (rlx.sym.BATCH, rlx.sym.SEQ), "i32")',
        )
    masks = [stage.input_name for stage in flow.stages if isinstance(stage, AttnMask) and stage.input_name]
    if masks:
        stages = [stage for stage in flow.stages if not isinstance(stage, AttnMask)]
        inputs = tuple(declared for declared in flow.inputs if declared[0] not in masks)
        flow = replace(flow.with_stages(stages), inputs=inputs)
    if flow.cache is None:
        flow = flow.kv_cache(*_cache_sizes(flow.name, built))
    if not any(map(_picks_tokens, flow.stages)):
        heads = [i for i, stage in enumerate(flow.stages) if isinstance(stage, LmHead)]
        at = heads[0] if heads else len(flow.stages)
        flow = flow.with_stages((*flow.stages[:at], GatherLastToken(), *flow.stages[at:]))
    return flow


def _cache_sizes(name: str, built: BuiltModel) -> tuple[int, int, int]:
    """Return the layers, key heads and head size of a flow's attention."""
    layers = [node for node in built.module.nodes if node.op == "self_attention"]
    sizes: set[tuple[int, int]] = set()
    for node in layers:
        if not parse_mask(node.attrs["mask_kind"]).limited:
            raise GraphError(
                f"load: flow {name!r} attends to later tokens, mask {node.attrs['mask_kind']!r}, so it cannot generate",
                hint='mask="causal"; an encoder runs with flow.build(params).compile() or flow.as_function(params)',
                notes=[f"built at: {node.origin}"],
            )  # fmt: skip
        keys = node.operands[1]
        assert keys is not None
        sizes.add((int(keys.shape[2]), int(keys.shape[3])))
    if not sizes:
        return 1, 0, 0  # only recurrent states
    if len(sizes) > 1:
        problem = f"has heads of several sizes: {sorted(sizes)}"
        hint = "give the flow a kv_cache(layers, kv_heads, head_dim)"
        raise GraphError(f"load: flow {name!r} {problem}, so its KV cache is not known", hint=hint)
    return len(layers), *sizes.pop()
