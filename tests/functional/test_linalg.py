"""numpy.linalg under a trace: values, derivatives and vmap against NumPy and SciPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from numpy_checks import check, close
from targets import AVX512

import rlx
from rlx.errors import GraphError, ShapeError
from rlx.lir.program import Program
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise

la = rlx.numpy.linalg
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(3)
SQUARE, OTHER = RNG.standard_normal((2, 4, 4))
DEFINITE = SQUARE @ SQUARE.T + np.eye(4)
SYMMETRIC = SQUARE + SQUARE.T
TALL, WIDE, VECTOR = RNG.standard_normal((6, 4)), RNG.standard_normal((3, 5)), RNG.standard_normal(4)
BATCH = RNG.standard_normal((3, 4, 4))
COLUMNS = RNG.standard_normal((4, 2))
TRIANGLES = BATCH + 4 * np.eye(4)


def symmetrised(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the average of a matrix and its transpose, as rlx takes matrices that should be symmetric."""
    return lambda x: function((x + np.swapaxes(x, -1, -2)) / 2)


def signed(vectors: Any) -> Any:
    """Columns whose components add up to a number that is not negative."""
    return vectors * np.where(vectors.sum(-2, keepdims=True) < 0, -1, 1)


def eigh(x: Any) -> tuple[Any, Any]:
    values, vectors = np.linalg.eigh(x)
    return values, signed(vectors)


def svd(x: Any) -> tuple[Any, Any, Any]:
    """Signs by the sums of the columns of V, or of U for a wide matrix."""
    u, values, vt = np.linalg.svd(x, full_matrices=False)
    by = u if x.shape[-2] < x.shape[-1] else np.swapaxes(vt, -1, -2)
    signs = np.where(by.sum(-2, keepdims=True) < 0, -1, 1)
    return u * signs, values, vt * np.swapaxes(signs, -1, -2)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Array, ...]]] = {
    "cholesky": (np.linalg.cholesky, symmetrised(np.linalg.cholesky), (DEFINITE,)),
    "cholesky upper": (lambda x: la.cholesky(x, upper=True), symmetrised(scipy.linalg.cholesky), (DEFINITE,)),
    "solve": (np.linalg.solve, np.linalg.solve, (SQUARE, COLUMNS)),
    "solve a vector": (np.linalg.solve, np.linalg.solve, (SQUARE, VECTOR)),
    "solve a batch": (np.linalg.solve, np.linalg.solve, (BATCH, COLUMNS)),
    "solve_triangular": (la.solve_triangular, scipy.linalg.solve_triangular, (TRIANGLES[0], COLUMNS)),
    "solve_triangular a vector": (
        lambda a, b: la.solve_triangular(a, b, 1, lower=True),
        lambda a, b: scipy.linalg.solve_triangular(a, b, 1, lower=True), (TRIANGLES[0], VECTOR),
    ),
    "solve_triangular a batch": (
        lambda a, b: la.solve_triangular(a, b, "T", unit_diagonal=True),
        lambda a, b: np.stack([scipy.linalg.solve_triangular(x, b, "T", unit_diagonal=True) for x in a]),
        (TRIANGLES, COLUMNS),
    ),
    "inv": (np.linalg.inv, np.linalg.inv, (SQUARE,)),
    "inv of a batch": (np.linalg.inv, np.linalg.inv, (BATCH,)),
    "det": (np.linalg.det, np.linalg.det, (BATCH,)),
    "slogdet": (np.linalg.slogdet, np.linalg.slogdet, (BATCH,)),
    "qr": (np.linalg.qr, np.linalg.qr, (TALL,)),
    "qr of a wide matrix": (np.linalg.qr, np.linalg.qr, (WIDE,)),
    "qr, only R": (lambda x: np.linalg.qr(x, "r"), lambda x: np.linalg.qr(x, "r"), (TALL,)),
    "eigh": (np.linalg.eigh, symmetrised(eigh), (SYMMETRIC,)),
    "eigh of a batch": (np.linalg.eigh, symmetrised(eigh), (BATCH,)),
    "eigvalsh": (np.linalg.eigvalsh, symmetrised(np.linalg.eigvalsh), (SYMMETRIC,)),
    "svd": (lambda x: np.linalg.svd(x, full_matrices=False), svd, (TALL,)),
    "svd of a wide matrix": (lambda x: np.linalg.svd(x, full_matrices=False), svd, (WIDE,)),
    "svdvals": (la.svdvals, lambda x: np.linalg.svd(x, compute_uv=False), (BATCH,)),
    "pinv": (np.linalg.pinv, np.linalg.pinv, (TALL,)),
    "pinv of a wide matrix": (np.linalg.pinv, np.linalg.pinv, (WIDE,)),
    "lstsq": (lambda a, b: np.linalg.lstsq(a, b)[0], lambda a, b: np.linalg.lstsq(a, b)[0], (TALL, TALL[:, 0] ** 2)),
    "matrix_power": (lambda x: np.linalg.matrix_power(x, 5), lambda x: np.linalg.matrix_power(x, 5), (SQUARE,)),
    "inverse power": (lambda x: np.linalg.matrix_power(x, -2), lambda x: np.linalg.matrix_power(x, -2), (SQUARE,)),
    "multi_dot": (lambda a, b, c: np.linalg.multi_dot([a, b, c]), lambda a, b, c: a @ b @ c, (TALL, SQUARE, COLUMNS)),
    "norm": (np.linalg.norm, np.linalg.norm, (TALL,)),
    "cond": (np.linalg.cond, np.linalg.cond, (SQUARE,)),
    "cond by the largest column": (lambda x: np.linalg.cond(x, 1), lambda x: np.linalg.cond(x, 1), (SQUARE,)),
}  # fmt: skip
for order in (None, 0, 1, 2, 3, np.inf, -np.inf):
    vector_norm = (lambda ord: lambda x: np.linalg.norm(x, ord, axis=1, keepdims=True))(order)
    CASES[f"norm {order} of vectors"] = (vector_norm, vector_norm, (TALL,))
