"""`model.apply` inside traced functions: gradients against finite differences in NumPy's float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama
import tiny_mamba
from scaled_folders import write_mxfp4
from scipy.special import log_softmax

import rlx
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.errors import BindError, RequestError, ShapeError

Array = np.ndarray[Any, Any]
TOKENS = np.random.default_rng(0).integers(0, 97, 12).astype(np.int32)


def loss_of(model: Any) -> Any:
    def loss(params: Any, tokens: Any) -> Any:
        logits = rlx.log_softmax(model.apply(params, tokens)[:-1], -1)
        return -np.mean(np.take_along_axis(logits, tokens[1:, None], 1))

    return loss


def numpy_loss(weights: dict[str, Array], tokens: Array) -> float:
    logits = tiny_llama.forward(weights, tokens.tolist())["logits"][:-1]
    return float(-np.mean(log_softmax(logits, -1)[np.arange(len(tokens) - 1), tokens[1:]]))


def slope(weights: dict[str, Array], name: str, direction: Array, tokens: Array) -> float:
    """The derivative of the loss along a direction of one weight, by central differences."""
    step, wide = 1e-5, {n: w.astype(np.float64) for n, w in weights.items()}
    up, down = (numpy_loss(wide | {name: wide[name] + sign * step * direction}, tokens) for sign in (1, -1))
    return (up - down) / (2 * step)


def test_gradients_are_those_of_numpy(tiny: LanguageModel, tmp_path: Path) -> None:
    weights = tiny_llama.write(tmp_path)
    names = [
        "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.down_proj.weight", "lm_head.weight",
    ]  # fmt: skip
    params = tiny.float_params(names)
    assert list(params) == sorted(names, key=list(tiny.params).index)
    value, gradient = rlx.value_and_grad(loss_of(tiny))(params, TOKENS)
    assert value == pytest.approx(numpy_loss(weights, TOKENS), rel=1e-5)
    rng = np.random.default_rng(2)
    for name in names:
        direction = rng.normal(size=weights[name].shape)
        wanted = slope(weights, name, direction, TOKENS)
        assert float((gradient[name] * direction).sum()) == pytest.approx(wanted, rel=2e-3, abs=2e-5), name


def test_gradients_of_examples_are_those_of_each(tiny: LanguageModel) -> None:
    params = tiny.float_params("model.layers.1.mlp.*.weight")
    rows = np.random.default_rng(3).integers(0, 97, (3, 8)).astype(np.int32)
    each = rlx.vmap(rlx.grad(loss_of(tiny)), in_axes=(None, 0))(params, rows)
    for i, row in enumerate(rows):
        alone = rlx.grad(loss_of(tiny))(params, row)
        assert all(np.allclose(each[name][i], alone[name], atol=1e-6) for name in params)


def test_training_a_loaded_model(tiny: LanguageModel) -> None:
    @rlx.jit
    def step(params: Any, tokens: Any) -> Any:
        value, gradient = rlx.value_and_grad(loss_of(tiny))(params, tokens)
        return value, rlx.tree.map(lambda p, g: p - 1.0 * g, params, gradient)

    params, losses = tiny.float_params("lm_head.weight"), []
    for _ in range(5):
        value, params = step(params, TOKENS)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.5 * losses[0]
    assert float(loss_of(tiny)(params, TOKENS)) < losses[-1]  # without a transform: apply compiles and runs
    assert "traced again" not in rlx.explain(step)


def test_the_gradient_by_an_edited_stage_is_a_saliency(tiny: LanguageModel, tmp_path: Path) -> None:
    weights = tiny_llama.write(tmp_path)

    def score(change: Any) -> Any:
        return tiny.apply({}, TOKENS, edit={"layers.0": lambda x: x + change})[-1, 5]

    zeros, direction = np.zeros((12, 48), np.float32), np.random.default_rng(4).normal(size=(12, 48))
    saliency = rlx.grad(score)(zeros)

    def numpy_score(step: float) -> float:
        return float(
            tiny_llama.forward(weights, TOKENS.tolist(), after={0: lambda x: x + step * direction})["logits"][-1, 5]
        )

    wanted = (numpy_score(1e-5) - numpy_score(-1e-5)) / 2e-5
    assert float((saliency * direction).sum()) == pytest.approx(wanted, rel=1e-3)
    changed = score(direction.astype(np.float32))  # not traced
    assert float(changed) == pytest.approx(numpy_score(1.0), rel=1e-4)


def test_all_kinds_of_models(tmp_path: Path) -> None:
    """An encoder, and a recurrent decoder: the value under a trace is that of a call."""
    for name, write in (("bert", small_bert.write), ("mamba", tiny_mamba.write)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        model = load(tmp_path / name)
        tokens = TOKENS % 40
        weight = next(n for n in model.params if n.endswith("weight") and "norm" in n.lower())
        params = model.float_params(weight)
        value, gradient = rlx.value_and_grad(lambda p, m=model, t=tokens: np.sum(m.apply(p, t) ** 2))(params)
        assert value == pytest.approx(float(np.sum(model.apply(params, tokens) ** 2)), rel=1e-4)
        step = np.zeros_like(params[weight])
        step[1] = 1e-2
        up, down = (np.sum(model.apply({weight: params[weight] + s}, tokens).astype(float) ** 2) for s in (step, -step))
        assert gradient[weight][1] == pytest.approx((up - down) / 2e-2, rel=2e-2)
        wanted, values = model.run(tokens, capture="layers.*"), model.apply({}, tokens, capture="layers.*")
        assert wanted and set(values) == set(wanted)
        assert all(np.allclose(values[path], wanted[path], atol=1e-4) for path in wanted)


def test_quantised_weights_are_read_as_they_are(tmp_path: Path) -> None:
    """Packed weights are not converted, and give the gradients of the numbers that they stand for."""
    changes = {"hidden_size": 64, "intermediate_size": 96}
    weights = tiny_llama.write(tmp_path / "f32", **changes)
    stood_for = write_mxfp4(tmp_path / "packed", weights, tiny_llama.CONFIG | changes, lambda name: ".mlp." in name)
    model, name = load(tmp_path / "packed", precision="f32"), "model.layers.0.mlp.up_proj.weight"
    assert model.params[name].dtype.names is not None  # blocks
    assert np.array_equal(model.float_params(name)[name], stood_for[name])
    direction = np.random.default_rng(5).normal(size=(12, 64))

    def numpy_score(step: float) -> float:
        after = {0: lambda x: x + step * direction}
        return float(tiny_llama.forward(stood_for, TOKENS.tolist(), after=after, **changes)["logits"][-1, 5])

    zeros = np.zeros((12, 64), np.float32)
    gradient = rlx.grad(lambda e: model.apply({}, TOKENS, edit={"layers.0": lambda x: x + e})[-1, 5])(zeros)
    wanted = (numpy_score(1e-5) - numpy_score(-1e-5)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(wanted, rel=1e-3)
    trained = rlx.grad(lambda p: model.apply(p, TOKENS)[-1, 5])(model.float_params(name))
    assert trained[name].shape == (96, 64) and trained[name].any()


def test_captured_values_are_those_of_run_and_have_gradients(tiny: LanguageModel) -> None:
    paths = ["layers.*", "layers.1.attn", "logits"]
    wanted = tiny.run(TOKENS, capture=paths)
    for values in (
        tiny.apply({}, TOKENS, capture=paths),
        rlx.jit(lambda tokens: tiny.apply({}, tokens, capture=paths))(TOKENS),
    ):
        assert set(values) == set(wanted) and "layers.0" in values and "logits" in values
        for path, value in wanted.items():
            np.testing.assert_allclose(values[path], value, rtol=1e-4, atol=1e-4)
    one = tiny.apply({}, TOKENS[:1], capture="logits")["logits"]
    assert one.shape == (1, 97)
    edited = tiny.apply({}, TOKENS, edit={"layers.0": lambda x: 0 * x}, capture="layers.0.out")
    assert list(edited) == ["layers.0.out"] and not edited["layers.0.out"].any()

    def norm(change: Any) -> Any:
        values = tiny.apply({}, TOKENS, edit={"layers.0": lambda x: x + change}, capture="layers.0")
        return np.sum(values["layers.0"] ** 2) / 2

    slopes = rlx.grad(norm)(np.zeros((12, 48), np.float32))
    np.testing.assert_allclose(slopes, wanted["layers.0"], rtol=1e-4, atol=1e-4)
    with pytest.raises(RequestError, match=r"no stage of .* matches 'layers\.9'"):
        tiny.apply({}, TOKENS, capture="layers.9")


def test_padding_at_the_end_changes_no_earlier_logits(tiny: LanguageModel) -> None:
    last_logits = rlx.jit(lambda tokens, last: tiny.apply({}, tokens)[last])
    for size in (5, 9):
        padded = np.pad(TOKENS[:size], (0, 12 - size))
        np.testing.assert_allclose(last_logits(padded, size - 1), tiny.logits(TOKENS[:size])[-1], rtol=1e-4, atol=1e-4)
    assert len(rlx.explain(last_logits).splitlines()) == 1


def test_what_cannot_be_applied_says_why(tiny: LanguageModel) -> None:
    def traced(params: Any, tokens: Any = TOKENS) -> Any:
        return rlx.grad(lambda p: np.sum(tiny.apply(p, tokens)))(params)

    with pytest.raises(BindError, match=r"no parameter is called 'lm_hed\.weight'") as caught:
        traced({"lm_hed.weight": np.zeros((97, 48), np.float32)})
    assert "lm_head.weight" in (caught.value.hint or "")
    with pytest.raises(ShapeError, match=r"'lm_head.weight' has shape \[2, 3\], expected \[97, 48\]"):
        traced({"lm_head.weight": np.zeros((2, 3), np.float32)})
    with pytest.raises(BindError, match=r"float_params: no parameter matches \['lm_hed\*'\]"):
        tiny.float_params("lm_hed*")
    with pytest.raises(RequestError, match=r"tokens have shape \[2, 6\], expected \[seq\]") as shape:
        rlx.jit(lambda t: tiny.apply({}, t))(TOKENS.reshape(2, 6))
    assert "rlx.vmap(lambda ids" in (shape.value.hint or "")
    with pytest.raises(RequestError, match=r"tokens have shape \[2, 6\], expected \[seq\]"):
        tiny.apply({}, TOKENS.reshape(2, 6))
    with pytest.raises(RequestError, match="tokens are a list of traced numbers") as numbers:
        rlx.jit(lambda t: tiny.apply({}, t))(TOKENS.tolist())
    assert "np.array(ids, np.int32)" in (numbers.value.hint or "")
    with pytest.raises(BindError, match="no parameter is called 'foo'") as unknown:
        tiny.apply({"foo": np.zeros(3)}, TOKENS)
    assert "model.params lists them" in (unknown.value.hint or "")
    with pytest.raises(RequestError, match="outside the vocabulary"):
        traced(tiny.float_params("lm_head.weight"), [200])
    with pytest.raises(RequestError, match="apply: tokens need a fixed length under a trace") as length:
        rlx.jit(lambda tk: tiny.apply({}, tk)[-1], dims={"tk": ("seq",)})(TOKENS)
    assert "pad tokens at the end" in (length.value.hint or "")
    for verb in (
        lambda edit: tiny.run(TOKENS, edit=edit)["logits"],
        lambda edit: tiny.generate(TOKENS, max_tokens=1, edit=edit),
    ):
        with pytest.raises(RequestError, match="a traced array") as edited:
            rlx.grad(lambda change: verb({"layers.0": lambda x: x + change})[-1, 5])(np.zeros(48, np.float32))  # noqa: B023
        assert "use model.apply(params, tokens, edit=...)" in (edited.value.hint or "")
    with pytest.raises(RequestError, match="run: tokens are <traced") as ran:
        rlx.jit(lambda tk: tiny.run(tk)["logits"])(TOKENS)
    assert "model.apply(params, tokens)" in (ran.value.hint or "")
    with pytest.raises(BindError, match="no parameter matches") as deep:
        tiny.float_params("model.layers.1.*")
    assert deep.value.hint == "`*` stops at a dot: 'model.layers.1.**'"


@pytest.mark.parametrize("tokens", [[5], [5, 6, 7]])
def test_edits_of_logits_see_a_row_per_token(tiny: LanguageModel, tokens: list[int]) -> None:
    shapes = []

    def doubled(value: Any) -> Any:
        shapes.append(value.shape)
        return value * 2

    edited = tiny.apply({}, tokens, edit={"logits": doubled})
    np.testing.assert_array_equal(edited, 2 * np.asarray(tiny.apply({}, tokens)))
    assert shapes == [(len(tokens), tiny.facts.vocab)]
