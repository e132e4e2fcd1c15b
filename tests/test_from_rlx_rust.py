"""The page for people who know RLX: every name of its surface is in a table, and every name of ours resolves."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from test_seed_surface import (
    AROUND_STAGES,
    BINDING,
    CONTEXT,
    GRAPH_BUILDERS,
    HANDLE,
    MODULE,
    SEQUENCE_OPS,
    STAGES,
    VARIANT,
)

import rlx

PAGE = (Path(__file__).parent.parent / "docs" / "from-rlx-rust.md").read_text()
ROW = re.compile(r"^\| (?P<theirs>`[^|]*`) \| (?P<ours>`rlx\.[^|]*`) \| (?P<differs>[^|]+) \|$", re.M)
# In the order of the five source files.
SURFACE = [
    [*CONTEXT, *" ".join(CONTEXT.values()).split()],
    [*STAGES, "MaskKind", *AROUND_STAGES],
    ["GraphStage", "GraphModule", "stage", "name", "fusion_policy", *MODULE],
    ["ModelPhase", "ModelVariant", *VARIANT, "DimBinding", *BINDING, "BATCH", "SEQ", "PAST_SEQ", "ROWS"],
    [*SEQUENCE_OPS, *GRAPH_BUILDERS, "MultiOutputHandle", *HANDLE],
]
SECTIONS = re.split(r"^## \d\. ", PAGE, flags=re.M)[1:]
OURS = [name for row in ROW.finditer(PAGE) for name in re.findall(r"`([^`]+)`", row["ours"])]


def resolve(path: str) -> Any:
    """What a dotted name stands for; fields of records and ops of graphs count."""
    value: Any = rlx
    for name in path.split(".")[1:]:
        if value is rlx.Graph and not hasattr(value, name):
            value = rlx.Graph("g")
        if dataclasses.is_dataclass(value) and name in {f.name for f in dataclasses.fields(value)}:
            value = None  # a field, which has no parts
        else:
            value = getattr(value, name)
    return value


@pytest.mark.parametrize("number", range(5))
def test_a_section_has_every_name_of_its_source_file_and_no_other(number: int) -> None:
    named = [n for row in ROW.finditer(SECTIONS[number]) for n in re.findall(r"`([^`]+)`", row["theirs"])]
    assert len(SECTIONS) == 5 and sorted(named) == sorted(SURFACE[number])


def test_every_row_of_a_section_is_understood() -> None:
    """A row that the pattern does not match would not be checked."""
    lines = [line for s in SECTIONS for line in s.splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROW.findall(PAGE)) > 100


@pytest.mark.parametrize("name", OURS)
def test_a_name_of_ours_resolves(name: str) -> None:
    resolve(name)


@pytest.mark.parametrize("name", ["rlx.FlowStat", "rlx.FlowState.rope", "rlx.Graph.scann", "rlx.flow.stages.RmsNorms"])
def test_a_wrong_name_does_not_resolve(name: str) -> None:
    with pytest.raises(AttributeError):
        resolve(name)


def test_every_section_has_an_example_that_runs() -> None:
    assert all("```python\n" in section and "```output\n" in section for section in SECTIONS)
