"""Recurrences: pieces give what the whole gives, and the published implementations agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import LowerError, ShapeError

rng = np.random.default_rng(5)


def test_a_sequence_may_come_in_pieces() -> None:
    """The state after one piece starts the next: the same bits as in one go, for scan, delta net and convolution."""
    n, channels = 4, 40
    g = rlx.Graph("pieces")
    x, delta = g.input("x", (2, "seq", channels)), g.input("delta", (2, "seq", channels))
    b, c = g.input("b", (2, "seq", n)), g.input("c", (2, "seq", n))
    a, state = g.param("a", (channels, n)), g.input("state", (2, channels, n))
    g.set_outputs(g.selective_scan_carry(x, delta, a, b, c, state, state_size=n))
    f = rlx.compile(g)
    f.set_param("a", -rng.random((channels, n)).astype(np.float32))
    sizes = {"x": channels, "delta": channels, "b": n, "c": n}
    full = {name: rng.random((2, 23, size)).astype(np.float32) for name, size in sizes.items()}
    start = np.zeros((2, channels, n), np.float32)
    y, last = f.run({**full, "state": start})
    parts, at = [], start
    for first, end in ((0, 1), (1, 8), (8, 8), (8, 23)):
        piece, at = f.run({**{k: v[:, first:end].copy() for k, v in full.items()}, "state": at})
        parts.append(piece)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), y)
    np.testing.assert_array_equal(at, last)


CARRIED: dict[str, tuple[list[tuple[Any, ...]], tuple[int, ...], dict[str, int]]] = {
    # an op: the shapes of what comes before its state, that of the state, attributes
    "selective_scan_carry": ([(2, 9, 40), (2, 9, 40), (40, 3), (2, 9, 3), (2, 9, 3)], (2, 40, 3), {"state_size": 3}),
    "gated_delta_net_carry": ([(2, 9, 3, 16)] * 3 + [(2, 9, 3)] * 2, (2, 3, 16, 16), {"state_size": 16}),
    "gated_linear_attention_carry": ([(2, 9, 1, 5)] * 2 + [(2, 9, 3, 20), (2, 9, 3)], (2, 3, 5, 20), {}),
    "depthwise_conv1d_causal_carry": ([(2, 9, 40), (40, 4)], (2, 3, 40), {"kernel_size": 4}),
}  # fmt: skip


def carrying(op: str, leaf: str) -> tuple[rlx.Graph, dict[str, Any]]:
    """A graph of one op whose state is such a leaf, and numbers for it."""
    shapes, state, attrs = CARRIED[op]
    numbers: dict[str, Any] = {f"x{i}": rng.random(shape).astype(np.float32) / 4 for i, shape in enumerate(shapes)}
    g = rlx.Graph("carrying")
    operands = [g.input(name, array.shape) for name, array in numbers.items()]
    operands.append(getattr(g, leaf)("state", state))
    if op == "depthwise_conv1d_causal_carry":
        operands.append(g.input("lengths", (2,), "i32"))
        numbers["lengths"] = np.array([9, 2], np.int32)
    g.set_outputs(getattr(g, op)(*operands, **attrs))
    return g, numbers | {"state": rng.random(state).astype(np.float32)}


@pytest.mark.parametrize("op", CARRIED)
def test_a_state_of_the_runtime_is_carried_on_in_place(op: str) -> None:
    """The caller finds the new state where the old one was; an input is left as it is."""
    pure, numbers = carrying(op, "input")
    before = numbers["state"].copy()
    y, after = rlx.compile(pure).run(numbers)
    np.testing.assert_array_equal(numbers["state"], before)
    graph, _ = carrying(op, "state")
    graph.set_outputs(graph.outputs[:1])
    (actual,) = rlx.compile(graph).run(numbers)
    np.testing.assert_array_equal(actual, y)
    np.testing.assert_array_equal(numbers["state"], after)


@pytest.mark.parametrize("op", CARRIED)
def test_a_state_that_is_read_again_as_it_was_is_refused(op: str) -> None:
    graph, _ = carrying(op, "state")
    state = next(n for n in graph.inputs if n.attrs["name"] == "state")
    graph.set_outputs([graph.outputs[0], state[0] * 2.0])
    with pytest.raises(LowerError, match=f"{op}: the old value of state 'state' is read later"):
        rlx.compile(graph)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7])
def test_the_state_of_a_convolution_has_the_last_tokens_that_count(length: int) -> None:
    g = rlx.Graph("tokens")
    x, state = g.input("x", (1, 7, 5)), g.state("state", (1, 3, 5))
    g.set_outputs(
        g.depthwise_conv1d_causal_carry(x, g.param("w", (5, 4)), state, g.input("n", (1,), "i32"), kernel_size=4)[:1]
    )
    f = rlx.compile(g)
    f.set_param("w", np.ones((5, 4), np.float32))
    tokens, previous = (np.arange(n * 5, dtype=np.float32).reshape(1, n, 5) + a for n, a in ((7, 100), (3, 0)))
    wanted = np.concatenate([previous[0], tokens[0, :length]])[-3:]
    f.run({"x": tokens, "state": previous, "n": np.array([length], np.int32)})
    np.testing.assert_array_equal(previous[0], wanted)


@pytest.mark.parity
def test_the_gated_delta_rule_is_that_of_transformers() -> None:
    """Both of its forms in Qwen3-Next: token by token, and in chunks."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    batch, seq, heads, n = 2, 70, 3, 32
    q, k, v = (rng.normal(size=(batch, seq, heads, n)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q /= np.linalg.norm(q, axis=-1, keepdims=True)
    gate, beta = (-rng.random((batch, seq, heads))).astype(np.float32), rng.random((batch, seq, heads)).astype("f4")
    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    results = [
        modeling.torch_recurrent_gated_delta_rule(
            *tensors, g=torch.from_numpy(gate), beta=torch.from_numpy(beta), initial_state=None, output_final_state=True
        ),
        modeling.torch_chunk_gated_delta_rule(
            *tensors, g=torch.from_numpy(gate), beta=torch.from_numpy(beta), initial_state=None, output_final_state=True
        ),
    ]
    g = rlx.Graph("delta")
    names = {"q": q, "k": k, "v": v, "g": gate, "beta": beta, "s": np.zeros((batch, heads, n, n), np.float32)}
    g.set_outputs(g.gated_delta_net_carry(*(g.input(i, a.shape) for i, a in names.items()), state_size=n))
    out, state = rlx.compile(g).run(names)
    for wanted_out, wanted_state in results:
        for have, want in ((out, wanted_out.numpy()), (state, wanted_state.numpy())):
            assert np.abs(have - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parity
def test_a_mamba_mixer_is_that_of_transformers() -> None:
    """Projection, causal convolution, selective scan with skip, gate: the whole mixer."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    torch.manual_seed(0)
    config = modeling.MambaConfig(hidden_size=24, state_size=5, conv_kernel=4, expand=2, time_step_rank=3)
    mixer = modeling.MambaMixer(config, layer_idx=0).eval()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = rng.normal(size=(2, 37, 24)).astype(np.float32)
    with torch.no_grad():
        wanted = mixer(torch.from_numpy(x)).numpy()

    w = {k: v.detach().numpy().astype(np.float32) for k, v in mixer.named_parameters()}
    g = rlx.Graph("mixer")
    inner, n, rank = 48, 5, 3
    p = {name: g.param(name, a.shape) for name, a in w.items()}
    both = g.input("x", (2, "seq", 24)) @ p["in_proj.weight"].mT
    hidden, gate = both[:, :, :inner], both[:, :, inner:]
    before = g.constant(np.zeros((2, 3, inner), np.float32))
    mixed = g.depthwise_conv1d_causal(hidden, p["conv1d.weight"], before, kernel_size=4) + p["conv1d.bias"]
    mixed = mixed.silu()
    parts = mixed @ p["x_proj.weight"].mT
    step = parts[:, :, :rank] @ p["dt_proj.weight"].mT + p["dt_proj.bias"]
    step = (step.exp() + 1.0).log()  # softplus
    b, c = parts[:, :, rank : rank + n], parts[:, :, rank + n :]
    y = g.selective_scan(mixed, step, p["A_log"].exp().neg(), b, c, p["D"], state_size=n)
    g.set_outputs([(y * gate.silu()) @ p["out_proj.weight"].mT])
    for f in (rlx.compile(g), rlx.compile(g, "reference")):
        f.set_params(w)
        assert np.abs(f.run({"x": x})[0] - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_state_has_elements() -> None:
    g = rlx.Graph("empty")
    x, a, b = g.input("x", (1, 2, 3)), g.input("a", (3, 0)), g.input("b", (1, 2, 0))
    with pytest.raises(ShapeError, match="state_size is 0"):
        g.selective_scan(x, x, a, b, b, state_size=0)
    q, gate = g.input("q", (1, 2, 3, 0)), g.input("g", (1, 2, 3))
    with pytest.raises(ShapeError, match="state_size is 0"):
        g.gated_delta_net(q, q, q, gate, gate, state_size=0)
