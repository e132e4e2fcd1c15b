"""Exports of graphs: equal bits in another process, without LLVM; and a clear no to everything that does not fit."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resigned
import targets
from limits import LONGEST_S
from scipy.special import erf

import rlx
from rlx.backends.base import kernels_compiled
from rlx.errors import BindError, CapabilityError, FormatError, KernelError, NotFoundError
from rlx.operand_layouts import parse_layout
from rlx.runtime import container, export, record_json
from rlx.target import Target
from rlx.types import Composite, Dim, Symbol

from .test_caches import source

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(7)
WEIGHTS = {
    "w": rng.standard_normal((20, 33), dtype=np.float32), "b": rng.standard_normal(33, dtype=np.float32),
    "table": rng.standard_normal((9, 20), dtype=np.float32),
}  # fmt: skip
INPUTS = {"ids": np.array([3, 0, 8, 3], np.int32), "x": rng.standard_normal((4, 20), dtype=np.float32)}


def small() -> rlx.Graph:
    """A packed weight, one that is read in place, one with a run-time size, a constant and a run-time size."""
    g = rlx.Graph("small")
    ids, x = g.input("ids", ("n",), "i32"), g.input("x", ("n", 20))
    w, b, table = g.param("w", (20, 33)), g.param("b", (33,)), g.param("table", ("rows", 20))
    x = x + table.gather(ids) * g.constant(np.linspace(0, 1, 20, dtype=np.float32))
    return g.set_outputs([(x @ w + b).gelu(), x.sum(axis=1)])


def wanted() -> list[Array]:
    w = {n: a.astype(np.float64) for n, a in WEIGHTS.items()}
    x = INPUTS["x"] + w["table"][INPUTS["ids"]] * np.linspace(0, 1, 20)
    y = x @ w["w"] + w["b"]
    return [y * 0.5 * (1 + erf(y / np.sqrt(2))), x.sum(axis=1)]


def compiled() -> rlx.CompiledGraph:
    f = rlx.compile(small())
    f.set_params(WEIGHTS)
    return f


def same_bits(a: list[Array], b: list[Array]) -> bool:
    return [x.tobytes() for x in a] == [x.tobytes() for x in b]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """An export without weights, and one with them."""
    folder = tmp_path_factory.mktemp("exports")
    return {w: compiled().export(folder / f"weights-{w}.rlxp", weights=w) for w in (False, True)}


@pytest.fixture
def copy(files: dict[bool, Path], tmp_path: Path) -> Path:
    """An export with weights that a test may change."""
    return Path(shutil.copy(files[True], tmp_path / "copy.rlxp"))


def load(path: Path, **options: Any) -> rlx.CompiledGraph:
    loaded = rlx.load_exported(path, **options)
    assert isinstance(loaded, rlx.CompiledGraph)
    return loaded


# -- running --
@pytest.mark.parametrize("embed", [False, True])
def test_an_export_gives_equal_bits_and_the_numbers_of_numpy(files: dict[bool, Path], embed: bool) -> None:
    before = kernels_compiled()
    f = load(files[embed])
    if not embed:
        with pytest.raises(BindError, match="'w', 'b', 'table' not set"):
            f.run(INPUTS)
        f.set_params(WEIGHTS)
    outputs = f.run(INPUTS)
    assert kernels_compiled() == before
    assert same_bits(outputs, compiled().run(INPUTS))
    for a, b in zip(outputs, wanted(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit(files: dict[bool, Path]) -> None:
    assert same_bits(load(files[True], threads=1).run(INPUTS), load(files[True], threads=2).run(INPUTS))


def test_new_sizes_need_nothing_new(files: dict[bool, Path]) -> None:
    f, plain = load(files[True]), compiled()
    before = kernels_compiled()
    for n in (0, 1, 17, 300):
        inputs = {"ids": np.arange(n, dtype=np.int32) % 9, "x": rng.standard_normal((n, 20), dtype=np.float32)}
        assert same_bits(f.run(inputs), plain.run(inputs))
    assert kernels_compiled() == before


def test_embedded_weights_are_mapped_on_cache_lines(files: dict[bool, Path]) -> None:
    f = load(files[True])
    for array in f.executable.weights.values():
        assert array.ctypes.data % 64 == 0 and not array.flags.writeable and not array.flags.owndata


def test_weights_may_be_replaced(files: dict[bool, Path]) -> None:
    f, plain = load(files[True]), compiled()
    for loaded in (f, plain):
        loaded.set_param("w", 2 * WEIGHTS["w"])
    assert same_bits(f.run(INPUTS), plain.run(INPUTS))


def test_what_was_packed_must_be_set_again_with_the_others(files: dict[bool, Path]) -> None:
    f = load(files[True])
    f.set_param("b", WEIGHTS["b"])
    with pytest.raises(BindError, match="params: 'w' not set"):
        f.run(INPUTS)


def test_a_state_stays_a_state(tmp_path: Path) -> None:
    g = rlx.Graph("counter")
    keys, table = g.state("keys", ("pages", 1, 4, 64)), g.input("table", ("batch", "blocks"), "i32")
    new, positions = g.input("new", ("batch", "seq", 1, 4)), g.input("positions", ("batch", "seq"), "i32")
    g.set_outputs([g.kv_append(keys, new, positions, table, axes="phds")])
    loaded = load(rlx.compile(g).export(tmp_path / "state.rlxp"))
    cache, places = np.zeros((2, 1, 4, 64), np.float32), {"positions": np.int32([[3]]), "table": np.int32([[1]])}
    loaded.run({"keys": cache, "new": np.ones((1, 1, 1, 4), np.float32), **places})
    assert cache[1, 0, :, 3].tolist() == [1.0] * 4 and cache.sum() == 4
    with pytest.raises(BindError, match="changed in place"):
        loaded.run({"keys": cache.tolist(), "new": np.ones((1, 1, 1, 4), np.float32), **places})


def test_a_loop_runs_in_the_export(tmp_path: Path) -> None:
    body = rlx.Graph("body")
    total, x = body.input("total", (3,)), body.input("x", (3,))
    body.set_outputs([total * 0.5 + x, total])
    g = rlx.Graph("loop")
    xs = g.input("xs", ("steps", 3))
    carries, ys = g.scan_general([g.input("start", (3,))], body, "steps", xs=[xs])
    f = rlx.compile(g.set_outputs([*carries, *ys]))
    inputs = {"start": np.ones(3, np.float32), "xs": rng.standard_normal((50, 3), dtype=np.float32)}
    outputs = load(f.export(tmp_path / "loop.rlxp")).run(inputs)
    assert same_bits(outputs, f.run(inputs))
    total = np.ones(3)
    for row in inputs["xs"]:
        total = total * 0.5 + row
    np.testing.assert_allclose(outputs[0], total, rtol=1e-5)


def test_graphs_of_almost_nothing_are_exported_too(tmp_path: Path) -> None:
    g = rlx.Graph("nothing")
    x, w = g.input("x", ("n", 0)), g.param("w", (0, 4))
    g.set_outputs([x, x + g.constant(np.zeros(0, np.float32)), x @ w, g.constant(np.array(True))])
    f = rlx.compile(g)
    f.set_param("w", np.zeros((0, 4), np.float32))
    outputs = load(f.export(tmp_path / "nothing.rlxp", weights=True)).run({"x": np.zeros((2, 0), np.float32)})
    assert [a.tolist() for a in outputs] == [[[], []], [[], []], [[0.0] * 4] * 2, True]


def test_limits_and_faults_are_as_before(tmp_path: Path) -> None:
    g = rlx.Graph("lookup")
    ids = g.input("ids", (rlx.dim("n", max=4),), "i32")
    g.set_outputs([g.param("table", (3, 2)).gather(ids)])
    f = rlx.compile(g)
    f.set_param("table", np.zeros((3, 2), np.float32))
    loaded = load(f.export(tmp_path / "lookup.rlxp", weights=True))
    with pytest.raises(BindError, match="n is 5, its limit is 4"):
        loaded.run({"ids": np.zeros(5, np.int32)})
    with pytest.raises(KernelError) as caught:
        loaded.run({"ids": np.array([3], np.int32)})
    assert any("test_export.py:" in note for note in caught.value.notes)


def test_reports_and_the_graph_come_along(files: dict[bool, Path]) -> None:
    f, plain = load(files[True]), compiled()
    assert f.name == "small" and "small" in repr(f)
    assert f.graph == plain.graph
    assert [str(n.origin) for n in f.graph.nodes] == [str(n.origin) for n in plain.graph.nodes]
    assert f.input_types == plain.input_types and f.param_types == plain.param_types
    f.run(INPUTS), plain.run(INPUTS)
    assert [x.kernel for x in f.report().launches] == [x.kernel for x in plain.report().launches]
    assert str(f.dispatch()) == str(plain.dispatch())
    assert str(f.memory()) == str(plain.memory())


def test_a_profile_comes_along(tmp_path: Path) -> None:
    f = rlx.compile(small(), profile=rlx.CompileProfile.unfused())
    loaded = load(f.export(tmp_path / "unfused.rlxp"))
    assert loaded.profile == rlx.CompileProfile.unfused()
    loaded.set_params(WEIGHTS)
    f.set_params(WEIGHTS)
    assert same_bits(loaded.run(INPUTS), f.run(INPUTS))


@pytest.mark.parametrize("target", targets.supported(), ids=lambda t: t.name)
def test_code_for_a_lesser_target_runs_as_that(target: Target, tmp_path: Path) -> None:
    f = rlx.compile(small(), target=target)
    f.set_params(WEIGHTS)
    loaded = load(f.export(tmp_path / f"{target.name}.rlxp", weights=True))
    assert loaded.target == target
    assert same_bits(loaded.run(INPUTS), f.run(INPUTS))


def test_many_threads_may_load_and_run(files: dict[bool, Path]) -> None:
    plain, equal = compiled().run(INPUTS), []

    def work() -> None:
        equal.append(same_bits(load(files[True]).run(INPUTS), plain))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 4


# -- another process --
CHILD = """
import json, sys, time
sys.path.insert(0, {source!r})
sys.path.insert(0, {here!r})
import numpy as np, rlx
if sys.argv[1] == "write":
    from runtime import test_export
    f = test_export.compiled()
    rlx.export(f, {path!r}, weights=True)
    print(json.dumps([a.tobytes().hex() for a in f.run(test_export.INPUTS)]))
