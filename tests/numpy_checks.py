"""Checks of a function of arrays against NumPy: its values, its derivatives by differences, its vmap by a loop.

All of them run in one compiled program per function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import rlx

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]
STEP = 1e-6


def leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def floats(results: Sequence[Any]) -> list[Any]:
    return [x for x in results if np.dtype(x.dtype).kind == "f"]


def close(actual: Any, wanted: Any, what: str, relative: float = 1e-9, absolute: float = 1e-11) -> None:
    assert np.shape(actual) == np.shape(wanted), f"{what}: {np.shape(actual)}, expected {np.shape(wanted)}"
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(wanted, np.float64), rtol=relative, atol=absolute, err_msg=what
    )


def check(
    function: Function, wanted: Function, *operands: Array, smooth: bool = True, batched: bool = True,
    relative: float = 1e-9, slope: float = 1e-5,
) -> None:  # fmt: skip
    """Check a function of float64 arrays. One that is not `smooth` at the operands is not differentiated."""
    rng = np.random.default_rng(7)
    tangents = [rng.standard_normal(x.shape) for x in operands]
    rows = [np.stack([x, x + 0.05 * rng.standard_normal(x.shape)]) for x in operands]
    with np.errstate(all="ignore"):
        values = [np.asarray(v) for v in leaves(wanted(*operands))]
    cotangents = [rng.standard_normal(v.shape) for v in floats(values)]

    def outputs(*xs: Any) -> list[Any]:
        return leaves(function(*xs))

    def program(xs: Any, dxs: Any, cts: Any, batch: Any) -> dict[str, Any]:
        results: dict[str, Any] = {"values": outputs(*xs)}
        if smooth:
            results["tangents"] = rlx.jvp(lambda *a: floats(outputs(*a)), tuple(xs), tuple(dxs))[1]
            results["cotangents"] = rlx.vjp(lambda *a: floats(outputs(*a)), *xs)[1](cts)
        if batched:
            results["rows"] = rlx.vmap(outputs)(*batch)
        return results

    actual = rlx.jit(program)(list(operands), tangents, cotangents, rows)
    for i, (have, want) in enumerate(zip(actual["values"], values, strict=True)):
        close(have, want, f"value {i}", relative)
    if smooth:
        change = _central_difference(wanted, operands, tangents)
        for i, (have, want) in enumerate(zip(actual["tangents"], change, strict=True)):
            close(have, want, f"tangent {i}", slope, slope)
        forward = sum(np.vdot(ct, t) for ct, t in zip(cotangents, actual["tangents"], strict=True))
        backward = sum(np.vdot(d, t) for d, t in zip(actual["cotangents"], tangents, strict=True))
        close(backward, forward, "transposed derivative", 1e-6, 1e-8)
    if batched:
        with np.errstate(all="ignore"):
            loop = [[np.asarray(v) for v in leaves(wanted(*(x[n] for x in rows)))] for n in range(2)]
        for i, have in enumerate(actual["rows"]):
            close(have, np.stack([one[i] for one in loop]), f"vmap of value {i}", relative)


def _central_difference(function: Function, operands: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
    ends = []
    for sign in (1, -1):
        moved = [x + sign * STEP * t for x, t in zip(operands, tangents, strict=True)]
        with np.errstate(all="ignore"):
            ends.append(floats([np.asarray(v) for v in leaves(function(*moved))]))
    return [(a - b) / (2 * STEP) for a, b in zip(*ends, strict=True)]
