"""NumPy's everyday functions on arrays and on stand-ins: against NumPy and SciPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from graphs import examples
from hypothesis import given
from hypothesis import strategies as st

import rlx
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional import dispatch

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(0)
X, Y, S = rng.normal(size=(3, 4, 5)), rng.normal(size=(5, 4)), rng.normal(size=(4, 4))
I = np.array([[0, 2], [1, -1]])  # noqa: E741
B = X > 0


def close(actual: Any, wanted: Any, where: str = "") -> None:
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    assert actual.shape == wanted.shape, (where, actual.shape, wanted.shape)
    np.testing.assert_allclose(
        actual.astype(np.float64), wanted.astype(np.float64), rtol=2e-6, atol=1e-6, err_msg=where
    )


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("sum", (X, 1)), ("sum", (B,)), ("prod", (X,)), ("mean", (X, (0, 2))), ("mean", (I,)), ("var", (X, 0)),
    ("std", (X, (0, 2))), ("max", (X, 1)), ("min", (X,)), ("any", (B, 1)), ("all", (B, 1)), ("argmax", (X, 1)),
    ("argmin", (X,)), ("cumsum", (X, 2)), ("cumsum", (X,)), ("sort", (X, 1)), ("argsort", (X,)), ("flip", (X, 1)),
    ("flip", (Y,)), ("roll", (X, 2, 1)), ("roll", (X, -1, 0)), ("repeat", (X, 3, 1)), ("tril", (S, 1)), ("triu", (S,)),
    ("tile", (Y, (2, 3))), ("clip", (X, -0.5, 0.5)), ("sign", (X,)), ("floor", (X,)), ("ceil", (X,)), ("round", (X, 2)),
    ("log1p", (np.abs(X) * 1e-9,)), ("log1p", (np.abs(X),)), ("expm1", (X * 1e-9,)), ("expm1", (X,)), ("square", (X,)),
    ("reciprocal", (X,)), ("outer", (Y, Y)), ("tensordot", (X, Y, 1)), ("dot", (X, Y)), ("dot", (S, S)),
    ("matmul", (X[0, 0], Y)), ("matmul", (Y, X[0, :, 0])), ("matmul", (X[0, 0], X[0, 0])), ("matmul", (X, Y)),
    ("swapaxes", (X, 0, 2)), ("moveaxis", (X, 0, 2)), ("transpose", (X,)), ("transpose", (X, (1, 0, 2))),
    ("stack", ([X, X], 1)), ("concatenate", ([X, X], 1)), ("take", (X, I, 1)), ("take", (Y, I)), ("power", (X, 3)),
    ("power", (np.abs(X), 0.5)), ("power", (X, 0)), ("isnan", (X,)), ("isinf", (X,)), ("isfinite", (X,)),
    ("logaddexp", (X, X + 1)), ("pad", (X, 1)), ("pad", (X, ((0, 1), (2, 0), (1, 1)))), ("floor_divide", (X, 0.3)),
    ("floor_divide", (I, 2)),
    ("mod", (X, 0.7)), ("mod", (I, 3)), ("power", (2.0, X)),
    ("divide", (I, 2)), ("divide", (X, X + 9)), ("take_along_axis", (X, np.argsort(X, 1), 1)),
    ("expand_dims", (X, (0, 2))), ("squeeze", (X[:, :1],)), ("broadcast_to", (Y, (2, 5, 4))), ("ravel", (X,)),
    ("reshape", (X, (-1, 10))), ("where", (B, X, 0.0)), ("maximum", (X, 0.0)), ("equal", (I, 1)), ("zeros_like", (X,)),
    ("exp", (X,)), ("arctan", (X,)), ("tanh", (I,)), ("negative", (I,)), ("logical_and", (B, ~B)), ("add", (I, 0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CALLS)])
def test_a_function_gives_what_numpy_gives(name: str, arguments: tuple[Any, ...]) -> None:
    wanted = getattr(np, name)(*arguments)
    close(getattr(rlx, name)(*arguments), wanted, name)


def test_numpy_functions_take_stand_ins() -> None:
    """All of them at once, each called by NumPy's own name inside a trace."""
    calls = [(n, a) for n, a in CALLS if getattr(np, n) in dispatch.FUNCTIONS]
    calls = [(n, a) for n, a in calls if isinstance(a[0], np.ndarray)]

    def every(*first: Any) -> Any:
        return [getattr(np, n)(x, *a[1:]) for x, (n, a) in zip(first, calls, strict=True)]

    graph = rlx.trace(every)(*(a[0] for _, a in calls))
    assert graph.verify()
    results = rlx.functional.tracing.run(graph, [a[0] for _, a in calls])
    for value, (name, arguments) in zip(results, calls, strict=True):
        close(value, getattr(np, name)(*arguments), name)


