"""The cache folder in whole processes: what a second start saves, and every way in which a folder can be of no use.

Each case is a child Python that compiles one small layer, runs it, and says what it did.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_internals import FORBID_WORK, GENERATORS, forget_code
from limits import LONGEST_S
from targets import host

import rlx
from rlx.backends import cache_folder
from rlx.errors import KernelError
from rlx.runtime.plan import make_plan, relocate
from rlx.runtime.session import Session

PACKAGE = Path(rlx.__file__).resolve().parent
CHILD = """
import json, os, sys
sys.path.insert(0, {source!r})
import numpy as np, rlx
{before}
g = rlx.Graph("small")
g.set_outputs([(g.input("x", ("n", 20)) @ g.param("w", (20, 30))).silu().sum(axis=1)])
f = rlx.compile(g)
f.set_param("w", np.ones((20, 30), np.float32))
outputs = f.run({{"x": np.full((7, 20), 0.25, np.float32)}})
from rlx.backends import cache_folder
from rlx.backends.base import kernels_compiled
store = cache_folder.current()
print(json.dumps({{
    "result": outputs[0].tolist(), "compiled": kernels_compiled(),
    "folder": str(store.folder or ""), "writable": store.writable, "why": store.why, "here": os.listdir(),
}}))
"""
NO_HOME = """
import pwd
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
"""


@functools.cache
def source() -> str:
    """A copy of rlx that nobody edits meanwhile: what is cached is good for the very same sources alone."""
    folder = tempfile.TemporaryDirectory(prefix="rlx-source-")
    atexit.register(folder.cleanup)
    shutil.copytree(PACKAGE, Path(folder.name) / "rlx", ignore=shutil.ignore_patterns("__pycache__", "*~"))
    return folder.name


def start(setting: str | None, here: Path, *, before: str = "", **environment: str) -> subprocess.Popen[str]:
    own = ("RLX_CACHE", "HOME", "XDG_CACHE_HOME", "PYTHONPATH")
    env = {n: v for n, v in os.environ.items() if n not in own} | environment
    if setting is not None:
        env["RLX_CACHE"] = setting
    code = CHILD.format(source=source(), before=before)
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, cwd=here, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What the child says; its outputs must be right."""
    out, err = child.communicate(timeout=LONGEST_S)
    assert child.returncode == 0, err
    said: dict[str, Any] = json.loads(out)
    assert said.pop("result") == pytest.approx([30 * 5 / (1 + math.exp(-5))] * 7, rel=1e-6)
    return said


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def _filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled") / "cache"
    assert result(start(str(folder), folder.parent))["compiled"] > 0
    return folder


@pytest.fixture
def filled(folder: Path, _filled: Path) -> Path:
    """A folder with all entries."""
    shutil.copytree(_filled, folder)
    return folder


# -- what it saves ------------------------------------------------------------------------------------------------
def test_a_second_start_compiles_and_plans_nothing(filled: Path, tmp_path: Path) -> None:
    said = result(start(str(filled), tmp_path, before=FORBID_WORK))
    assert said["compiled"] == 0 and said["folder"] == str(filled)


def test_nobody_else_can_read_or_write_the_folder(_filled: Path) -> None:
    for path in (_filled, *_filled.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_two_processes_share_a_cold_folder(folder: Path, tmp_path: Path) -> None:
    children = [start(str(folder), tmp_path) for _ in range(3)]
    for child in children:
        result(child)
    assert not [p for p in files(folder) if p.name.startswith("tmp")]
    assert result(start(str(folder), tmp_path, before=FORBID_WORK))["compiled"] == 0


# -- what is damaged ----------------------------------------------------------------------------------------------
def flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage", [flip, lambda d: d[: len(d) * 2 // 3], lambda d: b""], ids=["flipped", "cut", "emptied"]
)
def test_damaged_entries_are_built_again(damage: Callable[[bytes], bytes], filled: Path, tmp_path: Path) -> None:
    for path in files(filled):
        path.write_bytes(damage(path.read_bytes()))
    assert result(start(str(filled), tmp_path))["compiled"] > 0
    assert result(start(str(filled), tmp_path, before=FORBID_WORK))["compiled"] == 0


