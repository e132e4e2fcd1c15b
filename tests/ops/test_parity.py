"""The same ops in torch: a second opinion on what they mean, special numbers and ties included."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracles import Array
from targets import supported

import rlx
from rlx.transforms import vjp

pytestmark = pytest.mark.parity

PLACES = ["reference", *(t.name for t in supported())]
EVERY_PLACE = pytest.mark.parametrize("place", PLACES)
EVERY_TYPE = pytest.mark.parametrize("dtype", (np.float32, np.float64))


@pytest.fixture(scope="module")
def torch() -> Any:
    """Imported only when a test wants it: plain `pytest` collects this file without it."""
    return pytest.importorskip("torch")


def run(place: str, build: Callable[..., Any], *arrays: Array) -> list[Array]:
    graph = rlx.Graph("parity")
    inputs = build(graph, *(graph.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)))
    graph.set_outputs(inputs if isinstance(inputs, (list, tuple)) else [inputs])
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    return compiled.run({f"x{i}": a for i, a in enumerate(arrays)})


def close(actual: Array, wanted: Any, tolerance: float = 2e-6) -> None:
    """Within a tolerance of the largest number, in units of the type; NaN and infinities in the same places."""
    exact = wanted.numpy()
    assert actual.shape == exact.shape
    if not np.issubdtype(exact.dtype, np.floating):
        np.testing.assert_array_equal(actual, exact)
        return
    allowed = tolerance * (2.0**-29 * 4 if exact.dtype == np.float64 else 1)
    largest = np.max(np.abs(exact), initial=0, where=np.isfinite(exact))
    np.testing.assert_allclose(actual, exact, rtol=0, atol=allowed * largest)


def uniform(*shape: int, dtype: Any = np.float32, low: float = -4, high: float = 4, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


# Our name -> torch's.
UNARY = {
    "exp": "exp", "sin": "sin", "cos": "cos", "tan": "tan", "atan": "atan", "tanh": "tanh", "erf": "erf",
    "relu": "relu", "sigmoid": "sigmoid", "silu": "nn.functional.silu", "gelu": "nn.functional.gelu",
    "neg": "neg", "abs": "abs",
}  # fmt: skip
POSITIVE = {"log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt"}
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "maximum", "minimum": "minimum", "equal": "eq",
    "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
}  # fmt: skip


def call(torch: Any, path: str, *arrays: Array, **options: Any) -> Any:
    """A function of torch on NumPy arrays."""
    return operator.attrgetter(path)(torch)(*map(torch.from_numpy, arrays), **options)


@EVERY_PLACE
@EVERY_TYPE
def test_unary_ops(torch: Any, dtype: Any, place: str) -> None:
    x, y = uniform(7, 65, dtype=dtype), uniform(7, 65, dtype=dtype, low=1e-3, high=50)
    actual = run(place, lambda g, a, b: [g.apply(n, a) for n in UNARY] + [g.apply(n, b) for n in POSITIVE], x, y)
    wanted = [call(torch, f, x) for f in UNARY.values()] + [call(torch, f, y) for f in POSITIVE.values()]
    for array, exact in zip(actual, wanted, strict=True):
        close(array, exact)
    close(run(place, lambda g, a: a.gelu_tanh(), x)[0], call(torch, "nn.functional.gelu", x, approximate="tanh"))


@EVERY_PLACE
def test_special_numbers_mean_the_same(torch: Any, place: str) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.0, -1.0, 200.0, -200.0], np.float32)
    names = {**UNARY, **POSITIVE}
    actual = run(place, lambda g, a: [g.apply(n, a) for n in names], x)
    for name, array in zip(names, actual, strict=True):
        exact = call(torch, names[name], x).numpy()
        if name not in ("gelu", "silu"):  # x · 0 for -inf: NaN or 0, as libraries like
            np.testing.assert_array_equal(np.isnan(array), np.isnan(exact), err_msg=name)
        both = np.isfinite(array) & np.isfinite(exact)
        np.testing.assert_allclose(array[both], exact[both], rtol=2e-6, atol=1e-37, err_msg=name)


@EVERY_PLACE
@EVERY_TYPE
def test_binary_ops(torch: Any, dtype: Any, place: str) -> None:
    a, b = uniform(5, 1, 33, dtype=dtype), uniform(7, 1, dtype=dtype, seed=1)
    a[0, 0, :3], b[:2, 0] = [np.nan, np.inf, 0.0], [np.nan, np.inf]
    actual = run(place, lambda g, x, y: [g.apply(n, x, y) for n in BINARY], a, b)
    for (name, path), array in zip(BINARY.items(), actual, strict=True):
        exact = call(torch, path, a, b).numpy()
        np.testing.assert_array_equal(array, exact, err_msg=name)


@EVERY_PLACE
def test_powers(torch: Any, place: str) -> None:
    a, b = uniform(9, 33, low=0.01), uniform(9, 33, seed=1)
    close(run(place, lambda g, x, y: x**y, a, b)[0], call(torch, "pow", a, b))


@EVERY_PLACE
@pytest.mark.parametrize("dtype", (np.int8, np.int32, np.int64))
def test_integer_division_rounds_down(torch: Any, dtype: Any, place: str) -> None:
    a = np.arange(-20, 21).astype(dtype)[:, None]
    b = np.array([-7, -3, -2, -1, 1, 2, 3, 7]).astype(dtype)
    quotient, rest = run(place, lambda g, x, y: [x // y, x % y], a, b)
    p, q = torch.from_numpy(a), torch.from_numpy(b)
    close(quotient, torch.div(p, q, rounding_mode="floor"))
    close(rest, torch.remainder(p, q))


@EVERY_PLACE
@EVERY_TYPE
@pytest.mark.parametrize("axis", (0, 1, 2))
def test_reductions(torch: Any, axis: int, dtype: Any, place: str) -> None:
    x = uniform(5, 17, 33, dtype=dtype, low=0.5, high=1.5)
    t = torch.from_numpy(x)

    def build(g: Any, v: Any) -> list[Any]:
        simple = [
            g.apply(op, v, axis=axis) for op in ("sum", "mean", "prod", "max", "min", "argmax", "softmax", "cumsum")
        ]
        return [*simple, g.sum(v, axis=(0, 2), keepdims=True)]

    wanted = [
        t.sum(axis), t.mean(axis), t.prod(axis), t.amax(axis), t.amin(axis), t.argmax(axis), t.softmax(axis),
             t.cumsum(axis),
        t.sum((0, 2), keepdim=True),
    ]  # fmt: skip
    for array, exact in zip(run(place, build, x), wanted, strict=True):
        close(array, exact, 5e-6)


@EVERY_PLACE
def test_topk(torch: Any, place: str) -> None:
    x = (
        np.random.default_rng(0).permutation(7 * 65).reshape(7, 65).astype(np.float32)
    )  # no equals: torch breaks ties as it likes
    values, at = torch.topk(torch.from_numpy(x), 9)
    actual = run(place, lambda g, v: v.topk(k=9), x)
    close(actual[0], values)
    close(actual[1], at)


@EVERY_PLACE
@EVERY_TYPE
def test_norms(torch: Any, dtype: Any, place: str) -> None:
    x, gamma, beta = (
        uniform(4, 3, 130, dtype=dtype),
        uniform(130, dtype=dtype, seed=1),
        uniform(130, dtype=dtype, seed=2),
    )
    t, w, b = (torch.from_numpy(a) for a in (x, gamma, beta))
    layer, root, plain = run(
        place,
        lambda g, v, p, q: [g.layer_norm(v, p, q, eps=1e-5), g.rms_norm(v, p, eps=1e-6), g.layer_norm(v)],
        x,
        gamma,
        beta,
    )
    close(layer, torch.nn.functional.layer_norm(t, (130,), w, b, 1e-5), 3e-6)
    close(root, torch.nn.functional.rms_norm(t, (130,), w, 1e-6), 3e-6)
    close(plain, torch.nn.functional.layer_norm(t, (130,)), 3e-6)


@EVERY_PLACE
@EVERY_TYPE
def test_products(torch: Any, dtype: Any, place: str) -> None:
    a, b, c = (
        uniform(13, 65, dtype=dtype),
        uniform(65, 70, dtype=dtype, seed=1),
        uniform(3, 1, 7, 13, dtype=dtype, seed=2),
    )
    p, q, r = (torch.from_numpy(x) for x in (a, b, c))
    actual = run(place, lambda g, x, y, z: [x @ y, z @ x, x.mT @ z.mT], a, b, c)
    for array, exact in zip(actual, (p @ q, r @ p, p.mT @ r.mT), strict=True):
        close(array, exact, 1e-5)


@EVERY_PLACE
def test_indexing(torch: Any, place: str) -> None:
    x, updates = uniform(11, 33), uniform(20, 33, seed=1)
    at = np.random.default_rng(2).integers(0, 11, 20).astype(np.int64)
    t, i, u = torch.from_numpy(x), torch.from_numpy(at), torch.from_numpy(updates)
    rows, columns, added = run(
        place, lambda g, v, n, w: [g.gather(v, n), g.gather(v, n, axis=1), g.scatter_add(v, n, w)], x, at, updates
    )
    close(rows, torch.nn.functional.embedding(i, t))
    close(columns, torch.index_select(t, 1, i))
    close(added, t.index_add(0, i, u), 5e-6)
    full = i[:, None].expand(-1, 33)
    close(added, torch.scatter_add(t, 0, full, u), 5e-6)


@EVERY_PLACE
def test_moving_elements(torch: Any, place: str) -> None:
    x, y = uniform(3, 5, 17), uniform(3, 2, 17, seed=1)
    t, s = torch.from_numpy(x), torch.from_numpy(y)
    actual = run(
        place,
        lambda g, a, b: [g.concatenate([a, b], axis=1), g.pad(a, low=(0, 1, 2), high=(0, 0, 3), value=1.5),
             a[:, 1:4:2, ::3]],
        x, y,
    )  # fmt: skip
    close(actual[0], torch.cat([t, s], 1))
    close(actual[1], torch.nn.functional.pad(t, (2, 3, 1, 0), value=1.5))
    close(actual[2], t[:, 1:4:2, ::3])


@EVERY_PLACE
@pytest.mark.parametrize("dtype", (np.int8, np.int16, np.int32, np.int64, np.uint8))
def test_casts_within_range(torch: Any, dtype: Any, place: str) -> None:
    info = np.iinfo(dtype)
    x = uniform(5, 65, low=max(float(info.min), -1e6), high=min(float(info.max), 1e6))
    (actual,) = run(place, lambda g, v: v.astype(dtype), x)
    close(actual, torch.from_numpy(x).to(torch.from_numpy(np.zeros(1, dtype)).dtype))


@EVERY_PLACE
@EVERY_TYPE
@pytest.mark.parametrize(("heads", "kv_heads"), ((4, 4), (6, 2), (4, 1)))
def test_attention(torch: Any, heads: int, kv_heads: int, dtype: Any, place: str) -> None:
    q = uniform(2, 67, heads, 32, dtype=dtype, low=-1, high=1)
    k, v = (uniform(2, 67, kv_heads, 32, dtype=dtype, low=-1, high=1, seed=s) for s in (1, 2))
    bias = uniform(2, heads, 67, 67, dtype=dtype, seed=3)
    keep = np.random.default_rng(4).random((2, 67)) < 0.7

    def build(g: Any, a: Any, b: Any, c: Any, added: Any, mask: Any) -> list[Any]:
        return [
            g.attention(a, b, c), g.attention(a, b, c, mask_kind="causal"), g.attention(a, b, c, scale=0.3),
            g.attention(a, b, c, added, mask_kind="bias"), g.attention(a, b, c, mask, mask_kind="custom"),
            g.attention(a, b, c, mask_kind="sliding(9)"),
        ]  # fmt: skip

    rows, keys = np.arange(67)[:, None], np.arange(67)[None]
    window = torch.from_numpy((keys <= rows) & (keys > rows - 9))
    padding = torch.from_numpy(keep)[:, None, None, :]
    masks = [torch.from_numpy(bias), padding, window]
    kinds: list[dict[str, Any]] = [{}, {"is_causal": True}, {"scale": 0.3}, *({"attn_mask": mask} for mask in masks)]
    swapped = [torch.from_numpy(t).transpose(1, 2) for t in (q, k, v)]  # [batch, heads, seq, head_dim]
    for array, options in zip(run(place, build, q, k, v, bias, keep), kinds, strict=True):
        exact = torch.nn.functional.scaled_dot_product_attention(*swapped, enable_gqa=True, **options)
        close(array, exact.transpose(1, 2).contiguous(), 1e-5)


@EVERY_PLACE
@pytest.mark.parametrize("kind", ("segments", "causal+segments", "near(5)+segments", "near(5)"))
def test_attention_of_packed_sequences(torch: Any, kind: str, place: str) -> None:
    """Values and gradients against torch with a block-diagonal mask."""
    tensors = [uniform(2, 90, heads, 32, low=-1, high=1, seed=s) for s, heads in enumerate((4, 2, 2, 4))]
    ids = np.repeat(np.arange(4, dtype=np.int32), (64, 9, 16, 1))[None].repeat(2, 0)
    rows, keys = np.arange(90)[:, None], np.arange(90)[None]
    seen = {"c": keys <= rows, "n": abs(rows - keys) <= 5}.get(kind[0], np.ones((90, 90), bool))
    seen = seen & (ids[0][:, None] == ids[0]) if "segments" in kind else seen

    graph = rlx.Graph("packed")
    q, k, v = (graph.input(f"x{i}", t.shape, "f32") for i, t in enumerate(tensors[:3]))
    segments = graph.input("ids", ids.shape, "i32") if "segments" in kind else None
    graph.set_outputs([graph.attention(q, k, v, segments, mask_kind=kind)])
    graph = vjp(graph, ["x0", "x1", "x2"])
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    inputs = {f"x{i}": t for i, t in enumerate(tensors[:3])} | ({} if segments is None else {"ids": ids})
    actual = compiled.run(inputs | {"d_output": tensors[3]})
    *theirs, weights = (torch.from_numpy(t).transpose(1, 2) for t in tensors)
    theirs = [t.requires_grad_() for t in theirs]
    y = torch.nn.functional.scaled_dot_product_attention(*theirs, enable_gqa=True, attn_mask=torch.from_numpy(seen))
    y.backward(weights)
    for ours, exact in zip(actual, [y.detach(), *(t.grad for t in theirs)], strict=True):
        close(ours, exact.transpose(1, 2).contiguous(), 1e-5)


@EVERY_PLACE
@pytest.mark.parametrize(("name", "theirs"), (("bf16", "bfloat16"), ("f16", "float16")))
def test_narrow_floats_round_as_torch_rounds(torch: Any, name: str, theirs: str, place: str) -> None:
    x = uniform(9, 65)
    dtype = getattr(torch, theirs)
    (actual,) = run(place, lambda g, v: v.astype(name).astype("f32"), x)
    np.testing.assert_array_equal(actual, torch.from_numpy(x).to(dtype).to(torch.float32).numpy())