for order in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf):
    matrix_norm = (lambda ord: lambda x: np.linalg.norm(x, ord, axis=(0, 2)))(order)
    CASES[f"norm {order} of matrices"] = (matrix_norm, matrix_norm, (BATCH,))


@pytest.mark.parametrize("name", CASES)
def test_values_derivatives_and_vmap_are_those_of_numpy(name: str) -> None:
    function, wanted, operands = CASES[name]
    check(function, wanted, *operands, relative=1e-8)


# -- sizes: blocks, panels and remainders -----------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_factors_of_every_size_multiply_to_the_matrix(size: int, lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((*lead, size, size))
    definite = x @ np.swapaxes(x, -1, -2) + size * np.eye(size)

    def factors(x: Any, definite: Any) -> Any:
        return la.cholesky(definite), la.solve(x, definite), la.qr(x), la.eigh(definite), la.det(x / size**0.5)

    lower, solution, (q, r), (values, vectors), det = rlx.jit(factors)(x, definite)
    close(lower, np.linalg.cholesky(definite), "cholesky", 1e-9, 1e-9)
    close(x @ solution, definite, "solve", 1e-7, 1e-7 * size)
    close(q @ r, x, "qr", 1e-9, 1e-9)
    close(r, np.triu(r), "qr", 0, 0)
    close(values, np.linalg.eigvalsh(definite), "eigh", 1e-9)
    close((vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2), definite, "eigh", 1e-9, 1e-9 * size)
    close(np.swapaxes(vectors, -1, -2) @ vectors, np.eye(size) + 0 * x, "eigh", 1e-9, 1e-9)
    close(det, np.linalg.det(x / size**0.5), "det", 1e-8, 1e-12)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_singular_vectors_are_orthonormal_for_any_rank(kind: Any) -> None:
    rng = np.random.default_rng(5)
    near = np.finfo(kind).eps * 200
    matrices = {
        "zero": np.zeros((7, 5)), "rank 2": rng.standard_normal((9, 2)) @ rng.standard_normal((2, 6)),
        "equal values": np.eye(6), "large": rng.standard_normal((50, 40)),
        "graded": np.linalg.qr(rng.standard_normal((45, 45)))[0] * np.logspace(0, -9, 45),
        "huge": 1e18 * rng.standard_normal((6, 6)), "tiny": 1e-18 * rng.standard_normal((6, 6)),
    }  # fmt: skip
    for name, x in matrices.items():
        x = x.astype(kind)
        u, values, vt = rlx.jit(la.svd)(x)
        size = max(float(np.abs(values).max()), 1e-30)
        wanted = np.linalg.svd(x.astype(np.float64))[1]
        close(values / size, wanted / size, name, 0, near)
        close(u.T @ u, np.eye(len(u)), name, 0, near)
        close(vt @ vt.T, np.eye(len(vt)), name, 0, near)
        close((u[:, : len(values)] * values) @ vt[: len(values)] / size, x / size, name, 0, near)


def test_a_matrix_that_has_no_factor_gives_nan_or_infinity() -> None:
    assert np.isnan(la.cholesky(np.float32([[1, 2], [2, 1]]))[1, 1])
    assert not np.isfinite(la.inv(np.ones((3, 3), np.float32))).all()
    assert la.det(np.ones((3, 3), np.float32)) == 0
    assert np.isnan(la.eigh(np.full((3, 3), np.nan))[0]).all()


def test_the_gradient_of_a_singular_determinant_is_its_cofactors() -> None:
    x = np.array([[1.0, 2.0], [2.0, 4.0]])
    close(rlx.grad(la.det)(x), np.array([[4.0, -2.0], [-2.0, 1.0]]), "cofactors")