@pytest.mark.parametrize("kind", ["objects", "routines", "compiled"])
def test_lost_entries_are_built_again(kind: str, filled: Path, tmp_path: Path) -> None:
    lost = files(filled / kind)
    assert lost
    for path in {*lost, *files(filled / "compiled")}:
        path.unlink()
    assert (result(start(str(filled), tmp_path))["compiled"] > 0) == (kind != "compiled")
    assert {p.name for p in lost} <= {p.name for p in files(filled / kind)}


def test_a_linked_graph_needs_its_objects_alone(filled: Path, tmp_path: Path) -> None:
    shutil.rmtree(filled / "routines")
    assert result(start(str(filled), tmp_path, before=FORBID_WORK))["compiled"] == 0
    shutil.rmtree(filled / "objects")
    assert result(start(str(filled), tmp_path))["compiled"] > 0
    assert result(start(str(filled), tmp_path, before=FORBID_WORK))["compiled"] == 0


def test_a_second_start_imports_no_pass_and_no_generator(filled: Path, tmp_path: Path) -> None:
    heavy = ("rlx.mir.", "rlx.module", "rlx.lir.s", "rlx.runtime.plan", GENERATORS, "llvmlite")
    check = f"import atexit, sys; atexit.register(lambda: print([m for m in sys.modules if m.startswith({heavy})]))"
    child = start(str(filled), tmp_path, before=check)
    output, errors = child.communicate(timeout=LONGEST_S)
    assert output.splitlines()[-1] == "[]", errors


# -- what cannot be used ------------------------------------------------------------------------------------------
def test_off_writes_nothing(tmp_path: Path) -> None:
    said = result(start("off", tmp_path, XDG_CACHE_HOME=str(tmp_path / "home")))
    assert said["folder"] == "" and said["compiled"] > 0 and said["here"] == []


