"""Compile profiles: presets, TOML both ways, and each field by what it changes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layers import SMOLLM, Llama, compiled, llama_graph, llama_inputs, llama_numpy, weights
from targets import supported

import rlx
from rlx import CompileProfile, FusionPolicy, Graph, GraphModule
from rlx.backends import cache_folder
from rlx.errors import CapabilityError, DTypeError, FormatError, FusionError, GraphError, RlxError
from rlx.ir import registry
from rlx.ir.registry import FUSED
from rlx.profile import (
    PRESETS,
    BackendOptions,
    Fusion,
    KernelDispatchConfig,
    KernelDispatchPolicy,
    Passes,
    Precision,
)
from rlx.runtime.compiled import CompiledGraph

Array = np.ndarray[Any, Any]
DEVICES = pytest.mark.parametrize("device", ["reference", "cpu"])


def compile(graph: Any, **sections: Any) -> CompiledGraph:
    f = rlx.compile(graph, profile=CompileProfile(**sections))
    return f


# -- the record -------------------------------------------------------------------------------------------------------
def test_a_profile_is_a_frozen_record() -> None:
    profile = CompileProfile()
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.fusion = Fusion()  # type: ignore[misc]
    assert profile == CompileProfile() and hash(profile) == hash(CompileProfile())
    assert profile.fusion.policy is FusionPolicy.DIRECT and profile.fusion.target == "auto"
    assert profile.passes == Passes(dce=True, constant_folding=True, verbose=False)
    assert profile.precision == Precision(compute="f32", mixed="none")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Fusion(policy="fast"), "fusion.policy is 'fast', expected one of direct, fusable"),
        (lambda: Fusion(target=3), "fusion.target is 3, expected auto, a device or a target"),
        (lambda: Fusion(skip=1), "fusion.skip is 1, expected true or false"),
        (lambda: Fusion(skip=True, assert_clean=True), "exclude each other"),
        (lambda: Passes(dce="yes"), "passes.dce is 'yes', expected true or false"),
        (lambda: Precision(compute="f8"), "precision.compute is 'f8', expected one of f32, f16, bf16"),
        (lambda: Precision(mixed="some"), "precision.mixed is 'some', expected one of none, auto"),
        (lambda: Precision(mixed="auto"), "there is nothing to mix"),
    ],
)
def test_wrong_values_are_named(make: Any, says: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        make()
    assert says in str(caught.value)


def test_presets() -> None:
    assert CompileProfile.prefill() == CompileProfile.encoder() == CompileProfile()
    for profile in (CompileProfile.decode(), CompileProfile.training()):
        assert profile.fusion.policy is FusionPolicy.FUSABLE and not profile.fusion.skip
    assert CompileProfile.unfused().fusion.skip
    for name in ("llama32_prefill", "qwen35_prefill", "qwen3_prefill", "gemma_prefill", "flux2", "sam2", "sam3"):
        assert CompileProfile.preset(name).fusion.policy is FusionPolicy.DIRECT
    for name in ("llama32_decode", "qwen35_decode", "qwen3_decode", "gemma_decode"):
        assert CompileProfile.preset(name) == CompileProfile.decode()
    for name in ("sam2_memory_attention", "llada2_diffusion"):
        assert CompileProfile.preset(name).fusion.skip
    assert {"prefill", "decode", "encoder", "training", "sam_encoder"} < set(PRESETS)
    with pytest.raises(CapabilityError, match="no preset is called 'prefil'") as caught:
        CompileProfile.preset("prefil")
    assert "'prefill'" in str(caught.value.hint)


# -- TOML -------------------------------------------------------------------------------------------------------------
ODD = CompileProfile(
    Fusion(FusionPolicy.FUSABLE, "avx2", assert_clean=True), Passes(False, False, True), Precision("bf16", "auto"),
    KernelDispatchConfig(KernelDispatchPolicy.FORCE_NATIVE, ("softmax", "gelu"), ("silu",)),
    BackendOptions({"cpu": {"unfuse_regions": True}, "metal": {"skip_fusion": True, "grid": 3}}),
)  # fmt: skip


@pytest.mark.parametrize("profile", [CompileProfile(), ODD, CompileProfile.unfused()])
def test_toml_there_and_back(profile: CompileProfile, tmp_path: Path) -> None:
    text = profile.to_toml()
    assert CompileProfile.from_toml(text) == profile
    path = tmp_path / "model.rlx.toml"
    path.write_text(text)
    assert CompileProfile.from_toml(path) == CompileProfile.from_toml(str(path)) == profile


def test_every_key_is_optional() -> None:
    assert CompileProfile.from_toml("") == CompileProfile()
    actual = CompileProfile.from_toml('[fusion]\npolicy = "fusable"  # for decoding\n[precision]\ncompute = "f16"\n')
    assert actual == CompileProfile(Fusion(FusionPolicy.FUSABLE), precision=Precision("f16"))
    actual = CompileProfile.from_toml("backend.cpu.unfuse_regions = true\n[kernel_dispatch]\npolicy = 'force_common'\n")
    assert actual.backend == BackendOptions({"cpu": {"unfuse_regions": True}}) and actual.precision == Precision()
    assert actual.kernel_dispatch == KernelDispatchConfig(KernelDispatchPolicy.FORCE_COMMON)


def test_lists_of_ops_have_no_order() -> None:
    one, other = (KernelDispatchConfig(force_common_kinds=k) for k in (("gelu", "silu"), ["silu", "gelu", "gelu"]))
    assert one == other and one.force_common_kinds == ("gelu", "silu")


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("[fusion]\npolcy = 'direct'", "[fusion] has no key 'polcy'", "'policy'"),
        ("[fuson]\nskip = true", "has no key 'fuson'", "'fusion'"),
        ("[passes]\nconstant_fold = true", "has no key 'constant_fold'", "'constant_folding'"),
        ("[fusion]\npolicy = 'both'", "fusion.policy is 'both'", "direct, fusable"),
        ("[fusion]\ntarget = 2", "fusion.target is 2", ""),
        ("[passes]\ndce = 1", "passes.dce is 1, expected true or false", ""),
        ("fusion = 3", "fusion is 3, expected a table", "[fusion]"),
        ("[fusion", "is not TOML", ""),
        ("[precision]\nmixed = 'auto'", "there is nothing to mix", "bf16"),
        ("[fusion]\npolicy = ['direct']", "fusion.policy is ['direct']", ""),
        ("[backend]\ncpu = true", "backend.cpu is True, expected a table", "[backend.cpu]"),
        ("backend.metal.sizes = [1]", "backend.metal.sizes is [1], expected a plain value", ""),
        ("[kernel_dispatch]\npolicy = 'native'", "kernel_dispatch.policy is 'native'", "native"),
        ("kernel_dispatch.force_common_kinds = 'gelu'", "force_common_kinds is 'gelu', expected a list", ""),
    ],
)
def test_strict_toml(text: str, says: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        CompileProfile.from_toml(text)
    assert says in str(caught.value) and hint in (caught.value.hint or "")
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        CompileProfile.from_toml(path)
    assert str(caught.value).startswith(str(path)), "the error says which file"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        CompileProfile.from_toml(tmp_path / "none.toml")


def test_keys_are_the_same_in_every_process_and_differ_by_what_matters() -> None:
    keys = [p.key() for p in (CompileProfile(), ODD, CompileProfile.decode(), CompileProfile.unfused())]
    assert len(set(keys)) == 4
    assert CompileProfile(passes=Passes(verbose=True)).key() == keys[0], "talking changes nothing"
    code = "from rlx import CompileProfile; print(CompileProfile().key())"
    env = dict(os.environ, PYTHONPATH=str(Path(rlx.__file__).parents[1]), PYTHONHASHSEED="7")
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == keys[0]


def test_only_profiles_are_profiles() -> None:
    g = Graph("g")
    g.set_outputs([g.input("x", (2,)).tanh()])
    with pytest.raises(GraphError, match="profile is a str, expected a CompileProfile"):
        rlx.compile(g, profile="decode")  # type: ignore[arg-type]


# -- fusion -----------------------------------------------------------------------------------------------------------
def feed_forward() -> GraphModule:
    m = GraphModule.hir("ffn")
    x = m.input("x", ("n", 8))
    h = m.linear(x, m.param("w", (8, 16)), m.param("b", (16,)), activation="silu")
    y = m.swiglu_ffn(h, m.param("u", (16, 12)), m.param("g", (16, 12)), m.param("d", (12, 8)))
    return m.finish_hir([m.residual_rms_norm(x, y, m.param("s", (8,)), eps=1e-5)])


def numbers(graph: Graph) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    leaves = (n for n in graph.nodes if n.op == "param")
    return {n.attrs["name"]: (rng.standard_normal(n.types[0].shape) * 0.4).astype(np.float32) for n in leaves}


X = np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32)


@pytest.mark.parametrize("policy", FusionPolicy)
def test_the_profile_has_the_last_word_on_policy(policy: FusionPolicy) -> None:
    module = feed_forward()
    f = rlx.compile(module, "reference", profile=CompileProfile(Fusion(policy)))
    fused = [n.op for n in f.graph.nodes if FUSED in n.definition.traits]
    assert fused == (["fused_matmul", "fused_matmul", "residual_norm"] if policy is FusionPolicy.DIRECT else [])


def unfused_nodes(f: CompiledGraph) -> list[str]:
    """Nodes of the optimised graph that do more than one thing."""
    result = []
    for node in Graph.parse(f.plan.main_text).nodes:
        body = node.attrs.get("body")
        steps = 0 if body is None else sum(n.op not in ("input", "const") for n in body.nodes)
        if node.op == "residual_norm" or steps > (1 if node.op == "region" else 0) or node.attrs.get("weights", 1) > 1:
            result.append(node.op)
    return result


@pytest.mark.parametrize("policy", FusionPolicy)
def test_skip_leaves_nothing_fused(policy: FusionPolicy) -> None:
    module = feed_forward()
    plain = compile(module)
    skipped = compile(module, fusion=Fusion(policy, skip=True))
    assert unfused_nodes(plain) and not unfused_nodes(skipped)
    assert plain.plan.fusion.fused and not skipped.plan.fusion.fused and not skipped.plan.fusion.missed
    assert len(skipped.plan.main.launches) > len(plain.plan.main.launches)
    results = []
    for f in (plain, skipped):
        f.set_params(numbers(module.into_mir()))
        results.append(f.run({"x": X})[0])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


def missing() -> Graph:
    """A product that is also added up: its activations cannot ride on it."""
    g = Graph("missing")
    x = g.input("x", ("n", 8))
    with rlx.stage("ffn"):
        product = x @ g.param("w", (8, 8))
    return g.set_outputs([product.tanh(), product.exp(), product.sum(axis=0)])


def test_assert_clean_lists_what_was_missed() -> None:
    with pytest.raises(FusionError) as caught:
        compile(missing(), fusion=Fusion(assert_clean=True))
    assert str(caught.value) == "graph 'missing': 2 fusions missed"
    notes = "\n".join(caught.value.notes)
    assert notes.count("epilogue: region: the product has 3 readers") == 2 and "test_profile.py" in notes
    assert isinstance(caught.value, RlxError) and "assert_clean" in str(caught.value.hint)
    assert len(compile(missing()).plan.fusion.missed) == 2, "without it they are only reported"
    for _ in range(2):  # from the cache too
        assert compile(feed_forward(), fusion=Fusion(assert_clean=True)).plan.fusion.missed == []


def test_target_chooses_the_processor() -> None:
    module = feed_forward()
    wanted = supported()[-1].name
    f = compile(module, fusion=Fusion(target=wanted))
    assert f.target.name == wanted == f.plan.main.target
    for name in ("auto", "cpu"):
        assert compile(module, fusion=Fusion(target=name)).target == rlx.Session().target
    assert rlx.compile(module, "reference", profile=CompileProfile(Fusion(target="cuda"))).device == "reference"
    with pytest.raises(CapabilityError, match="the profile is for cuda, the session's device is cpu"):
        compile(module, fusion=Fusion(target="cuda"))
    other = "neon" if supported()[0].arch == "x86_64" else "avx2"
    with pytest.raises(CapabilityError, match=f"this machine does not run '{other}'"):
        compile(module, fusion=Fusion(target=other))


def test_regions_of_elementwise_ops_come_apart_on_the_cpu() -> None:
    g = Graph("chain")
    g.set_outputs([g.input("x", (5,)).tanh().exp() * 3.0])
    joined, apart, other = (
        compile(g, backend=b)
        for b in map(BackendOptions, ({}, {"cpu": {"unfuse_regions": True}}, {"metal": {"unfuse_regions": True}}))
    )
    assert [len(f.plan.main.launches) for f in (joined, apart, other)] == [1, 3, 1]
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    for f in (joined, apart):
        np.testing.assert_allclose(f.run({"x": x})[0], np.exp(np.tanh(x.astype(float))) * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unfuse": True}, "backend.cpu has no setting 'unfuse'"),
        ({"unfuse_regions": 1}, "is 1, expected true or false"),
    ],
)
def test_a_backend_checks_its_own_settings(options: dict[str, Any], message: str) -> None:
    g = Graph("one")
    g.set_outputs([g.input("x", (5,)).tanh()])
    with pytest.raises(CapabilityError, match=message) as caught:
        compile(g, backend=BackendOptions({"cpu": options}))
    assert caught.value.hint is None or "unfuse_regions" in caught.value.hint


# -- passes -----------------------------------------------------------------------------------------------------------
def with_constants() -> Graph:
    g = Graph("constants")
    g.input("x", (4,)).sin()  # which nothing reads
    return g.set_outputs([g.named("x") * (g.constant([1.0, 2.0, 3.0, 4.0]).exp() + 1.0)])


def test_constant_folding_off_leaves_constants() -> None:
    folded, unfolded = compile(with_constants()), compile(with_constants(), passes=Passes(constant_folding=False))
    both = [f.plan.main_text + f.plan.bind_text for f in (folded, unfolded)]
    assert "exp(" not in both[0] and "exp(" in both[1]
    x = np.array([1, -2, 3, -4], np.float32)
    for f in (folded, unfolded):
        np.testing.assert_allclose(f.run({"x": x})[0], x * (np.exp([1.0, 2, 3, 4]) + 1), rtol=1e-6)


def test_dce_off_keeps_what_nothing_reads() -> None:
    lean, full = compile(with_constants()), compile(with_constants(), passes=Passes(dce=False))
    assert "sin(" not in lean.plan.main_text and "sin(" in full.plan.main_text
    assert len(full.plan.main.launches) == len(lean.plan.main.launches) + 1
    x = np.array([1, -2, 3, -4], np.float32)
    assert full.run({"x": x})[0].tobytes() == lean.run({"x": x})[0].tobytes()


def test_verbose_tells_what_the_passes_did(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second time it is in the cache
        compile(feed_forward(), passes=Passes(verbose=True))
        said = capfd.readouterr()
        assert said.out == ""
        for word in (
            "canonicalize",
            "fuse_epilogues",
            "fused 4",
            "missed 0",
            "graph @ffn mir {",
            "graph @ffn.bind mir",
        ):
            assert word in said.err
    compile(feed_forward())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "profile",
    [
        CompileProfile(passes=Passes(dce=False, constant_folding=False)), CompileProfile.unfused(),
        CompileProfile(Fusion(skip=True), Passes(dce=False)), CompileProfile.decode(),
    ],
    ids=["nothing cleaned", "unfused", "neither", "decode"],
)  # fmt: skip
@pytest.mark.parametrize("past", [False, True])
def test_layers_give_the_same_by_every_profile(profile: CompileProfile, past: bool) -> None:
    sizes = Llama(24, 3, 1, 8, 40)
    inputs = llama_inputs(sizes, 2, 5, 6) if past else llama_inputs(sizes, 2, 5)
    graph, w = llama_graph(sizes, past=past), weights(sizes)
    f = rlx.compile(graph, profile=profile)
    f.set_params(w)
    for have, want in zip(f.run(inputs), compiled(graph, w).run(inputs), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


# -- precision --------------------------------------------------------------------------------------------------------
NUMPY = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
NARROW = pytest.mark.parametrize("compute", NUMPY)


def rounded(x: Any, compute: str) -> Array:
    return np.asarray(x, np.float32).astype(NUMPY[compute]).astype(np.float64)


@NARROW
@DEVICES
def test_values_are_rounded_between_ops_and_sums_are_not(compute: str, device: str) -> None:
    """A sum of many small numbers that a narrow accumulator would lose, and inputs that a narrow type cannot hold."""
    g = Graph("sums")
    x, w = g.input("x", (3, 512)), g.param("w", (512, 4))
    g.set_outputs([x @ w, x.sum(axis=-1), x * 1.0])
    rng = np.random.default_rng(0)
    a, b = (1 + rng.uniform(0, 1, s).astype(np.float32) for s in ((3, 512), (512, 4)))
    f = rlx.compile(g, device, profile=CompileProfile(precision=Precision(compute)))
    f.set_params({"w": b})
    product, total, same = f.run({"x": a})
    assert product.dtype == total.dtype == same.dtype == np.float32, "outputs have the types they had"
    ra, rb = rounded(a, compute), rounded(b, compute)
    epsilon = float(ml_dtypes.finfo(NUMPY[compute]).eps)
    for have, want in ((product, ra @ rb), (total, ra.sum(-1))):
        assert np.array_equal(have, rounded(have, compute)), "what is stored is narrow"
        np.testing.assert_allclose(have, want, rtol=epsilon)  # a narrow accumulator would be off by far more
    np.testing.assert_array_equal(same, rounded(a, compute))
    assert not np.array_equal(same, a)


@NARROW
@DEVICES
def test_token_ids_stay_whole_whatever_the_precision(compute: str, device: str) -> None:
    """Integers are left alone, and so are floats that become integers: 40001 is neither an f16 nor a bf16."""
    rows = 50_000
    g = Graph("embed")
    ids, floats = g.input("ids", (3,), "i32"), g.input("floats", (3,))
    table = g.param("table", (rows, 2))
    places = ((floats.reshape(3, 1) + 1.0)[:, 0] - 1.0).astype("i32")
    g.set_outputs([table.gather(ids), table.gather(places), places, ids * 2 + 1, floats * 1.0])
    f = rlx.compile(g, device, profile=CompileProfile(precision=Precision(compute)))
    f.set_params({"table": np.stack([np.arange(rows) % 97, np.arange(rows) // 97 % 89], 1).astype(np.float32)})
    wanted = np.array([40_001, 257, 2049], np.int32)
    a, b, places_, doubled, same = f.run({"ids": wanted, "floats": wanted.astype(np.float32)})
    expected = np.stack([wanted % 97, wanted // 97 % 89], 1)
    np.testing.assert_array_equal(a, expected)
    np.testing.assert_array_equal(b, expected)
    np.testing.assert_array_equal(places_, wanted)
    np.testing.assert_array_equal(doubled, wanted * 2 + 1)
    np.testing.assert_array_equal(same, rounded(wanted, compute))


@DEVICES
def test_mixed_keeps_reductions_and_norms_wide(device: str) -> None:
    g = Graph("mixed")
    x = g.input("x", (2, 64))
    g.set_outputs([x.softmax(axis=-1), x.rms_norm(eps=1e-6), x @ g.constant(np.eye(64, dtype=np.float32))])
    a = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    narrow, mixed = (
        rlx.compile(g, device, profile=CompileProfile(precision=Precision("bf16", m))).run({"x": a})
        for m in ("none", "auto")
    )
    is_narrow = [[np.array_equal(y, rounded(y, "bf16")) for y in ys] for ys in (narrow, mixed)]
    assert is_narrow == [[True, True, True], [False, False, True]]
    exact = np.exp(a.astype(float))
    np.testing.assert_allclose(mixed[0], exact / exact.sum(-1, keepdims=True), rtol=1e-6)


@NARROW
def test_a_layer_in_narrow_precision_is_near_and_its_graph_is_narrow(compute: str) -> None:
    sizes = Llama(64, 4, 2, 16, 96)
    w, inputs = weights(sizes), llama_inputs(sizes, 2, 9)
    f = rlx.compile(llama_graph(sizes), profile=CompileProfile(precision=Precision(compute)))
    f.set_params(w)
    want, have = llama_numpy(sizes, w, **inputs)[0], f.run(inputs)[0]
    error = float(np.abs(have - want).max() / np.abs(want).max())
    assert 1e-5 < error < (0.03 if compute == "bf16" else 0.004)
    stored = [b for b in f.plan.main.buffers.values() if b.kind == "buffer"]
    assert sum(str(b.type.dtype) == compute for b in stored) > len(stored) // 2


def test_f64_caches_and_packed_weights_are_left_alone() -> None:
    g = Graph("alone")
    wide = g.input("wide", (2, 3), "f64")
    keys = g.state("keys", (1, 1, 4, 64))
    new = g.input("new", (1, 1, 1, 4))
    packed = g.param("packed", (8, 32), "q8_0").dequantise().mT
    zero = g.constant(np.zeros((1, 1), np.int32))
    stored = keys.kv_append(new, zero, zero, axes="phds")
    g.set_outputs([wide * 3.0, stored, g.input("x", (2, 32)) @ packed])
    f = compile(g, precision=Precision("bf16"))
    assert "interleaved(q8_0" in f.plan.main_text, "the weights stay packed"
    blocks = np.zeros((8, 1), rlx.dtype("q8_0").numpy)
    blocks["d"], blocks["qs"] = 0.1, np.arange(256).reshape(8, 1, 32) % 7
    f.set_params({"packed": blocks})
    third = np.full((2, 3), 1 / 3)
    cache = np.zeros((1, 1, 4, 64), np.float32)
    x = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)
    row = np.array([1.0, 2.0, 3.0, 1 / 3], np.float32).reshape(1, 1, 1, 4)
    tripled, cached, product = f.run({"wide": third, "keys": cache, "new": row, "x": x})
    np.testing.assert_array_equal(tripled, third * 3.0)
    np.testing.assert_array_equal(cached[0, 0, :, 0], rounded(row, "bf16").ravel())
    numbers_ = np.float32(np.float16(0.1)) * (np.arange(256).reshape(8, 32) % 7)
    np.testing.assert_allclose(product, rounded(x, "bf16") @ numbers_.T, rtol=1e-2, atol=1e-2)


def test_integers_made_inside_a_loop_are_whole() -> None:
    """A float that counts in a loop and picks rows there: 300 steps are more than bf16 can count."""
    body = Graph("body")
    counter, table = body.input("counter", ()), body.input("table", (400,))
    body.set_outputs([counter + 1.0, table.gather(counter.astype("i32"))])
    g = Graph("loop")
    last, rows = g.apply("scan", g.input("start", ()), g.param("table", (400,)), body=body, length=300, carries=1,
                         broadcasts=1)  # fmt: skip
    g.set_outputs([last, rows])
    for device in ("reference", "cpu"):
        f = rlx.compile(g, device, profile=CompileProfile(precision=Precision("bf16")))
        f.set_params({"table": np.arange(400, dtype=np.float32) % 50})
        last_, rows_ = f.run({"start": np.float32(0)})
        assert last_ == 300
        np.testing.assert_array_equal(rows_, np.arange(300) % 50)


@NARROW
@DEVICES
def test_decisions_do_not_depend_on_the_precision(compute: str, device: str) -> None:
    """Comparisons, indices of largest numbers and the ends of loops: neither type tells these numbers apart."""
    more, step = Graph("more"), Graph("step")
    more.set_outputs([more.input("t", ()) < 1.0])
    step.set_outputs([step.input("t", ()) + 0.0009765625])
    g = Graph("decide")
    x, ids = g.input("x", (4,)), g.input("ids", (3,), "i32")
    near = x + 0.0
    _, places = near.topk(k=2)
    numbers_ = ids.astype("f32")
    shifted = numbers_ + 0.5
    draws = g.random_uniform(g.constant(np.array([1, 2], np.uint32)), shape=(64,))
    last = g.while_loop(g.constant(0.0, "f32"), more, step)
    g.set_outputs([near > 2048.25, near.argmax(), places, numbers_, shifted, draws, last, draws < 0.5])
    f = rlx.compile(g, device, profile=CompileProfile(precision=Precision(compute)))
    a, i = np.array([2048.0, 2048.3, 2048.2, 2048.4], np.float32), np.array([257, 2049, 40_001], np.int32)
    above, top, order, floats, halves, drawn, end, low = f.run({"x": a, "ids": i})
    np.testing.assert_array_equal(above, [False, True, False, True])
    assert top == 3 and list(order) == [3, 1] and end == 1.0
    np.testing.assert_array_equal(floats, i)
    np.testing.assert_array_equal(halves, i + 0.5)
    assert not np.array_equal(drawn, rounded(drawn, compute)), "random numbers have all their bits"
    np.testing.assert_array_equal(low, drawn < 0.5)


def test_ops_of_users_get_what_they_were_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(x: rlx.TensorType) -> rlx.TensorType:
        """x + 1, of f32 alone."""
        if str(x.dtype) != "f32":
            raise DTypeError(f"plus_one: takes f32, found {x.dtype}")
        return x

    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))  # which forgets the op afterwards
    rlx.op("plus_one", reference=lambda x: x + 1)(rule)
    g = Graph("own")
    g.set_outputs([g.plus_one(g.input("x", (3,)) * 1.0) * 1.0])
    f = rlx.compile(g, "reference", profile=CompileProfile(precision=Precision("bf16")))
    x = np.array([1 / 3, 100.3, -7.77], np.float32)
    np.testing.assert_array_equal(f.run({"x": x})[0], rounded(rounded(x, "bf16") + 1, "bf16"))


# -- the program cache -----------------------------------------------------------------------------------------------
def test_profiles_do_not_share_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    store = cache_folder.current()
    assert str(store.folder) == str(tmp_path)
    profiles = [CompileProfile(), CompileProfile.unfused(), CompileProfile(precision=Precision("bf16"))]
    for _ in range(2):
        launches, results = [], []
        for profile in profiles:
            f = rlx.compile(feed_forward(), profile=profile)
            f.set_params(numbers(f.graph))
            launches.append(len(f.plan.main.launches))
            results.append(f.run({"x": X})[0])
        assert launches[0] < launches[1]
        assert np.abs(results[0] - results[2]).max() > 1e-4
        assert len(list((tmp_path / "compiled").iterdir())) == 3


def test_a_model_size_layer_compiles_by_every_preset() -> None:
    for name in ("prefill", "decode", "encoder", "training"):
        f = rlx.compile(llama_graph(SMOLLM), profile=CompileProfile.preset(name))
        assert len(f.plan.main.launches) == 8


@pytest.mark.parametrize("source", [None, b"[fusion]", 3])
def test_profiles_are_read_from_text_or_a_path(source: Any) -> None:
    with pytest.raises(FormatError, match="takes TOML text or a path"):
        CompileProfile.from_toml(source)


def test_profiles_are_made_of_their_parts() -> None:
    with pytest.raises(CapabilityError, match="fusion is a dict, expected a Fusion"):
        CompileProfile({"skip": True})  # type: ignore[arg-type]


def test_tables_of_unknown_devices_are_refused() -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2,)) + 1.0])
    with pytest.raises(CapabilityError, match=r"profile: backend\.cdua is the table of no device") as caught:
        compile(g, backend=BackendOptions({"cdua": {"unfuse_regions": True}}))
    assert "'cuda'" in caught.value.notes[0]
    compile(g, backend=BackendOptions({"metal": {"unfuse_regions": True}}))  # a device of other systems
