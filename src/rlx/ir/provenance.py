"""Provenance of nodes: the user's source line, the stage path, the node one level up, the pass that created it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib.util import find_spec
from types import FrameType

from rlx.fast_dataclass import dataclass

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))  # inside _STDLIB
_NUMPY = (
    os.path.dirname(str(getattr(find_spec("numpy"), "origin", ""))) + os.sep
)  # located, not imported, which is slow


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of one node; every field may be empty."""

    file: str = ""  # or the command that builds the node
    line: int = 0  # 0: all of the file
    stage: str = ""
    source: str = ""  # the node at the level above
    made_by: str = ""  # the pass
    merged: tuple[Origin, ...] = ()  # origins of other nodes that this one replaces

    def __str__(self) -> str:
        parts = [self.stage]
        if self.file:
            name = os.path.basename(self.file)
            parts.append(f"{name}:{self.line}" if self.line else name)
        if self.source:
            parts.append(f"from {self.source}")
        if self.made_by:
            parts.append(f"by {self.made_by}")
        return ", ".join(p for p in parts if p)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The HIR blocks that the node is part of, by name; several if it replaces nodes of several blocks."""
        names = (origin.source.partition(" ")[2] for origin in (self, *self.merged))
        return tuple(dict.fromkeys(name for name in names if name))

    def by(self, name: str) -> Origin:
        """The same origin, marked with the pass `name`."""
        return replace(self, made_by=name)


_stage: ContextVar[str] = ContextVar("stage", default="")


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Nodes built inside carry the stage path `name`, nested with dots."""
    outer = _stage.get()
    token = _stage.set(f"{outer}.{name}" if outer else name)
    try:
        yield
    finally:
        _stage.reset(token)


_source: ContextVar[Origin | None] = ContextVar("source", default=None)


@contextmanager
def built_from(origin: Origin) -> Iterator[None]:
    """Nodes built inside, in any graph, come from `origin` unless they have another one."""
    token = _source.set(origin)
    try:
        yield
    finally:
        _source.reset(token)


_added: ContextVar[tuple[FrameType, Origin] | None] = ContextVar("added", default=None)


@contextmanager
def added_at(place: Origin, builder: FrameType) -> Iterator[None]:
    """Nodes that rlx builds inside come from `place`, the user's call site, not from the caller of `builder`."""
    token = _added.set((builder, place))
    try:
        yield
    finally:
        _added.reset(token)


@functools.lru_cache(maxsize=1024)
def _is_library(file: str) -> bool:
    """Whether code belongs to rlx, NumPy or the standard library rather than to a user."""
    if file.startswith((_PACKAGE, _NUMPY, "<frozen")):
        return True
    return file.startswith(_STDLIB) and not any(folder in file for folder in _INSTALLED)


def here() -> Origin:
    """The default origin of nodes: the nearest user frame with the current stage path, or `built_from`."""
    source = _source.get()
    if source is not None:
        return source
    frame: FrameType | None = sys._getframe(1)
    added = _added.get()
    while frame is not None and _is_library(frame.f_code.co_filename):
        if added is not None and frame is added[0]:
            return Origin(added[1].file, added[1].line, _stage.get())
        frame = frame.f_back
    if frame is None:  # rlx itself is the program
        return Origin(stage=_stage.get())
    return Origin(frame.f_code.co_filename, frame.f_lineno, _stage.get())