def test_the_gradient_of_a_log_determinant_is_the_inverse() -> None:
    gradient = rlx.jit(rlx.grad(lambda x: la.slogdet(x)[1]))(DEFINITE)
    close(gradient, np.linalg.inv(DEFINITE), "gradient")
    by_factor = rlx.grad(lambda x: 2 * np.log(np.diagonal(la.cholesky(x))).sum())(DEFINITE)
    close(by_factor, np.linalg.inv(DEFINITE), "gradient")


def test_a_second_derivative_is_that_of_the_formula() -> None:
    """The derivative of tr(X⁻¹) in the direction of the identity is -tr(X⁻²), and its own one 2 tr(X⁻³)."""
    inverse = np.linalg.inv(DEFINITE)

    def along(t: Any) -> Any:
        return np.trace(la.inv(DEFINITE + t * np.eye(4)))

    close(rlx.grad(along)(0.0), -np.trace(inverse @ inverse), "first", 1e-5)
    close(rlx.grad(rlx.grad(along))(0.0), 2 * np.trace(inverse @ inverse @ inverse), "second", 1e-5)


def test_a_norm_of_zeros_has_a_zero_gradient() -> None:
    close(rlx.grad(np.linalg.norm)(np.zeros(3)), np.zeros(3), "gradient")


def test_complete_bases() -> None:
    q, r = la.qr(TALL, "complete")
    close(q.T @ q, np.eye(6), "q")
    close(q @ r, TALL, "q r")
    with pytest.raises(GraphError, match="a complete Q has no derivative"):
        rlx.grad(lambda x: la.qr(x, "complete")[0].sum())(TALL)


def test_ranks_and_least_squares_of_a_deficient_matrix() -> None:
    x = TALL.copy()
    x[:, 3] = x[:, 0] + x[:, 1]
    b = RNG.standard_normal(6)
    assert la.matrix_rank(x) == 3 and la.matrix_rank(TALL) == 4
    solution, _, rank, values = la.lstsq(x, b)
    wanted = np.linalg.lstsq(x, b)
    close(solution, wanted[0], "solution")
    assert rank == 3
    close(values, wanted[3], "values", 1e-8, 1e-12)


@pytest.mark.parametrize("device", ["toy"])
def test_factors_on_another_device(device: str) -> None:
    graph = rlx.Graph("factors")
    x, definite = graph.input("x", ("batch", 5, 5)), graph.input("definite", ("batch", 5, 5))
    results = [definite.cholesky(), *x.lu(), *x.qr(), *definite.eigh(), *x.svd()]
    graph.set_outputs(results)
    arrays = {"x": np.float32(BATCH[0:2, :1, :1] + RNG.standard_normal((2, 5, 5)))}
    arrays["definite"] = arrays["x"] @ np.swapaxes(arrays["x"], -1, -2) + np.eye(5, dtype=np.float32)
    for have, want in zip(rlx.compile(graph, device).run(arrays), rlx.compile(graph).run(arrays), strict=True):
        close(np.asarray(have), want, device, 1e-3, 1e-4)


def test_sizes_known_only_at_run_time() -> None:
    graph = rlx.Graph("sizes")
    x = graph.input("x", ("n", "n"), "f64")
    b = graph.input("b", ("n", 2), "f64")
    lower = x.cholesky()
    graph.set_outputs([lower, lower.triangular_solve(b), x.lu()[0], x.eigh()[0]])
    compiled = rlx.compile(graph)
    for size in (1, 7, 80):
        matrix = RNG.standard_normal((size, size))
        definite = matrix @ matrix.T + np.eye(size)
        rhs = RNG.standard_normal((size, 2))
        factor, solution, lu, values = compiled.run({"x": definite, "b": rhs})
        close(factor, np.linalg.cholesky(definite), "cholesky", 1e-8)
        close(solution, scipy.linalg.solve_triangular(factor, rhs, lower=True), "solve", 1e-8, 1e-10)
        close(lu, scipy.linalg.lu_factor(definite)[0], "lu", 1e-7, 1e-9)
        close(values, np.linalg.eigvalsh(definite), "eigh", 1e-8)


def test_programs_of_factors_print_and_parse() -> None:
    """Their kernels have sums whose lengths are computed by the kernel."""
    graph = rlx.Graph("factors")
    x = graph.input("x", (70, 70))
    graph.set_outputs([x.cholesky(), *x.lu(), *x.qr(), *x.eigh(), *x.svd()])
    program = schedule(optimise(graph, AVX512).main, AVX512)
    text = program.text(full=True)
    assert Program.parse(text).text(full=True) == text
    assert "sum(i in rest" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: la.inv(TALL), "linalg.inv: takes square matrices"),
        (lambda: la.solve(SQUARE, TALL), "linalg.solve: sizes differ"),
        (lambda: la.cholesky(VECTOR), "linalg.cholesky: takes matrices"),
        (lambda: la.norm(BATCH, axis=(0, 1, 2)), "linalg.norm: takes one axis or two, found 3"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()
