"""What `elementwise.py` asks of a library: an op on matrices of f32. Runs in the library's own process.

A case's subject is the name of what is computed; operands are the same in every process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from worker import Case, Prepared

WIDTH = 768
EPS = 1e-5

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Work:
    """How many matrices, then vectors of a row's length, go in; how many matrices, rows and columns come out."""

    matrices: int = 1
    vectors: int = 0
    results: int = 1
    column: int = 0
    row: int = 0


WORKS = {
    "add": Work(2),
    "exp": Work(),
    "gelu": Work(),
    "gelu tanh": Work(),
    "silu gate": Work(2),
    "chain": Work(3),
    "softmax": Work(),
    "layer norm": Work(vectors=2),
    "rms norm": Work(vectors=1),
    "add + rms norm": Work(2, vectors=1, results=2),
    "sum of rows": Work(results=0, column=1),
    "sum of columns": Work(results=0, row=1),
}


def operands(case: Case) -> list[Array]:
    """The same in every process."""
    rng, work = np.random.default_rng(0), WORKS[case.subject]
    shapes = [(case.dims["rows"], WIDTH)] * work.matrices + [(WIDTH,)] * work.vectors
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def flat(outputs: Any) -> Array:
    """What is compared: the result, or all of them end to end."""
    several = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return np.concatenate([np.asarray(output).ravel() for output in several])


# -- what is computed -------------------------------------------------------------------------------------------------
def numpy_functions() -> dict[str, Function]:
    """As one writes them in NumPy; in float64 they are the reference."""
    from scipy.special import erf

    def softmax(x: Array) -> Array:
        power = np.exp(x - x.max(-1, keepdims=True))
        return power / power.sum(-1, keepdims=True)

    def layer_norm(x: Array, g: Array, b: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + EPS) * g + b

    def rms_norm(x: Array, g: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * g

    def add_norm(x: Array, y: Array, g: Array) -> tuple[Array, Array]:
        total = x + y
        return rms_norm(total, g), total

    return {
        "add": np.add,
        "exp": np.exp,
        "gelu": lambda x: x * (0.5 + 0.5 * erf(x * 0.5**0.5)),
        "gelu tanh": lambda x: x * (0.5 + 0.5 * np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x))),
        "silu gate": lambda x, y: x / (1 + np.exp(-x)) * y,
        "chain": lambda x, y, z: np.tanh(x * y + z) * y - z,
        "softmax": softmax,
        "layer norm": layer_norm,
        "rms norm": rms_norm,
        "add + rms norm": add_norm,
        "sum of rows": lambda x: x.sum(1),
        "sum of columns": lambda x: x.sum(0),
    }


def torch_functions() -> dict[str, Function]:
    import torch
    import torch.nn.functional as f

    def add_norm(x: Any, y: Any, g: Any) -> tuple[Any, Any]:
        total = x + y
        return f.rms_norm(total, (WIDTH,), g, EPS), total

    return {
        "add": torch.add,
        "exp": torch.exp,
        "gelu": f.gelu,
        "gelu tanh": lambda x: f.gelu(x, approximate="tanh"),
        "silu gate": lambda x, y: f.silu(x) * y,
        "chain": lambda x, y, z: torch.tanh(x * y + z) * y - z,
        "softmax": lambda x: torch.softmax(x, -1),
        "layer norm": lambda x, g, b: f.layer_norm(x, (WIDTH,), g, b, EPS),
        "rms norm": lambda x, g: f.rms_norm(x, (WIDTH,), g, EPS),
        "add + rms norm": add_norm,
        "sum of rows": lambda x: x.sum(1),
        "sum of columns": lambda x: x.sum(0),
    }


def jax_functions() -> dict[str, Function]:
    import jax
    import jax.numpy as jnp

    def layer_norm(x: Any, g: Any, b: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + EPS) * g + b

    def rms_norm(x: Any, g: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * g

    def add_norm(x: Any, y: Any, g: Any) -> tuple[Any, Any]:
        total = x + y
        return rms_norm(total, g), total

    return {
        "add": jnp.add,
        "exp": jnp.exp,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "gelu tanh": jax.nn.gelu,
        "silu gate": lambda x, y: jax.nn.silu(x) * y,
        "chain": lambda x, y, z: jnp.tanh(x * y + z) * y - z,
        "softmax": jax.nn.softmax,
        "layer norm": layer_norm,
        "rms norm": rms_norm,
        "add + rms norm": add_norm,
        "sum of rows": lambda x: x.sum(1),
        "sum of columns": lambda x: x.sum(0),
    }


RLX: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "exp": lambda x: x.exp(),
    "gelu": lambda x: x.gelu(),
    "gelu tanh": lambda x: x.gelu_tanh(),
    "silu gate": lambda x, y: x.silu() * y,
    "chain": lambda x, y, z: (x * y + z).tanh() * y - z,
    "softmax": lambda x: x.softmax(),
    "layer norm": lambda x, g, b: x.layer_norm(g, b, eps=EPS),
    "rms norm": lambda x, g: x.rms_norm(g, eps=EPS),
    "add + rms norm": lambda x, y, g: ((total := x + y).rms_norm(g, eps=EPS), total),
    "sum of rows": lambda x: x.sum(axis=1),
    "sum of columns": lambda x: x.sum(axis=0),
}


def reference(case: Case) -> Array:
    return flat(numpy_functions()[case.subject](*(array.astype(np.float64) for array in operands(case))))


def keep_memory() -> None:
    """Have glibc use freed memory again, however large: for most of the larger results its new pages cost the most."""
    if sys.platform == "linux":
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 1 << 30)


# -- libraries --------------------------------------------------------------------------------------------------------
def rlx(case: Case, threads: int) -> Prepared:
    import rlx

    graph, by_name = rlx.Graph("elementwise"), {f"x{i}": array for i, array in enumerate(operands(case))}
    inputs = [graph.input(name, ("rows", WIDTH) if array.ndim == 2 else array.shape) for name, array in by_name.items()]
    results = RLX[case.subject](*inputs)
    graph.set_outputs(list(results) if isinstance(results, tuple) else [results])
    compiled = rlx.compile(graph, device="cpu", threads=threads)
    return prepared(compiled.run, [by_name])


def numpy(case: Case, threads: int) -> Prepared:
    return prepared(numpy_functions()[case.subject], operands(case))


def torch(case: Case, threads: int) -> Prepared:
    return _torch(case, threads, lambda function: function)


def torch_compile(case: Case, threads: int) -> Prepared:
    """Compiled for the shape at hand."""
    import torch

    return _torch(case, threads, functools.partial(torch.compile, dynamic=False))


def _torch(case: Case, threads: int, make: Callable[[Function], Function]) -> Prepared:
    import torch

    torch.set_num_threads(threads)
    function = make(torch_functions()[case.subject])
    return prepared(torch.inference_mode()(function), [torch.from_numpy(array) for array in operands(case)])


def jax(case: Case, threads: int) -> Prepared:
    """Under `jax.jit`. Its pool has a thread for each core that it may use."""
    if "jax" not in sys.modules:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax

    function = jax.jit(jax_functions()[case.subject])
    return prepared(lambda *args: jax.block_until_ready(function(*args)), [*map(jax.numpy.asarray, operands(case))])


def prepared(function: Function, args: Sequence[Any]) -> Prepared:
    keep_memory()
    return Prepared(lambda: function(*args), lambda: flat(function(*args)))
