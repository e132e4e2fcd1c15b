"""Write `docs/numpy.md`: which of NumPy's functions work under a trace, from the functions themselves.

`python scripts/numpy_page.py` writes it, and so does `pytest --update tests/test_docs.py`; the test compares it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import rlx.numpy
from rlx.functional import dispatch

PATH = Path(__file__).parents[1] / "docs" / "numpy.md"
GROUPS = {  # by the module that a function is defined in
    "creation": "Making arrays", "operands": "Making arrays", "elementwise": "Elementwise", "ufuncs": "Elementwise",
    "shapes": "Shapes, joining and splitting", "indexing": "Sorting and indexing",
    "reductions": "Sums, extremes, comparisons", "statistics": "Statistics, and reductions without NaN",
    "searching": "Searching, counting, sets", "products": "Products",
    "calculus": "Differences, integrals, polynomials, convolutions",
}  # fmt: skip

HEAD = """\
# NumPy under a trace
Inside `rlx.jit`, `rlx.grad` and `rlx.vmap`, NumPy's own functions work on traced arrays: they are recorded in the graph
and compiled (not `np.take(constant, traced)` or `constant[traced]`: use `rlx.take`). `rlx.numpy` holds the same
functions, and also computes on plain arrays, through compiled kernels.
```python
import numpy as np
import rlx
import rlx.numpy as rnp


def loss(matrix, target):
    return np.linalg.norm(np.linalg.solve(matrix, target)) + np.median(np.abs(matrix))


matrix, target = np.float64([[3, 1], [1, 2]]), np.float64([1, 4])
print(rlx.jit(loss)(matrix, target).round(6))
print(rlx.jit(rlx.grad(loss))(matrix, target).round(4))
print(rnp.linalg.det(matrix))
```
```output
3.736068
[[-0.1073  0.5903]
 [ 0.7504 -0.8774]]
5.0
```

All functions below have derivatives in both modes, where there is one, and a `vmap`. What differs from NumPy:
- **Types.** A Python number takes the type of the array it meets; integers become f32 where NumPy would return f64.
  Arrays are made as f32 unless a `dtype` is given. Indices and counts are i32: `argmax`, `argsort`, `searchsorted`,
  `nonzero`, the counts of `histogram` and `unique`.
- **Sizes that depend on data** need a bound under a trace: `rnp.unique(x, size=8)`, `rnp.nonzero(x, size=8)`,
  `rnp.bincount(x, length=8)`. These are functions of `rlx.numpy`: NumPy's own refuse `size=` before rlx sees it.
- **No exceptions at run time.** A singular matrix gives infinities or NaN, and so does `cholesky` of one that is not
  positive definite.
- **Symmetric matrices.** `cholesky`, `eigh` and `eigvalsh` average the matrix and its transpose, so that gradients are
  symmetric. Signs are fixed: the components of each eigenvector have a sum >= 0, and so have those of each right
  singular vector (of each left one, if the matrix is wide).
- **Repeated eigenvalues or singular values.** Vectors have no derivative where values are equal. The terms of such
  pairs count as 0, where JAX gives NaN; derivatives of the values are the same.
- **`np.array([x, y])`** of traced values is impossible, since NumPy asks for their numbers: `rnp.array([x, y])` and
  `np.stack([x, y])` do it.
- `out=`, in-place methods and strings are not supported. Errors name the function in full, and what to use instead.

## Fourier transforms
There is no `fft`: rlx has no complex dtype, and pairs of real arrays under NumPy's names would not be NumPy's
functions. A transform of a fixed length is two products, with a matrix of cosines and with one of sines; it is fast up
to lengths of a few hundred, and differentiable.
```python
def power_spectrum(x):
    n = x.shape[-1]
    angle = 2 * np.pi * np.outer(np.arange(n), np.arange(n // 2 + 1)) / n
    return (x @ np.cos(angle)) ** 2 + (x @ np.sin(angle)) ** 2


signal = np.random.default_rng(0).standard_normal(64)
print(np.allclose(rlx.jit(power_spectrum)(signal), np.abs(np.fft.rfft(signal)) ** 2))
```
```output
True
```
"""


def page() -> str:
    """The text of the page."""
    functions = {name: f for name, f in vars(rlx.numpy).items() if inspect.isfunction(f) and name[0] != "_"}
    parts = [HEAD]
    for title in dict.fromkeys(GROUPS.values()):
        group = {name: f for name, f in functions.items() if GROUPS[_module(f)] == title}
        parts.append(f"## {title}\n{_table('', group)}")
    parts.append(
        f"## Linear algebra\n`rlx.numpy.linalg`, which is `numpy.linalg`, and `solve_triangular` as SciPy has it."
        f" Leading axes are a batch; matrices of up\nto {_small()} rows in large batches are factored one per vector"
        " lane, larger ones by blocks.\n\n"
        f"{_table('linalg.', {n: f for n, f in vars(rlx.numpy.linalg).items() if inspect.isfunction(f)})}"
    )
    parts.append(f"## Methods of ufuncs\n{_methods()}")
    return "\n".join(parts)


def _small() -> int:
    from rlx.lir.forms.small_matrices import LARGEST

    return LARGEST


def _module(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2]


def _table(prefix: str, functions: Mapping[str, Callable[..., Any]]) -> str:
    rows = [f"| `{prefix}{name}` | {_summary(f)} |" for name, f in sorted(functions.items())]
    return "\n".join(["| function | |", "| --- | --- |", *rows]) + "\n"


def _summary(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _methods() -> str:
    def names(ufuncs: Mapping[np.ufunc, Any]) -> str:
        return ", ".join(f"`{ufunc.__name__}`" for ufunc in ufuncs)

    return (
        f"`reduce` of {names(dispatch.REDUCTIONS)}; `accumulate` of {names(dispatch.CUMULATIVE)}; `outer` of every\n"
        "binary one. `np.add.at(x, key, y)` is `x = x.at[key].add(y)`.\n"
    )


if __name__ == "__main__":
    PATH.write_text(page())
