"""The exception tree: every error that rlx raises on purpose.

    RlxError
    ├── GraphError            a graph that cannot be built: unknown op, wrong operand, wrong attribute
    │   ├── ShapeError        sizes that do not fit
    │   └── DTypeError        element types that do not fit
    ├── ParseError            text that is not a graph
    ├── VerifyError           a pass broke a graph: a bug in rlx
    ├── LowerError            no rule lowers this node
    ├── FusionError           the profile asserts that every fusion happens, and one did not
    ├── FormatError           a broken file, or one that lacks a weight or has it in another shape
    ├── NotFoundError         a model that is not installed and could not be downloaded
    ├── ResourceError         not enough memory (also a MemoryError)
    ├── CapabilityError       the device, this machine or this model cannot do it
    │   └── WrongVerb         a verb of another kind of model (rlx.engine.model; also an AttributeError)
    ├── BindError             weights, inputs or dims that do not fit a compiled graph
    ├── KernelError           machine code reported a fault, such as an index out of range
    ├── BatchError            a batch job that cannot go on, or was made with other settings
    ├── NonFiniteError        a run produced NaN or infinity under rlx.debug.nans (also a FloatingPointError)
    └── RequestError          an invalid request to a model: a setting, a prompt, a number out of range
        ├── ContextError      a prompt that is longer than the context
        ├── NotEndedError     the completion of a stream that is still running (also an AttributeError)
        ├── UnknownAttribute  an attribute that other libraries have (also an AttributeError)
        ├── OverloadedError   too many requests wait already; `retry_after` says for how long
        └── UsageError        an invalid command line (rlx.cli.console)

A message says `where: what, with both values`. Outer layers add context with `add_note`. Messages and note lines are
cut to `MESSAGE` characters.
"""

from __future__ import annotations

from collections.abc import Iterable

MESSAGE = 500  # maximum characters of a message and of a line of a note


class RlxError(Exception):
    """Base of all rlx errors. `hint` says what to try; `notes` give context."""

    def __init__(self, message: str, *, hint: str | None = None, notes: Iterable[str] = ()) -> None:
        super().__init__(shortened(message, MESSAGE))
        self.hint = hint if hint is None else shortened(hint, MESSAGE)
        for note in notes:
            self.add_note(f"  {note}")
        if hint:
            self.add_note(f"  hint: {hint}")

    def add_note(self, note: str, /) -> None:
        """Add one or more lines of context."""
        super().add_note("\n".join(shortened(line, MESSAGE) for line in note.split("\n")))

    @property
    def notes(self) -> list[str]:
        """Context lines added by outer layers, including the hint."""
        return list(getattr(self, "__notes__", ()))


class GraphError(RlxError):
    """A graph that cannot be built."""


class ShapeError(GraphError):
    """Sizes that do not fit together."""


class DTypeError(GraphError):
    """Element types that do not fit together."""


class ParseError(RlxError):
    """Text that is not a graph."""


class VerifyError(RlxError):
    """A pass produced an invalid graph: a bug in rlx."""


class LowerError(RlxError):
    """No rule lowers this node."""


class FusionError(RlxError):
    """The profile asserts that every fusion happens, and one did not. The notes say which and why."""


class ResourceError(RlxError, MemoryError):
    """Not enough memory, detected before allocating."""


class FormatError(RlxError):
    """A file that violates its format, or does not contain the model that it declares."""


class NotFoundError(RlxError):
    """A model that is not installed and could not be downloaded: an unknown name, no network, terms not accepted."""


class CapabilityError(RlxError):
    """The device or this machine cannot do what was requested."""


class BindError(RlxError):
    """Inputs, weights or dims that do not fit a compiled graph."""


class KernelError(RlxError):
    """Compiled code reported a fault at run time."""


class BatchError(RlxError):
    """A batch job that cannot go on: other settings than before, shards that kill workers. Its folder stays valid."""


class NonFiniteError(RlxError, FloatingPointError):
    """A run produced NaN or infinity under `rlx.debug.nans`. The message names the node responsible."""


class RequestError(RlxError):
    """An invalid request to a model: a setting, a prompt, a number out of range."""


class ContextError(RequestError):
    """A prompt that is longer than the model's context: `tokens` (None: not counted) and `context` are their sizes."""

    def __init__(self, message: str, *, context: int, tokens: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.context, self.tokens = context, tokens


class NotEndedError(RequestError, AttributeError):
    """The completion of a stream that is still running. An AttributeError, so `hasattr` says whether it has ended."""


class UnknownAttribute(RequestError, AttributeError):
    """An attribute that things of other libraries have. Also an AttributeError, so that `hasattr` returns False."""


class OverloadedError(RequestError):
    """Too many requests wait already. After `retry_after` seconds there may be room."""

    def __init__(self, message: str, *, retry_after: float = 1.0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


def shortened(text: str, limit: int) -> str:
    """Cuts text to at most `limit` characters, keeping both ends.

    >>> shortened("abcdefghijklmnopqrstuvwxyz", 11)
    'abcd...wxyz'
    """
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 2
    return f"{text[: limit - 3 - tail]}...{text[len(text) - tail :]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A hint with the known names closest to `name`, or None if none is close."""
    names = sorted(set(known))
    import difflib  # only needed for errors

    close = difflib.get_close_matches(name[:MESSAGE], names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"{c!r}" for c in close) + "?"
    if names and len(names) <= 8:
        return "known: " + ", ".join(names)
    return None
