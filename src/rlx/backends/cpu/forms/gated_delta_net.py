"""The gated delta net and its gradient on the CPU: token by token, and for long sequences by chunks of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.forms import delta_chunks
from rlx.backends.cpu.forms.delta_tokens import by_token
from rlx.ir.graph import Node
from rlx.lir.forms.ragged import Tokens, clear_padding
from rlx.lir.forms.recurrent import results_of
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View
from rlx.ops.recurrent import CHUNK
from rlx.types import dim_min


def gated_delta_net(s: Scheduler, node: Node) -> Sequence[View]:
    """By chunks where there is a whole one, else token by token: one of the two launches has no units.

    Of ragged tokens, each row goes the way that it would go by itself. Without a state to continue from, always by
    chunks: a short sequence then has the bits that it has packed with others.
    """
    outs, state = results_of(s, node)
    last = outs[1] if state is not None else None
    tokens = Tokens.of(s, node)
    if tokens.ragged:
        clear_padding(s, node, outs[0])
        by_token(s, node, outs[0], state, last, 1, fewer=CHUNK)
        delta_chunks.forward(s, node, outs[0], CHUNK, 1, state=state, last=last)
        return outs
    many = dim_min(tokens.width // CHUNK, 1) if state is not None else 1
    if many != 1:
        by_token(s, node, outs[0], state, last, 1 - many)
    if many != 0:
        delta_chunks.forward(s, node, outs[0], CHUNK, many, state=state, last=last)
    return outs


def gated_delta_net_with_states(s: Scheduler, node: Node) -> Sequence[View]:
    out, last, *saved = (s.result(node, i) for i in range(4))
    state = s.view(node.operands[5])
    delta_chunks.forward(s, node, out, node.attrs["chunk"], 1, state=state, last=last, saved=saved)
    return [out, last, *saved]


def gated_delta_net_backward(s: Scheduler, node: Node) -> Sequence[View]:
    results = [s.result(node, i) for i in range(6)]
    delta_chunks.backward(s, node, results)
    return results
