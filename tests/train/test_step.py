"""Training steps against NumPy float64: optimisers, clipping, what is trained and what is not, checkpoints, errors."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.base import kernels_compiled
from rlx.errors import BindError, FormatError, GraphError, KernelError, LowerError, RequestError, ShapeError
from rlx.profile import Precision
from rlx.train import Optimiser, TrainStep, adamw, sgd, step

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
STEPS = 20


# -- a loss, its gradient and optimisers in NumPy ----------------------------------------------------------------------
def regression() -> rlx.Graph:
    """mean((tanh(x @ w) @ v + b - y)²)."""
    g = rlx.Graph("regression")
    x, y = g.input("x", ("n", 5)), g.input("y", ("n", 3))
    w, v, b = g.param("w", (5, 40)), g.param("v", (40, 3)), g.param("b", (3,))
    error = (x @ w).tanh() @ v + b - y
    return g.set_outputs([(error * error).mean()])


def regression_gradient(p: Mapping[str, Array], x: Array, y: Array) -> tuple[float, Arrays]:
    h = np.tanh(x @ p["w"])
    error = h @ p["v"] + p["b"] - y
    back = 2 * error / error.size
    grads = {"v": h.T @ back, "b": back.sum(0), "w": x.T @ (back @ p["v"].T * (1 - h * h))}
    return float((error**2).mean()), grads


def start(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in {"w": (5, 40), "v": (40, 3), "b": (3,)}.items()}


def batches(count: int, size: int = 16) -> list[Arrays]:
    rng = np.random.default_rng(1)
    return [
        {n: rng.standard_normal((size, k)).astype(np.float32) for n, k in (("x", 5), ("y", 3))} for _ in range(count)
    ]


Rule = Callable[[str, Array, Array, int, dict[str, Array]], Array]  # (name, param, gradient, t, memory) -> param


def numpy_adamw(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Rule:
    def rule(name: str, p: Array, g: Array, t: int, memory: dict[str, Array]) -> Array:
        m = memory["m" + name] = betas[0] * memory.get("m" + name, 0.0) + (1 - betas[0]) * g
        v = memory["v" + name] = betas[1] * memory.get("v" + name, 0.0) + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        return np.asarray(p - lr * weight_decay * p - lr * m_hat / (np.sqrt(v_hat) + eps))

    return rule


def numpy_sgd(lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Rule:
    def rule(name: str, p: Array, g: Array, t: int, memory: dict[str, Array]) -> Array:
        g = g + weight_decay * p
        u = memory[name] = momentum * memory.get(name, 0.0) + g
        return np.asarray(p - lr * (g + momentum * u if nesterov else u))

    return rule


def numpy_training(rule: Rule, data: Sequence[Arrays], clip: float | None = None) -> tuple[list[float], Arrays]:
    p = {n: a.astype(np.float64) for n, a in start().items()}
    memory: dict[str, Array] = {}
    losses = []
    for t, batch in enumerate(data, 1):
        loss, grads = regression_gradient(p, batch["x"].astype(np.float64), batch["y"].astype(np.float64))
        losses.append(loss)
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        p = {n: rule(n, p[n], grads[n] * scale, t, memory) for n in p}
    return losses, p


def trained(train: TrainStep, data: Sequence[Arrays]) -> list[float]:
    train.set_params(start())
    return [train.run(batch) for batch in data]


CASES = {
    "adamw": (adamw(0.02), numpy_adamw(0.02, (0.9, 0.999), 1e-8, 0.01)),
    "adamw, all settings": (adamw(0.03, (0.8, 0.95), 1e-3, 0.2), numpy_adamw(0.03, (0.8, 0.95), 1e-3, 0.2)),
    "sgd": (sgd(0.1), numpy_sgd(0.1)),
    "sgd with decay": (sgd(0.1, weight_decay=0.05), numpy_sgd(0.1, weight_decay=0.05)),
    "momentum": (sgd(0.05, 0.9), numpy_sgd(0.05, 0.9)),
    "nesterov": (
        sgd(0.05, 0.9, nesterov=True, weight_decay=0.01), numpy_sgd(0.05, 0.9, nesterov=True, weight_decay=0.01)
    ),
}  # fmt: skip


# -- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_training_is_what_numpy_computes(case: str, clip: float | None, device: str) -> None:
    optimiser, rule = CASES[case]
    data = batches(STEPS)
    losses, params = numpy_training(rule, data, clip)
    train = step(regression(), optimiser, clip=clip, device=device)
    np.testing.assert_allclose(trained(train, data), losses, rtol=1e-5)
    for name, want in params.items():
        np.testing.assert_allclose(train.params[name], want, rtol=0, atol=1e-5, err_msg=name)
    assert train.steps == STEPS


def test_the_norm_of_clipped_gradients_is_known() -> None:
    train = step(regression(), sgd(), clip=100.0)
    (batch,) = batches(1)
    trained(train, [batch])
    _, grads = regression_gradient({n: a.astype(np.float64) for n, a in start().items()}, batch["x"], batch["y"])
    assert train.norm == pytest.approx(math.sqrt(sum((g**2).sum() for g in grads.values())), rel=1e-5)


def test_a_learning_rate_is_an_argument() -> None:
    """A schedule, by the attribute and by the call; nothing is compiled again for it."""
    data = batches(4)
    one, other = (step(regression(), sgd(1.0)) for _ in range(2))
    for train in (one, other):
        train.set_params(start())
    losses, _ = numpy_training(lambda name, p, g, t, memory: p - 0.1 / t * g, data)
    before = kernels_compiled()
    for i, batch in enumerate(data):
        one.lr = 0.1 / (i + 1)
        loss = one.run(batch)
        assert loss == other.run(batch, lr=0.1 / (i + 1)) == pytest.approx(losses[i], rel=1e-5)
    assert kernels_compiled() == before


def test_bits_do_not_depend_on_threads() -> None:
    data = batches(5, size=300)
    one, two = (step(regression(), adamw(0.01), clip=1.0, threads=n) for n in (1, 2))
    assert trained(one, data) == trained(two, data)
    for name in one.params:
        np.testing.assert_array_equal(one.params[name], two.params[name])


def test_batches_of_any_size_take_the_same_step() -> None:
    train = step(regression(), adamw(0.01))
    train.set_params(start())
    before = kernels_compiled()
    for size in (1, 7, 64, 3):
        (batch,) = batches(1, size)
        want, _ = regression_gradient(
            {n: a.astype(np.float64) for n, a in train.params.items()}, batch["x"], batch["y"]
        )
        assert train.run(batch) == pytest.approx(want, rel=1e-5)
    assert kernels_compiled() == before


def test_values_computed_again_give_the_same_step() -> None:
    data = batches(3)
    stored, again = (step(regression(), adamw(0.01), keep=k) for k in ("everything", "nothing"))
    np.testing.assert_allclose(trained(stored, data), trained(again, data), rtol=1e-6)


@pytest.mark.parametrize("compute", ["bf16", "f16"])
def test_params_stay_wide_where_values_are_narrow(compute: str) -> None:
    """Values between ops are rounded; parameters and moments are f32, so that small steps are not lost."""
    profile = replace(rlx.CompileProfile(), precision=Precision(compute=compute))
    data = batches(STEPS)
    losses, params = numpy_training(numpy_sgd(1e-3), data)
    train = step(regression(), sgd(1e-3), profile=profile)
    np.testing.assert_allclose(trained(train, data), losses, rtol=0.05)
    for name, want in params.items():
        moved = np.abs(want - start()[name]).max()
        np.testing.assert_allclose(train.params[name], want, atol=0.1 * moved)


# -- states ----------------------------------------------------------------------------------------------------------
def test_params_that_are_each_others_gradient_change_together() -> None:
    """The gradient of a · b by a is b itself: it is read as it was before b changed."""
    g = rlx.Graph("product")
    g.set_outputs([(g.param("a", (7,)) * g.param("b", (7,))).sum()])
    train = step(g, sgd(0.5))
    a, b = np.arange(7, dtype=np.float32), np.full(7, 3, np.float32)
    train.set_params({"a": a, "b": b})
    assert train.run() == 63.0
    np.testing.assert_array_equal(train.params["a"], a - 1.5)
    np.testing.assert_array_equal(train.params["b"], b - a / 2)


def test_params_that_are_not_named_stay() -> None:
    data = batches(3)
    train = step(regression(), sgd(0.1), ["v"])
    losses, params = numpy_training(lambda name, p, g, t, memory: p - 0.1 * g if name == "v" else p, data)
    np.testing.assert_allclose(trained(train, data), losses, rtol=1e-5)
    assert list(train.params) == ["v"]
    np.testing.assert_allclose(train.params["v"], params["v"], atol=1e-6)


def test_what_comes_with_the_loss_is_from_before_the_step() -> None:
    g = regression()
    w = g.named("w")
    g.set_outputs([*g.outputs, w, (w * w).sum()])
    train = step(g, adamw(0.1), has_aux=True, clip=1.0)
    train.set_params(start())
    loss, (aux, squares) = train.run(batches(1)[0])
    assert isinstance(loss, float)
    np.testing.assert_array_equal(aux, start()["w"])
    assert squares == pytest.approx((start()["w"].astype(np.float64) ** 2).sum(), rel=1e-6)
    assert (train.params["w"] != aux).any()


def test_a_param_of_one_number_and_one_of_none_are_trained() -> None:
    g = rlx.Graph("small")
    scale, nothing = g.param("scale", ()), g.param("nothing", (0, 3))
    g.set_outputs([scale * scale + nothing.sum()])
    train = step(g, sgd(0.25))
    train.set_params({"scale": np.float32(2), "nothing": np.zeros((0, 3), np.float32)})
    assert train.run() == 4.0
    assert train.params["scale"] == 1.0 and train.params["nothing"].shape == (0, 3)


def test_an_optimiser_of_ones_own_is_built_of_ops() -> None:
    """The sign of a mean of gradients decides (Chen et al. 2023, in part)."""

    def update(p: Any, moments: Mapping[str, Any], grad: Any, n: Mapping[str, Any], scale: Any) -> list[Any]:
        m = moments["m"] * 0.9 + grad * 0.1
        sign = (m > 0).astype("f32") - (m < 0).astype("f32")
        return [p.assign(p - sign * n["lr"]), moments["m"].assign(m)]

    train = step(regression(), Optimiser("sign", 0.01, ("m",), lambda t, lr: {"lr": lr}, update))
    data = batches(6)
    trained(train, data)

    def rule(name: str, p: Array, g: Array, t: int, memory: dict[str, Array]) -> Array:
        memory[name] = 0.9 * memory.get(name, 0.0) + 0.1 * g
        return np.asarray(p - 0.01 * np.sign(memory[name]))

    _, params = numpy_training(rule, data)
    for name, want in params.items():
        np.testing.assert_allclose(train.params[name], want, atol=1e-6)


def test_steps_allocate_nothing_that_stays() -> None:
    train = step(regression(), adamw(0.01), clip=1.0)
    data = batches(2)
    trained(train, data)
    tracemalloc.start()
    try:
        for _ in range(5):
            train.run(data[0])
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(50):
            train.run(data[1])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50 * 1024  # far below one batch a step, above what an interpreter keeps for itself


def test_a_report_leaves_params_as_they_are() -> None:
    train = step(regression(), adamw(0.01))
    (batch,) = batches(1)
    trained(train, [batch])
    before = train.params
    report = train.report(batch)
    assert any("adamw_update" in launch.kernel for launch in report.launches)
    for name, array in before.items():
        np.testing.assert_array_equal(train.params[name], array)


# -- checkpoints -----------------------------------------------------------------------------------------------------
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    data = batches(6)
    through = step(regression(), adamw(0.02))
    losses = trained(through, data)
    half = step(regression(), adamw(0.02))
    trained(half, data[:3])
    assert half.save(tmp_path / "half.safetensors") == tmp_path / "half.safetensors"
    other = step(regression(), adamw(0.02))
    other.load(tmp_path / "half.safetensors")
    assert other.steps == 3
    assert [other.run(batch) for batch in data[3:]] == losses[3:]
    assert [p.name for p in tmp_path.iterdir()] == ["half.safetensors"]


def test_a_checkpoint_is_readable_by_others(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    train = step(regression(), adamw(0.02))
    trained(train, batches(2))
    train.save(tmp_path / "all.safetensors")
    tensors = load_file(tmp_path / "all.safetensors")
    assert set(tensors) == {"w", "v", "b"} | {f"adamw.{m}:{p}" for m in "mv" for p in "wvb"}
    np.testing.assert_array_equal(tensors["w"], train.params["w"])


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    train = step(regression(), sgd(0.1))
    trained(train, [])
    train.save(tmp_path / "sgd.safetensors")
    np.savez(tmp_path / "params.npz", **train.params)
    with pytest.raises(FormatError) as caught:
        train.load(tmp_path / "params.npz")
    assert any("file that save wrote" in note for note in caught.value.notes)
    with pytest.raises(FormatError, match="is no checkpoint of adamw, its optimiser is 'sgd'"):
        step(regression(), adamw()).load(tmp_path / "sgd.safetensors")
    with pytest.raises(FormatError, match="'b' is not a state of this step"):
        step(regression(), sgd(), ["w", "v"]).load(tmp_path / "sgd.safetensors")


# -- errors ----------------------------------------------------------------------------------------------------------
def test_params_that_are_not_set_are_named() -> None:
    train = step(regression(), sgd())
    train.set_params({"w": start()["w"]})
    with pytest.raises(BindError, match="params: 'v', 'b' not set"):
        train.run(batches(1)[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": np.zeros(3)}, "nothing is called 'weight'"),
        ({"w": np.zeros((40, 5), np.float32)}, r"param 'w': shape is \[40, 5\], expected f32\[5, 40\]"),
        ({"w": np.zeros((5, 40))}, "param 'w': element type is f64, expected f32"),
    ],
)
def test_params_that_do_not_fit_are_refused(values: Arrays, message: str) -> None:
    train = step(regression(), sgd())
    with pytest.raises(BindError, match=message):
        train.set_params(values)


def test_what_is_no_loss_is_refused() -> None:
    g = rlx.Graph("rows")
    g.set_outputs([g.input("x", ("n", 3)) @ g.param("w", (3, 2))])
    with pytest.raises(ShapeError, match=r"step: the loss is f32\[n, 2\], expected one number"):
        step(g, sgd())
    with pytest.raises(GraphError, match="'x' is an input, only params are trained"):
        step(regression(), sgd(), "x")
    with pytest.raises(GraphError, match="optimiser is a str"):
        step(regression(), "adamw")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adamw(-1.0), "adamw: lr is -1.0"),
        (lambda: adamw(betas=(0.9, 1.0)), r"adamw: betas\[1\] is 1.0"),
        (lambda: sgd(momentum=1.5), "sgd: momentum is 1.5"),
        (lambda: sgd(nesterov=True), "nesterov needs a momentum"),
        (lambda: step(regression(), sgd(), clip=0), "clip is 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call()


def test_what_a_step_cannot_take_is_refused() -> None:
    train = step(regression(), sgd())
    train.set_params(start())
    with pytest.raises(RequestError, match="lr is nan"):
        train.run(batches(1)[0], lr=math.nan)
    with pytest.raises(BindError, match="'y' not given") as caught:
        train.run({"x": batches(1)[0]["x"]})
    assert not any("sgd.rate" in note for note in caught.value.notes)
    with pytest.raises(BindError, match="'w' belongs to the step"):
        train.run({**batches(1)[0], "w": start()["w"]})


def test_an_optimiser_that_forgets_a_moment_is_refused() -> None:
    bad = Optimiser("bad", 0.1, ("m",), lambda t, lr: {}, lambda p, moments, grad, n, scale: [p.assign(p - grad)])
    with pytest.raises(GraphError, match=r"step: bad gives f32\[5, 40\] for 'w'"):
        step(regression(), bad)


def test_a_state_that_is_read_after_it_changed_is_refused() -> None:
    g = rlx.Graph("late")
    state = g.state("s", (3,))
    changed = state.assign(state + 1.0)
    g.set_outputs([changed.sum() + (state * 2.0).sum()])
    with pytest.raises(LowerError, match="the old value of state 's' is read later"):
        rlx.compile(g)


def test_a_wrong_label_is_reported() -> None:
    g = rlx.Graph("labels")
    logits = g.input("x", ("n", 5)) @ g.param("w", (5, 4))
    g.set_outputs([g.mean(g.cross_entropy(logits, g.input("label", ("n",), "i32")))])
    train = step(g, sgd())
    train.set_params({"w": np.zeros((5, 4), np.float32)})
    with pytest.raises(KernelError, match="cross_entropy"):
        train.run({"x": np.ones((2, 5), np.float32), "label": np.array([0, 4], np.int32)})
    assert train.run({"x": np.ones((2, 5), np.float32), "label": np.array([0, 3], np.int32)}) > 0


def test_a_loss_counts_only_labels_that_are_not_ignored() -> None:
    def loss(emit: Any, logits: Any) -> Any:
        labels = emit.input("labels", ("n",), "i32")
        return np.mean(emit.cross_entropy(logits, labels), where=rlx.not_equal(labels, -100))

    logits = np.arange(15, dtype=np.float32).reshape(5, 3) % 4
    labels = np.array([0, 1, -100, 2, -100], np.int32)
    expected = rlx.cross_entropy(logits[[0, 1, 3]], labels[[0, 1, 3]]).mean()
    flow = rlx.ModelFlow("f").input("logits", ("n", 3)).custom(loss)
    (masked,) = flow.build().compile().run({"logits": logits, "labels": labels})
    np.testing.assert_allclose(masked, expected, rtol=1e-6)
    traced = rlx.jit(lambda x, y: np.mean(rlx.cross_entropy(x, y), where=rlx.not_equal(y, -100)))
    np.testing.assert_allclose(traced(logits, labels), expected, rtol=1e-6)


def test_a_mean_of_some_elements_is_said_to_be_numpys() -> None:
    g = rlx.Graph("g")
    with pytest.raises(GraphError, match="mean: has no attribute 'where'") as caught:
        g.mean(g.input("x", (3,)), where=True)  # type: ignore[call-arg]
    assert caught.value.hint == "np.mean(value, where=mask) takes graph values"


def test_tables_that_a_flow_computes_are_not_trained() -> None:
    table = np.array([1.0, 2.0, 3.0], np.float32)

    def scaled(emit: Any, value: Any) -> Any:
        return (value * emit.load_param("scale", shape=(3,)) * emit.synth_param("table", table)).sum()

    built = rlx.ModelFlow("m").input("x", ("batch", 3)).custom(scaled).build({"scale": np.ones(3, np.float32)})
    step = rlx.train.step(built.module, rlx.train.sgd(0.5))
    step.set_params(dict(built.params))
    assert step.run({"x": np.ones((1, 3), np.float32)}) == 6.0
    assert sorted(step.params) == ["scale"]
    np.testing.assert_allclose(step.params["scale"], 1 - 0.5 * table)
    named = rlx.train.step(built.module, rlx.train.sgd(0.5), wrt="table")  # who names it means it
    assert sorted(named.params) == ["table"]


def test_a_built_model_brings_its_weights_and_its_profile() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 3)).astype(np.float32), rng.standard_normal((2, 3)).astype(np.float32)
    flow = rlx.ModelFlow("m").input("x", ("batch", 3)).linear("w").custom(lambda emit, value: (value * value).sum())
    step = rlx.train.step(flow.build({"w": w}), rlx.train.sgd(0.01))
    wide = x.astype(np.float64)
    assert step.run({"x": x}) == pytest.approx(((wide @ w.T) ** 2).sum(), rel=1e-5)
    np.testing.assert_allclose(step.params["w"], w - 0.01 * 2 * (wide @ w.T).T @ wide, rtol=1e-5, atol=1e-6)
    unfused = rlx.CompileProfile.from_toml("fusion.skip = true")
    slow = rlx.train.step(flow.profile(unfused).build({"w": w}), rlx.train.sgd(0.01))
    assert len(slow.report({"x": x}).launches) > len(step.report({"x": x}).launches)
    with pytest.raises(GraphError, match="step: ModelFlow is neither a Graph nor a GraphModule"):
        rlx.train.step(flow, rlx.train.sgd(0.5))
    for function in (lambda x: x, rlx.jit(lambda x: x), rlx.grad(lambda x: x)):
        with pytest.raises(GraphError, match="is neither a Graph nor a GraphModule") as caught:
            rlx.train.step(function, rlx.train.sgd(0.5))
        assert "Adam over a tree" in str(caught.value.hint)
