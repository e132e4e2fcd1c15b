"""The selective scan that keeps states, and the kernels of its gradient, against recurrences written here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from targets import compiled, host, supported

import rlx
from rlx.errors import DTypeError, ShapeError
from rlx.ops.recurrent import CHUNK
from rlx.transforms import grad, value_and_grad, vmap

Array = np.ndarray[Any, Any]
NAMES = ("x", "delta", "a", "b", "c", "state", "d")
N = 6  # of a state: three numbers go together, so that there are two turns


def plain(
    x: Array, delta: Array, a: Array, b: Array, c: Array, state: Array, d: Array | float = 0.0
) -> tuple[Array, Array]:
    """As the paper writes it, token by token; complex numbers too."""
    ys = []
    for t in range(x.shape[1]):
        state = np.exp(delta[:, t, :, None] * a) * state + (delta[:, t] * x[:, t])[..., None] * b[:, t, None]
        ys.append((state @ c[:, t, :, None])[..., 0] + d * x[:, t])
    return (np.stack(ys, 1) if ys else x * 0), state


def numbers(seq: int, channels: int = 5, n: int = N, *, batch: int = 2, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    wide, narrow = (batch, seq, channels), (batch, seq, n)
    built = (
        rng.standard_normal(wide), rng.uniform(0.01, 0.5, wide), -rng.uniform(0.1, 2.0, (channels, n)),
        rng.standard_normal(narrow), rng.standard_normal(narrow), rng.standard_normal((batch, channels, n)),
        rng.standard_normal(channels),
    )  # fmt: skip
    return dict(zip(NAMES, built, strict=True))


def summed(channels: Any = 5, n: int = N, dtype: str = "f64", batch: Any = "batch") -> rlx.Graph:
    """One number of outputs and last state, in which no two have the same part."""
    graph = rlx.Graph("selective")
    wide, narrow = (batch, "seq", channels), (batch, "seq", n)
    shapes = (wide, wide, (channels, n), narrow, narrow, (batch, channels, n), (channels,))
    inputs = [graph.input(name, shape, dtype) for name, shape in zip(NAMES, shapes, strict=True)]
    y, last = graph.selective_scan_carry(*inputs, state_size=n)
    return graph.set_outputs([(y * y * 0.5).sum() + (last * (last + 1.0)).sum()])


def slope(inputs: dict[str, Array], name: str, direction: Array) -> float:
    """The derivative of `summed` along a direction, by a step in the complex plane: nothing is subtracted."""
    step = 1e-30
    y, last = plain(**{k: v + 1j * step * direction if k == name else v for k, v in inputs.items()})
    return float(((y * y * 0.5).sum() + (last * (last + 1.0)).sum()).imag / step)


def check_gradients(actual: list[Array], inputs: dict[str, Array]) -> None:
    rng = np.random.default_rng(1)
    for name, gradient in zip(NAMES, actual, strict=True):
        assert gradient.shape == inputs[name].shape
        for _ in range(3):
            direction = rng.standard_normal(inputs[name].shape)
            wanted = slope(inputs, name, direction)
            assert abs(np.vdot(gradient, direction) - wanted) <= 1e-11 * max(1.0, abs(wanted)), name


@pytest.mark.parametrize("channels", [5, 16, 70, "channels"])
def test_gradients_are_those_of_the_plain_recurrence(channels: Any) -> None:
    """One program for any number of rows and tokens, and of channels: whole vectors and blocks of them, and a bit."""
    f = rlx.compile(grad(summed(channels), NAMES))
    sizes = [channels] if isinstance(channels, int) else [1, 33, 64]
    for size in sizes:
        for seq, batch in ((0, 2), (1, 1), (CHUNK, 2), (2 * CHUNK + 6, 3)):
            inputs = numbers(seq, size, batch=batch)
            check_gradients(f.run(inputs), inputs)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16])
def test_a_state_may_have_any_size(n: int) -> None:
    inputs = numbers(CHUNK + 3, 9, n)
    check_gradients(rlx.compile(grad(summed(9, n), NAMES)).run(inputs), inputs)


def test_a_scan_without_state_and_d_has_the_gradients_of_one_with_zeros() -> None:
    inputs = numbers(CHUNK + 5)
    graph = rlx.Graph("bare")
    operands = [graph.input(name, inputs[name].shape, "f64") for name in NAMES[:5]]
    graph.set_outputs([(graph.selective_scan(*operands, state_size=N) ** 2.0 * 0.5).sum()])
    actual = rlx.compile(grad(graph, NAMES[:5])).run({name: inputs[name] for name in NAMES[:5]})
    rng = np.random.default_rng(1)
    for name, gradient in zip(NAMES, actual, strict=False):
        direction = rng.standard_normal(inputs[name].shape)
        moved = {k: v + 1e-30j * direction if k == name else v for k, v in inputs.items()} | {
            "state": inputs["state"] * 0
        }
        y, _ = plain(**{k: v for k, v in moved.items() if k != "d"})
        wanted = (y * y * 0.5).sum().imag / 1e-30
        assert abs(np.vdot(gradient, direction) - wanted) <= 1e-11 * max(1.0, abs(wanted)), name


def adjoints(
    x: Array, delta: Array, a: Array, b: Array, c: Array, states: Array, d_out: Array, d_last: Array, chunk: int
) -> tuple[Array, ...]:
    """One channel, one component of its state and one token after the other."""
    dx, ddelta, da, db, dc = (np.zeros_like(v) for v in (x, delta, a, b, c))
    start = d_last.copy()
    for row, channel, i in np.ndindex(d_last.shape):
        past: list[float] = []  # the state before each token
        for t in range(x.shape[1]):
            step, before = delta[row, t - 1, channel], past[-1] if past else 0.0
            following = np.exp(step * a[channel, i]) * before + step * x[row, t - 1, channel] * b[row, t - 1, i]
            past.append(following if t % chunk else states[row, t // chunk, i, channel])
        for t in reversed(range(x.shape[1])):
            at, of = (row, t, channel), (row, t, i)
            gate = np.exp(delta[at] * a[channel, i])
            adjoint = start[row, channel, i] + d_out[at] * c[of]
            dc[of] += d_out[at] * (gate * past[t] + delta[at] * x[at] * b[of])
            db[of] += adjoint * delta[at] * x[at]
            dx[at] += adjoint * delta[at] * b[of]
            ddelta[at] += adjoint * (x[at] * b[of] + a[channel, i] * gate * past[t])
            da[channel, i] += adjoint * delta[at] * gate * past[t]
            start[row, channel, i] = adjoint * gate
    return dx, ddelta, da, db, dc, start


WIDTHS = {t.vector_bytes: t.name for t in supported()}  # a target of each width
EACH = [("f32", name, 1e-5) for name in WIDTHS.values()] + [("f64", host().name, 1e-13), ("bf16", host().name, 0.03)]
EACH += [("f64", "toy", 1e-13)]  # by portable forms


@pytest.mark.parametrize(("dtype", "target", "relative"), EACH)
def test_the_kernel_of_the_gradient_is_right_for_any_operands(dtype: str, target: str, relative: float) -> None:
    """Also for states that no forward pass gives: derivatives of gradients take them for operands."""
    graph, arguments, wanted = rlx.Graph("back"), {}, []
    for i, (seq, channels, n, chunk) in enumerate(((10, 5, 3, 4), (19, 35, 4, 16))):
        x, delta, a, b, c, state, _ = numbers(seq, channels, n, seed=i).values()
        states = np.random.default_rng(2).standard_normal((2, -(-seq // chunk), n, channels))
        arrays = [v.astype(np.float32).astype(np.float64) for v in (x, delta, a, b, c, states, x[::-1], state)]
        inputs = [graph.input(f"x{i}_{j}", v.shape, dtype) for j, v in enumerate(arrays)]
        built = graph.apply("selective_scan_backward", *inputs, state_size=n, chunk=chunk)
        graph.set_outputs([*graph.outputs, *built])
        rounded = [v.astype(x.dtype.numpy) for x, v in zip(inputs, arrays, strict=True)]
        arguments |= {x.node.attrs["name"]: v for x, v in zip(inputs, rounded, strict=True)}
        wanted += adjoints(*(v.astype(np.float64) for v in rounded), chunk=chunk)
    for device in (compiled(graph, target), rlx.compile(graph, "reference")):
        for actual, want in zip(map(np.asarray, device.run(arguments)), wanted, strict=True):
            assert actual.shape == want.shape
            assert np.abs(actual.astype(np.float64) - want).max() <= relative * np.abs(want).max()


@pytest.mark.parametrize("seq", [0, 3, 8, 13])
def test_the_kept_states_are_those_before_each_chunk(seq: int) -> None:
    arrays, chunk = numbers(seq, 35), 4
    del arrays["d"]
    graph = rlx.Graph("kept")
    inputs = [graph.input(name, array.shape, "f64") for name, array in arrays.items()]
    graph.set_outputs(graph.apply("selective_scan_with_states", *inputs, state_size=N, chunk=chunk))
    for device in ("cpu", "reference"):
        y, last, states = rlx.compile(graph, device).run(arrays)
        np.testing.assert_allclose(y, plain(**arrays)[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(last, plain(**arrays)[1], rtol=1e-12, atol=1e-12)
        assert states.shape == (2, -(-seq // chunk), N, 35)
        for i in range(states.shape[1]):
            before = {k: v[:, : i * chunk] if k in ("x", "delta", "b", "c") else v for k, v in arrays.items()}
            np.testing.assert_allclose(states[:, i].swapaxes(1, 2), plain(**before)[1], rtol=1e-12, atol=1e-12)


def test_a_gradient_is_three_launches_and_keeps_one_state_for_each_chunk() -> None:
    channels, n = 64, 64
    f = rlx.compile(value_and_grad(summed(channels, n, "f32"), NAMES))
    program = f.plan.main
    assert not program.controls
    named = [launch.kernel.name for launch in program.launches]
    scans = [name for name in named if name.startswith("selective_scan")]
    assert scans == ["selective_scan_with_states", "selective_scan_backward", "selective_scan_sums"]
    sizes = [b.type.bytes for b in program.buffers.values()]
    largest = [max(rlx.types.evaluate(x, {"batch": 1, "seq": seq}) for x in sizes) for seq in (50 * CHUNK, 100 * CHUNK)]
    assert largest == [4 * channels * n * 50, 4 * channels * n * 100]


def test_kernels_stay_inside_their_arrays_and_give_the_same_bits_on_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays that end at an inaccessible page and begin as NaN, at lengths around those of chunks; three blocks."""
    graph = value_and_grad(summed(135, 3, "f32"), NAMES)
    f = rlx.compile(graph, threads=1)
    monkeypatch.setenv("RLX_CHECK", "1")
    checked = rlx.compile(graph, threads=2)
    for seq in (0, 1, CHUNK, CHUNK + 1):
        inputs = {k: v.astype("f4") for k, v in numbers(seq, 135, 3).items()}
        for actual, wanted in zip(checked.run(inputs), f.run(inputs), strict=True):
            np.testing.assert_array_equal(actual, wanted)


