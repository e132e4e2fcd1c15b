"""Small parts where they go wrong silently: residuals, made params, masks of integers, indices of any rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import GraphError, RlxError, ShapeError
from rlx.flow import ModelFlow
from rlx.flow.stages import (
    AttnMask,
    BertEncoderLayer,
    ClsTokenPool,
    DeltaNetLayer,
    FlowStage,
    GatherAdd,
    GatherFromInput,
    GatherLastToken,
    GemmaKvTap,
    LlamaDecoder,
    LlamaKvTap,
    MoeFfn,
    NomicEncoderLayer,
    SelfAttnPrefill,
    VitSelfAttn,
)
from rlx.flow.stages.encoder import attend

Array = np.ndarray[Any, Any]
BATCH, SEQ, HIDDEN, HEADS, HEAD = 3, 5, 8, 2, 4
DEVICES = ["cpu", "reference"]


def draws(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = draws(0, BATCH, SEQ, HIDDEN)


def close(actual: Array, wanted: Array) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-5)


# -- residuals, graphs, made params ----------------------------------------------------------------------------------
def test_a_residual_of_another_shape_is_refused() -> None:
    square = ModelFlow("f").input("x", (3, 3, 4)).residual_save().cls_token_pool().residual_add()
    with pytest.raises(ShapeError, match=r"ResidualAdd: the value is f32\[3, 4\], the saved one is f32\[3, 3, 4\]"):
        square.build()
    open_sizes = ModelFlow("f").input("x", ("batch", "seq", 4)).residual_save().custom(lambda e, v: v[:, 0:1])
    with pytest.raises(ShapeError, match="stage ResidualAdd"):
        open_sizes.residual_add().build()


def test_a_graph_is_not_made_of_a_module() -> None:
    module = rlx.GraphModule.define("m", lambda m: m.input("x", (2,)))
    with pytest.raises(GraphError, match="Graph: its name is a GraphModule") as caught:
        rlx.Graph(module)  # type: ignore[arg-type]
    assert "module.into_graph()" in (caught.value.hint or "")
    assert [n.op for n in module.into_graph().nodes] == ["input"]


@pytest.mark.parametrize("data", [np.linspace(0, 1, 6), np.float64(0.5), [0.1] * 6, 0.25])
def test_numbers_of_a_stage_do_not_widen_the_flow(data: Any) -> None:
    flow = ModelFlow("f").input("x", (2, 6)).custom(lambda e, v: v * e.synth_param("scale", data))
    built = flow.build()
    assert built.module.outputs[0].dtype is rlx.dtype("f32")
    x = draws(1, 2, 6)
    close(built.compile("cpu").run({"x": x})[0], x * np.asarray(data, np.float64))


# -- masks -----------------------------------------------------------------------------------------------------------
MASK = np.arange(SEQ) < np.array([5, 2, 3])[:, None]
VIT = {"qkv": draws(2, 3 * HIDDEN, HIDDEN), "out": draws(3, HIDDEN, HIDDEN)}


def attended(x: Array, mask: Array) -> Array:
    q, k, v = (t.reshape(BATCH, SEQ, HEADS, HEAD) for t in np.split(x @ VIT["qkv"].T.astype(np.float64), 3, -1))
    odds = np.exp(np.where(mask[:, None, None], np.einsum("bqhd,bkhd->bhqk", q, k) / 2, -np.inf))
    seen = np.einsum("bhqk,bkhd->bqhd", odds / odds.sum(-1, keepdims=True), v)
    return np.asarray(seen.reshape(x.shape) @ VIT["out"].T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["f32", "i64", "i32", "u8", "bool"])
def test_a_mask_has_any_type(kind: str, device: str) -> None:
    vit = VitSelfAttn("qkv", None, "out", None, HEADS, HEAD)
    flow = (
        ModelFlow("f").input("x", X.shape).input("m", ("batch", SEQ), kind).stage(AttnMask(BATCH, SEQ, "m")).stage(vit)
    )
    mask = MASK.astype(rlx.dtype(kind).numpy)
    with pytest.raises(RlxError, match="batch"):  # the sizes of a mask are still those of the value
        flow.build(VIT)
    flow = ModelFlow("f").input("x", X.shape).input("m", MASK.shape, kind).stage(AttnMask(BATCH, SEQ, "m")).stage(vit)
    close(flow.build(VIT).compile(device).run({"x": X, "m": mask})[0], attended(X.astype(np.float64), MASK))


@pytest.mark.parametrize("kind", ["i64", "bool"])
@pytest.mark.parametrize("stage", [BertEncoderLayer, NomicEncoderLayer])
def test_encoder_layers_take_the_masks_of_tokenizers(stage: Any, kind: str) -> None:
    """A mask of integers is the same as one of floats, which other tests compare with NumPy and torch."""
    angles = np.outer(np.arange(SEQ), [1.0, 0.1])
    layer = stage("p", HIDDEN, HEADS, HEAD, 1e-5, intermediate_size=6)
    results = []
    for kind_, mask in (("f32", MASK.astype(np.float32)), (kind, MASK.astype(rlx.dtype(kind).numpy))):
        flow = ModelFlow("f").input("x", X.shape).input("attention_mask", MASK.shape, kind_)
        flow = flow.rope_tables(np.cos(angles), np.sin(angles)).stage(layer)
        f = flow.build(flow.init(rlx.random.key(0))).compile("reference")
        assert set(f.input_types) == {"x", "attention_mask"}  # positions are counted
        results.append(f.run({"x": X, "attention_mask": mask})[0])
    np.testing.assert_array_equal(*results)
    everything = f.run({"x": X, "attention_mask": np.ones_like(mask)})[0]
    assert np.abs(everything - results[0]).max() > 1e-4


def seen_tokens(mask: Any, dtype: str, kind: str) -> Any:
    """[batch, seq, seq] which tokens see which: each gives 1 in a column of its own, above 0 for those that see it."""

    def sums(ctx: Any, value: Any) -> Any:
        zeros = value.reshape(len(mask), SEQ, 1, HIDDEN) * 0.0
        own = ctx.hir().constant(np.eye(SEQ, HIDDEN, dtype=np.float32).reshape(1, SEQ, 1, HIDDEN))
        own = own.graph.one("expand", own, shape=(len(mask), SEQ, 1, HIDDEN))
        return attend(ctx, zeros, zeros, own, "attention_mask", kind)

    flow = ModelFlow("f").input("x", (len(mask), SEQ, HIDDEN)).input("attention_mask", mask.shape, dtype).custom(sums)
    output = flow.build().compile("reference").run({"x": X[: len(mask)], "attention_mask": mask})[0]
    return output[..., :SEQ] > 0


@pytest.mark.parametrize("dtype", ["f32", "i64", "i32", "u8", "bool"])
def test_masks_of_earlier_and_of_near_tokens_have_any_type(dtype: str) -> None:
    mask = MASK.astype(rlx.dtype(dtype).numpy)
    near = np.abs(np.arange(SEQ)[:, None] - np.arange(SEQ)) <= 1
    for kind, seen in ((rlx.MaskKind.near(1), near), (rlx.MaskKind.CAUSAL, np.tri(SEQ, dtype=bool))):
        np.testing.assert_array_equal(seen_tokens(mask, dtype, kind), seen & MASK[:, None] & MASK[:, :, None])


@pytest.mark.parametrize("kind", [rlx.MaskKind.NONE, rlx.MaskKind.CAUSAL])
def test_the_edge_of_a_mask_of_floats_is_the_same_everywhere(kind: str) -> None:
    """0.5 keeps a token."""
    seen = seen_tokens(np.float32([[0.5, 0.49, 1, 0, 2]]), "f32", kind)
    assert seen[0, -1].tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_of_ones_may_have_sizes_of_the_run(device: str) -> None:
    vit = VitSelfAttn("qkv", None, "out", None, HEADS, HEAD)
    flow = ModelFlow("f").input("x", ("batch", "seq", HIDDEN)).attn_mask_ones("batch", "seq").stage(vit)
    close(flow.build(VIT).compile(device).run({"x": X})[0], attended(X.astype(np.float64), MASK | True))
    with pytest.raises(RlxError, match=r"not a size"):
        ModelFlow("f").input("x", X.shape).attn_mask_ones(1.5, 2).build()  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(SEQ, HIDDEN), (1, BATCH, SEQ, HIDDEN)])
@pytest.mark.parametrize(
    "stage",
    [
        BertEncoderLayer("p", HIDDEN, HEADS, HEAD, 1e-5), NomicEncoderLayer("p", HIDDEN, HEADS, HEAD, 1e-5),
        VitSelfAttn("qkv", None, "out", None, HEADS, HEAD), LlamaDecoder("p", HEADS, HEADS, HEAD, 1e-5),
        DeltaNetLayer("p", 1e-5, layer_idx=0), SelfAttnPrefill("q", "k", "v", HEADS, HEADS, HEAD),
        LlamaKvTap("p", HEAD, 1e-5, rlx.SideOutputs()), GemmaKvTap("p", HEAD, rlx.SideOutputs()), MoeFfn("m", 4, 2),
        ClsTokenPool(), GatherLastToken(),
    ],
    ids=lambda stage: type(stage).__name__ if isinstance(stage, FlowStage) else str(len(stage)),
)  # fmt: skip
def test_layers_say_that_they_take_sequences(stage: FlowStage, shape: tuple[int, ...]) -> None:
    with pytest.raises(GraphError, match=rf"stage {type(stage).__name__}: takes \[batch, seq, hidden\], found f32"):
        ModelFlow("f").input("x", shape).stage(stage).build()


# -- rows of tables --------------------------------------------------------------------------------------------------
TABLE = draws(4, 9, HIDDEN)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(BATCH, SEQ), (SEQ,), (1, SEQ), ()])
def test_rows_are_added_by_an_index_of_any_rank(shape: tuple[int, ...], device: str) -> None:
    rows = np.random.default_rng(5).integers(0, 9, shape, dtype=np.int64)
    flow = ModelFlow("f").input("x", X.shape).input("rows", shape, "i64").stage(GatherAdd("rows", "table"))
    close(flow.build({"table": TABLE}).compile(device).run({"x": X, "rows": rows})[0], X + TABLE[rows])
    flow = ModelFlow("f").input("x", X.shape).input("rows", shape, "i64").stage(GatherFromInput("rows", "table"))
    close(flow.build({"table": TABLE}).compile(device).run({"x": X, "rows": rows})[0], TABLE[rows])


def test_rows_that_do_not_fit_the_value_are_refused() -> None:
    for shape in ((BATCH + 1, SEQ), (2, BATCH, SEQ)):
        flow = ModelFlow("f").input("x", X.shape).input("rows", shape, "i32").stage(GatherAdd("rows", "table"))
        with pytest.raises(ShapeError):
            flow.build({"table": TABLE})
