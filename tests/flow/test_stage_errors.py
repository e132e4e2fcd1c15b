"""Mistakes of authors of stages: errors name the stage and the call to write, and values have the methods of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ModelFlow
from rlx.errors import BindError, DTypeError, GraphError, RequestError, RlxError, ShapeError
from rlx.flow import LayerStack

KEY = rlx.random.key(0)
X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def flow() -> ModelFlow:
    return ModelFlow("f").input("x", (2, 3, 4))


def refusal(kind: type[Exception], f: Callable[[], object]) -> str:
    """The message and the notes of an error."""
    with pytest.raises(kind) as caught:
        f()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


# -- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.mean(1), lambda x: x.sum(1, keepdims=True), lambda x: x.transpose(0, 2, 1),
        lambda x: x.transpose((2, 0, 1)), lambda x: x.swapaxes(1, 2), lambda x: x.T, lambda x: x.flatten(),
        lambda x: x.std(-1), lambda x: x.argmax(1), lambda x: x.reshape(x.ndim, -1),
        lambda x: x[:, :, None], lambda x: x[..., None], lambda x: x[None, 0, ..., None, 1:],
    ],
)  # fmt: skip
def test_values_of_a_stage_have_the_methods_of_arrays(f: Callable[[Any], Any]) -> None:
    result = flow().custom(lambda emit, value: f(value)).build().compile().run({"x": X})[0]
    np.testing.assert_allclose(result, f(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rlx.jit(f)(X), f(X), rtol=1e-5, atol=1e-6)  # traced arrays have the same


def test_a_value_is_updated_by_index() -> None:
    result = flow().custom(lambda emit, value: value.at[0].set(1.0)).build().compile().run({"x": X})[0]
    assert (result[0] == 1).all() and np.array_equal(result[1], X[1])


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (lambda v: v.view(2, -1), "Use reshape"), (lambda v: v.unsqueeze(1), "rlx.expand_dims(x, axis)"),
        (lambda v: v.sum(dim=1), "did you mean 'axis'?"), (lambda v: v.__setitem__(0, 1), "x.at[key].set(y)"),
        (lambda v: v.softmax(-1), "attributes are given by name: axis=..."), (lambda v: v.item(), "no data"),
        (lambda v: v.transpose(0, 1, 5), "axis 5 is outside a rank-3 tensor"),
        (lambda v: 1 if v.mean() > 0 else 2, "rlx.where(...) chooses"),
    ],
)  # fmt: skip
def test_wrong_calls_name_the_right_one(f: Callable[[Any], Any], said: str) -> None:
    text = refusal(Exception, lambda: flow().custom_named("mine", lambda emit, value: f(value)).build())
    assert said in text and "  in stage: mine" in text


def test_the_axes_of_a_transposed_array_exist() -> None:
    with pytest.raises(ShapeError, match="axis 3 is outside"):
        rlx.transpose(X, (0, 1, 3))


def test_f64_next_to_f32_is_said_to_come_from_numpy() -> None:
    def conv(emit: Any, value: Any) -> Any:
        weight, left_pad = np.ones((4, 2), np.float32), np.zeros((2, 1, 4), np.float32)
        return emit.depthwise_conv1d_causal(value * np.ones(4), weight, left_pad, kernel_size=2)

    assert "array.astype(np.float32)" in refusal(DTypeError, lambda: flow().custom(conv).build())


# -- stages ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Returns(rlx.FlowStage):
    """Returns something else than a flow value."""

    f: Callable[[Any], Any]

    def emit(self, ctx: Any, value: Any) -> Any:
        return self.f(value)


@pytest.mark.parametrize("f", [lambda value: value.id, lambda value: np.zeros(3)])
def test_a_wrong_result_is_of_the_stage_that_returned_it(f: Callable[[Any], Any]) -> None:
    layers = flow().repeat_layers(2, lambda i: LayerStack().named_layer("conv", Returns(f)))
    assert "  in stage: layers.0.conv" in refusal(GraphError, layers.build)


def test_an_error_while_a_layer_is_made_names_the_layer() -> None:
    wrong: Any = lambda value: value
    layers = flow().repeat_layers(2, lambda i: LayerStack().custom_named("mine", wrong))
    text = refusal(GraphError, layers.build)
    assert "stage Custom 'mine'" in text and "  in stage: layers.0" in text


def test_a_linear_stage_is_called_like_its_weight() -> None:
    layers = flow().repeat_layers(2, lambda i: LayerStack().linear(f"layers.{i}.attn.o_proj.weight", out=4))
    built = layers.build(layers.init(KEY), capture="layers.*.o_proj")
    assert built.output_names == ["output", "layers.0.o_proj", "layers.1.o_proj"]
    assert "in stage: layers.0.o_proj" in refusal(BindError, lambda: layers.build({}))


def test_sizes_that_are_known_to_differ_are_not_to_be_assumed_equal() -> None:
    wrong = flow().residual_save().linear("w", out=8).residual_add()
    assert "assume_equal" not in refusal(ShapeError, lambda: wrong.init(KEY))
    saved = ModelFlow("f").input("x", ("n", 4)).residual_save()
    other = saved.custom(lambda emit, value: emit.input("y", ("m", 4))).residual_add()
    assert "assume_equal" in refusal(ShapeError, other.build)


def test_a_class_is_no_plugin() -> None:
    cls: Any = Returns
    assert "plugin(Returns(...))" in refusal(GraphError, lambda: flow().plugin(cls))


def test_an_input_comes_from_its_own_line() -> None:
    (x, *_) = flow().custom(lambda emit, value: value * 2.0).build().module.nodes
    assert x.origin.file == __file__ and x.origin.line < 30


# -- weights ---------------------------------------------------------------------------------------------------------
def test_computed_tables_are_not_counted_as_weights() -> None:
    rotary = ModelFlow("r").input("tokens", ("batch", "seq"), "i32").rope(8, 16).embed("embed", shape=(9, 64))
    rotary = rotary.attention("attn", 4)
    weights = rotary.init(KEY)
    assert repr(rotary.build(weights)).endswith(f"{len(weights)} weights, 2 computed>")


def test_only_shapes_that_do_not_follow_from_others_are_asked_for() -> None:
    open_ = ModelFlow("o").input("tokens", ("batch", "seq"), "i32").embed("embed").rms_norm("n", 1e-5)
    text = refusal(BindError, lambda: open_.init(KEY))
    assert "which shape weight 'embed' [?, ?] has" in text


def test_a_pattern_of_initialisers_that_matches_nothing_names_the_nearest() -> None:
    wrong = flow().linear("layers.0.down", out=4).initialised({"*.dwn": 0.01})
    assert "did you mean" in (text := refusal(BindError, lambda: wrong.init(KEY))) and "down" in text
    assert "xavier_uniform" in dir(rlx.flow.init) and "math" not in dir(rlx.flow.init)


def test_a_file_of_arrays_is_read_by_numpy(tmp_path: Path) -> None:
    path: Any = tmp_path / "w.npz"
    linear = flow().linear("w", out=4)
    np.savez(path, **linear.init(KEY))
    text = refusal(RlxError, lambda: linear.build(path))
    assert f"dict(np.load({str(path)!r}))" in text
    assert linear.build(dict(np.load(path))).compile().run({"x": X})[0].shape == X.shape


def test_flows_are_compiled_before_they_are_exported(tmp_path: Path) -> None:
    linear: Any = flow().linear("w", out=4)
    for what in (linear, linear.build(linear.init(KEY))):
        assert "rlx.compile(" in refusal(RequestError, lambda what=what: rlx.export(what, tmp_path / "x.rlxp"))  # type: ignore[misc]
