"""The exception tree: every error that rlx raises on purpose.

    RlxError
    ├── GraphError            a graph that cannot be built: unknown op, wrong operand, wrong attribute
    │   ├── ShapeError        sizes that do not fit
    │   └── DTypeError        element types that do not fit
    ├── ParseError            text that is not a graph
    ├── VerifyError           a pass broke a graph: a defect of rlx itself
    ├── LowerError            no rule takes this node one level down
    ├── FusionError           a profile wants every fusion to happen, and one did not
    ├── FormatError           a broken file, or one that lacks a weight or has it in another shape
    ├── NotFoundError         a model that is not here and could not be had
    ├── ResourceError         not enough memory (also a MemoryError)
    ├── CapabilityError       the device, this machine or this model cannot do it
    │   └── WrongVerb         a verb of another kind of model (rlx.engine.model; also an AttributeError)
    ├── BindError             weights, inputs or dims given to a compiled graph do not fit it
    ├── KernelError           machine code reported a fault, such as an index out of range
    ├── NonFiniteError        a run gave NaN or infinity while rlx.debug.nans watched (also a FloatingPointError)
    └── RequestError          what was asked of a model cannot be meant: a setting, a prompt, a number out of range
        └── UsageError        a command line that cannot be meant (rlx.cli.console)

A message says `where: what, with both values`. Layers on the way up add context with `add_note`. Messages and lines of
notes are shortened to `MESSAGE` characters here, whatever was put into them.
"""

from __future__ import annotations

from collections.abc import Iterable

MESSAGE = 500  # characters of a message and of a line of a note, at most


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
        """Add a line, or several, of context."""
        super().add_note("\n".join(shortened(line, MESSAGE) for line in note.split("\n")))

    @property
    def notes(self) -> list[str]:
        """Context lines that the layers added, the hint among them."""
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
    """A pass left a graph in a state that cannot be: a defect of rlx."""


class LowerError(RlxError):
    """No rule takes this node one level down."""


class FusionError(RlxError):
    """A profile wants every fusion to happen, and one did not. The notes say which and why."""


class ResourceError(RlxError, MemoryError):
    """Not enough memory, seen before it was taken."""


class FormatError(RlxError):
    """A file that breaks its format, or does not hold the model that it says it holds."""


class NotFoundError(RlxError):
    """A model that is not here and could not be had: an unknown name, no network, terms not accepted."""


class CapabilityError(RlxError):
    """The device or this machine cannot do what was asked."""


class BindError(RlxError):
    """Inputs, weights or dims that do not fit a compiled graph."""


class KernelError(RlxError):
    """Machine code reported a fault while it ran."""


class NonFiniteError(RlxError, FloatingPointError):
    """A run gave NaN or infinity while `rlx.debug.nans` watched. The message names the node that made it."""


class RequestError(RlxError):
    """What was asked of a model cannot be meant: a setting, a prompt, a number out of range."""


def shortened(text: str, limit: int) -> str:
    """A text of at most `limit` characters: of a longer one both ends.

    >>> shortened("abcdefghijklmnopqrstuvwxyz", 11)
    'abcd...wxyz'
    """
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 2
    return f"{text[: limit - 3 - tail]}...{text[len(text) - tail :]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A hint with the known names closest to `name`, or None when nothing is close."""
    names = sorted(set(known))
    import difflib  # for somebody who makes a mistake

    close = difflib.get_close_matches(name[:MESSAGE], names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"{c!r}" for c in close) + "?"
    if names and len(names) <= 8:
        return "known: " + ", ".join(names)
    return None
