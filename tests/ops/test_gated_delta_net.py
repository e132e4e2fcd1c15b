"""The gated delta net by tokens and by chunks, and the kernels of its gradient, against recurrences written here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from targets import compiled, host, supported

import rlx
from rlx.errors import DTypeError, ShapeError
from rlx.ops.recurrent import CHUNK
from rlx.transforms import grad, value_and_grad

Array = np.ndarray[Any, Any]
NAMES = ("q", "k", "v", "g", "beta", "state")


def plain(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """As papers write it, token by token; complex numbers too."""
    out = np.zeros(v.shape, np.result_type(q, k, v, g, beta, state))
    for t in range(q.shape[1]):
        state = state * np.exp(g[:, t, :, None, None])
        change = (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[:, :, None]
        out[:, t] = (q[:, t, :, None] @ state)[:, :, 0] / math.sqrt(q.shape[-1])
    return out, state


def numbers(seq: int, n: int, *, batch: int = 2, heads: int = 3, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((batch, seq, heads, n)) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.uniform(0, 0.5, (batch, seq, heads)), rng.uniform(0, 1, (batch, seq, heads))
    return dict(zip(NAMES, (q, k, v, g, beta, rng.standard_normal((batch, heads, n, n))), strict=True))


def carrying(n: int, dtype: str = "f32", heads: int = 3, leaf: str = "input") -> rlx.Graph:
    graph = rlx.Graph("delta")
    inputs = [graph.input(x, ("batch", "seq", heads, n), dtype) for x in "qkv"]
    inputs += [graph.input(x, ("batch", "seq", heads), dtype) for x in ("g", "beta")]
    inputs.append(getattr(graph, leaf)("state", ("batch", heads, n, n), dtype))
    return graph.set_outputs(graph.gated_delta_net_carry(*inputs, state_size=n))


def near(actual: Array, wanted: Array, relative: float = 1e-5) -> None:
    assert actual.shape == wanted.shape
    assert np.abs(actual - wanted).max(initial=0) <= relative * max(np.abs(wanted).max(initial=0), 1e-30)


# -- forward -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [16, 33, 64])
def test_one_program_does_any_number_of_tokens(n: int) -> None:
    """Tokens one by one, a chunk less one, whole chunks, a chunk and a bit: float32 within 1e-5 of float64."""
    f = rlx.compile(carrying(n))
    for seq in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5):
        inputs = numbers(seq, n)
        for actual, wanted in zip(f.run({k: v.astype("f4") for k, v in inputs.items()}), plain(**inputs), strict=True):
            near(actual, wanted)


def test_many_tokens_are_one_launch_of_chunks_and_few_one_of_tokens() -> None:
    """Where run time knows the length, the other launch has no units; where the graph does, there is none.

    Without a state, short sequences go by chunks too: they have the same bits when they are packed with others.
    """

    def launches(seq: Any, *, carry: bool = True) -> list[tuple[str, Any]]:
        graph = rlx.Graph("delta")
        inputs = [graph.input(x, (1, seq, 2, 16)) for x in "qkv"] + [graph.input(x, (1, seq, 2)) for x in ("g", "beta")]
        if carry:
            results = graph.gated_delta_net_carry(*inputs, graph.input("state", (1, 2, 16, 16)), state_size=16)
        else:
            results = [graph.gated_delta_net(*inputs, state_size=16)]
        f = rlx.compile(graph.set_outputs(results))
        actual = [(launch.kernel.name, launch.units) for launch in f.plan.main.launches]
        return [x for x in actual if x[0] != "exp"]

    few, many = "gated_delta_net_carry", "gated_delta_net_carry_chunks"
    assert launches(CHUNK - 1) == [(few, 2)]
    assert launches(CHUNK) == [(many, 2)]
    (first, by_token), (second, by_chunk) = launches("seq")
    assert (first, second) == (few, many)
    units = [tuple(rlx.types.evaluate(u, {"seq": seq}) for u in (by_token, by_chunk)) for seq in (1, CHUNK, 10 * CHUNK)]
    assert units == [(2, 0), (0, 2), (0, 2)]
    for seq in (1, CHUNK - 1, CHUNK, "seq"):
        assert launches(seq, carry=False) == [("gated_delta_net_chunks", 2)]


def test_a_long_sequence_may_come_in_pieces_and_its_state_is_carried_in_place() -> None:
    inputs = {k: v.astype("f4") for k, v in numbers(3 * CHUNK + 7, 16).items()}
    full, last = rlx.compile(carrying(16)).run(inputs)
    graph = carrying(16, leaf="state")
    f = rlx.compile(graph.set_outputs(graph.outputs[:1]))
    parts, state, first = [], inputs["state"].copy(), 0
    for length in (CHUNK + 3, 1, 1, 2 * CHUNK, 2):
        piece = {k: v[:, first : first + length].copy() for k, v in inputs.items() if k != "state"}
        parts += f.run({**piece, "state": state})
        first += length
    near(np.concatenate(parts, 1), full)
    near(state, last)


@pytest.mark.parametrize("seq", [5, CHUNK + 5])
def test_gates_and_rates_of_zero_are_numbers_like_others(seq: int) -> None:
    """A gate of zero forgets everything, a rate of zero learns nothing; gradients stay finite."""
    inputs = numbers(seq, 16)
    inputs["g"][:, 3::7], inputs["g"][:, 4], inputs["beta"][:, 1::5] = -math.inf, -200.0, 0.0
    f = rlx.compile(carrying(16, "f64"))
    with np.errstate(invalid="raise"):
        wanted = plain(**inputs)
    for actual, want in zip(f.run(inputs), wanted, strict=True):
        near(actual, want, 1e-12)
    gradients = rlx.compile(grad(summed(16), NAMES)).run(inputs)
    assert all(np.isfinite(x).all() for x in gradients)
    of_gates = np.abs(gradients[3])
    assert of_gates[:, 3::7].max() <= 1e-13 * of_gates.max(), "a gate of zero stays one however its logarithm moves"


# -- gradients ---------------------------------------------------------------------------------------------------------
def summed(n: int, dtype: str = "f64") -> rlx.Graph:
    """One number of outputs and last state, in which no two have the same part."""
    graph = carrying(n, dtype)
    out, last = graph.outputs
    return graph.set_outputs([(out * out * 0.5).sum() + (last * (last + 1.0)).sum()])


def slope(inputs: dict[str, Array], name: str, direction: Array) -> float:
    """The derivative of `summed` along a direction, by a step in the complex plane: nothing is subtracted."""
    step = 1e-30
    out, last = plain(**{k: v + 1j * step * direction if k == name else v for k, v in inputs.items()})
    return float(((out * out * 0.5).sum() + (last * (last + 1.0)).sum()).imag / step)


@pytest.mark.parametrize(("n", "seq"), [(16, 2 * CHUNK + 6), (5, CHUNK), (16, 3), (5, 0)])
def test_gradients_are_those_of_the_plain_recurrence(n: int, seq: int) -> None:
    inputs = numbers(seq, n)
    actual = rlx.compile(grad(summed(n), NAMES)).run(inputs)
    rng = np.random.default_rng(1)
    for name, gradient in zip(NAMES, actual, strict=True):
        for _ in range(3):
            direction = rng.standard_normal(inputs[name].shape)
            wanted = slope(inputs, name, direction)
            assert abs(np.vdot(gradient, direction) - wanted) <= 1e-11 * max(1.0, abs(wanted)), name


def adjoints(
    q: Array, k: Array, g: Array, beta: Array, states: Array, misses: Array, d_out: Array, d_last: Array, chunk: int
) -> tuple[Array, ...]:
    """One head and token after the other: what a state is multiplied with, (1 - beta k kᵀ) exp(g), is symmetric."""
    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, misses, g, beta))
    start, n = d_last.copy(), q.shape[-1]
    for batch, head in np.ndindex(q.shape[0], q.shape[2]):
        past: list[Array] = []  # the state before each token
        for t in range(q.shape[1]):
            at = batch, t - 1, head
            following = t % chunk and math.exp(g[at]) * past[-1] + np.outer(k[at], beta[at] * misses[at])
            past.append(following if t % chunk else states[batch, head, t // chunk])
        for t in reversed(range(q.shape[1])):
            at = batch, t, head
            key, rate, gate, ct = k[at], beta[at], math.exp(g[at]), d_out[at] / math.sqrt(n)
            adjoint = start[batch, head] + np.outer(q[at], ct)
            dq[at] = (gate * past[t] + np.outer(key, rate * misses[at])) @ ct
            dbeta[at] = key @ adjoint @ misses[at]
            dv[at] = rate * key @ adjoint
            dk[at] = rate * adjoint @ misses[at] - gate * past[t] @ dv[at]
            start[batch, head] = gate * (np.eye(n) - rate * np.outer(key, key)) @ adjoint
            dg[at] = (start[batch, head] * past[t]).sum()
    return dq, dk, dv, dg, dbeta, start


WIDTHS = {t.vector_bytes: t.name for t in supported()}  # a target of each width
EACH = [("f32", name, 1e-5) for name in WIDTHS.values()] + [("f64", host().name, 1e-13), ("bf16", host().name, 0.03)]
EACH += [("f64", "toy", 1e-13)]  # by portable forms


@pytest.mark.parametrize(("dtype", "target", "relative"), EACH)
def test_the_kernel_of_the_gradient_is_right_for_any_operands(dtype: str, target: str, relative: float) -> None:
    """Also for states and misses that no forward pass gives: derivatives of gradients take them for operands."""
    graph, arguments, wanted = rlx.Graph("back"), {}, []
    for i, (seq, n, chunk) in enumerate(((10, 5, 4), (37, 16, 16))):
        q, k, v, g, beta, state = numbers(seq, n, seed=i).values()
        states = np.random.default_rng(2).standard_normal((2, 3, -(-seq // chunk), n, n))
        arrays = [a.astype(np.float32).astype(np.float64) for a in (q, k, g, beta, states, v, v[::-1], state)]
        named = {f"x{i}_{j}": a for j, a in enumerate(arrays)}
        inputs = [graph.input(name, a.shape, dtype) for name, a in named.items()]
        graph.set_outputs(
            [*graph.outputs, *graph.apply("gated_delta_net_backward", *inputs, state_size=n, chunk=chunk)]
        )
        arguments |= {x.node.attrs["name"]: a.astype(x.dtype.numpy) for x, a in zip(inputs, arrays, strict=True)}
        wanted += adjoints(*arrays, chunk=chunk)
    for device in (compiled(graph, target), rlx.compile(graph, "reference")):
        for actual, want in zip(map(np.asarray, device.run(arguments)), wanted, strict=True):
            near(actual.astype(np.float64), want, relative)


def test_a_gradient_keeps_one_state_for_each_chunk() -> None:
    """Two launches and no loop; what waits for the way back grows by a state a chunk and a row a token."""
    n, heads = 64, 3
    f = rlx.compile(value_and_grad(summed(n, "f32"), NAMES))
    program = f.plan.main
    assert not program.controls
    named = [launch.kernel.name for launch in program.launches]
    assert named.count("gated_delta_net_with_states_chunks") == named.count("gated_delta_net_backward") == 1
    sizes = [b.type.bytes for b in program.buffers.values()]
    largest = [max(rlx.types.evaluate(x, {"batch": 1, "seq": seq}) for x in sizes) for seq in (50 * CHUNK, 100 * CHUNK)]
    assert largest == [4 * heads * n * n * 50, 4 * heads * n * n * 100]


def test_kernels_stay_inside_their_arrays_and_give_the_same_bits_on_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays that end at an inaccessible page and begin as NaN, at lengths around those of chunks."""
    graph = value_and_grad(summed(5, "f32"), NAMES)
    f = rlx.compile(graph, threads=1)
    monkeypatch.setenv("RLX_CHECK", "1")
    checked = rlx.compile(graph, threads=2)
    for seq in (0, 1, CHUNK, CHUNK + 1):
        inputs = {k: v.astype("f4") for k, v in numbers(seq, 5).items()}
        for actual, wanted in zip(checked.run(inputs), f.run(inputs), strict=True):
            np.testing.assert_array_equal(actual, wanted)


