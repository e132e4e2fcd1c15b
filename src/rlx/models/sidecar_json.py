"""Typed access to the JSON files next to the weights: a member of the wrong type is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.fast_dataclass import dataclass
from rlx.formats.tensor_file import broken, quoted
from rlx.models.load import read_json


@dataclass(frozen=True)
class JsonObject:
    """A JSON object of a file with typed access to its members; empty if the file is absent."""

    path: Path
    members: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        return cls(path, read_json(path) if path.exists() else {})

    def get(self, name: str, *kinds: type) -> Any:
        """Returns a member, or None if it is absent or null."""
        member = self.members.get(name)
        if member is None or type(member) in kinds:  # not isinstance: a truth value is no number
            return member
        expected = " or ".join(k.__name__ for k in kinds)
        raise broken(self.path, quoted(name), expected=expected, actual=quoted(member))

    def need(self, name: str, kind: type) -> Any:
        member = self.get(name, kind)
        if member is None:
            raise broken(self.path, f"{quoted(name)} is missing")
        return member
