"""Models by name: a catalogue, a folder of models, and the way from one to the other."""

from __future__ import annotations

from rlx.hub.catalogue import CATALOGUE, DEFAULT, Entry
from rlx.hub.pull import ModelFiles, locate, names_a_model, remove, resolve, stored

__all__ = ["CATALOGUE", "DEFAULT", "Entry", "ModelFiles", "locate", "names_a_model", "remove", "resolve", "stored"]
