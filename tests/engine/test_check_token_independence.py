"""Flows whose stages mix tokens are refused, or carry a state; padding masks of attention; exports of flows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import CapabilityError, GraphError
from rlx.flow import ModelFlow
from rlx.flow.stages import Custom
from rlx.formats.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

VOCAB, DIM, KERNEL = 23, 16, 3
f32, i32 = np.float32, np.int32


def base() -> ModelFlow:
    tokens = ModelFlow("mine").input("tokens", ("batch", "seq"), "i32").rope(64, DIM // 2)
    return tokens.embed("embed", shape=(VOCAB, DIM)).attention("attn", 2)


def attend(emit: Any, v: Any) -> Any:
    return emit.softmax(v @ v.mT, axis=-1) @ v


def block(emit: Any, v: Any) -> Any:
    heads = v.reshape(*v.shape[:2], 2, DIM // 2)
    return emit.self_attention(heads, heads, heads, mask_kind="causal")


def gated(emit: Any, v: Any) -> Any:
    """Weights of zeros hide nothing."""
    return v + emit.cumsum(v, axis=1) * emit.load_param("gate", shape=(DIM,), init=0.0)


MIXING: dict[str, Any] = {
    "cumsum": lambda emit, v: v + emit.cumsum(v, axis=1),
    "mean": lambda emit, v: v - v.mean(axis=1, keepdims=True),
    "shift": lambda emit, v: emit.concatenate(emit.zeros((v.shape[0], 1, DIM)), v[:, :-1], axis=1),
    "matmul": attend,
    "self_attention": block,
    "zero gate": gated,
    "counted": lambda emit, v: v + emit.cumsum(emit.zeros((v.shape[1],)) + 1.0, axis=0).reshape(1, v.shape[1], 1),
}


def mapped(emit: Any, v: Any) -> Any:
    """All that a stage may do: elementwise, over channels, with weights, by position."""
    v = v.tanh() * emit.load_param("scale", shape=(DIM,)) + emit.matmul(v, emit.load_param("w", shape=(DIM, DIM)))
    v = (v.reshape(v.shape[0] * v.shape[1], DIM) * 2).reshape(*v.shape) + emit.softmax(v, axis=-1)
    return v * emit.positions(v).astype("f32").reshape(*v.shape[:2], 1)


def load(stage: Any) -> Any:
    flow = base().custom_named("mix", stage).lm_head(VOCAB, DIM, tied=True)
    return rlx.load(flow, params=flow.init(rlx.random.key(0)))


@pytest.mark.parametrize("name", MIXING)
def test_a_stage_that_mixes_tokens_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match="load: stage 'mix' of flow 'mine' mixes tokens") as caught:
        load(MIXING[name])
    assert "Stages with a state" in str(caught.value.notes)


def test_a_stage_that_treats_tokens_one_by_one_is_not_refused() -> None:
    assert len(load(mapped).generate([1, 2, 3], max_tokens=3).tokens) == 3


def test_a_patch_that_mixes_tokens_is_refused(tiny_folder: Path) -> None:
    centred = Custom(lambda emit, v: v - v.mean(axis=1, keepdims=True), "centred")
    with pytest.raises(GraphError, match=r"stage 'layers\.1\.?[a-z]*' of flow 'llama' mixes tokens"):
        rlx.load(tiny_folder, patch=lambda flow: flow.edit("layers.1", lambda stage: centred))
    model = rlx.load(tiny_folder, patch=lambda flow: flow.custom(lambda emit, v: v * 2))
    np.testing.assert_allclose(model.logits([1, 2]), rlx.load(tiny_folder).logits([1, 2]) * 2, rtol=1e-5)


# -- states -----------------------------------------------------------------------------------------------------------
def conv(emit: Any, value: Any) -> Any:
    weight, before = emit.load_param("conv", shape=(DIM, KERNEL)), emit.carried("conv.state", KERNEL - 1, DIM)
    if before is None:
        before = emit.zeros((value.shape[0], KERNEL - 1, DIM))
        return value + emit.depthwise_conv1d_causal(value, weight, before, kernel_size=KERNEL)
    counts = (emit.positions(value) >= 0).astype("i32").sum(axis=1)
    mixed, _ = emit.depthwise_conv1d_causal_carry(value, weight, before, counts, kernel_size=KERNEL)
    return value + mixed


def test_a_stage_with_a_state_generates_what_torch_computes_from_entire_sequences() -> None:
    flow = ModelFlow("conv").input("tokens", ("batch", "seq"), "i32").embed("embed", shape=(VOCAB, DIM))
    flow = flow.custom_named("conv", conv).lm_head(VOCAB, DIM, tied=True).kv_cache(0)
    params = {name: array * 20 for name, array in flow.init(rlx.random.key(3)).items()}
    table, taps = (torch.tensor(params[name]) for name in ("embed", "conv"))

    def logits(tokens: list[int]) -> Any:
        x = table[torch.tensor(tokens)].T[None]  # [1, channels, seq]
        padded = torch.nn.functional.pad(x, (KERNEL - 1, 0))
        y = x + torch.nn.functional.conv1d(padded, taps[:, None], groups=DIM)
        return (y[0].T @ table.T).numpy()

    model = rlx.load(flow, params=params)
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    np.testing.assert_allclose(model.logits(prompts[0]), logits(prompts[0]), rtol=1e-4, atol=1e-5)
    for prompt, answer in zip(prompts, model.generate(prompts, max_tokens=12), strict=True):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(logits(tokens)[-1].argmax()))
        assert answer.tokens == tokens[len(prompt) :]


# -- padding ----------------------------------------------------------------------------------------------------------
LENGTHS = (6, 4, 1)
X = np.random.default_rng(0).standard_normal((3, 6, DIM)).astype(f32)
MASK = np.arange(6) < np.array(LENGTHS)[:, None]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("none", "f32"),
        ("none", "i32"),
        ("custom", "bool"),
        ("causal", "f32"),
        ("causal", "bool"),
        ("sliding(2)", "i32"),
    ],
)
def test_attention_does_not_see_padding(kind: str, dtype: str) -> None:
    flow = ModelFlow("padded").input("x", ("batch", "seq", DIM)).input("mask", ("batch", "seq"), dtype)
    flow = flow.attn_mask("batch", "seq", "mask").attention("a", 2, rope=None, mask=kind)
    params = {name: array * 10 for name, array in flow.init(rlx.random.key(0)).items()}
    (y,) = flow.build(params).compile().run({"x": X, "mask": MASK.astype(rlx.dtype(dtype).numpy)})
    w = {name: torch.tensor(params[f"a.{name}_proj.weight"]) for name in "qkvo"}
    for row, length in enumerate(LENGTHS):
        x = torch.tensor(X[row : row + 1, :length])
        q, k, v = ((x @ w[name].T).reshape(1, length, 2, DIM // 2).transpose(1, 2) for name in "qkv")
        back = torch.arange(length)[:, None] - torch.arange(length)
        seen = back < (2 if kind == "sliding(2)" else length)
        seen = seen & (back >= 0) if kind in ("causal", "sliding(2)") else seen
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        want = attended.transpose(1, 2).reshape(1, length, DIM) @ w["o"].T
        np.testing.assert_allclose(y[row, :length], want[0].numpy(), rtol=1e-4, atol=1e-5)


def test_masks_that_nothing_supplies_are_named() -> None:
    flow = ModelFlow("f").input("x", ("batch", "seq", DIM))
    for kind, message in (("custom", "reads a mask, and none flows here"), ("padding", "is not known")):
        with pytest.raises(GraphError, match=f"mask kind '{kind}' {message}") as caught:
            flow.attention("a", 2, rope=None, mask=kind).init(rlx.random.key(0))
        assert "attn_mask" in caught.value.notes[0]
    cached = flow.attn_mask("batch", "seq", "mask").attention("a", 2, rope=None).kv_cache(1, 2, DIM // 2)
    with pytest.raises(GraphError, match="AttnMask: the flow has a KV cache"):
        cached.init(rlx.random.key(0))


def test_a_padding_mask_is_left_out_where_a_flow_generates() -> None:
    masked = (
        ModelFlow("mine").input("tokens", ("batch", "seq"), "i32").input("mask", ("batch", "seq")).rope(64, DIM // 2)
    )
    masked = masked.attn_mask("batch", "seq", "mask").embed("embed", shape=(VOCAB, DIM)).attention("attn", 2)
    masked, plain = (flow.lm_head(VOCAB, DIM, tied=True) for flow in (masked, base()))
    params = {name: array * 20 for name, array in plain.init(rlx.random.key(0)).items()}
    answers = [rlx.load(flow, params=params).generate([1, 2], max_tokens=6).tokens for flow in (masked, plain)]
    assert answers[0] == answers[1]


# -- exports ----------------------------------------------------------------------------------------------------------
def test_an_exported_flow_generates_the_same_without_the_flow(tmp_path: Path) -> None:
    flow = base().lm_head(VOCAB, DIM, tied=True)
    params = {name: array * 20 for name, array in flow.init(rlx.random.key(0)).items()}
    model = rlx.load(flow, params=params, tokenizer=Tokenizer.from_characters("abcdefghijklmnopqrstuvw"))
    again: Any = rlx.load(model.export(tmp_path / "mine.rlxp", weights=True))
    assert repr(again) == repr(model) and again.context == 64
    assert again.generate("cab", max_tokens=9).text == model.generate("cab", max_tokens=9).text
    np.testing.assert_array_equal(again.logits("cab"), model.logits("cab"))
    with pytest.raises(CapabilityError, match="the export does not have the flow"):
        _ = again.flow


def test_an_export_without_weights_has_the_tables_of_its_flow(tmp_path: Path) -> None:
    flow = base().lm_head(VOCAB, DIM, tied=True).custom(lambda emit, v: v.max(axis=-1)).output("best")
    params = flow.init(rlx.random.key(0))
    compiled = flow.build(params).compile()
    again: Any = rlx.load_exported(compiled.export(tmp_path / "mine.rlxp"))
    again.set_params(params)  # without RoPE tables
    tokens = {"tokens": np.array([[3, 1, 4]], i32)}
    np.testing.assert_array_equal(again.run(tokens)[0], compiled.run(tokens)[0])
    assert compiled.output_names == again.output_names == ["best"]
    graph = rlx.Graph("g")
    x = graph.input("x", (3,))
    assert rlx.compile(graph.set_outputs([x, x + 1])).output_names == ["output", "output.1"]
