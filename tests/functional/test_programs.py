"""Small research programs as their authors write them, against NumPy and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rlx

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(7)


def slopes(f: Callable[[Array], Any], x: Array, h: float = 1e-6) -> Array:
    """Derivatives of one number by central differences."""
    steps = np.eye(x.size).reshape(-1, *x.shape) * h
    return np.array([(f(x + d) - f(x - d)) / (2 * h) for d in steps]).reshape(x.shape)


def test_newtons_method_with_conjugate_gradients() -> None:
    a, b = rng.normal(size=(6, 6)), rng.normal(size=6)
    a = a @ a.T + np.eye(6)

    def f(x: Any) -> Any:
        return 0.5 * x @ a @ x - b @ x + 0.01 * np.sum(x**4)

    @rlx.jit
    def newton_step(x: Any) -> Any:
        def step(state: Any) -> Any:
            d, r, p, k = state
            hp = rlx.hvp(f, (x,), (p,))
            length = (r @ r) / (p @ hp)
            left = r - length * hp
            return d + length * p, left, left + (left @ left) / (r @ r) * p, k + 1

        start = -rlx.grad(f)(x)
        more = lambda state: (np.sum(state[1] ** 2) > 1e-20) & (state[3] < 50)
        return x + rlx.while_loop(more, step, (np.zeros_like(x), start, start, 0))[0]

    x = rng.normal(size=6)
    wanted = x - np.linalg.solve(a + np.diag(0.12 * x**2), a @ x - b + 0.04 * x**3)
    np.testing.assert_allclose(newton_step(x), wanted, rtol=1e-9)


def test_the_likelihood_of_a_hidden_markov_model() -> None:
    transitions, emissions = rng.normal(size=(3, 3)), rng.normal(size=(20, 3))

    def likelihood(transitions: Any, emissions: Any) -> Any:
        logs = rlx.log_softmax(transitions, axis=1)

        def step(alpha: Any, emission: Any) -> Any:
            return rlx.logsumexp(alpha[:, None] + logs, axis=0) + emission, None

        return rlx.logsumexp(rlx.scan(step, np.full(3, -np.log(3)), emissions)[0])

    def in_numpy(transitions: Array, emissions: Array = emissions) -> float:
        chances = np.exp(transitions) / np.exp(transitions).sum(1, keepdims=True)
        alpha = np.full(3, 1 / 3)
        for row in emissions:
            alpha = alpha @ chances * np.exp(row)
        return float(np.log(alpha.sum()))

    value, (dt, de) = rlx.jit(rlx.value_and_grad(likelihood, (0, 1)))(transitions, emissions)
    np.testing.assert_allclose(value, in_numpy(transitions))
    np.testing.assert_allclose(dt, slopes(in_numpy, transitions), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(de.sum(1), np.ones(20))  # the posterior of the states


def test_learning_to_learn() -> None:
    """The gradient of a loss after a step of gradient descent, over a batch of tasks: grad of vmap of grad."""
    xs = rng.normal(size=(4, 8))
    ys, w = np.sin(2 * xs), rng.normal(size=3)

    def loss(w: Any, x: Any, y: Any) -> Any:
        return np.mean((np.tanh(x * w[0] + w[1]) * w[2] - y) ** 2)

    def adapted(w: Any, x: Any, y: Any, rate: float = 0.1) -> Any:
        return loss(w - rate * rlx.grad(loss)(w, x, y), x, y)

    def in_numpy(w: Array) -> float:
        total = 0.0
        for x, y in zip(xs, ys, strict=True):
            t = np.tanh(x * w[0] + w[1])
            error = 2 * (t * w[2] - y) / x.size
            down = error * w[2] * (1 - t * t)
            total += loss(w - 0.1 * np.array([(down * x).sum(), down.sum(), (error * t).sum()]), x, y)
        return total / len(xs)

    gradient = rlx.jit(rlx.grad(lambda w: np.mean(rlx.vmap(adapted, (None, 0, 0))(w, xs, ys))))(w)
    np.testing.assert_allclose(gradient, slopes(in_numpy, w), rtol=1e-6)


def test_a_fixed_point_differentiated_by_its_equation() -> None:
    @rlx.custom_vjp
    def fixed_point(a: Any) -> Any:
        return rlx.while_loop(lambda x: np.abs(np.cos(a * x) - x) > 1e-12, lambda x: np.cos(a * x), 0.5)

    def back(residuals: Any, ct: Any) -> Any:
        a, x = residuals
        return (-ct * x * np.sin(a * x) / (1 + a * np.sin(a * x)),)

    def forward(a: Any) -> Any:
        x = fixed_point(a)
        return x, (a, x)

    fixed_point.defvjp(forward, back)

    def in_numpy(a: Any) -> Any:
        x = 0.5
        for _ in range(300):
            x = np.cos(a * x)
        return x

    a = np.array([0.3, 0.7])
    result = rlx.jit(rlx.vmap(rlx.value_and_grad(fixed_point)))(a)
    np.testing.assert_allclose(result[0], in_numpy(a))
    np.testing.assert_allclose(result[1], [slopes(in_numpy, v) for v in a], rtol=1e-6)


def test_hamiltonian_monte_carlo() -> None:
    variance = np.array([1.0, 4.0], np.float32)

    def log_density(q: Any) -> Any:
        return -0.5 * np.sum(q**2 / variance)

    def move(q: Any, key: Any) -> Any:
        first, second = rlx.random.split(key)
        momentum, force = rlx.random.normal(first, (2,)), rlx.grad(log_density)

        def leap(state: Any, _: Any) -> Any:
            q, p = state
            p = p + 0.1 * force(q)
            q = q + 0.2 * p
            return (q, p + 0.1 * force(q)), None

        (new, p), _ = rlx.scan(leap, (q, momentum), length=8)
        gain = log_density(new) - log_density(q) + 0.5 * (np.sum(momentum**2) - np.sum(p**2))
        return np.where(np.log(rlx.random.uniform(second)) < gain, new, q), q

    keys = rlx.random.split(rlx.random.key(3), 4000)
    drawn = rlx.jit(lambda keys: rlx.scan(move, np.zeros(2, np.float32), keys)[1])(keys)
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn.var(0), variance, rtol=0.2)
