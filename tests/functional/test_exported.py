"""Exported functions are called like the functions: trees in, trees out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
from rlx.errors import BindError, FormatError
from rlx.functional.exported import ExportedCall

W, X = np.full((3, 2), 0.5, np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class State:
    value: Any


def predict(params: Any, x: Any, scale: float = 2.0, *, power: int = 1) -> Any:
    y = (x @ params["w"] + params["b"][0]) * scale**power
    return {"y": y, "rest": (x.sum(), [x], None), "pair": Pair(x, x), "state": State(y), "none": {}}


def test_a_loaded_function_takes_and_returns_trees(tmp_path: Path) -> None:
    params = {"w": W, "b": [np.float32(1)]}
    step = rlx.jit(predict, static_argnames="power")
    expected = step(params, X, 3.0, power=2)
    program: Any = rlx.load_exported(step.export(tmp_path / "f.rlxp"))
    for result in (program(params, X, 3.0), program(params, x=X, scale=3.0), program(x=X, params=params, scale=3.0)):
        assert np.array_equal(result["y"], expected["y"])
        assert result["rest"][0] == X.sum() and np.array_equal(result["rest"][1][0], X) and result["rest"][2] is None
        assert np.array_equal(result["pair"]["second"], X) and np.array_equal(result["state"]["value"], expected["y"])
        assert result["none"] == {}
    flat = {"params.w": W, "params.b[0]": np.float32(1), "x": X, "scale": np.float32(3)}
    assert np.array_equal(program.run(flat)[program.convention.structure.paths().index("y")], expected["y"])
    other: Any = rlx.load_exported(rlx.export(step, tmp_path / "g.rlxp"))
    assert np.array_equal(other(params, X, 3.0)["y"], expected["y"])


def test_a_function_with_arrays_of_its_own_and_prints(tmp_path: Path) -> None:
    def f(x: Any) -> Any:
        rlx.debug.print("x {}", x)
        return np.tanh(x @ W)

    step = rlx.jit(f)
    expected = step(X)
    program: Any = rlx.load_exported(step.export(tmp_path / "f.rlxp"))
    assert np.array_equal(program(X), expected)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1, 2, 3, 4), {}, r"4 given by position, the function takes \(params, x, scale\)"),
        (({}, X), {"x": X}, "'x' is given twice"),
        (({"w": W, "b": [1.0], "c": X}, X, 3.0), {}, "nothing is called 'params.c'"),
        (({"w": W}, X, 3.0), {}, "params.b"),
    ],
)
def test_wrong_arguments_are_named(args: Any, kwargs: Any, message: str, tmp_path: Path) -> None:
    step = rlx.jit(predict)
    step({"w": W, "b": [1.0]}, X, 3.0)
    program: Any = rlx.load_exported(step.export(tmp_path / "f.rlxp"))
    with pytest.raises(BindError, match=message):
        program(*args, **kwargs)


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        {"parameters": 1, "result": "leaf"},
        {"parameters": [], "result": "leaves"},
        {"parameters": [], "result": {"dict": ["leaf"]}},
        {"parameters": [], "result": {"dict": ["leaf"], "keys": [[]]}},
        {"parameters": [], "result": {"list": ["leaf", "leaf"]}},
        {"parameters": [], "result": {"list": 1, "dict": 2}},
        {"parameters": [], "result": "leaf", "keywords": 1},
    ],
)
def test_a_bad_record_of_a_file_is_refused(record: Any) -> None:
    with pytest.raises(FormatError, match=r"f\.rlxp: function"):
        ExportedCall.from_json(record, "f.rlxp", 1)
    nested: Any = "leaf"
    for _ in range(100):
        nested = {"list": [nested]}
    with pytest.raises(FormatError, match="more than 64 levels"):
        ExportedCall.from_json({"parameters": [], "result": nested}, "f.rlxp", 1)


def test_a_loaded_function_takes_any_arguments_that_the_function_takes(tmp_path: Path) -> None:
    def f(a: Any, *rest: Any, c: Any, **named: Any) -> Any:
        return a * named["b"] + rest[0] - rest[1] * c

    step = rlx.jit(f)
    arguments, named = (X, 2 * X, X + 1), {"b": X, "c": X - 1}
    expected = step(*arguments, **named)
    program: Any = rlx.load_exported(step.export(tmp_path / "f.rlxp"))
    assert np.array_equal(program(*arguments, **named), expected)
    with pytest.raises(BindError, match=r"nothing is called 'named\.d'"):
        program(*arguments, **named, d=X)