def test_steps_and_rates_of_zero_are_numbers_like_others() -> None:
    """A step of zero leaves the state as it is, one without end forgets it."""
    inputs = numbers(CHUNK + 5)
    inputs["delta"][:, 3::7], inputs["a"][1], inputs["a"][2] = 0.0, 0.0, -1e4
    check_gradients(rlx.compile(grad(summed(), NAMES)).run(inputs), inputs)


def test_a_gradient_has_a_gradient() -> None:
    """Along a direction, against differences of gradients."""
    inputs = numbers(CHUNK + 3, 3, 2, batch=1)
    dotted, rng = grad(summed(3, 2), NAMES).copy(), np.random.default_rng(3)
    pairs = zip(NAMES, dotted.outputs, strict=True)
    parts = [(out * dotted.input(f"w_{name}", out.shape, "f64")).sum() for name, out in pairs]
    dotted.set_outputs([sum(parts[1:], parts[0])])
    inputs |= {f"w_{name}": rng.standard_normal(inputs[name].shape) for name in NAMES}
    second = rlx.compile(grad(dotted, NAMES)).run(inputs)
    f, step = rlx.compile(dotted), 1e-6
    for name, actual in zip(NAMES, second, strict=True):
        direction = rng.standard_normal(inputs[name].shape)
        high, low = (float(f.run({**inputs, name: inputs[name] + s * direction})[0]) for s in (step, -step))
        wanted = (high - low) / (2 * step)
        assert abs(np.vdot(actual, direction) - wanted) <= 1e-6 * max(1.0, abs(wanted)), name


