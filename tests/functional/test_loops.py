"""Loops that are cut off: while_loop with max_steps, as it runs, is differentiated, batched and printed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import GraphError, KernelError


def root(x: Any, max_steps: int | None = None, **options: Any) -> Any:
    """The square root of x by Newton's method."""
    return rlx.while_loop(
        lambda c: np.abs(c * c - x) > 1e-5 * x, lambda c: (c + x / c) / 2, x * 1.0, max_steps, **options
    )


def newton(x: float, steps: int) -> float:
    c = x
    for _ in range(steps):
        c = (c + x / c) / 2
    return c


def test_a_loop_that_ends_in_time_gives_its_result() -> None:
    np.testing.assert_allclose(root(2.0, 10), np.sqrt(2.0), rtol=1e-5)
    np.testing.assert_allclose(rlx.grad(lambda x: root(x, 10))(2.0), 0.5 / np.sqrt(2.0), rtol=1e-4)
    needed = next(n for n in range(10) if abs(newton(2.0, n) ** 2 - 2) <= 2e-5)
    np.testing.assert_allclose(root(2.0, needed), np.sqrt(2.0), rtol=1e-5)  # the last step that is allowed
    with pytest.raises(KernelError):
        root(2.0, needed - 1)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_loop_that_is_cut_off_is_an_error_when_it_runs(device: str) -> None:
    f = rlx.compile(rlx.trace(lambda x: root(x, 2))(1.0), device=device)
    with pytest.raises(KernelError, match=r"while_loop.*: its condition still holds after max_steps"):
        f.run({"x": np.float32(2.0)})
    (result,) = f.run({"x": np.float32(1.0)})  # and the next run is as good as ever
    assert result == 1.0


def test_what_is_made_of_a_loop_that_is_cut_off_is_an_error_too() -> None:
    cut: dict[str, Any] = {
        "eager": lambda: root(2.0, 2),
        "jit": lambda: rlx.jit(lambda x: root(x, 2))(2.0),
        "grad": lambda: rlx.grad(lambda x: root(x, 2))(2.0),
        "jvp": lambda: rlx.jvp(lambda x: root(x, 2), (2.0,), (1.0,)),
        "hessian": lambda: rlx.hessian(lambda x: root(x, 2))(2.0),
        "one lane of many": lambda: rlx.vmap(lambda x: root(x, 2))(np.array([1.0, 1.0, 2.0])),
        "grad of lanes": lambda: rlx.vmap(rlx.grad(lambda x: root(x, 2)))(np.array([1.0, 2.0])),
        "one of several": lambda: rlx.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] * 2.0), (0, 1.0), 3)[1],
    }  # fmt: skip
    for name, call in cut.items():
        with pytest.raises(KernelError, match="its condition still holds after max_steps"):
            print(name, call())
    np.testing.assert_allclose(rlx.vmap(lambda x: root(x, 8))(np.array([1.0, 4.0])), [1.0, 2.0], rtol=1e-5)


def test_truncate_gives_the_carry_after_max_steps() -> None:
    np.testing.assert_allclose(root(2.0, 2, truncate=True), newton(2.0, 2), rtol=1e-6)
    slope = (newton(2.0 + 1e-6, 2) - newton(2.0 - 1e-6, 2)) / 2e-6
    np.testing.assert_allclose(rlx.grad(lambda x: root(x, 2, truncate=True))(2.0), slope, rtol=1e-5)
    lanes = rlx.vmap(lambda x: root(x, 2, truncate=True))(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(lanes, [newton(x, 2) for x in (1.0, 2.0, 3.0)], rtol=1e-6)
    with pytest.raises(GraphError, match="truncate needs max_steps"):
        root(2.0, truncate=True)


def test_a_loop_that_prints_is_cut_off_as_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    def step(c: Any) -> Any:
        rlx.debug.print("at {}", c)
        return c + 1

    assert rlx.while_loop(lambda c: c < 10, step, 0, 2, truncate=True) == 2
    assert capsys.readouterr().out.splitlines() == ["at 0", "at 1"]
    with pytest.raises(KernelError, match="still holds after max_steps"):
        rlx.while_loop(lambda c: c < 10, step, 0, 2)