def test_a_gradient_has_a_gradient() -> None:
    """Along a direction, against differences of gradients."""
    n, seq = 4, CHUNK + 3
    inputs = {k: v[:1, ..., :n] if k in "qkv" else v[:1] for k, v in numbers(seq, n).items()}
    graph = grad(summed(n), NAMES)
    rng = np.random.default_rng(3)
    weights = {name: rng.standard_normal(inputs[name].shape) for name in NAMES}
    dotted = graph.copy()
    pairs = zip(NAMES, dotted.outputs, strict=True)
    parts = [(out * dotted.input(f"w_{name}", out.shape, "f64")).sum() for name, out in pairs]
    dotted.set_outputs([sum(parts[1:], parts[0])])
    weighted = {f"w_{name}": w for name, w in weights.items()}
    second = rlx.compile(grad(dotted, NAMES)).run({**inputs, **weighted})
    f, step = rlx.compile(dotted), 1e-6
    for name, actual in zip(NAMES, second, strict=True):
        direction = rng.standard_normal(inputs[name].shape)
        high, low = (float(f.run({**inputs, **weighted, name: inputs[name] + s * direction})[0]) for s in (step, -step))
        wanted = (high - low) / (2 * step)
        assert abs(np.vdot(actual, direction) - wanted) <= 1e-6 * max(1.0, abs(wanted)), name


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"chunk": 0}, ShapeError, "chunk is 0, expected an integer from 1"),
        ({"states": (1, 2, 5, 4, 4)}, ShapeError, r"states is f32\[1, 2, 5, 4, 4\], expected \[1, 2, 3, 4, 4\]"),
        ({"misses": (1, 5, 2, 8)}, ShapeError, r"misses is f32\[1, 5, 2, 8\], expected \[1, 5, 2, 4\]"),
        ({"dtype": "f64"}, DTypeError, "takes floats of one type"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    graph = rlx.Graph("bad")
    row, state = (1, 5, 2, 4), (1, 2, 4, 4)
    shapes = {"q": row, "k": row, "g": row[:3], "beta": row[:3], "states": (1, 2, 3, 4, 4), "misses": row,
              "d_out": row, "d_last": state}  # fmt: skip
    inputs = [graph.input(n, change.get(n, s), change.get("dtype", "f32") if n == "d_last" else "f32")
             for n, s in shapes.items()]  # fmt: skip
    with pytest.raises(error, match=f"gated_delta_net_backward: {says}"):
        graph.apply("gated_delta_net_backward", *inputs, state_size=4, chunk=change.get("chunk", 2))


@pytest.mark.parity
def test_gradients_are_those_of_torch_through_the_rule_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = {k: v.astype(np.float32) for k, v in numbers(150, 32).items()}
    tensors = {k: torch.from_numpy(v).requires_grad_() for k, v in inputs.items()}
    q, k, v, g, beta, state = tensors.values()
    out, last = modeling.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True
    )
    ((out * out * 0.5).sum() + (last * (last + 1.0)).sum()).backward()
    actual = rlx.compile(grad(summed(32, "f32"), NAMES)).run(inputs)
    for name, gradient in zip(NAMES, actual, strict=True):
        near(gradient, tensors[name].grad.numpy(), 1e-4)
