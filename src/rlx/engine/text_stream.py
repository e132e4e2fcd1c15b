"""A text that is read piece by piece while it is generated; `async_stream` is the same for asyncio."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NoReturn, Self

from rlx.engine.completion import Completion
from rlx.engine.interventions import Captures
from rlx.engine.request import Ticket
from rlx.engine.scheduler import Scheduler
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.errors import NotEndedError, shortened

if TYPE_CHECKING:
    from rlx.engine.language_model import LanguageModel
    from rlx.engine.logprobs import Logprob


class TextStream(Iterator[str]):
    """Iterates over pieces of a text while it is generated. Use it in `with`, or close it, to stop early.

    Closing, from any thread, stops the computation within one decode step or prefill chunk. `completion` is available
    once the stream has ended or was closed; `text`, `tokens` and `logprobs` are what there is so far.
    """

    def __init__(
        self, model: LanguageModel, sequence: TokenSequence, scheduler: Scheduler, captures: Captures | None
    ) -> None:
        """`scheduler` is for this sequence alone; the end of the stream closes it."""
        self._model = model
        self._sequence = sequence
        self._captures = captures
        new = list[str]()
        self._ticket = scheduler.add(sequence, on_piece=lambda _, piece: new.append(piece))
        self._pieces = _pieces(model, scheduler, self._ticket, new)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def text(self) -> str:
        """The text so far: all pieces that were returned."""
        return self._sequence.text

    @property
    def tokens(self) -> list[int]:
        """The tokens so far. A piece may be the text of several: one token need not be a whole character."""
        return list(self._sequence.tokens)

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The log-probabilities of `tokens`; None unless `logprobs=` was given."""
        logprobs = self._sequence.logprobs
        return None if logprobs is None else list(logprobs)

    def close(self) -> None:
        """Stop generating and release the cache for other calls."""
        self._ticket.cancel()
        with suppress(ValueError):  # the generator runs in another thread and ends by itself
            self._pieces.close()

    def _not_ended(self) -> NotEndedError:
        return NotEndedError("stream: it has not ended", hint="read it to its end or close it")

    @property
    def completion(self) -> Completion:
        """The text so far, its tokens, usage and timings. Raises NotEndedError while the stream is running."""
        if inspect.getgeneratorstate(self._pieces) != inspect.GEN_CLOSED:
            raise self._not_ended()
        return self._model.completion_of(self._sequence, self._captures)

    def __repr__(self) -> str:
        ended = inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED
        state = "ended" if ended else "running"
        return f"<stream {shortened(self.text, 60)!r}: {len(self._sequence.tokens)} tokens, {state}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import box, note, prose  # few programs need it

        return box("stream", prose(self.text), note(repr(self).rpartition(": ")[2].removesuffix(">")))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes: names of other libraries raise an explanation."""
            if name == "completion":
                raise self._not_ended()
            hint = ": close() stops it" if name in ("stop", "cancel", "abort", "stop_event", "interrupt") else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(model: LanguageModel, scheduler: Scheduler, ticket: Ticket, new: list[str]) -> Generator[str, None, None]:
    """Not a method: that would keep the stream alive, so leaving a loop by `break` would not close it."""
    with closing(scheduler):
        model.check_usable()  # again: the stream may start long after it was created
        while not ticket.done:
            scheduler.step()
            pieces = [piece for piece in new if piece]
            new.clear()
            yield from pieces
        if ticket.exception is not None:
            raise ticket.exception
