"""What `scan.py` asks of a library: a recurrence along a sequence, forward, or forward and backward.

Operands, and the directions by which gradients are checked, are the same in every process. Peers run the recurrence as
it is written in papers: a step of one token, under `lax.scan`, or under a Python loop. rlx runs its ops.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from worker import Case, Prepared

Array = np.ndarray[Any, Any]
Arrays = list[Array]
MAMBA, DELTA = "selective_scan", "gated_delta_net"


def operands(case: Case) -> Arrays:
    """Of selective_scan: x, delta, a, b, c; of gated_delta_net: q, k, v, g, beta."""
    d, rng = case.dims, np.random.default_rng(0)
    if case.subject == MAMBA:
        wide, narrow = (1, d["seq"], d["channels"]), (1, d["seq"], d["state"])
        x, b, c = rng.standard_normal(wide), rng.standard_normal(narrow), rng.standard_normal(narrow)
        delta, a = rng.uniform(0.001, 0.1, wide), -rng.uniform(0.5, 2.0, (d["channels"], d["state"]))
        arrays = [x, delta, a, b, c]
    else:
        q, k, v = (rng.standard_normal((1, d["seq"], d["heads"], d["state"])) for _ in range(3))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        g, beta = -rng.uniform(0, 0.1, (1, d["seq"], d["heads"])), rng.uniform(0, 1, (1, d["seq"], d["heads"]))
        arrays = [q, k, v, g, beta]
    return [array.astype(np.float32) for array in arrays]


def cotangent(case: Case) -> Array:
    """Of the result, which has the shape of x or v."""
    arrays = operands(case)
    return np.random.default_rng(1).standard_normal(arrays[0].shape).astype(np.float32)


def directions(case: Case) -> Arrays:
    rng = np.random.default_rng(2)
    return [rng.standard_normal(array.shape).astype(np.float32) for array in operands(case)]


def along(case: Case, gradients: Sequence[Any]) -> Array:
    """A number a gradient: its product with a direction."""
    pairs = zip(gradients, directions(case), strict=True)
    return np.array([np.vdot(np.asarray(g, np.float64), d.astype(np.float64)) for g, d in pairs])


# -- float64 ----------------------------------------------------------------------------------------------------------
def plain(case: Case, arrays: Sequence[Array]) -> Array:
    """The recurrence in NumPy, in the type of what is given."""
    out = []
    if case.subject == MAMBA:
        x, delta, a, b, c = arrays
        h = np.zeros((1, *a.shape), x.dtype)
        for t in range(x.shape[1]):
            h = h * np.exp(delta[:, t, :, None] * a) + (delta[:, t] * x[:, t])[..., None] * b[:, t, None]
            out.append((h @ c[:, t, :, None])[..., 0])
    else:
        q, k, v, g, beta = arrays
        s = np.zeros((*q.shape[::2], q.shape[3], q.shape[3]), q.dtype)  # [batch, heads, state, state]
        for t in range(q.shape[1]):
            s = s * np.exp(g[:, t, :, None, None])
            change = (v[:, t] - (k[:, t, :, None] @ s)[:, :, 0]) * beta[:, t, :, None]
            s = s + k[:, t, :, :, None] * change[:, :, None]
            out.append((q[:, t, :, None] @ s)[:, :, 0] / np.sqrt(q.shape[3]))
    return np.stack(out, 1)


def reference(case: Case) -> Array:
    """The result; of a backward pass the derivatives along the directions, by differences, far below what f32 shows."""
    arrays = [array.astype(np.float64) for array in operands(case)]
    if not case.dims["backward"]:
        return plain(case, arrays)
    slopes, step, ct = [], 1e-5, cotangent(case).astype(np.float64)
    for i, direction in enumerate(directions(case)):
        moved = ([a + s * direction if i == j else a for j, a in enumerate(arrays)] for s in (step, -step))
        high, low = (float(np.vdot(ct, plain(case, shifted))) for shifted in moved)
        slopes.append((high - low) / (2 * step))
    return np.array(slopes)


# -- libraries --------------------------------------------------------------------------------------------------------
def rlx(case: Case, threads: int) -> Prepared:
    import rlx

    op = getattr(rlx, case.subject)

    def forward(*arrays: Any) -> Any:
        return op(*arrays, state_size=case.dims["state"])

    def both(arrays: Any, ct: Any) -> Any:
        y, back = rlx.vjp(forward, *arrays)
        return y, back(ct)

    arrays, ct = operands(case), cotangent(case)
    if not case.dims["backward"]:
        run = rlx.jit(forward)
        return Prepared(lambda: run(*arrays), lambda: np.asarray(run(*arrays)))
    run = rlx.jit(both)
    return Prepared(lambda: run(arrays, ct), lambda: along(case, run(arrays, ct)[1]))


def jax(case: Case, threads: int) -> Prepared:
    """`lax.scan` of a step under `jax.jit`. Its pool has a thread for each core it may use."""
    if "jax" not in sys.modules:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax
    import jax.numpy as jnp

    def mamba(x: Any, delta: Any, a: Any, b: Any, c: Any) -> Any:
        def step(h: Any, now: Any) -> Any:
            x, delta, b, c = now
            h = h * jnp.exp(delta[..., None] * a) + (delta * x)[..., None] * b[:, None]
            return h, jnp.einsum("bcn,bn->bc", h, c)

        rows = tuple(jnp.moveaxis(array, 1, 0) for array in (x, delta, b, c))
        return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((1, *a.shape)), rows)[1], 0, 1)

    def delta_net(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        scale = q.shape[3] ** -0.5

        def step(s: Any, now: Any) -> Any:
            q, k, v, g, beta = now
            s = s * jnp.exp(g)[..., None, None]
            change = (v - jnp.einsum("bhij,bhi->bhj", s, k)) * beta[..., None]
            s = s + k[..., None] * change[..., None, :]
            return s, jnp.einsum("bhij,bhi->bhj", s, q) * scale

        rows = tuple(jnp.moveaxis(array, 1, 0) for array in (q, k, v, g, beta))
        start = jnp.zeros((*q.shape[::2], q.shape[3], q.shape[3]))
        return jnp.moveaxis(jax.lax.scan(step, start, rows)[1], 0, 1)

    forward: Callable[..., Any] = mamba if case.subject == MAMBA else delta_net

    def both(arrays: Any, ct: Any) -> Any:
        y, back = jax.vjp(forward, *arrays)
        return y, back(ct)

    arrays, ct = [jnp.asarray(array) for array in operands(case)], jnp.asarray(cotangent(case))
    if not case.dims["backward"]:
        run = jax.jit(forward)
        return Prepared(lambda: run(*arrays).block_until_ready(), lambda: np.asarray(run(*arrays)))
    run = jax.jit(both)
    return Prepared(lambda: jax.block_until_ready(run(arrays, ct)), lambda: along(case, run(arrays, ct)[1]))


def torch_loop(case: Case, threads: int) -> Prepared:
    return _torch(case, threads, compiled=False)


def torch_compile(case: Case, threads: int) -> Prepared:
    """The step is compiled. The whole loop would be unrolled, token by token, which takes hours to compile."""
    return _torch(case, threads, compiled=True)


def _torch(case: Case, threads: int, compiled: bool) -> Prepared:
    import torch

    torch.set_num_threads(threads)

    def mamba_step(h: Any, x: Any, delta: Any, b: Any, c: Any, a: Any) -> Any:
        h = h * torch.exp(delta[..., None] * a) + (delta * x)[..., None] * b[:, None]
        return h, (h @ c[..., None])[..., 0]

    def delta_step(s: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        s = s * torch.exp(g)[..., None, None]
        change = (v - (k[..., None, :] @ s)[..., 0, :]) * beta[..., None]
        s = s + k[..., None] * change[..., None, :]
        return s, (q[..., None, :] @ s)[..., 0, :] * q.shape[-1] ** -0.5

    step: Any = mamba_step if case.subject == MAMBA else delta_step
    if compiled:
        step = torch.compile(step)

    def forward(arrays: Sequence[Any]) -> Any:
        if case.subject == MAMBA:
            x, delta, a, b, c = arrays
            moving, shared, state = [x, delta, b, c], [a], torch.zeros(1, *a.shape)
        else:
            moving, shared = list(arrays), []
            size = arrays[0].shape
            state = torch.zeros(size[0], size[2], size[3], size[3])
        out = []
        # unbind, for the gradient of indexing would be a whole array for each token
        for rows in zip(*(array.unbind(1) for array in moving), strict=True):
            state, y = step(state, *rows, *shared)
            out.append(y)
        return torch.stack(out, 1)

    arrays, ct = [torch.from_numpy(array) for array in operands(case)], torch.from_numpy(cotangent(case))
    if not case.dims["backward"]:

        def call() -> Any:
            with torch.no_grad():
                return forward(arrays)

        return Prepared(call, lambda: call().numpy())
    wanted = [array.requires_grad_() for array in arrays]

    def both() -> Any:
        return torch.autograd.grad(forward(wanted), wanted, ct)

    return Prepared(both, lambda: along(case, both()))
