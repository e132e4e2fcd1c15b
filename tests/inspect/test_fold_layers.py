"""Folding: stages as a tree, layers that are alike once, sequences without stages once."""

from __future__ import annotations

import pytest
from inspected import stacked

import rlx
from rlx.inspect.fold_layers import FOLD, REPEATS, STAGE, Group, Item, Line, fold_lines, lines_of, span, tree_text
from rlx.inspect.levels import graph_lines, stage_of


def outline(items: tuple[Item, ...], pad: str = "") -> list[str]:
    """The titles of a tree."""
    titles = []
    for item in items:
        if isinstance(item, Group):
            titles += [pad + item.title, *outline(item.items, pad + "  ")] if not item.is_fold else [pad + item.title]
    return titles


def test_alike_layers_are_shown_once_in_the_tree_of_stages() -> None:
    assert outline(fold_lines(graph_lines(stacked(30)))) == [
        "embed", "layers: 30 × layer", "  layers.0", "    layers.0.norm", "    layers.0.ffn",
        "  layers.1-29: 29 × like layers.0", "head",
    ]  # fmt: skip


def test_no_line_is_lost_and_any_layer_can_be_unfolded() -> None:
    graph = stacked(30)
    tree = fold_lines(graph_lines(graph))
    assert sorted(line.id for line in lines_of(tree)) == list(range(len(graph)))
    (layers,) = (g for g in tree if isinstance(g, Group) and g.name == "layers")
    first, copies = layers.items
    assert isinstance(first, Group) and isinstance(copies, Group)
    assert copies.kind == FOLD and not copies.is_open and len(copies.items) == 29
    seventh = copies.items[6]
    assert isinstance(seventh, Group) and seventh.name == "layers.7" and seventh.kind == STAGE
    assert {line.stage[:8] for line in seventh.lines()} == {"layers.7"}


def test_layers_of_two_kinds_are_two_folds() -> None:
    titles = outline(fold_lines(graph_lines(stacked(12, odd=(5, 11)))))
    assert [t.strip() for t in titles if "×" in t] == [
        "layers: 12 × layer, 2 kinds", "layers.1-4, 6-10: 9 × like layers.0", "layers.11: 1 × like layers.5",
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["operand", "type", "attribute"])
def test_layers_that_differ_in_anything_are_not_alike(change: str) -> None:
    g = rlx.Graph("g")
    x, other = g.input("x", (4, 4)), g.input("other", (4, 4))
    for i in range(2):
        with rlx.stage(f"layers.{i}"):
            y = x * g.param(f"w{i}", (4,) if i and change == "type" else (4, 4))
            z = other.sum(axis=1 if i and change == "attribute" else 0, keepdims=True)
            x = y - z if not (i and change == "operand") else y - y
    titles = outline(fold_lines(graph_lines(g.set_outputs([x]))))
    assert not [t for t in titles if "like" in t]


def test_an_input_that_layer_0_asked_for_first_is_no_difference() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (4,))
    for i in range(4):
        with rlx.stage(f"layers.{i}"):
            shared = g.input("shared", (4,)) if i == 0 else shared  # noqa: F821
            x = (x + shared).exp()
    titles = outline(fold_lines(graph_lines(g.set_outputs([x]))))
    assert titles == ["layers: 4 × layer", "  layers.0", "  layers.1-3: 3 × like layers.0"]


def test_sequences_without_stages_are_folded_where_they_repeat() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (4,)).tanh()
    for _ in range(20):
        x = ((x + 1.0).exp() * 0.5).sin()
    tree = fold_lines(graph_lines(g.set_outputs([x.cos()])))
    (fold,) = (item for item in tree if isinstance(item, Group))
    assert fold.kind == REPEATS and fold.name == "19 × the 6 lines above" and len(fold.items) == 19
    assert sorted(line.id for line in lines_of(tree)) == list(range(len(g)))
    assert len(tree) == 2 + 6 + 1 + 1


def test_few_lines_are_not_folded() -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (4,)).exp().exp().exp()])
    assert all(isinstance(item, Line) for item in fold_lines(graph_lines(g)))


def test_declarations_are_gathered_by_stage_and_launches_keep_their_order() -> None:
    stages = ["a", "b", "a"]
    named = [Line(str(i), stage=s, key=i, declares=True) for i, s in enumerate(stages)]
    run = [Line(str(i), stage=s, key=i) for i, s in enumerate(stages)]
    assert outline(fold_lines(named)) == ["a", "b"] and outline(fold_lines(run)) == ["a", "b", "a"]


def test_text_of_a_tree_has_all_lines_when_asked_for() -> None:
    tree = fold_lines(graph_lines(stacked(3)))
    some, every = ("\n".join(tree_text(tree, lambda line: line.text, all_=all_)) for all_ in (False, True))
    assert "layers.2.up" not in some and "# layers.1-2: 2 × like layers.0" in some
    assert "layers.2.up" in every


def test_names_of_folded_stages_are_short() -> None:
    assert span(["layers.1", "layers.2", "layers.3", "layers.7"]) == "layers.1-3, 7"
    assert span(["block1", "block2"]) == "block1 … block2" and span(["block1"]) == "block1"


def test_the_stage_of_a_launch_is_what_its_place_begins_with() -> None:
    assert stage_of("layers.1.attn, file.py:3, by fuse_epilogues") == "layers.1.attn"
    assert stage_of("file.py:3, by fuse_epilogues") == stage_of("by dce") == stage_of("") == ""
