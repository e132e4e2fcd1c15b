"""Common forms: every op that has one gives by it what its oracle says, and a profile decides which one runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import ORACLES
from sample_graphs import compile_sample, sample_graph
from targets import host

import rlx
from rlx import CompileProfile, KernelDispatchConfig, KernelDispatchPolicy
from rlx.errors import CapabilityError, LowerError
from rlx.mir.common_forms import common_form

COMMON = CompileProfile().with_kernel_dispatch(KernelDispatchPolicy.FORCE_COMMON)


@pytest.mark.parametrize("element_type", ["f32", "f64", "f16"])
@pytest.mark.parametrize("op", list(common_form))
def test_a_common_form_gives_what_the_oracle_of_its_op_says(op: str, element_type: str) -> None:
    case = sample_graph(op, element_type)
    f = compile_sample(op, element_type, host().name, profile=COMMON)
    report = f.dispatch()
    assert not report["native"] and report["decomposed"], "no kernel of its own"
    outputs = f.run(case.inputs)
    if element_type != "f16":  # where each op inside rounds
        case.check(outputs)
    for output, answer in zip(outputs, case.answers, strict=True):
        np.testing.assert_allclose(output.astype(np.float64), answer.exact, rtol=0.03, atol=0.03)


def layers(batch: Any = "batch", seq: Any = "seq") -> rlx.Graph:
    """Ops of several groups, one of them inside a loop, at sizes that only a run knows."""
    body = rlx.Graph("body")
    body.set_outputs([body.input("c", (batch, 8)).softmax(axis=-1) * 3.0])
    g = rlx.Graph("layers")
    x = g.input("x", (batch, seq, 8))
    y = g.layer_norm(x, g.param("gamma", (8,)), g.param("beta", (8,))).silu()
    g.set_outputs([y.softmax(axis=-1), g.scan(y.mean(axis=1), body, 4)])
    return g


def run(profile: CompileProfile, device: str = "cpu") -> tuple[rlx.CompiledGraph, list[Any]]:
    f = rlx.compile(layers(), device, profile=profile)
    rng = np.random.default_rng(0)
    f.set_params({n: rng.normal(size=8).astype(np.float32) for n in ("gamma", "beta")})
    return f, f.run({"x": rng.normal(size=(2, 5, 8)).astype(np.float32)})


def ops(f: rlx.CompiledGraph) -> str:
    return f.plan.main_text


def dispatch(**inputs: Any) -> CompileProfile:
    return CompileProfile(kernel_dispatch=KernelDispatchConfig(**inputs))


def test_the_policy_decides_and_lists_of_ops_win() -> None:
    native, wanted = run(CompileProfile())
    forced, also = run(COMMON)
    some, third = run(dispatch(force_common_kinds=["layer_norm"]))
    rest, fourth = run(dispatch(policy="force_common", force_native_kinds=["softmax"], force_common_kinds=["softmax"]))
    assert [("softmax(" in ops(f), "layer_norm(" in ops(f)) for f in (native, forced, some, rest)] == [
        (True, True), (False, False), (True, False), (True, False),
    ]  # fmt: skip
    assert ops(native).count("softmax(") == ops(rest).count("softmax(") == 2, "in the loop too"
    exact = run(CompileProfile(), "reference")[1]
    for actual in (wanted, also, third, fourth):
        for have, want in zip(actual, exact, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    paths = {row.op: row.path for row in forced.dispatch().rows}
    assert paths["layer_norm"] == paths["softmax"] == paths["silu"] == "decomposed"


def test_what_has_no_kernel_of_its_own_is_refused_by_force_native() -> None:
    g = rlx.Graph("g")
    with rlx.stage("stem"):
        g.set_outputs([g.pool1d(g.input("x", (1, 2, 6)), kind="max", kernel=2)])
    (y,) = rlx.compile(g).run({"x": np.arange(12, dtype=np.float32).reshape(1, 2, 6)})
    np.testing.assert_array_equal(y, [[[1, 3, 5], [7, 9, 11]]])
    for profile in (dispatch(policy="force_native"), dispatch(force_native_kinds=["pool1d"])):
        with pytest.raises(LowerError, match="op pool1d: has no kernel of its own") as caught:
            rlx.compile(g, profile=profile)
        assert "prefer_native" in str(caught.value.hint)
    assert run(dispatch(policy="force_native")), "all of it has"


@pytest.mark.parametrize(
    ("inputs", "says", "hint"),
    [
        ({"force_common_kinds": ["softmux"]}, "no op is called 'softmux'", "softmax"),
        ({"force_native_kinds": ["softmux"]}, "no op is called 'softmux'", "softmax"),
        ({"force_common_kinds": ["matmul"]}, "op matmul has no common form", "gelu"),
    ],
)
def test_names_that_mean_nothing_are_refused(inputs: Any, says: str, hint: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        run(dispatch(**inputs))
    assert says in str(caught.value) and hint in str(caught.value.hint)


def test_the_environment_decides_where_the_profile_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_KERNEL_DISPATCH", "common")
    assert "softmax(" not in ops(run(CompileProfile())[0])
    assert CompileProfile().key() == COMMON.key(), "nothing is taken from a cache that was made without"
    assert "softmax(" in ops(run(dispatch(policy="force_native"))[0])
    assert "softmax(" in ops(run(dispatch(force_native_kinds=["softmax"]))[0])
    monkeypatch.setenv("RLX_KERNEL_DISPATCH", "fast")
    with pytest.raises(CapabilityError, match="RLX_KERNEL_DISPATCH is 'fast', expected one of common, native"):
        run(CompileProfile())


def test_a_recurrence_of_unknown_length_is_a_loop() -> None:
    g = rlx.Graph("gdn")
    shapes = {"q": 4, "k": 4, "v": 4, "g": 0, "beta": 0}
    inputs = [g.input(name, ("b", "s", 3, n) if n else ("b", "s", 3)) for name, n in shapes.items()]
    g.set_outputs([g.gated_delta_net(*inputs, state_size=4)])
    f = rlx.compile(g, profile=COMMON)
    assert "scan(" in ops(f)
    rng = np.random.default_rng(1)
    for batch, seq in ((1, 1), (2, 7), (3, 0)):
        arrays = [rng.uniform(-0.3, 0.3, (batch, seq, 3, n) if n else (batch, seq, 3)) for n in shapes.values()]
        (y,) = f.run({name: a.astype(np.float32) for name, a in zip(shapes, arrays, strict=True)})
        np.testing.assert_allclose(y, ORACLES["gated_delta_net"](*arrays, state_size=4), atol=1e-6)