def test_lanes_of_a_gradient_are_apart() -> None:
    """Under vmap each has its own gradient of a, though they share a."""
    lanes = [numbers(7, 3, 2, batch=2, seed=seed) for seed in range(3)]
    graph = vmap(grad(summed(3, 2, batch=2), NAMES), {name: 0 for name in NAMES if name not in ("a", "d")})
    shared = {name: lanes[0][name] for name in ("a", "d")}
    inputs = {name: np.stack([lane[name] for lane in lanes]) for name in NAMES if name not in shared} | shared
    actual = rlx.compile(graph).run(inputs)
    for i, lane in enumerate(lanes):
        check_gradients([gradient[i] for gradient in actual], lane | shared)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"chunk": 0}, ShapeError, "chunk is 0, expected an integer from 1"),
        ({"states": (1, 5, 4, 2)}, ShapeError, r"states is f32\[1, 5, 4, 2\], expected \[1, 3, 4, 2\]"),
        ({"d_out": (1, 5, 3)}, ShapeError, r"d_out is f32\[1, 5, 3\], expected \[1, 5, 2\]"),
        ({"dtype": "f64"}, DTypeError, "takes floats of one type"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    graph = rlx.Graph("bad")
    wide, narrow = (1, 5, 2), (1, 5, 4)
    shapes = {"x": wide, "delta": wide, "a": (2, 4), "b": narrow, "c": narrow, "states": (1, 3, 4, 2), "d_out": wide,
              "d_last": (1, 2, 4)}  # fmt: skip
    inputs = [graph.input(n, change.get(n, s), change.get("dtype", "f32") if n == "d_last" else "f32")
             for n, s in shapes.items()]  # fmt: skip
    with pytest.raises(error, match=f"selective_scan_backward: {says}"):
        graph.apply("selective_scan_backward", *inputs, state_size=4, chunk=change.get("chunk", 2))
