"""Stages of RoPE by length among others: masks of any type, positions, caches of the caller, tables of the same name.

Numbers are compared with plain NumPy in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.errors import GraphError, RlxError, ShapeError
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

Array = np.ndarray[Any, Any]
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
    results = []
    for kind, dtype in (("f32", np.float32), ("bool", np.bool_), ("i32", np.int32)):
        flow = ModelFlow("f").input("x", (2, 6, 8)).input("attention_mask", (2, 6), kind)
        run = flow.stage(STAGES[name]).stage(ATTENTION).build(W).compile()
        results.append(np.asarray(run(x=X, attention_mask=mask.astype(dtype))))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


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


def attended(x: Array, angles: Array) -> Array:
    """Causal attention `[batch, seq, 8]` of two heads that turn by angles `[batch, seq, half]`."""
    q, k, v = (x.astype(np.float64) @ W[n].T.astype(np.float64) for n in "qkv")
    q, k, v = (t.reshape(*x.shape[:2], 2, 4) for t in (q, k, v))
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]

    def rotated(t: Array) -> Array:
        a, b = t[..., :2], t[..., 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    scores = np.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / 2
    odds = np.exp(np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf))
    return np.einsum("bhqk,bkhd->bqhd", odds / odds.sum(-1, keepdims=True), v).reshape(x.shape)


LONG = np.outer(np.arange(12), [0.5, 0.05])  # the angles of sequences beyond the limit of 4
BOTH = np.concatenate([ANGLES[:4], LONG])
BY_NUMPY: dict[str, tuple[FlowStage, Any]] = {
    "switch": (RopeSwitch(np.cos(BOTH), np.sin(BOTH), 4), lambda at, length: (LONG if length > 4 else ANGLES)[at]),
    "growth": (RopeGrowth(FREQUENCIES, 4), lambda at, length: at[:, None] * FREQUENCIES[max(length - 4, 0)]),
}


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", BY_NUMPY)
def test_each_row_goes_by_its_own_length(name: str, device: str) -> None:
    """Rows of 6, 3 and 5 tokens that are no padding: two lengths beyond the limit, and one within it."""
    stage, angles_of = BY_NUMPY[name]
    lengths = [6, 3, 5]
    mask = np.arange(6) < np.array(lengths)[:, None]
    x = DRAWS.standard_normal((3, 6, 8)).astype(np.float32)
    flow = ModelFlow("f").input("x", ("batch", "seq", 8)).input("attention_mask", ("batch", "seq"), "i64")
    run = flow.stage(stage).stage(ATTENTION).build(W).compile(device)
    (result,) = run(x=x, attention_mask=mask.astype(np.int64))
    wanted = attended(x, np.stack([angles_of(np.arange(6), length) for length in lengths]))
    np.testing.assert_allclose(result[mask], wanted[mask], rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", BY_NUMPY)
def test_a_sequence_is_as_long_as_its_last_position_says(name: str, device: str) -> None:
    """As in transformers: three tokens that begin at position 3 are those of a sequence of 6."""
    stage, angles_of = BY_NUMPY[name]
    x, at = X[:, :3], np.array([[3, 4, 5], [0, 1, 2]])
    flow = ModelFlow("f").input("x", (2, 3, 8)).input("attention_mask", (2, 3)).input("positions", (2, 3), "i32")
    run = flow.stage(stage).stage(ATTENTION).build(W).compile(device)
    (result,) = run(x=x, attention_mask=np.ones((2, 3), np.float32), positions=at.astype(np.int32))
    wanted = attended(x, np.stack([angles_of(row, row.max() + 1) for row in at]))
    np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("stage", [RopeSwitch(COS[:9], SIN[:9], 4), RopeGrowth(FREQUENCIES[:2], 4)])
def test_a_length_that_is_seen_at_run_time_is_checked_then(stage: FlowStage, device: str) -> None:
    flow = ModelFlow("f").input("x", ("batch", "seq", 8)).input("attention_mask", ("batch", "seq"))
    run = flow.stage(stage).stage(ATTENTION).build(W).compile(device)
    run(x=X[:, :5], attention_mask=np.ones((2, 5), np.float32))
    with pytest.raises(RlxError):
        run(x=X, attention_mask=np.ones((2, 6), np.float32))


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_ragged_tokens_have_no_lengths(stage: FlowStage) -> None:
    flow = ModelFlow("f").input("tokens", ("batch", "seq"), "i32").kv_cache(1, 2, 4).ragged()
    with pytest.raises(GraphError, match=r"length of sequences take tokens \[batch, seq\], found ragged ones"):
        flow.embed("table").stage(stage).build({"table": np.zeros((9, 8), np.float32)})


def test_short_sequences_need_no_long_table() -> None:
    ModelFlow("f").input("x", (2, 6, 8)).stage(RopeSwitch(COS[:9], SIN[:9], 8)).stage(ATTENTION).build(W)


def test_later_tables_of_the_same_name_take_their_place() -> None:
    plain = ModelFlow("f").input("x", (2, 6, 8)).stage(RopeTables(COS, SIN)).stage(ATTENTION)
    both = plain.with_stages((STAGES["growth"], *plain.stages))
    mask = np.ones((2, 6), np.float32)
    result = both.build(W).compile()(x=X, attention_mask=mask)
    assert np.array_equal(np.asarray(result), np.asarray(plain.build(W).compile()(x=X)))


def test_styles_and_shapes_are_checked() -> None:
    with pytest.raises(GraphError, match="stage RopeSwitch: style is 'halfs'"):
        RopeSwitch(COS, SIN, 4, "halfs")
    with pytest.raises(GraphError, match="stage RopeGrowth: style is 'halfs'"):
        RopeGrowth(FREQUENCIES, 4, style="halfs")
    with pytest.raises(ShapeError, match="stage RopeSwitch: cos and sin"):
        RopeSwitch(COS, SIN[:3], 4)
    with pytest.raises(ShapeError, match="stage RopeSwitch: limit is 16, but tables have only 16 rows"):
        RopeSwitch(COS, SIN, 16)
    with pytest.raises(GraphError, match="stage RopeSwitch: limit is 0"):
        RopeSwitch(COS, SIN, 0)
    with pytest.raises(ShapeError, match=r"stage RopeGrowth: frequencies are \[lengths, half\], found shape \(2,\)"):
        RopeGrowth(FREQUENCIES[0], 4)
    with pytest.raises(GraphError, match=r"stage RopeGrowth: limit is 2\.5"):
        RopeGrowth(FREQUENCIES, 2.5)  # type: ignore[arg-type]
