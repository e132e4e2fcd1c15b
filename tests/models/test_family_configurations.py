"""The rules of family configurations: one flat class each, of shared bases and of groups of fields."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rlx.models.load  # noqa: F401  declares the families
from rlx.errors import CapabilityError, FormatError
from rlx.models import config as configs
from rlx.models.config import ModelConfig, group, key, leaves
from rlx.models.family import FAMILIES, Family, find

FAMILY_FILES = {f.config.__module__ for f in FAMILIES.values()}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_a_configuration_inherits_from_no_other_family(family: Family) -> None:
    """Bases are in files without families: two at most, for decoders and for one kind of them."""
    bases = [kind for kind in family.config.__mro__[1:] if kind not in (ModelConfig, object)]
    assert not [kind for kind in bases if kind.__module__ in FAMILY_FILES]
    assert len(bases) <= 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_no_two_values_of_a_configuration_have_the_same_name(family: Family) -> None:
    names = [leaf.name for leaf in leaves(family.config)]
    assert len(set(names)) == len(names)


def test_the_loader_names_no_family() -> None:
    source = Path(sys.modules["rlx.models.load"].__file__ or "").read_text()
    assert not [name for name in FAMILIES if f'"{name}"' in source]


@pytest.mark.parametrize(("experts", "name"), [(0, "llama"), (2, "mixtral"), ("2", "llama"), (None, "llama")])
def test_a_llama_of_gguf_with_experts_is_a_mixtral(experts: Any, name: str) -> None:
    metadata = {"general.architecture": "llama"} | ({} if experts is None else {"llama.expert_count": experts})
    assert find("llama", "gguf", metadata).name == name


@dataclass(frozen=True)
class Heads:
    count: int = key(hf="heads", gguf="head_count", default=4)
    size: int = key(hf="head_size", default=8)
    gated: bool = False


@dataclass(frozen=True)
class Grouped(ModelConfig):
    dim: int = key(hf="dim", gguf="dim")
    heads: Heads = group(Heads, size=key(hf="width", default=2, maximum=9), gated=True)


def test_a_group_is_read_with_the_keys_of_its_family() -> None:
    actual = configs.from_hf(Grouped, {"dim": 3, "heads": 5, "width": 7, "head_size": 99, "gated": False}, "c")
    assert actual == Grouped(3, Heads(5, 7, True))
    assert configs.from_hf(Grouped, {"dim": 3}, "c").heads == Heads(4, 2, True)
    assert (
        configs.from_gguf(Grouped, {"general.architecture": "x", "x.dim": 3, "x.head_count": 6}, "c").heads.count == 6
    )
    assert configs.from_hf(Grouped, {"dim": 3, "width": 7}, "c", {"size": 1}).heads.size == 1


def test_what_is_wrong_in_a_group_is_named() -> None:
    with pytest.raises(FormatError, match="c: width: expected 1 to 9, found 10"):
        configs.from_hf(Grouped, {"dim": 3, "width": 10}, "c")
    with pytest.raises(KeyError, match="other"):
        group(Heads, other=1)


def test_values_change_by_name_also_in_groups() -> None:
    first = Grouped(3)
    changed = first.changed(dim=4, count=7)
    assert (changed.dim, changed.heads) == (4, Heads(7, 2, True))
    assert first.changed() == first
    assert {leaf.name: changed.value(leaf) for leaf in leaves(Grouped)} | {"quantization": None} == {
        "initializer_range": 0.02, "quantization": None, "dim": 4, "count": 7, "size": 2, "gated": True
    }  # fmt: skip


def test_an_unknown_architecture_is_refused_with_the_nearest() -> None:
    with pytest.raises(CapabilityError, match="'lama'"):
        find("lama", "gguf", {})
