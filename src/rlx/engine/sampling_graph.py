"""Adds the sampler to a decoder's graph: each call picks the next token of every row.

Settings, random numbers, masks and histories are inputs (`sampler.BatchSampling` fills them); tokens and their
log-probabilities are the last two outputs. On devices that run behind the host, the output before them is the input
`tokens` of the next step, so that the host need not know the tokens to start it.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.engine.sampler import OPERANDS, operand_input
from rlx.flow.built import BuiltModel
from rlx.ir.graph import Value
from rlx.ir.rewrite import copy_graph

OUTPUTS = ("next_token", "next_logprob")
NEXT_INPUT = "next_input"


def with_sampler(built: BuiltModel, vocab: int, *, feeds: bool) -> BuiltModel:
    """The model with a sampler of its logits `[picked, vocab]`, of which those beyond `vocab` are padding.

    With `feeds`, it also has the output `next_input`, `[picked, 1]`: the tokens, and 0 where none could be picked.

    A model whose main output is not such logits is returned unchanged, and cannot generate.
    """
    main = built.module.outputs[0]
    if len(main.shape) != 2 or not main.dtype.is_float or not isinstance(main.shape[1], int):
        return built
    copy = copy_graph(built.module)
    outputs = [copy.nodes[value.node.id][value.index] for value in built.module.outputs]
    logits = outputs[0] if main.shape[1] <= vocab else outputs[0][:, :vocab]
    rows = main.shape[0]
    operands: dict[str, Value] = {}
    for name, (kind, width) in OPERANDS.items():
        shape = (rows,) if width is None else (rows, f"sampling_{width}")
        operands[name] = copy.input(operand_input(name), shape, kind)
    picked = copy.build("sample_tokens", [logits, *operands.values()], {}).results
    next_input = [picked[0].maximum(0).reshape((rows, 1))] if feeds else []
    copy.set_outputs([*outputs, *next_input, *picked])
    names = [*built.output_names, *([NEXT_INPUT] if feeds else []), *OUTPUTS]
    return replace(built, module=copy, output_names=names)
