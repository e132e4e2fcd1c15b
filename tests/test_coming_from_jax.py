"""The table of `docs/coming-from-jax.md`: every name on the right side exists, and none is listed twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import jax_names
from rlx.errors import GraphError
from rlx.functional import random, tree

PAGE = Path(__file__).parent.parent / "docs" / "coming-from-jax.md"
ROW = re.compile(r"^\| (?P<jax>`.*?) \| (?P<here>`.*?) \| (?P<note>.*?)\|$", re.M)
NAME = re.compile(r"rlx\.([a-z_.0-9A-Z]+)")


def test_every_name_of_the_table_exists() -> None:
    rows = list(ROW.finditer(PAGE.read_text()))
    assert len(rows) > 25
    names = [name for row in rows for name in NAME.findall(row["here"])]
    assert len(names) > 40
    for name in names + [name for row in rows for name in NAME.findall(row["note"])]:
        value: object = rlx
        for part in name.rstrip(".").split("."):
            assert hasattr(value, part), name
            value = getattr(value, part)
    left = [row["jax"] for row in rows]
    assert len(set(left)) == len(left)


def _hints() -> list[str]:
    hints = [*jax_names._HERE.values(), *tree._ELSEWHERE.values(), *random._ELSEWHERE.values()]
    return [*hints, "rlx.at rlx.switch rlx.fori_loop rlx.take"]


@pytest.mark.parametrize("hint", _hints())
def test_every_name_of_a_hint_exists(hint: str) -> None:
    for name in NAME.findall(hint):
        value: object = rlx
        for part in name.rstrip(".").split("."):
            assert hasattr(value, part), name
            value = getattr(value, part)


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (rlx, "lax", "rlx.scan, rlx.cond"),
        (rlx, "devices", "rlx env lists"),
        (rlx, "disable_jit", "f.function"),
        (rlx, "optim", "rlx.train has adamw"),
        (rlx.numpy, "fft", "docs/numpy.md shows a transform"),
        (rlx.numpy, "linspce", "did you mean 'linspace'"),
        (rlx.train.adamw(1e-3), "init", "rlx.train.step(loss, optimiser)"),
        (rlx, "vamp", "did you mean 'vmap'"),
        (rlx.random, "multivariate_normal", "cholesky"),
        (rlx.random, "PRNGKey", "rlx.random.key"),
        (rlx.tree, "flatten_with_path", "paths()"),
    ],
)
def test_absent_names_have_hints(module: object, name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(hint)):
        getattr(module, name)


def test_the_formulas_of_hints_are_right() -> None:
    covariance, mean, key = np.array([[2.0, 0.5], [0.5, 1.0]], np.float32), np.ones(2, np.float32), rlx.random.key(1)

    def draw(key: Any) -> Any:
        return mean + np.linalg.cholesky(covariance) @ rlx.random.normal(key, mean.shape)

    draws = rlx.vmap(draw)(rlx.random.split(key, 20_000))
    assert np.abs(np.cov(draws.T) - covariance).max() < 0.1 and np.abs(draws.mean(0) - 1.0).max() < 0.05
    q = np.linalg.qr(rlx.random.normal(key, (4, 4)))[0]
    assert np.abs(q @ q.T - np.eye(4)).max() < 1e-5
    x = {"a": np.ones(2), "b": [np.zeros(1)]}
    assert [path for path, _ in zip(rlx.tree.structure(x).paths(), rlx.tree.leaves(x), strict=True)] == ["a", "b[0]"]


def test_a_numpy_array_is_read_by_traced_indices() -> None:
    table = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    i = np.int32(2)
    for wrong in (lambda i: table[i, 0], lambda i: np.take(table, i, axis=0)):
        with pytest.raises(GraphError) as error:
            rlx.jit(wrong)(i)
        assert "rlx.at(array)[i, 0].get()" in str(error.value.hint)
    assert rlx.jit(lambda i: rlx.at(table)[i, 0].get())(i) == table[2, 0]
    assert np.array_equal(rlx.jit(lambda i: rlx.take(table, i, axis=0))(i), table[2])
    with pytest.raises(GraphError) as error:
        rlx.jit(lambda mask: table[mask])(np.array([True, False, True, True]))
    assert "rlx.where(mask, array, 0.0)" in str(error.value.hint)
