"""What gradients of norms, losses and embeddings do to memory: how often tensors are read, and what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.lir.program import ARENA, CONST, WEIGHT, Launch
from rlx.transforms import grad, vjp


def launches(compiled: Any) -> list[Launch]:
    return list(compiled.executable.program.launches)


def readers(compiled: Any, name: str) -> list[str]:
    """The kernels that read a buffer."""
    reading = [x for x in launches(compiled) if any(v.buffer == name for v in x.views(written=False))]
    return [x.kernel.symbol.split(".")[0] for x in reading]


# -- norms ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_the_gradient_of_a_norm_reads_its_operands_twice(op: str) -> None:
    g = rlx.Graph(op)
    x, gamma, beta = g.input("x", ("n", 96)), g.param("gamma", (96,)), g.param("beta", (96,))
    g.set_outputs([g.one(op, x, gamma, beta)])
    compiled = rlx.compile(vjp(g, ["x", "gamma", "beta"]), threads=1)
    kind = op.removesuffix("_norm")
    by_columns = [f"{kind}_scale_grad_blocks", f"{kind}_scale_grad"]  # rows of whole blocks, and the others
    assert readers(compiled, "x") == [op, f"{op}_grad", *by_columns]
    assert readers(compiled, "d_output") == [f"{op}_grad", *by_columns]
    arena = [b.bytes for b in compiled.memory({"n": 512}).buffers if b.kind == ARENA]
    assert sum(arena) <= 2 * 4 * 512 + 2 * 4 * 96  # a mean and a scale for each row, two sums of a block's columns


def test_without_a_scale_there_is_one_pass() -> None:
    g = rlx.Graph("norm")
    g.set_outputs([g.input("x", ("n", 96)).layer_norm()])
    compiled = rlx.compile(vjp(g, ["x"]), threads=1)
    assert readers(compiled, "d_output") == ["layer_norm_grad"]


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_of_norms_are_limits_of_differences(kind: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s) for n, s in (("x", (3, 7)), ("gamma", (7,)), ("beta", (7,)), ("dy", (3, 7)))}

    def result(**moved: Any) -> float:
        x, gamma, beta = (moved.get(n, arrays[n]) for n in ("x", "gamma", "beta"))
        centred = x - x.mean(1, keepdims=True) if kind == "layer" else x
        y = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 0.1) * gamma + beta
        return float((y * arrays["dy"]).sum())

    g = rlx.Graph("norm")
    inputs = [g.input(n, arrays[n].shape, "f64") for n in ("x", "gamma", "beta")]
    g.set_outputs([g.one(f"{kind}_norm", *inputs, eps=0.1)])
    back = vjp(g, ["x", "gamma", "beta"])
    feeds = {n: arrays[n] for n in ("x", "gamma", "beta")} | {"d_output": arrays["dy"]}
    for name, gradient in zip(("x", "gamma", "beta"), rlx.compile(back).run(feeds)[1:], strict=True):
        for at in np.ndindex(gradient.shape):
            step = np.zeros(gradient.shape)
            step[at] = 1e-6
            slope = (result(**{name: arrays[name] + step}) - result(**{name: arrays[name] - step})) / 2e-6
            assert abs(slope - gradient[at]) < 1e-7


# -- cross-entropy ----------------------------------------------------------------------------------------------------
def test_logits_and_their_gradient_share_memory() -> None:
    g = rlx.Graph("loss")
    hidden, weight = g.input("hidden", ("n", 32)), g.param("weight", (32, 5000))
    loss = (hidden @ weight).cross_entropy(g.input("labels", ("n",), "i32")).mean()
    compiled = rlx.compile(grad(g.set_outputs([loss]), ["hidden", "weight"]), threads=1)
    sizes = [b.bytes for b in compiled.memory({"n": 300}).buffers if b.kind == ARENA]
    assert [size for size in sizes if size >= 4 * 300 * 5000] == [4 * 300 * 5000]


def test_logits_that_are_wanted_are_kept() -> None:
    g = rlx.Graph("loss")
    logits = g.input("x", (4, 9)) * 2.0
    g.set_outputs([logits.cross_entropy(g.input("labels", (4,), "i32")).sum(), logits])
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((4, 9)).astype(np.float32), np.int32([1, 0, 8, 3])
    seeds = {"d_output_0": np.float32(1), "d_output_1": np.zeros((4, 9), np.float32)}
    _, output, dx = rlx.compile(vjp(g, ["x"])).run({"x": x, "labels": labels} | seeds)
    np.testing.assert_array_equal(output, x * 2)
    shares = np.exp(2.0 * x.astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    np.testing.assert_allclose(dx, 2 * (shares - np.eye(9)[labels]), atol=1e-6)


@pytest.mark.parametrize("op", ["cross_entropy_grad", "scatter", "scatter_add"])
def test_a_state_is_not_memory_to_spare(op: str) -> None:
    """Only ops that change states by design write there, whether or not the state is read again."""
    rng = np.random.default_rng(0)
    for again in (False, True):
        g = rlx.Graph("state")
        x, at = g.state("x", (4, 9)), g.input("at", (4,), "i32")
        other = g.input("other", (4,) if op == "cross_entropy_grad" else (4, 9))
        g.set_outputs([getattr(g, op)(x, at, other) * 2.0, *([x + 1.0] if again else [])])
        state = rng.standard_normal((4, 9)).astype(np.float32)
        before = state.copy()
        inputs = {"x": state, "at": np.int32([1, 0, 3, 3]), "other": np.ones(other.shape, np.float32)}
        rlx.compile(g, threads=1).run(inputs)
        np.testing.assert_array_equal(state, before)


def test_a_param_that_is_the_logits_is_trained() -> None:
    g = rlx.Graph("table")
    logits, labels = g.param("logits", (3, 5)), np.int32([4, 0, 2])
    g.set_outputs([logits.cross_entropy(g.input("labels", (3,), "i32")).sum()])
    step = rlx.train.step(g, rlx.train.sgd(0.5), threads=1)
    step.set_params({"logits": np.zeros((3, 5), np.float32)})
    step(labels=labels)
    np.testing.assert_allclose(step.params["logits"], -0.5 * (0.2 - np.eye(5)[labels]), atol=1e-6)


# -- embeddings -------------------------------------------------------------------------------------------------------
def table_sized(compiled: Any, elements: int) -> list[tuple[str, str]]:
    """Buffers as large as the table: kind and name."""
    return [(b.kind, b.name) for b in compiled.memory({"s": 8}).buffers if b.bytes >= 4 * elements]


def test_the_gradient_of_an_embedding_needs_no_table_of_zeros() -> None:
    g = rlx.Graph("embedding")
    table, at = g.param("table", (700, 16)), g.input("at", ("s",), "i32")
    g.set_outputs([(table.gather(at, axis=0) ** 2.0).sum()])
    compiled = rlx.compile(grad(g, ["table"]), threads=1)
    kinds = [kind for kind, _ in table_sized(compiled, 700 * 16)]
    assert (kinds.count(WEIGHT), kinds.count(CONST), kinds.count(ARENA)) == (1, 0, 0)  # the table itself
    rng = np.random.default_rng(0)
    value, which = rng.standard_normal((700, 16)).astype(np.float32), np.int32([3, 9, 3, 3, 0, 699])
    compiled.set_param("table", value)
    exact = np.zeros((700, 16))
    np.add.at(exact, which, 2.0 * value[which])
    np.testing.assert_allclose(compiled.run({"at": which})[0], exact, rtol=1e-6)


def test_rows_of_a_tied_embedding_are_added_to_the_gradient_of_its_matmul() -> None:
    g = rlx.Graph("tied")
    table, at = g.param("table", (700, 16)), g.input("at", ("s",), "i32")
    hidden = table.gather(at, axis=0).tanh()
    g.set_outputs([(hidden @ table.mT).cross_entropy(at).sum()])
    back = grad(g, ["table"])
    compiled = rlx.compile(back, threads=1)
    names = [x.kernel.symbol.split(".")[0] for x in launches(compiled)]
    assert names.count("scatter_add") == 1 and not any(name.startswith("add") for name in names)
    value = np.random.default_rng(0).standard_normal((700, 16)).astype(np.float32)
    which = np.int32([3, 9, 3, 0])
    compiled.set_param("table", value)
    wide = value.astype(np.float64)
    hidden64 = np.tanh(wide[which])
    shares = np.exp(hidden64 @ wide.T)
    shares = shares / shares.sum(1, keepdims=True) - np.eye(700)[which]
    exact = shares.T @ hidden64
    np.add.at(exact, which, (shares @ wide) * (1 - hidden64**2))
    np.testing.assert_allclose(compiled.run({"at": which})[0], exact, atol=1e-5)