def test_readonly_reads_the_usual_folder_and_writes_nothing(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    assert result(start("readonly", here, XDG_CACHE_HOME=str(home)))["compiled"] > 0
    assert not home.exists()
    usual = result(start(None, here, XDG_CACHE_HOME=str(home)))
    assert usual["folder"] == str(home / "rlx") and usual["writable"]
    before = {p: p.stat().st_mtime_ns for p in files(home)}
    said = result(start("readonly", here, before=FORBID_WORK, XDG_CACHE_HOME=str(home)))
    assert said["compiled"] == 0 and not said["writable"]
    assert {p: p.stat().st_mtime_ns for p in files(home)} == before


def test_a_folder_that_others_may_write_is_refused(filled: Path, tmp_path: Path) -> None:
    before = files(filled)
    for mode in (0o720, 0o702, 0o777):
        filled.chmod(mode)
        store = cache_folder._open.__wrapped__(str(filled))
        assert store.folder is None and "not ours alone" in store.why and f"{mode:o}" in store.why
    assert result(start(str(filled), tmp_path))["compiled"] > 0
    assert files(filled) == before


@pytest.mark.parametrize("kind", ["objects", "starts"])
def test_a_folder_inside_that_others_may_write_is_refused(filled: Path, tmp_path: Path, kind: str) -> None:
    inner = filled / kind
    inner.mkdir(exist_ok=True)
    inner.chmod(0o777)
    said = result(start(str(filled), tmp_path))
    assert said["compiled"] > 0 and said["why"] == f"{inner} is not ours alone (owner {os.getuid()}, mode 777); " + (
        f"run: chmod go-w {inner}"
    )
    subprocess.run(said["why"].partition("run: ")[2], shell=True, check=True)
    assert result(start(str(filled), tmp_path, before=FORBID_WORK))["compiled"] == 0


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_a_folder_inside_of_another_user_is_refused(filled: Path, tmp_path: Path) -> None:
    os.chown(filled / "objects", 65534, -1)
    said = result(start(str(filled), tmp_path))
    assert said["compiled"] > 0 and "objects is not ours alone (owner 65534" in said["why"]
    assert said["why"].endswith("; remove it")


def test_a_path_that_cannot_be_a_folder_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = result(start(str(tmp_path / "file" / "below"), tmp_path))
    assert said["folder"] == "" and "cannot be used" in said["why"] and said["compiled"] > 0


def test_a_user_without_a_home_has_no_cache_and_no_folder_called_tilde(tmp_path: Path) -> None:
    said = result(start(None, tmp_path, before=NO_HOME))
    assert said["folder"] == "" and "home" in said["why"] and said["here"] == []


def test_a_relative_folder_stays_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = cache_folder._open.__wrapped__("below")
    store.write("objects", "key", b"payload")
    monkeypatch.chdir("/")
    assert store.read("objects", "key") == b"payload"


def test_a_disk_that_takes_nothing_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cache_folder._open.__wrapped__(str(folder))

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.write("objects", "key", b"payload")
    assert store.read("objects", "key") is None and files(folder) == []
    monkeypatch.setattr(tempfile, "mkstemp", full)
    store.write("objects", "key", b"payload")
    assert store.read("objects", "key") is None


def test_a_damaged_entry_that_cannot_be_removed_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cache_folder._open.__wrapped__(str(folder))
    store.write("objects", "key", b"payload")
    (folder / "objects" / "key").write_bytes(b"nonsense")

    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert store.read("objects", "key") is None


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    store = cache_folder._open.__wrapped__(str(folder))
    assert store.folder is None and "owner 12345" in store.why


def test_size_and_clear_count_entries(folder: Path) -> None:
    store = cache_folder._open.__wrapped__(str(folder))
    for i in range(3):
        store.write("objects", f"key{i}", b"payload")
    assert store.size() == (3, 3 * (32 + len(b"payload")))
    assert store.clear() == 3 and store.size() == (0, 0)


# -- what is not mixed up -----------------------------------------------------------------------------------------
def lookup() -> rlx.Graph:
    g = rlx.Graph("lookup")
    return g.set_outputs([g.input("table", ("rows", 4)).gather(g.input("ids", ("n",), "i32"))])


def lookup_again() -> rlx.Graph:
    g = rlx.Graph("lookup")
    return g.set_outputs([g.input("table", ("rows", 4)).gather(g.input("ids", ("n",), "i32"))])


def test_equal_graphs_of_different_lines_keep_their_own_lines() -> None:
    assert lookup() == lookup_again()
    for build in (lookup, lookup_again):
        line = build.__code__.co_firstlineno + 2
        with pytest.raises(KernelError) as caught:
            rlx.compile(build()).run({"table": np.zeros((2, 4), np.float32), "ids": np.array([2], np.int32)})
        assert any(f"test_caches.py:{line}" in note for note in caught.value.notes)


def test_a_line_that_became_several_is_planned_anew() -> None:
    plan = make_plan(lookup(), host())
    assert len(set(plan.origins)) == 1
    elsewhere = [o.replace(".py:", ".py:9") for o in plan.origins]
    moved = relocate(plan, tuple(elsewhere))
    assert moved is not None and moved.main.launches[0].where == elsewhere[0]
    assert relocate(plan, (*elsewhere[:-1], "other.py:1")) is None


def test_a_compiled_graph_goes_with_its_last_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    forget_code(monkeypatch)
    gc.disable()
    try:
        for linked in (1, 0):  # compiled, then from the cache
            links: list[int] = []
            link = Session.link

            def counted(*args: Any, links: list[int] = links, link: Any = link) -> Any:
                links.append(1)
                return link(*args)

            monkeypatch.setattr(Session, "link", counted)
            g = rlx.Graph("product")
            g.set_outputs([g.input("x", ("n", 4)) @ g.param("w", (4, 8))])
            compiled, weight = rlx.compile(g), np.ones((4, 8), np.float32)
            monkeypatch.setattr(Session, "link", link)
            assert len(links) == linked
            compiled.set_param("w", weight)
            assert compiled.run({"x": np.ones((1, 4), np.float32)})[0].tolist() == [[4.0] * 8]
            assert compiled.report().launches and compiled.dispatch().counts
            assert compiled.executable.program is compiled.plan.main
            gone = weakref.ref(compiled), weakref.ref(weight)
            del compiled, weight
            assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_plan_is_kept_for_who_asks_and_for_kernels_that_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    forget_code(monkeypatch)
    for _ in range(2):
        compiled = rlx.compile(lookup())
    assert not files(tmp_path / "programs")
    assert compiled.plan.main.launches and len(files(tmp_path / "programs")) == 1  # type: ignore[attr-defined]
    g = rlx.Graph("by_size")  # scratch grows with n
    g.set_outputs([g.input("a", (3, "n")) @ g.input("b", ("n", 5))])
    rlx.compile(g)
    assert len(files(tmp_path / "programs")) == 2
    arrays = {"a": np.ones((3, 300), np.float32), "b": np.ones((300, 5), np.float32)}
    assert np.array_equal(rlx.compile(g).run(arrays)[0], np.full((3, 5), 300, np.float32))
