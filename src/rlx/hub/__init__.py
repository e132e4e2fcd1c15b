"""Models by name: the catalogue, the local model folder, and downloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.hub.pull import ModelFiles, locate, names_a_model, remove, resolve, stored

if TYPE_CHECKING:
    from rlx.hub.catalogue import CATALOGUE, DEFAULT, Entry

__all__ = ["CATALOGUE", "DEFAULT", "Entry", "ModelFiles", "locate", "names_a_model", "remove", "resolve", "stored"]


def __getattr__(name: str) -> Any:
    """Import the catalogue on first use: a model given by its path does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlx.hub import catalogue

    return getattr(catalogue, name)
