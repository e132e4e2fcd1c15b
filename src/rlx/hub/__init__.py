"""Models by name: a catalogue, a folder of models, and the way from one to the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.hub.pull import ModelFiles, locate, names_a_model, remove, resolve, stored

if TYPE_CHECKING:
    from rlx.hub.catalogue import CATALOGUE, DEFAULT, Entry

__all__ = ["CATALOGUE", "DEFAULT", "Entry", "ModelFiles", "locate", "names_a_model", "remove", "resolve", "stored"]


def __getattr__(name: str) -> Any:
    """The catalogue is read when it is asked for: a model that is given by its path needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlx.hub import catalogue

    return getattr(catalogue, name)
