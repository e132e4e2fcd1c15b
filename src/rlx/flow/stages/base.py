"""Stages: frozen records that add their part of a model to the graph."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlx.flow.context import FlowCtx
from rlx.flow.state import FlowValue


class FlowStage(ABC):
    """One stage of a model's assembly line. Subclasses are frozen dataclasses."""

    @abstractmethod
    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        """Add this stage to the graph; returns the value for the next stage."""

    @property
    def path(self) -> str:
        """The name of this stage in paths such as `layers.3.attn`; empty for none."""
        return ""

    @property
    def is_named(self) -> bool:
        """Whether its path is a name chosen by the user, which must be unique."""
        return False