@pytest.mark.parametrize(
    "key",
    [0, -1, (slice(None), 1), (slice(1, 3), slice(None, None, 2)), (..., 0), (None, 0, ..., None), slice(2, 1),
     (slice(None), slice(3, 0, -2)), I, (slice(None), I), (I[0], slice(None), I[1]), (I, I + 1), slice(5, 9),
     slice(None, None, -1),
     (slice(None), I[0], I[1]), (0, slice(None), I[0]), (slice(-2, None), slice(None, -1)), ([0, 1], 2)],
    ids=str,
)  # fmt: skip
def test_indexing_is_numpys(key: Any) -> None:
    close(rlx.jit(lambda x: x[key])(X), X[key])
    changed = X.copy()
    changed[key] = 7.0
    close(rlx.at(X)[key].set(7.0), changed)
    added = X.copy()
    np.add.at(added, key, 2.0)
    close(rlx.jit(lambda x: x.at[key].add(2.0))(X), added)


def test_an_index_may_be_data() -> None:
    close(rlx.jit(lambda x, i: x[i, 1])(X, np.int32(2)), X[2, 1])
    close(rlx.jit(lambda x, i: x[:, i])(X, I), X[:, I])


@pytest.mark.parametrize(
    ("letters", "operands"),
    [("ij->ji", (Y,)), ("ij->", (Y,)), ("ij->j", (Y,)), ("abc,cd->abd", (X, Y)), ("abc,abd->cd", (X, X[:, :, :2])),
     ("bqd,bkd,bk->bq", (X, X, X[:, :, 0])), ("ii->i", (S,)), ("ii", (S,)), ("ij,jk", (S, S)),
     ("i,j->ij", (S[0], S[1])),
     ("...ij,jk->...ik", (X, Y)), ("...,...->...", (X, X[:1])), ("i...->...", (X,)), ("...ij,...jk", (S, S[None])),
     ("b...,b->...", (X, X[:, 0, 0])), ("ij...,j->i...", (S, S[0])), ("...a->a...", (X,)),
     ("abc,abc->", (X, X)), ("abc,dc->dba", (X, np.ones((2, 5)))), ("ij,ij->ij", (S, S))],
)  # fmt: skip
def test_einsum_is_numpys(letters: str, operands: tuple[Array, ...]) -> None:
    close(rlx.einsum(letters, *operands), np.einsum(letters, *operands))
    jitted = rlx.jit(lambda *operands: np.einsum(letters, *operands, optimize=True))
    close(jitted(*operands), np.einsum(letters, *operands))


OTHERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "logsumexp": (lambda x: rlx.logsumexp(x, 1), lambda x: scipy.special.logsumexp(x, 1)),
    "log_softmax": (lambda x: rlx.log_softmax(x, 1), lambda x: scipy.special.log_softmax(x, 1)),
    "softmax": (lambda x: rlx.softmax(x, 0), lambda x: scipy.special.softmax(x, 0)),
    "sigmoid": (rlx.sigmoid, scipy.special.expit), "erf": (rlx.erf, scipy.special.erf),
    "softplus": (rlx.softplus, lambda x: np.log1p(np.exp(x))),
    "one_hot": (lambda x: rlx.one_hot(np.array([1, 0, 2]), 3), lambda x: np.eye(3)[[1, 0, 2]]),
    "topk": (lambda x: rlx.topk(x, 2)[0], lambda x: -np.sort(-x, -1)[..., :2]),
    "cross_entropy": (
        lambda x: rlx.cross_entropy(x, np.full((3, 4), 2)), lambda x: -scipy.special.log_softmax(x, -1)[..., 2]
    ),
    "split": (lambda x: rlx.split(x, 2, axis=1)[1], lambda x: np.split(x, 2, axis=1)[1]),
    "arange": (lambda x: rlx.arange(2, 9, 3), lambda x: np.arange(2, 9, 3)),
    "linspace": (lambda x: rlx.linspace(0, 1, 5), lambda x: np.linspace(0, 1, 5)),
    "nothing is infinite": (lambda x: rlx.logsumexp(np.array([-np.inf, -np.inf])), lambda x: -np.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_further_functions(name: str) -> None:
    ours, theirs = OTHERS[name]
    close(ours(X), theirs(X), name)


@examples(20)
@given(data=st.data())
def test_slices_of_any_kind(data: Any) -> None:
    size = data.draw(st.integers(0, 6))
    bound = st.one_of(st.none(), st.integers(-8, 8))
    key = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, 3, -1, -2])))
    x = np.arange(float(size))
    close(rlx.functional.tracing.run(rlx.trace(lambda x: x[key])(x), [x])[0], x[key], str(key))


def test_every_op_is_a_function_and_a_method() -> None:
    q = rng.normal(size=(1, 3, 2, 4))
    wanted = rlx.attention(q, q, q, mask_kind="causal")
    np.testing.assert_allclose(rlx.jit(lambda q: q.attention(q, q, mask_kind="causal"))(q), wanted)
    np.testing.assert_allclose(wanted[:, 0], q[:, 0])
    normal = rlx.rms_norm(X, np.ones(5), eps=0.0)
    np.testing.assert_allclose((normal**2).mean(-1), np.ones((3, 4)))
    assert not hasattr(rlx, "fused_matmul") and not hasattr(rlx, "param")


# -- element types ---------------------------------------------------------------------------------------------------
def test_element_types_are_those_of_rlx() -> None:
    assert rlx.exp(np.arange(3)).dtype == np.float32
    assert (rlx.add(np.float32(1), np.arange(3))).dtype == np.float32
    assert rlx.add(np.float64(1), np.float32(1)).dtype == np.float64
    assert rlx.softmax([1.0, 2.0]).dtype == np.float32
    assert rlx.jit(lambda x: x * 2.0)(np.ones(1, np.float32)).dtype == np.float32
    assert rlx.sum(B).dtype == np.int32
    assert rlx.argmax(X, 1).dtype == np.int32


# -- errors ----------------------------------------------------------------------------------------------------------
def test_what_cannot_be_is_said() -> None:
    with pytest.raises(GraphError, match=r"numpy\.linalg\.eig: is not supported on traced arrays"):
        rlx.jit(np.linalg.eig)(S)
    with pytest.raises(GraphError, match="has no truth value while it is traced") as caught:
        rlx.jit(lambda x: x if x > 0 else -x)(1.0)
    assert any("test_arrays.py" in n for n in caught.value.notes)
    assert caught.value.hint and "rlx.cond" in caught.value.hint
    uses = {"int()": int, "float()": float, "NumPy": np.asarray, "an index or a size": lambda x: range(3)[x]}
    for use, function in uses.items():
        with pytest.raises(GraphError, match=f"has no values? for {re.escape(use)} while it is traced"):
            rlx.jit(function)(np.int32(1))
    with pytest.raises(ShapeError, match="4 indices for f64"):
        rlx.jit(lambda x: x[0, 0, 0, 0])(X)
    with pytest.raises(ShapeError, match="7 lies outside an axis of size 3"):
        rlx.jit(lambda x: x[7])(X)
    with pytest.raises(DTypeError, match="indices are integers"):
        rlx.jit(lambda x: x[x > 0])(Y)
    with pytest.raises(AttributeError, match="has no 'sums'"):
        rlx.jit(lambda x: x.sums())(X)
    with pytest.raises(GraphError, match="einsum: 'ab' does not name the axes"):
        rlx.einsum("ab,bc->ac", X, Y)
    with pytest.raises(DTypeError, match="str: is not an array"):
        rlx.sum("no")
    with pytest.raises(ShapeError, match="not 3 equal parts"):
        rlx.split(X, 3, axis=1)
