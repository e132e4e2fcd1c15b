"""A generated text with its tokens, usage and timings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from rlx.arrays import Array
from rlx.engine.sequence import Timings, Usage
from rlx.errors import shortened
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.engine.logprobs import Logprob
    from rlx.engine.tools import ToolCall


@dataclass(frozen=True)
class Completion:
    """A generated text with its tokens, usage and timings. `str(completion)` is the text."""

    text: str
    tokens: list[int]  # including those of a stop string and the end-of-text token
    finish_reason: str  # "stop": the model or a stop string ended it; "length"; "closed": a stream was closed early
    usage: Usage
    timings: Timings
    seed: int  # reproduces the text
    fingerprint: str
    logprobs: list[Logprob] | None = None
    captured: dict[str, Array] | None = None  # values by stage: a row per token of prompt and text but the last
    tool_calls: tuple[ToolCall, ...] = ()  # of `chat(..., tools=...)`, with results where `chat` has called them

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<completion {shortened(self.text, 60)!r}: {len(self.tokens)} tokens, {self.finish_reason}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import box, note, prose  # few programs need it

        usage, times = self.usage, self.timings
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        counts = (
            f"{usage.prompt_tokens} prompt tokens{cached}, {usage.completion_tokens} generated, {self.finish_reason}"
        )
        speed = f"; {times.answer_per_second:.1f} tokens/s" if times.answer_per_second else ""
        return box("completion", prose(self.text), note(f"{counts}{speed}; seed {self.seed}"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes: names of other libraries raise an explanation."""
            from rlx.engine.foreign_names import missing_attribute  # only errors need it

            raise missing_attribute(self, name)
