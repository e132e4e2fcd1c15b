"""What a model's author is told about mistakes that used to pass silently, or with a misleading error."""

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import RlxError
from rlx.flow import FlowCtx, LayerStack, ModelFlow
from rlx.flow.stages import Attention, GeGlu, GeluFfn, SwiGlu

f32 = np.float32
TOKENS = ModelFlow("f").input("tokens", ("batch", "seq"), "i32").embed("e", shape=(9, 16))
MASKED = TOKENS.attn_mask("batch", "seq", "attention_mask").attention("a", 2, rope=None, mask="none")
EDGE = ModelFlow("f").input("x", (2, 4))
W = {"w": np.ones((3, 4), f32)}
KEY = rlx.random.key(0)


def load(flow: ModelFlow, **settings: Any) -> Any:
    return rlx.load(flow, params=flow.init(KEY), **settings)


def conv(emit: Any, value: Any, *, with_state: bool) -> Any:
    weight, before = emit.load_param("c", shape=(16, 3)), emit.carried("s", 2, 16) if with_state else None
    if before is None:
        return value + emit.depthwise_conv1d_causal(value, weight, emit.zeros((value.shape[0], 2, 16)), kernel_size=3)
    lengths = (emit.positions(value) >= 0).astype("i32").sum(axis=1)
    return value + emit.depthwise_conv1d_causal_carry(value, weight, before, lengths, kernel_size=3)[0]


def head(flow: ModelFlow) -> ModelFlow:
    return flow.lm_head(9, 16, tied=True)


CONV = head(TOKENS.custom_named("conv", lambda e, v: conv(e, v, with_state=False)))
STATE = head(TOKENS.custom_named("conv", lambda e, v: conv(e, v, with_state=True)))
ROPE = head(TOKENS.rope(32, 8).attention("a", 2))
DROPPED = EDGE.dropout(0.5)
LOSS = EDGE.linear("w", out=3).custom(lambda e, v: e.mean(v)).build(W)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda: TOKENS.attention("a", 2, rope=None).attn_mask("batch", "seq", "m").init(KEY),
            "no stage reads the mask 'm' of attn_mask\n.*before the layers",
        ),
        (lambda: load(CONV), "stage 'conv' of flow 'f' mixes tokens"),
        (lambda: load(head(TOKENS)), "has no attention stage and no state"),
        (lambda: load(ROPE, context=64), r"the RoPE tables of flow 'f' have 32 positions\n.*flow.rope\(64"),
        (lambda: load(MASKED), r"attends to later tokens(.|\n)*.*build\(params\).compile\(\)"),
        (lambda: EDGE.linear("w").build({"w": np.ones((3, 4), np.int32)}), r"weight 'w': is i32.*expected floats"),
        (lambda: EDGE.linear("w").build({"w": np.ones((3, 4), complex)}), "weight 'w': "),
        (lambda: EDGE.custom(lambda e, v: np.ones(4)).build(), r"returned a ndarray.*\n.*emit.synth_param\(name, x\)"),
        (lambda: EDGE.custom(lambda e, v: e.load_parm("w")).build(), "did you mean 'load_param'"),
        (lambda: ModelFlow("f").input("t", ("n",), "i32").embed("e").init(KEY), r"'e' \[\?, \?\] has\n.*\(64, 64\)"),
        (lambda: DROPPED.as_function({}, training=True)(np.ones((2, 4), f32)), r"key' is missing\n.*random.key"),
        (lambda: MASKED.as_function(MASKED.init(KEY))(np.ones((1, 2), np.int32)), "takes tokens, attention_mask"),
        (lambda: EDGE.linear("w").as_function({**W, "v": W["w"]}, strict=True)(np.ones((2, 4), f32)), "not used: 'v'"),
        (lambda: rlx.train.step(LOSS, rlx.train.adamw(weight_decay={"*": 0.1, "w": 0})), "match all weights of 'w'"),
        (lambda: rlx.train.step(EDGE.linear("w").build(W), rlx.train.sgd(0.1)), "step: the loss is f32"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, problem: str) -> None:
    with pytest.raises((RlxError, AttributeError), match=problem):
        call()


def test_a_model_with_only_a_state_generates() -> None:
    params = {name: array * 30 for name, array in STATE.init(KEY).items()}
    answer = rlx.load(STATE, params=params).generate([3, 1, 4], max_tokens=5).tokens
    tokens = [3, 1, 4]
    for _ in answer:
        tokens.append(int(STATE.as_function(params)(np.array([tokens], np.int32))[0, -1].argmax()))
    assert tokens[3:] == answer


def test_inputs_of_stages_are_positional_too() -> None:
    params, tokens = MASKED.init(KEY), np.array([[1, 2, 3]], np.int32)
    f, mask = MASKED.as_function(params), np.array([[1, 1, 0]], f32)
    np.testing.assert_array_equal(f(tokens, mask), f(tokens, attention_mask=mask))
    assert f"{f.__name__}(tokens) at" in repr(f)


def test_methods_take_the_settings_of_their_stages() -> None:
    stack = (
        LayerStack().attention("a", 2, eps=1e-3, score_scale=0.5).swiglu("g", "u", "d", bias=True, activation="relu")
    )
    stack = stack.geglu("g", "u", "d", bias=True).gelu_ffn("a", "b", "c", "d", activation="relu")
    assert stack.stages == (
        Attention("a", 2, eps=1e-3, score_scale=0.5), SwiGlu("g", "u", "d", bias=True, activation="relu"),
        GeGlu("g", "u", "d", bias=True), GeluFfn("a", "b", "c", "d", activation="relu"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["carried", "zeros", "positions", "stage"])
def test_a_context_documents_what_stages_use(name: str) -> None:
    assert getattr(FlowCtx, name).__doc__
