"""Variants and execution configurations: bindings, keys that last, and when machine code is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import Llama, compiled, llama_graph, llama_inputs, weights

import rlx
from rlx import (
    CompilationMode,
    CompileProfile,
    DimBinding,
    Graph,
    GraphModule,
    ModelExecutionConfig,
    ModelPhase,
    ModelVariant,
    Session,
    sym,
)
from rlx.errors import BindError, CapabilityError, FormatError, GraphError, ShapeError
from rlx.lir.forms.custom import forget


# -- the seeds' own tests ---------------------------------------------------------------------------------------------
def test_prefill_binding_sets_batch_seq() -> None:
    binding = ModelVariant.prefill(2, 128).dim_binding()
    assert (binding.get(sym.BATCH), binding.get(sym.SEQ), binding.get(sym.PAST_SEQ)) == (2, 128, None)
    assert binding.get(sym.ROWS) == 256 and binding == DimBinding.batch_seq(2, 128)


def test_decode_binding_sets_past_and_new_seq() -> None:
    variant = ModelVariant.decode(3, 64, 1)
    binding = variant.dim_binding()
    assert (binding.get(sym.BATCH), binding.get(sym.PAST_SEQ), binding.get(sym.SEQ)) == (3, 64, 1)
    assert (variant.batch, variant.past_seq, variant.seq, variant.phase) == (3, 64, 1, ModelPhase.DECODE)


def test_cache_key_differs_by_phase() -> None:
    keys = {v.cache_key() for v in (ModelVariant.prefill(1, 8), ModelVariant.encoder(1, 8), ModelVariant(1, 8))}
    assert len(keys) == 3


# -- variants ---------------------------------------------------------------------------------------------------------
def test_keys_differ_by_sizes_and_extras_but_not_by_their_order() -> None:
    base = ModelVariant.decode(1, 8, 1)
    others = [ModelVariant.decode(2, 8, 1), ModelVariant.decode(1, 9, 1), ModelVariant.decode(1, 8, 2),
              base.with_extra("images", 1), base.with_extra("images", 2), base.with_extra("image", 12)]  # fmt: skip
    assert len({v.cache_key() for v in (base, *others)}) == 7
    one = base.with_extra("a", 1).with_extra("b", 2)
    other = base.with_extra("b", 2).with_extra("a", 1)
    assert one == other and hash(one) == hash(other) and one.cache_key() == other.cache_key()


def test_an_extra_that_repeats_a_size_is_another_variant() -> None:
    base = ModelVariant.prefill(1, 8)
    assert base.with_extra("batch", 1).cache_key() != base.cache_key()


def test_extras_bind_and_later_ones_win() -> None:
    variant = ModelVariant.encoder(2, 8).with_extra(rlx.dim("images"), 3).with_extra("images", 5)
    assert variant.dim_binding().get("images") == 5 and variant.extra == (("images", 5),)
    assert variant.with_extra("seq", 9).dim_binding().get(sym.ROWS) == 18
    assert ModelVariant(1, 2, extra={"n": 4}).dim_binding().get("n") == 4  # type: ignore[arg-type]


def test_phases_are_given_by_member_or_name() -> None:
    assert ModelVariant(1, 2, None, "prefill") == ModelVariant.prefill(1, 2)  # type: ignore[arg-type]
    assert [p.name for p in ModelPhase] == ["PREFILL", "DECODE", "ENCODER", "INFERENCE"]
    assert ModelVariant(1, 2).dim_binding() == DimBinding.batch_seq(1, 2), "inference binds batch and seq"
    with pytest.raises(GraphError, match="variant: inference has no past, found past_seq 3") as caught:
        ModelVariant(1, 2, 3)
    assert "ModelVariant.decode" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ModelVariant(1, 2, None, ModelPhase.DECODE), GraphError, "decode needs a past_seq"),
        (lambda: ModelVariant(1, 2, 3, ModelPhase.PREFILL), GraphError, "prefill has no past, found past_seq 3"),
        (lambda: ModelVariant.encoder(-1, 2), ShapeError, "size -1 is negative"),
        (lambda: ModelVariant.encoder(1, sym.SEQ), GraphError, "seq is seq, expected a number"),  # type: ignore[arg-type]
        (lambda: ModelVariant.encoder(1, 1.5), ShapeError, "1.5 is not a size"),  # type: ignore[arg-type]
        (lambda: ModelVariant(1, 2, None, "train"), GraphError, "phase is 'train', expected one of PREFILL"),  # type: ignore[arg-type]
        (lambda: ModelVariant.prefill(1, 2).with_extra(sym.ROWS, 4), GraphError, "is an expression, not a symbol"),
    ],
)
def test_wrong_variants_are_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


KEYS = """
from rlx import *
import rlx
v = rlx.ModelVariant.decode(2, 100, 1).with_extra("b", 3).with_extra("a", 2)
print(v.cache_key(), rlx.ModelExecutionConfig(v, rlx.CompileProfile.decode(), rlx.CompilationMode.LAZY).cache_key())
"""


def test_keys_are_the_same_in_every_process() -> None:
    said = []
    for seed in ("0", "1"):
        env = dict(os.environ, PYTHONPATH=str(Path(rlx.__file__).parents[1]), PYTHONHASHSEED=seed)
        said.append(subprocess.check_output([sys.executable, "-c", KEYS], env=env, text=True).split())
    variant = ModelVariant.decode(2, 100, 1).with_extra("a", 2).with_extra("b", 3)
    own = ModelExecutionConfig(variant, CompileProfile.decode(), CompilationMode.LAZY)
    assert said[0] == said[1] == [variant.cache_key(), own.cache_key()]
    assert variant.cache_key() == "aa5a3a21b731b5ad", "the same in every version: files are named by it"


# -- bindings ---------------------------------------------------------------------------------------------------------
def test_dim_bindings() -> None:
    binding = DimBinding.batch_past_seq(2, 7)
    assert binding.get(sym.PAST_SEQ) == 7 and binding.get("batch") == 2 and binding.get(sym.SEQ) is None
    assert binding.get(sym.ROWS) is None, "it is batch × seq, and seq is not bound"
    assert binding.set(sym.SEQ, 3) is binding and binding.get(sym.ROWS) == 6
    assert binding.set("seq", 4).get(sym.ROWS) == 8, "later ones win"
    with pytest.raises(GraphError, match="is an expression, not a symbol"):
        binding.set(sym.ROWS, 8)
    with pytest.raises(ShapeError, match="None is not a size"):
        binding.get(None)  # type: ignore[arg-type]


# -- configurations ---------------------------------------------------------------------------------------------------
def test_configurations_join_variant_profile_and_mode() -> None:
    config = ModelExecutionConfig.decode(1, 64, 1)
    assert config.profile == CompileProfile.decode() and config.mode is CompilationMode.EAGER
    assert config.dim_binding() == config.variant.dim_binding()
    assert ModelExecutionConfig.prefill(1, 8).profile == CompileProfile.prefill()
    assert ModelExecutionConfig.encoder(1, 8).variant.phase is ModelPhase.ENCODER
    others = [config.with_mode(CompilationMode.LAZY), config.with_profile("unfused"),
              config.with_profile(CompileProfile.prefill()), ModelExecutionConfig.decode(1, 65, 1),
              config.with_kernel_dispatch(rlx.KernelDispatchPolicy.FORCE_COMMON),
              config.with_kernel_dispatch(rlx.KernelDispatchConfig(force_native_kinds=("gelu",)))]  # fmt: skip
    assert len({c.cache_key() for c in (config, *others)}) == 7
    with pytest.raises(GraphError, match="mode is 'soon', expected one of EAGER, LAZY, AOT"):
        config.with_mode("soon")  # type: ignore[arg-type]


def small() -> Graph:
    g = Graph("small")
    x = g.input("x", (sym.BATCH, sym.SEQ, 4))
    return g.set_outputs([(x @ g.param("w", (4, 3))).reshape(sym.ROWS, 3), x.sum(axis=1)])


W = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("mode", [CompilationMode.EAGER, CompilationMode.LAZY])
def test_a_variant_is_compiled_for_its_sizes(mode: CompilationMode, device: str) -> None:
    config = ModelExecutionConfig.prefill(2, 3).with_mode(mode)
    f = config.compile(small(), Session(device))
    assert f.input_types["x"].shape == (2, 3, 4) and f.graph.outputs[0].shape == (6, 3)
    f.set_param("w", W)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    product, total = f.run({"x": x})
    np.testing.assert_allclose(product, (x @ W).reshape(6, 3), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, x.sum(1), rtol=1e-5, atol=1e-6)
    with pytest.raises(BindError):
        f.run({"x": np.zeros((2, 4, 4), np.float32)})


def test_eager_compiles_at_once_and_lazy_when_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    plain = Session._compile

    def watched(self: Session, graph: Graph, profile: CompileProfile) -> Any:
        compiled.append(graph.name)
        return plain(self, graph, profile)

    monkeypatch.setattr(Session, "_compile", watched)
    config = ModelExecutionConfig.prefill(1, 2)
    config.compile(small())
    assert compiled == ["small"]
    lazy = config.with_mode(CompilationMode.LAZY).compile(small())
    assert not lazy.is_compiled
    with pytest.raises(BindError, match="'w' not set"):
        lazy.run({"x": np.zeros((1, 2, 4), np.float32)})
    lazy.set_param("w", W)
    assert compiled == ["small"], "nothing is compiled before it is needed"
    zeros = {"x": np.ones((1, 2, 4), np.float32)}
    first = lazy.run(zeros)
    assert compiled == ["small"] * 2 and lazy.is_compiled
    lazy.set_param("w", W * 2)
    np.testing.assert_allclose(lazy.run(zeros)[0], first[0] * 2)
    assert compiled == ["small"] * 2, "new weights do not compile again"
    assert lazy.report(zeros).launches


def test_lazy_graphs_check_names_as_others_do() -> None:
    lazy = ModelExecutionConfig.prefill(1, 2).with_mode(CompilationMode.LAZY).compile(small())
    with pytest.raises(BindError, match="nothing is called 'v'"):
        lazy.set_param("v", W)
    with pytest.raises(BindError):
        lazy.set_param("w", W.T)


def test_layers_of_a_variant_are_the_layers() -> None:
    sizes = Llama(24, 3, 1, 8, 40)
    w, inputs = weights(sizes), llama_inputs(sizes, 2, 5)
    config = ModelExecutionConfig.prefill(2, 5)
    f = config.compile(llama_graph(sizes))
    f.set_params(w)
    for have, want in zip(f.run(inputs), compiled(llama_graph(sizes), w).run(inputs), strict=True):
        assert have.tobytes() == want.tobytes(), "sizes that are known change no bit"


def test_modules_are_specialised_at_the_level_they_have() -> None:
    def build(m: GraphModule) -> Any:
        return m.linear(m.input("x", (sym.BATCH, sym.SEQ, 4)), m.param("w", (4, 3)))

    module = GraphModule.define("m", build)
    config = ModelExecutionConfig.encoder(2, 3)
    assert config.specialise(module).level == "hir" and config.specialise(module.lower()).level == "mir"
    f = config.compile(module)
    f.set_param("w", W)
    assert f.run({"x": np.ones((2, 3, 4), np.float32)})[0].shape == (2, 3, 3)


def test_what_is_made_ahead_of_time_is_loaded_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelExecutionConfig.prefill(1, 2).with_mode(CompilationMode.AOT)
    x = {"x": np.random.default_rng(0).standard_normal((1, 2, 4)).astype(np.float32)}
    built = config.compile(small(), folder=tmp_path)
    built.set_param("w", W)
    (path,) = tmp_path.iterdir()
    assert path.name == config.file_name(config.specialise(small()), Session()) and path.suffix == ".rlxp"

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "compile", forbidden)
        actual = config.compile(small(), folder=tmp_path)
        actual.set_param("w", W)
        assert [a.tobytes() for a in actual.run(x)] == [a.tobytes() for a in built.run(x)]
    path.write_bytes(path.read_bytes()[:-9])
    again = config.compile(small(), folder=tmp_path)
    again.set_param("w", W)
    assert again.run(x)[0].tobytes() == built.run(x)[0].tobytes(), "a damaged file is made again"
    ModelExecutionConfig.prefill(1, 3).with_mode(CompilationMode.AOT).compile(small(), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "a file for each variant"


def test_ahead_of_time_needs_a_folder_and_machine_code(tmp_path: Path) -> None:
    config = ModelExecutionConfig.prefill(1, 2).with_mode(CompilationMode.AOT)
    with pytest.raises(CapabilityError, match="needs a folder"):
        config.compile(small())
    with pytest.raises(CapabilityError, match="device reference has no machine code"):
        config.compile(small(), Session("reference"), folder=tmp_path)
    config.compile(small(), folder=tmp_path / "new" / "er")
    assert len(list((tmp_path / "new" / "er").iterdir())) == 1, "the folder is made"
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="the folder cannot be created"):
        config.compile(small(), folder=tmp_path / "file")


@pytest.mark.usefixtures("own_ops")
def test_ops_of_users_are_compiled_each_time(tmp_path: Path) -> None:
    """Their source is no part of the key: another declaration must not meet the file of the first."""
    config = ModelExecutionConfig.prefill(1, 2).with_mode(CompilationMode.AOT)
    for factor in (2.0, 3.0):

        def times(x: rlx.TensorType) -> rlx.TensorType:
            """x times something."""
            return x

        rlx.op("times", decompose=lambda x, factor=factor: x * factor)(times)
        g = Graph("own")
        g.set_outputs([g.times(g.input("x", (3,)))])
        f = config.compile(g, folder=tmp_path)
        np.testing.assert_array_equal(f.run({"x": np.ones(3, np.float32)})[0], np.full(3, factor))
        forget("times")
    assert not list(tmp_path.iterdir())


def test_configurations_are_made_of_variants_and_profiles() -> None:
    with pytest.raises(GraphError, match="variant is a tuple, expected a ModelVariant"):
        ModelExecutionConfig((1, 2))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="profile is a str, expected a CompileProfile"):
        ModelExecutionConfig(ModelVariant(1, 2), "decode")  # type: ignore[arg-type]


def test_a_built_model_is_taken_with_its_weights_and_a_flow_is_not() -> None:
    flow = rlx.ModelFlow("flow").input("x", ("batch", 4)).linear("w", out=4).output("y")
    built = flow.build({"w": np.eye(4, dtype=np.float32) * 2})
    compiled = ModelExecutionConfig.prefill(1, 2).compile(built)
    assert compiled.run({"x": np.ones((1, 4), np.float32)})[0].tolist() == [[2, 2, 2, 2]]
    with pytest.raises(GraphError, match="takes a Graph or a GraphModule, found ModelFlow"):
        ModelExecutionConfig.prefill(1, 2).compile(flow)  # type: ignore[arg-type]
