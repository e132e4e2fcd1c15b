"""A backend from a script: `register`, and a `ProgramExecutable` that only launches kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends import base
from rlx.backends.program_executable import ProgramExecutable
from rlx.backends.toy import ToyExecutable
from rlx.errors import BindError, CapabilityError, KernelError
from rlx.lir.kernels import Kernel
from rlx.lir.program import Launch, Program
from rlx.target import Target


class MineExecutable(ProgramExecutable):
    """Memory of the host, kernels of the toy's interpreter."""

    def launch(self, launch: Launch, sizes: Mapping[str, int], memory: Mapping[str, Any]) -> int:
        return ToyExecutable.launch(self, launch, sizes, {name: _Bytes(x) for name, x in memory.items()})  # type: ignore[arg-type]


class _Bytes:
    def __init__(self, array: Any) -> None:
        self.memory = array.reshape(-1).view(np.uint8)


class Mine(base.Backend):
    name = "mine"

    def targets(self) -> tuple[Target, ...]:
        return (Target("mine", device="mine"),)

    def identity(self, target: Target) -> str:
        return "1"

    def compile(self, program: Program, target: Target, **options: Any) -> MineExecutable:
        return MineExecutable(program, target)

    def kernel_text(self, kernels: Iterable[Kernel], target: Target, *, assembly: bool = False) -> str:
        return "\n\n".join(kernel.text() for kernel in kernels)


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "_registered", {})
    base.register("mine", Mine)
    yield
    for key in [key for key in base._instances if key[0] == "mine"]:
        del base._instances[key]


def test_a_registered_backend_runs_graphs_with_weights_and_loops() -> None:
    assert "mine" in base.available() and isinstance(base.backend("mine"), Mine)
    g = rlx.Graph("layer")
    x, w = g.input("x", ("rows", 4)), g.param("w", (4, 3))
    g.set_outputs([(x @ w + np.float32([1, 2, 3])).softmax(axis=-1)])
    f = rlx.compile(g, device="mine")  # has no image, which is not an error
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 4), np.float32), rng.standard_normal((4, 3), np.float32)
    f.set_param("w", b)
    want = np.exp(a @ b + np.float32([1, 2, 3]))
    np.testing.assert_allclose(f.run({"x": a})[0], want / want.sum(-1, keepdims=True), rtol=1e-5)
    doubled = rlx.jit(lambda x: rlx.while_loop(lambda v: v < 100, lambda v: v * 2, x), device="mine")
    assert float(np.asarray(doubled(np.float32(3)))) == 192


def test_faults_and_assertions_are_errors_of_the_run() -> None:
    g = rlx.Graph("pick")
    g.set_outputs([g.input("x", (3, 2)).gather(g.input("i", ("n",), "i32"), axis=0)])
    f = rlx.compile(g, device="mine")
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(f.run({"x": x, "i": np.int32([2, 0])})[0], x[[2, 0]])
    with pytest.raises(KernelError, match=r"index 7 \(input 'i' at \[1\]\) lies outside the 3"):
        f.run({"x": x, "i": np.int32([0, 7])})
    g = rlx.Graph("fold")
    g.set_outputs([g.input("x", ("n",)).assume_equal(shape=(4,)) + 1.0])
    with pytest.raises(BindError):
        rlx.compile(g, device="mine").run({"x": np.ones(3, np.float32)})


def test_names_that_cannot_be_registered() -> None:
    class Nameless(Mine):
        name = "other"

    for name, kind, message in (
        ("cpu", Mine, "'cpu' cannot be registered"),
        ("a:1", Mine, "'a:1' cannot be registered"),
        ("mine", Nameless, "the name of .*Nameless' is other"),
        ("mine", Target, "not a subclass"),
    ):
        with pytest.raises(CapabilityError, match=message):
            base.register(name, kind)  # type: ignore[arg-type]


def test_targets_by_name_need_not_run_here() -> None:
    assert base.known_target("neon").name == "neon" and base.known_target("mine").device == "mine"
    with pytest.raises(CapabilityError, match="'avx1024' is not known to cpu"):
        base.known_target("avx1024", "cpu")
    g = rlx.Graph("one")
    g.set_outputs([g.input("x", (4,)) + 1.0])
    assert str(rlx.GraphModule(g).plan("neon")).startswith("program @one()  # neon\n")
    assert rlx.Level is rlx.GraphStage and repr(g) == "<graph 'one' mir: 3 nodes, 1 output>"
