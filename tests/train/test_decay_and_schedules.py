"""Weight decay by groups, learning rate schedules and dropout of training steps, against torch and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BindError, GraphError, RequestError
from rlx.flow import ModelFlow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

f32 = np.float32
NAMES = ("linear.weight", "linear.bias", "norm.weight")


def loss_graph() -> rlx.Graph:
    g = rlx.Graph("loss")
    x = g.input("x", ("n", 4))
    y = x @ g.param("linear.weight", (4, 3)) + g.param("linear.bias", (3,))
    return g.set_outputs([g.mean((y * g.param("norm.weight", (3,))).tanh())])


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.normal(0, 1, s).astype(f32) for n, s in zip(NAMES, ((4, 3), (3,), (3,)), strict=True)}


def batches(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(0, 1, (5, 4)).astype(f32) for _ in range(count)]


def torch_params(optimiser: str, decays: dict[str, float], data: list[np.ndarray]) -> dict[str, np.ndarray]:
    params = {n: torch.tensor(a, requires_grad=True) for n, a in weights().items()}
    groups = [{"params": [params[n]], "weight_decay": decays[n]} for n in NAMES]
    method = (
        torch.optim.AdamW(groups, lr=0.1) if optimiser == "adamw" else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    )
    for x in data:
        method.zero_grad()
        y = torch.tensor(x) @ params["linear.weight"] + params["linear.bias"]
        (y * params["norm.weight"]).tanh().mean().backward()
        method.step()
    return {n: p.detach().numpy() for n, p in params.items()}


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("rules", "decays"),
    [
        ({"*norm*": 0.0, "*bias": 0.0, "*": 0.5}, (0.5, 0.0, 0.0)),
        ({"linear.*": 0.5}, (0.5, 0.5, 0.0)),
        ({"*bias": 0.1, "norm.*": 0.3, "*": 0.5}, (0.5, 0.1, 0.3)),
        (0.5, (0.5, 0.5, 0.5)),
    ],
)
def test_decay_by_patterns_is_that_of_torch_with_groups(optimiser: str, rules: object, decays: tuple[float]) -> None:
    data = batches(3)
    method = (
        rlx.train.adamw(0.1, weight_decay=rules)
        if optimiser == "adamw"
        else rlx.train.sgd(0.1, 0.9, weight_decay=rules)
    )
    step = rlx.train.step(loss_graph(), method)
    step.set_params(weights())
    for x in data:
        step.run({"x": x})
    wanted = torch_params(optimiser, dict(zip(NAMES, decays, strict=True)), data)
    for name, array in step.params.items():
        np.testing.assert_allclose(array, wanted[name], rtol=2e-5, atol=2e-6, err_msg=name)


def test_a_bad_decay_is_named() -> None:
    with pytest.raises(RequestError, match="weight_decay of '\\*bias' is -1"):
        rlx.train.adamw(weight_decay={"*": 0.1, "*bias": -1})
    with pytest.raises(RequestError, match="adamw: weight_decay is -1"):
        rlx.train.adamw(weight_decay=-1)


# -- schedules --------------------------------------------------------------------------------------------------------
def test_schedules_are_those_of_torch() -> None:
    lr = torch.optim.lr_scheduler
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    warm = lr.LinearLR(optimiser, 1 / 5, 1.0, total_iters=4)  # 1/5, 2/5, ..., 1 of the peak
    down = lr.CosineAnnealingLR(optimiser, 15, eta_min=0.04)
    joined = lr.SequentialLR(optimiser, [warm, down], [5])
    schedule = rlx.train.cosine(0.4, 20, warmup=5, end=0.04)
    for t in range(20):
        assert schedule(t) == pytest.approx(joined.get_last_lr()[0], rel=1e-6), t
        optimiser.step()
        joined.step()
    assert schedule(20) == schedule(500) == 0.04
    falling = rlx.train.linear(1.0, 10)
    assert [falling(t) for t in (0, 5, 10, 11)] == [1.0, 0.5, 0.0, 0.0]
    assert [rlx.train.constant(2.0, warmup=4)(t) for t in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_a_step_follows_its_schedule_and_resumes_it(tmp_path) -> None:
    data, rates = batches(6), [0.3, 0.2, 0.1, 0.05, 0.02, 0.01]
    step = rlx.train.step(loss_graph(), rlx.train.sgd(rates.__getitem__))
    by_hand = rlx.train.step(loss_graph(), rlx.train.sgd(9.0))
    for each in (step, by_hand):
        each.set_params(weights())
    for t, x in enumerate(data):
        if t == 3:  # a new step goes on where the old one was
            step.save(tmp_path / "at.safetensors")
            step = rlx.train.step(loss_graph(), rlx.train.sgd(rates.__getitem__))
            step.load(tmp_path / "at.safetensors")
        assert step.run({"x": x}) == by_hand.run({"x": x}, lr=rates[t])
    assert all(np.array_equal(step.params[n], by_hand.params[n]) for n in NAMES)


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(RequestError, match="cosine: 5 steps are not more than 5 steps of warm-up"):
        rlx.train.cosine(0.1, 5, warmup=5)
    with pytest.raises(RequestError, match="linear: peak is -1"):
        rlx.train.linear(-1, 5)
    step = rlx.train.step(loss_graph(), rlx.train.sgd(0.1))
    step.set_params(weights())
    with pytest.raises(RequestError, match="lr is nan, expected a number from 0, or a function of the steps made"):
        step.run({"x": batches(1)[0]}, lr=lambda t: math.nan)


# -- dropout ----------------------------------------------------------------------------------------------------------
def dropped(rate: float = 0.25) -> ModelFlow:
    return ModelFlow("dropped").input("x", ("n", 64)).dropout(rate)


def test_dropout_is_off_unless_a_flow_is_built_for_training() -> None:
    x = np.ones((200, 64), f32)
    plain = dropped().build()
    assert plain.skips_dropout and np.array_equal(plain.compile().run({"x": x})[0], x)
    f = dropped().build(training=True).compile()
    keys = [np.array([3, 4], np.uint32), np.array([3, 5], np.uint32)]
    first, again, other = (f.run({"x": x, "dropout.key": keys[i]})[0] for i in (0, 0, 1))
    assert np.array_equal(first, again) and (first != other).mean() > 0.2
    assert set(np.unique(first)) == {f32(0), f32(1 / 0.75)}
    # 12,800 draws: a share of 0.25 has a standard deviation of 0.004
    assert abs((first == 0).mean() - 0.25) < 0.02 and abs(first.mean() - 1) < 0.03
    assert not (first == 0).all(axis=0).any() and not (first == 0).all(axis=1).any()


def test_two_stages_of_dropout_are_independent() -> None:
    flow = (
        ModelFlow("two")
        .input("x", ("n", 64))
        .store_stream("x")
        .dropout(0.5)
        .store_stream("a")
        .load_stream("x")
        .dropout(0.5)
    )
    f = flow.outputs("b", "a").build(training=True).compile()
    b, a = f.run({"x": np.ones((100, 64), f32), "dropout.key": np.array([1, 2], np.uint32)})
    both = ((a == 0) & (b == 0)).mean()
    assert abs(both - 0.25) < 0.03  # the product of independent chances


def test_training_with_dropout_draws_anew_each_step_and_gradients_see_the_same_draw() -> None:
    """With loss mean(dropout(x w)), each gradient of w is that of the units that stayed."""
    flow = ModelFlow("loss").input("x", ("n", 8)).linear("w", out=8).dropout(0.5).custom(lambda e, v: e.mean(v))
    params = {"w": np.zeros((8, 8), f32)}
    with pytest.raises(GraphError, match="step: the dropout of 'loss' is off") as caught:
        rlx.train.step(flow.build(params), rlx.train.sgd(1.0))
    assert "training=True" in caught.value.notes[0]
    x = np.ones((1, 8), f32)

    def updates(seed: int) -> list[np.ndarray]:
        step = rlx.train.step(flow.build(params, training=True), rlx.train.sgd(1.0), seed=seed)
        rows = []
        for _ in range(4):
            before = step.params["w"]
            step.run({"x": x})
            rows.append(before - step.params["w"])
        return rows

    first, again, other = updates(0), updates(0), updates(1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    for update in first:
        np.testing.assert_allclose(np.unique(update), [0, 2 / 8], atol=1e-6)  # dropped, or 1 / (1 - rate) of a mean
        assert all(len(np.unique(row)) == 1 for row in update)  # a unit is dropped with all its weights
    assert len({update.tobytes() for update in first}) > 1


def test_a_rate_of_dropout_is_checked() -> None:
    for rate in (1.0, -0.1, True, "x"):
        with pytest.raises(GraphError, match="stage Dropout: rate is"):
            dropped(rate)  # type: ignore[arg-type]
    assert not dropped(0.0).build().skips_dropout


def test_a_pattern_that_matches_no_param_is_named_and_case_does_not_matter() -> None:
    with pytest.raises(BindError, match=r"adamw: weight_decay: no weight matches '\*nrm\*'"):
        rlx.train.step(loss_graph(), rlx.train.adamw(weight_decay={"*nrm*": 0, "*": 0.1}))
    step = rlx.train.step(loss_graph(), rlx.train.sgd(0.1, weight_decay={"*NORM*": 0.5}))
    step.set_params({n: np.ones_like(a) * (0 if n == "linear.weight" else 1) for n, a in weights().items()})
    before = step.params["norm.weight"]
    step.run({"x": np.zeros((2, 4), f32)})
    gradient = (1 - math.tanh(1) ** 2) / 3  # of the mean of tanh(bias * norm), at 1
    np.testing.assert_allclose(step.params["norm.weight"], before - 0.1 * (gradient + 0.5), rtol=1e-5)


def test_the_rate_of_a_step_is_a_number() -> None:
    schedule = rlx.train.linear(0.4, 4)
    step = rlx.train.step(loss_graph(), rlx.train.sgd(schedule))
    step.set_params(weights())
    assert step.lr == schedule(0) and step.schedule is schedule
    step.run({"x": batches(1)[0]})
    assert step.lr == schedule(1) == pytest.approx(0.3)
    step.lr = 0.25
    assert step.lr == step.schedule == 0.25
    with pytest.raises(RequestError, match="lr is -1"):
        step.lr = -1


def test_optimisers_and_schedules_are_printed_as_they_were_made() -> None:
    schedule = rlx.train.cosine(0.003, steps=300, warmup=20)
    assert repr(schedule) == "cosine(0.003, steps=300, warmup=20)"
    assert repr(rlx.train.linear(1.0, 10, end=0.1)) == "linear(1.0, steps=10, end=0.1)"
    assert repr(rlx.train.constant(0.1, warmup=3)) == "constant(0.1, warmup=3)"
    shown = repr(rlx.train.adamw(schedule, weight_decay={"*bias": 0.0, "*": 0.1}))
    assert shown.startswith(f"adamw({schedule!r}, ") and "weight_decay={'*bias': 0.0, '*': 0.1})" in shown


def test_weight_decay_is_no_function() -> None:
    decay: Any = lambda name: 0.1
    with pytest.raises(RequestError, match="weight_decay is a function") as caught:
        rlx.train.adamw(weight_decay=decay)
    assert '"*norm*": 0' in str(caught.value.hint)
