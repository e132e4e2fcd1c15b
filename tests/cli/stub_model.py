"""A language model that needs no weights: it answers with what it is told to, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from rlx.engine.language_model import Completion, Timings, Usage


class StubStream:
    """Pieces of one answer; `INTERRUPT` among them is a Ctrl-C at that place."""

    def __init__(self, pieces: Sequence[str], prompt_tokens: int) -> None:
        self.pieces = pieces
        self.prompt_tokens = prompt_tokens
        self.closed = False

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            if piece == INTERRUPT:
                raise KeyboardInterrupt
            yield piece

    def close(self) -> None:
        self.closed = True

    @property
    def completion(self) -> Completion:
        count = len(self.pieces)
        return Completion(
            "".join(self.pieces), list(range(count)), "stop", Usage(self.prompt_tokens, 0, count),
            Timings(0.1, 0.2, 31.4, 96.2), 7, "rlx test",
        )  # fmt: skip


INTERRUPT = "\x03"


class StubModel:
    """One token a word; `answers` are given in order."""

    target = "avx512"
    threads = 2

    def __init__(self, *answers: Sequence[str], template: bool = True, context: int = 100, longest: int = 200) -> None:
        self.answers = list(answers)
        self.template = object() if template else None
        self.context = context
        self.said: Any = None  # what became tokens last
        self.asked: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.checkpoint = SimpleNamespace(config=SimpleNamespace(context=longest))
        self.closed = False

    def prompt_ids(self, text: str, where: str) -> list[str]:
        self.said = text
        return text.split()

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[str]:
        self.said = messages
        return [word for m in messages for word in [m["role"], *m["content"].split()]]

    def stream(self, tokens: list[str], *, chat: bool, **options: Any) -> StubStream:
        assert chat == (not isinstance(self.said, str))
        self.asked.append(self.said)
        self.options.append(options)
        return StubStream(self.answers.pop(0), len(tokens))

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> StubModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
