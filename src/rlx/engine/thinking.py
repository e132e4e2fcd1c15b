"""The markers around a model's thoughts, learnt from its chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlx.errors import RlxError
from rlx.formats.chat import ChatTemplate

# Many templates drop thoughts of earlier turns; these markers are then looked for in their source.
MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_THOUGHT, _ANSWER = "qthought", "qanswer"


def learn_thinking(template: ChatTemplate, source: str) -> tuple[str, str] | None:
    """The texts before and after the thoughts of an answer; None if the template knows none."""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
    ]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except RlxError:
        text = ""
    before, thought, rest = text.partition(_THOUGHT)
    after, answer, _ = rest.partition(_ANSWER)
    if thought and answer:
        begins, ends = _TAG.findall(before), _TAG.findall(after)
        if begins and ends:
            return begins[-1], ends[0]
    return next((pair for pair in MARKERS if pair[1] in source), None)


def is_thinking(tail: str, markers: tuple[str, str] | None) -> bool | None:
    """Whether a prompt with this tail is inside a thinking section; None if the tail ends in neither marker."""
    if markers is None:
        return False
    text = tail.rstrip()
    if text.endswith(markers[0]):
        return True
    return False if text.endswith(markers[1]) else None


def tail_of(tokens: Sequence[int]) -> Sequence[int]:
    """The end of a prompt that can say whether it is inside a thinking section."""
    return tokens[-64:]
