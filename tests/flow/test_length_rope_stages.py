"""Stages of RoPE by length among others: masks of any type, caches of the caller, tables of the same name."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.errors import GraphError, ShapeError
from rlx.flow import ModelFlow
from rlx.flow.stages import (
    BindDecodeInputs,
    FlowStage,
    LlamaDecodeLayer,
    RopeGrowth,
    RopeSwitch,
    RopeTables,
    SelfAttnPrefill,
)

ANGLES = np.outer(np.arange(16), [1.0, 0.1])
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)
FREQUENCIES = np.outer(np.linspace(1.0, 0.5, 5), [1.0, 0.1])
STAGES = {"switch": RopeSwitch(COS, SIN, 4), "growth": RopeGrowth(FREQUENCIES, 4)}
ATTENTION = SelfAttnPrefill("q", "k", "v", 2, 2, 4)
DRAWS = np.random.default_rng(3)
W = {name: DRAWS.standard_normal((8, 8)).astype(np.float32) for name in "qkv"}
X = DRAWS.standard_normal((2, 6, 8)).astype(np.float32)


@pytest.mark.parametrize("name", STAGES)
def test_lengths_come_from_masks_of_any_type(name: str) -> None:
    mask = np.array([[1] * 6, [1, 1, 1, 0, 0, 0]])
    found = []
    for kind, dtype in (("f32", np.float32), ("bool", np.bool_), ("i32", np.int32)):
        flow = ModelFlow("f").input("x", (2, 6, 8)).input("attention_mask", (2, 6), kind)
        run = flow.stage(STAGES[name]).stage(ATTENTION).build(W).compile()
        found.append(np.asarray(run(x=X, attention_mask=mask.astype(dtype))))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("name", STAGES)
def test_a_cache_that_the_caller_keeps_is_refused(name: str) -> None:
    flow = ModelFlow("f").input("x", (2, 1, 8)).input("past_k_0", (2, 5, 8)).input("past_v_0", (2, 5, 8))
    flow = flow.stage(STAGES[name]).stage(BindDecodeInputs(1)).stage(LlamaDecodeLayer("l", 2, 2, 4, 1e-5, layer_idx=0))
    with pytest.raises(GraphError, match="LlamaDecodeLayer: RoPE tables 'rope' depend on the length"):
        flow.build({f"l.self_attn.{n}_proj.weight": W["q"] for n in "qkvo"} | {"l.input_layernorm.weight": np.ones(8)})


@pytest.mark.parametrize("stage", [RopeSwitch(COS[:9], SIN[:9], 4), RopeGrowth(FREQUENCIES[:2], 4)])
def test_sequences_that_are_too_long_are_refused(stage: FlowStage) -> None:
    with pytest.raises(ShapeError, match="have 5 rows, positions go up to 5"):
        ModelFlow("f").input("x", (2, 6, 8)).stage(stage).stage(ATTENTION).build(W)


def test_later_tables_of_the_same_name_take_their_place() -> None:
    plain = ModelFlow("f").input("x", (2, 6, 8)).stage(RopeTables(COS, SIN)).stage(ATTENTION)
    both = plain.with_stages((STAGES["growth"], *plain.stages))
    mask = np.ones((2, 6), np.float32)
    found = both.build(W).compile()(x=X, attention_mask=mask)
    assert np.array_equal(np.asarray(found), np.asarray(plain.build(W).compile()(x=X)))


def test_styles_and_shapes_are_checked() -> None:
    with pytest.raises(GraphError, match="stage RopeSwitch: style is 'halfs'"):
        RopeSwitch(COS, SIN, 4, "halfs")
    with pytest.raises(GraphError, match="stage RopeGrowth: style is 'halfs'"):
        RopeGrowth(FREQUENCIES, 4, style="halfs")
    with pytest.raises(ShapeError, match="stage RopeSwitch: cos and sin"):
        RopeSwitch(COS, SIN[:3], 4)