else:
    import rlx.engine.export
    inputs = dict(np.load({inputs!r}))
    begin = time.process_time()
    outputs = rlx.load_exported({path!r}).run(inputs)
    spent = time.process_time() - begin
    from rlx.backends.base import kernels_compiled
    print(json.dumps({{
        "outputs": [a.tobytes().hex() for a in outputs], "spent": spent, "compiled": kernels_compiled(),
        "llvm": [m for m in sys.modules if m.startswith("llvmlite")],
    }}))
"""


def child(role: str, path: Path) -> Any:
    inputs = path.with_name("inputs.npz")
    np.savez(inputs, **INPUTS)  # type: ignore[arg-type]
    here = Path(__file__).parent.parent
    code = CHILD.format(source=source(), here=str(here), path=str(path), inputs=str(inputs))
    env = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"} | {"RLX_CACHE": "off"}
    run = subprocess.run([sys.executable, "-c", code, role], env=env, capture_output=True, text=True, timeout=LONGEST_S)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_another_process_loads_it_without_llvm(tmp_path: Path) -> None:
    path = tmp_path / "small.rlxp"
    outputs = child("write", path)
    said = child("run", path)
    assert said["outputs"] == outputs
    assert said["llvm"] == [] and said["compiled"] == 0
    assert said["spent"] < 0.5


# -- what is refused --
def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    for data in (b"GGUF" + bytes(100), b"RLXP", b"RLX"):
        (tmp_path / "x.rlxp").write_bytes(data)
        with pytest.raises(FormatError, match=r"x\.rlxp, byte 0: not an export of rlx: expected b'RLXP'"):
            load(tmp_path / "x.rlxp")
    with pytest.raises(NotFoundError, match="no such file"):
        load(tmp_path / "absent.rlxp")


def test_another_version_of_the_format_is_refused(copy: Path) -> None:
    data = bytearray(copy.read_bytes())
    struct.pack_into("<I", data, 4, 99)
    copy.write_bytes(data)
    with pytest.raises(FormatError, match="version of the format: expected 4, found 99") as caught:
        load(copy)
    assert "export it again" in str(caught.value.hint)


def test_a_file_cut_short_is_refused_wherever_it_ends(copy: Path) -> None:
    data = copy.read_bytes()
    for end in (3, 20, 47, 48, 300, len(data) // 2, len(data) - 1):
        copy.write_bytes(data[:end])
        with pytest.raises(FormatError):
            load(copy)
    copy.write_bytes(data + b"\0")
    with pytest.raises(FormatError, match=f"length: expected {len(data)} bytes, found {len(data) + 1} bytes"):
        load(copy)


def test_damage_is_seen_and_its_place_named(copy: Path) -> None:
    intact = copy.read_bytes()
    manifest = export.read_export(copy).manifest
    start = len(intact) - manifest["bytes"]
    for name, section in manifest["sections"].items():
        if section["bytes"]:
            data = bytearray(intact)
            data[start + section["at"] + section["bytes"] // 2] ^= 0x10
            copy.write_bytes(data)
            with pytest.raises(FormatError, match=f"section '{name}' is damaged"):
                load(copy, verify=True)
    data = bytearray(intact)
    data[100] ^= 0x10
    copy.write_bytes(data)
    with pytest.raises(FormatError, match="manifest is damaged"):
        load(copy)


def change(path: Path, **changes: Any) -> None:
    """Another manifest for the same sections."""
    file = export.read_export(path)
    sections: dict[str, Any] = {}
    for name, section in file.manifest["sections"].items():
        sections[name] = file.arrays(name) if "arrays" in section else file.section(name)
    plain = {k: v for k, v in file.manifest.items() if k not in ("sections", "bytes")}
    container.write(path, {**plain, **changes.pop("manifest", {})}, {**sections, **changes})


def test_a_manifest_with_wrong_members_is_a_format_error_or_does_what_it_says(copy: Path) -> None:
    manifest, body = resigned.parts_of(copy)
    bad, refused = [], {"looked at": 0, "loaded": 0}
    for place in resigned.places(manifest):
        for number in range(3):
            what, wrong = resigned.changed(manifest, place, number)
            resigned.write(copy, wrong, body)
            for name, read in (("looked at", export.read_export), ("loaded", load)):
                try:
                    read(copy)
                except FormatError:
                    refused[name] += 1
                except CapabilityError as error:  # code for another machine
                    if place[0] != "target":
                        bad.append(f"{what}, {name}: {error!r}")
                except Exception as error:
                    bad.append(f"{what}, {name}: {error!r}")
    assert not bad, bad[:5]
    assert refused["looked at"] > 200 and refused["loaded"] > 300


@pytest.mark.parametrize("manifest", [[], 7, "text", None, {}, {"bytes": 5}, {"sections": {}, "bytes": 0}])
def test_a_manifest_that_is_none_is_refused(copy: Path, manifest: Any) -> None:
    resigned.write(copy, manifest, b"")
    with pytest.raises(FormatError, match="manifest"):
        export.read_export(copy)


def test_a_wrong_member_is_named_with_both_values(copy: Path) -> None:
    manifest, body = resigned.parts_of(copy)
    manifest["inputs"][1][2] = "f33[n]"
    resigned.write(copy, manifest, body)
    with pytest.raises(FormatError, match=r"manifest: inputs\[1\]\[2\]: expected a type, .*, found 'f33\[n\]'"):
        export.read_export(copy)
    manifest["inputs"][1][2] = "f32[n, 21]"
    resigned.write(copy, manifest, body)
    with pytest.raises(FormatError, match=r"inputs: its program says .*, its manifest "):
        load(copy)


@pytest.mark.parametrize("key, value", [("rlx", "9.9.9"), ("source", "ffffffffffffffff")])
def test_an_export_of_other_sources_is_refused(copy: Path, key: str, value: str) -> None:
    change(copy, manifest={key: value})
    with pytest.raises(FormatError, match=rf"made by rlx .*{value[:12]}.*, this is rlx {rlx.__version__}") as caught:
        load(copy)
    assert "export it again" in str(caught.value.hint)


def test_code_that_this_machine_does_not_run_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if targets.best() is targets.BASELINE:
        pytest.skip("every machine runs the baseline")
    best = targets.best().name
    monkeypatch.setattr(type(targets.CPU), "targets", lambda self: (targets.BASELINE,))
    with pytest.raises(CapabilityError, match=rf"code is for {best} .*this machine runs baseline"):
        load(copy)


def test_code_of_another_architecture_is_refused(copy: Path) -> None:
    other = {"name": "neon" if targets.best().arch == "x86_64" else "avx2", "arch": "other", "features": "+other"}
    change(copy, manifest={"target": {**export.read_export(copy).manifest["target"], **other}})
    with pytest.raises(CapabilityError, match=r"\(other \+other\)"):
        load(copy)


def test_a_target_that_was_asked_for_is_not_ignored(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TARGET", "elsewhere")
    with pytest.raises(CapabilityError, match="RLX_TARGET asks for elsewhere"):
        load(copy)


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_file_that_anybody_may_write_is_refused(copy: Path) -> None:
    assert stat.S_IMODE(copy.stat().st_mode) & 0o022 == 0
    copy.chmod(0o646)
    with pytest.raises(CapabilityError, match="everybody may write it"):
        load(copy)


def test_the_reference_device_has_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="reference"):
        rlx.compile(small(), "reference").export(tmp_path / "x.rlxp")


def test_weights_that_are_not_set_cannot_be_embedded(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="not set"):
        rlx.compile(small()).export(tmp_path / "x.rlxp", weights=True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_the_old_file(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = copy.read_bytes()

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        compiled().export(copy)
    assert copy.read_bytes() == before and list(copy.parent.iterdir()) == [copy]


# -- records --
@dataclass(frozen=True)
class Point:
    x: float
    y: Any


POINT = {"Point": Point}


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, 1.0, "text", float("inf"), (), [], {}, (1, 1.0, True, "1"), [Point(1.5, (Point(0.0, None),))],
        {"a": [1, {"b": (2,)}], 3: "c"}, Dim((((Symbol("n", 7), Composite("//", 3, 2)), 4),)), rlx.dtype("q4_k"),
        parse_layout("cpu.panels(64)"), Point(1.0, parse_layout("cpu.interleaved(q4_k, 64, 16, true)")),
    ],
    ids=str,
)  # fmt: skip
def test_records_come_back_as_they_were(value: Any) -> None:
    classes = POINT | record_json.records_of(rlx.dims, rlx.types)
    text, arrays = record_json.encode(value, classes)
    decoded = record_json.decode(text, classes, arrays, "test")
    assert decoded == value and repr(decoded) == repr(value)


def test_equal_records_are_written_once_and_lists_are_not_shared() -> None:
    text, _ = record_json.encode([Point(1.0, 2), Point(1.0, 2), [], []], POINT)
    assert text.count("Point") == 1
    decoded = record_json.decode(text, POINT, [], "test")
    assert decoded[0] is decoded[1] and decoded[2] is not decoded[3]


def test_minus_zero_and_nan_survive() -> None:
    text, _ = record_json.encode((0.0, -0.0, float("nan")), {})
    assert repr(record_json.decode(text, {}, [], "test")) == "(0.0, -0.0, nan)"


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(CapabilityError, match="function cannot be stored in a file"):
        record_json.encode(Point(1.0, lambda: 1), POINT)


@pytest.mark.parametrize(
    "text",
    [
        '[["os.system", 0]]', '["ls", ["posix.system", 0]]', '[1, ["Point", 0, 0, 0]]', '[["()", 5]]', "[", "[]", "7",
        '["__import__", 1, 2, ["Composite", 0, 1, 2]]', '[["dtype"]]', '[0, ["array", 0]]', '[["{}", 0]]',
        '["cpu.pans(3)", ["layout", 0]]', '["os.system(1)", ["layout", 0]]', '[5, ["layout", 0]]',
    ],
)  # fmt: skip
def test_text_that_says_anything_else_is_a_format_error(text: str) -> None:
    with pytest.raises(FormatError, match="test: is not a table of records"):
        record_json.decode(text, POINT | record_json.records_of(rlx.types), [], "test")


def test_a_program_that_names_another_class_is_refused(copy: Path) -> None:
    change(copy, program=b'["echo", ["os.system", 0]]')
    with pytest.raises(FormatError, match=r"program: is not a table of records: KeyError: 'os\.system'"):
        load(copy)


def test_paths_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    f = compiled()
    for write in (f.export, f.page):
        with pytest.raises(FormatError, match="there is no folder"):
            write(tmp_path / "missing" / "file")
        with pytest.raises(FormatError, match="is a folder"):
            write(tmp_path)
