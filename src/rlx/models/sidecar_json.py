"""JSON files beside the weights: objects whose members are asked for by type, so that a wrong one is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.formats.tensor_file import broken, quoted
from rlx.models.load import read_json


@dataclass(frozen=True)
class JsonObject:
    """An object of a file, whose members are asked for by type; an absent file has none."""

    path: Path
    members: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        return cls(path, read_json(path) if path.exists() else {})

    def get(self, name: str, *kinds: type) -> Any:
        """A member, or None where it is absent or null."""
        found = self.members.get(name)
        if found is None or type(found) in kinds:  # not isinstance: a truth value is no number
            return found
        expected = " or ".join(k.__name__ for k in kinds)
        raise broken(self.path, quoted(name), expected=expected, actual=quoted(found))

    def need(self, name: str, kind: type) -> Any:
        found = self.get(name, kind)
        if found is None:
            raise broken(self.path, f"{quoted(name)} is missing")
        return found
