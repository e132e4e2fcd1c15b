"""Snapshots: the second load of a model builds, plans, compiles and packs nothing, and says the same, bit for bit.

What was kept is only ever a saving: damaged, lost, outdated or not allowed, the model is loaded as if it were new.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama
from cpu_internals import forget_code, loaded_files, pretend_other_llvm
from limits import LONGEST_S
from runtime.test_caches import flip, source
from targets import host

from rlx.backends import cache_folder
from rlx.engine import load as load_module
from rlx.engine import model_snapshot
from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.engine.model_snapshot import SnapshotCheckpoint
from rlx.errors import CapabilityError, FormatError
from rlx.host_memory import root_buffer
from rlx.models import family
from rlx.profile import CompileProfile
from rlx.runtime.session import Session

from .conftest import STORIES, language_model

TOKENS = [3, 14, 15, 92, 6]
CHILD = """
import json, sys
sys.path.insert(0, {source!r})
import rlx
model = rlx.load({path!r}, threads=2)
completion = model.generate({prompt!r}, max_tokens=12, temperature=0.0)
modules = sorted(m for m in sys.modules if m.startswith("rlx.") or m == "llvmlite")
from rlx.backends.base import kernels_compiled
print(json.dumps({{
    "tokens": completion.tokens, "text": completion.text, "kept": "rlx.models.load" not in modules, "modules": modules,
    "compiled": kernels_compiled(), "logits": model.logits({prompt!r}).tobytes().hex()[-4096:],
}}))
"""
# What a warm start must not need: LLVM, the generators, and whatever builds, lowers, optimises or schedules graphs.
HEAVY = ("llvmlite", "rlx.ir", "rlx.ops", "rlx.hir", "rlx.mir", "rlx.flow", "rlx.module", "rlx.models")
LIGHT_LIR = {"rlx.lir", "rlx.lir.interface", "rlx.lir.memory"}
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")
GENERATORS = {"generators", "matmul", "loops", "builder", "attention", "math", "driver_code"}


def child(path: Path, prompt: Any, setting: str, **environment: str) -> subprocess.Popen[str]:
    own = ("RLX_CACHE", "RLX_CACHE_LIMIT", "XDG_CACHE_HOME", "PYTHONPATH")
    env = {n: v for n, v in os.environ.items() if n not in own} | {"RLX_CACHE": setting, **environment}
    code = CHILD.format(source=source(), path=str(path), prompt=prompt)
    return subprocess.Popen([sys.executable, "-c", code], env=env, text=True, stdout=-1, stderr=-1)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def answer(report: dict[str, Any]) -> tuple[Any, ...]:
    return report["tokens"], report["text"], report["logits"]


def settle() -> None:
    """Wait until files that were just written count as settled."""
    time.sleep(2 * model_snapshot.SETTLED_NS / 1e9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, for this process too."""
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    forget_code(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def tiny_path(tmp_path: Path) -> Path:
    tiny_llama.write(tmp_path / "tiny")
    settle()
    return tmp_path / "tiny"


def stored_files(folder: Path) -> list[Path]:
    return sorted((folder / cache_folder.SNAPSHOTS).glob("*")) if (folder / cache_folder.SNAPSHOTS).exists() else []


built_sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # in which a model was made from its files


@pytest.fixture(autouse=True)
def noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def notice(path: Path, name: str | None, session: Session, settings: Any) -> Any:
        built_sessions.add(session)
        return make(path, name, session, settings)

    make = load_module.open_model
    monkeypatch.setattr(load_module, "open_model", notice)


def is_kept(model: LanguageModel | EmbeddingModel) -> bool:
    """Whether it is from a snapshot of an earlier load."""
    return isinstance(model._checkpoint, SnapshotCheckpoint) and model._session not in built_sessions


def unkept(path: Path) -> LanguageModel | EmbeddingModel:
    """A model from its files that goes on with what it was made of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_snapshot, "find", lambda *_: {})
        model = load(path)
    assert isinstance(model, (LanguageModel, EmbeddingModel)) and not isinstance(model._checkpoint, SnapshotCheckpoint)
    return model


def unkept_language_model(path: Path) -> LanguageModel:
    model = unkept(path)
    assert isinstance(model, LanguageModel)
    return model


def bits(model: LanguageModel) -> bytes:
    return model.logits(TOKENS).tobytes() + bytes(model.generate(TOKENS, max_tokens=12).tokens)


# -- what it saves ------------------------------------------------------------------------------------------------
@needs_stories
def test_the_second_process_needs_no_compiler_and_says_the_same(tmp_path: Path) -> None:
    setting, prompt = str(tmp_path / "cache"), "Once upon a time"
    first = said(child(STORIES, prompt, setting))
    second = said(child(STORIES, prompt, setting))
    assert not first["kept"] and first["compiled"] > 0
    assert second["kept"] and second["compiled"] == 0
    assert answer(first) == answer(second)
    modules = set(second["modules"])
    assert not [m for m in modules if m in HEAVY or m.startswith(tuple(f"{h}." for h in HEAVY))]
    assert {m for m in modules if m.startswith("rlx.lir")} <= LIGHT_LIR
    assert not loaded_files(modules) & GENERATORS
    assert not [
        m
        for m in modules
        if m in ("rlx.hub.fetching", "rlx.hub.archives", "rlx.formats.gguf", "rlx.formats.tokenizer_models")
    ]


def test_processes_that_start_at_once_keep_one_start(tiny_path: Path, tmp_path: Path) -> None:
    setting = str(tmp_path / "cache")
    reports = [said(p) for p in [child(tiny_path, TOKENS, setting) for _ in range(2)]]
    assert len({json.dumps(answer(f)) for f in reports}) == 1
    assert len(stored_files(Path(setting))) == 1  # and nothing that was left half-way
    for path in (Path(setting), *Path(setting).rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    last = said(child(tiny_path, TOKENS, setting))
    assert last["kept"] and answer(last) == answer(reports[0])
    for path in (Path(setting) / "objects").iterdir():
        path.unlink()
    without_code = said(child(tiny_path, TOKENS, setting))
    assert not without_code["kept"] and answer(without_code) == answer(last)


def test_a_kept_model_is_a_model_in_all_its_parts(folder: Path, tiny_path: Path, tmp_path: Path) -> None:
    first = unkept_language_model(tiny_path)
    language_model(tiny_path)
    model = language_model(tiny_path)
    assert is_kept(model)
    assert bits(model) == bits(first) and repr(model) == repr(first) and model.digest == first.digest
    assert model.fingerprint(3) == first.fingerprint(3) and model.checkpoint.config == first.checkpoint.config
    assert model.memory().weights == 0 < model.memory().mapped
    captured, expected = (m.run(TOKENS, capture=["layers.*", "logits"]) for m in (model, first))
    assert captured.keys() == expected.keys()
    assert all(captured[name].tobytes() == expected[name].tobytes() for name in expected)
    assert model.built.module.fingerprint() == first.built.module.fingerprint()
    assert model.compiled.dispatch().counts == first.compiled.dispatch().counts
    assert len(model.compiled.report().launches) == len(first.compiled.report().launches)
    again = load(model.export(tmp_path / "tiny.rlxp"))
    assert isinstance(again, LanguageModel) and bits(again) == bits(first)
    model.close()
    assert "closed" in repr(model)


def test_a_weight_of_a_kept_graph_can_be_set(folder: Path, tiny_path: Path) -> None:
    first, model = unkept_language_model(tiny_path), language_model(tiny_path)
    before = bits(model)
    for m in (first, model):
        m.compiled.set_param("model.norm.weight", np.full(48, 0.5, np.float32))
    assert bits(first) == bits(model) != before


def test_a_closed_model_gives_its_memory_back_at_once(folder: Path, tiny_path: Path) -> None:
    for _ in range(2):  # the first load, and one from a snapshot
        model = language_model(tiny_path)
        bits(model)
        graph = weakref.ref(model.compiled)
        gc.disable()  # a cycle would have to wait for it
        try:
            model.close()
            assert graph() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
def test_files_that_changed_after_the_load_are_not_mixed_in(folder: Path, tiny_path: Path, again: bool) -> None:
    for _ in range(1 + again):
        model = language_model(tiny_path)
    expected = bits(model)
    shutil.move(tiny_path, tiny_path.with_name("before"))  # what is mapped stays
    tiny_llama.write(tiny_path, seed=1)
    for ask in (lambda: model.run(TOKENS, capture=["layers.0"]), lambda: model.params, lambda: model.built):
        with pytest.raises(FormatError, match="its weights have changed since it was loaded"):
            ask()
    assert bits(model) == expected


def test_an_encoder_is_kept_too(folder: Path, tmp_path: Path) -> None:
    small_bert.write(tmp_path / "bert", files=small_bert.sentence_transformers("cls"))
    settle()
    first, _, second = unkept(tmp_path / "bert"), load(tmp_path / "bert"), load(tmp_path / "bert")
    assert isinstance(first, EmbeddingModel) and isinstance(second, EmbeddingModel) and is_kept(second)
    texts = ["bal bam", "dal", "fes gom kun bal bal bal"]
    assert second.embed(texts).tobytes() == first.embed(texts).tobytes()
    assert (second.settings, second.dim, second.limit) == (first.settings, first.dim, first.limit)


def test_each_load_says_once_what_files_leave_open(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_bert.write(tmp_path / "bert", files={})
    settle()
    for wanted in (1, 2):
        load(tmp_path / "bert").close()
        assert caplog.text.count("no file says how to pool") == wanted
    assert len(stored_files(folder)) == 1


def test_weights_that_are_read_as_they_are_stay_in_the_model_s_file(folder: Path, tiny_path: Path) -> None:
    first = language_model(tiny_path)
    (path,) = stored_files(folder)
    manifest = model_snapshot.container.read(path).manifest
    names = {name for name, *_ in manifest["sections"]["weights"]["arrays"]}
    assert "model.embed_tokens.weight" in manifest["in_place"] and names.isdisjoint(manifest["in_place"])
    assert names | set(manifest["in_place"]) == set(first.compiled.executable.weights)  # type: ignore[attr-defined]


@needs_stories
def test_the_tables_of_a_tokenizer_are_mapped(folder: Path) -> None:
    first, _, model = unkept_language_model(STORIES), language_model(STORIES), language_model(STORIES)
    assert is_kept(model)
    assert model.token_ids("Once upon a time, 你 🙂") == first.token_ids("Once upon a time, 你 🙂")
    assert model.tokenizer.to_json() == first.tokenizer.to_json()
    _, tables = model.tokenizer.pack()
    assert tables and all(isinstance(root_buffer(table).obj, mmap.mmap) for table in tables.values() if table.size)


@needs_stories
def test_a_tokenizer_whose_tables_are_damaged_is_made_again(folder: Path) -> None:
    expected = language_model(STORIES).token_ids("Once upon a time")
    (path,) = stored_files(folder)
    data, file = path.read_bytes(), model_snapshot.container.read(path)
    at = len(data) - len(file.data) + file.manifest["sections"][model_snapshot.TABLES]["at"]
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    model = language_model(STORIES)
    assert not is_kept(model) and model.token_ids("Once upon a time") == expected


# -- what is of no use --------------------------------------------------------------------------------------------
def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flipped_head(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


@pytest.mark.parametrize(
    "damage", [flipped_head, flip, cut, lambda d: b"", lambda d: b"\0" * len(d), lambda d: d + b"x"],
    ids=["manifest", "middle", "cut", "emptied", "zeros", "longer"],
)  # fmt: skip
def test_a_damaged_snapshot_is_made_again(folder: Path, tiny_path: Path, damage: Callable[[bytes], bytes]) -> None:
    expected = bits(language_model(tiny_path))
    (path,) = stored_files(folder)
    path.write_bytes(damage(path.read_bytes()))
    model = language_model(tiny_path)
    assert not is_kept(model) and bits(model) == expected
    model = language_model(tiny_path)
    assert is_kept(model) and bits(model) == expected


def test_the_start_of_another_model_is_refused(folder: Path, tiny_path: Path, tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "other", seed=1)
    settle()
    language_model(tiny_path)
    (one,) = stored_files(folder)
    expected = bits(language_model(tmp_path / "other"))
    (other,) = set(stored_files(folder)) - {one}
    shutil.copy(one, other)
    model = language_model(tmp_path / "other")
    assert not is_kept(model) and bits(model) == expected


def test_a_snapshot_made_by_another_llvm_is_not_used(
    folder: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(language_model(tiny_path))
    assert is_kept(language_model(tiny_path))
    pretend_other_llvm(monkeypatch)
    other = language_model(tiny_path)
    assert not is_kept(other) and bits(other) == expected
    assert is_kept(language_model(tiny_path)) and len(stored_files(folder)) == 1  # that of the LLVM before is gone


def test_other_instructions_have_a_start_of_their_own(folder: Path, tiny_path: Path) -> None:
    settings = {"profile": CompileProfile(), "context": None, "cache": "f32", "precision": "auto"}
    session = Session()
    (here,) = model_snapshot.find(tiny_path, session, settings).values()
    session.target = replace(host(), features=f"{host().features},+other")
    (elsewhere,) = model_snapshot.find(tiny_path, session, settings).values()
    assert here.key != elsewhere.key


def test_pipes_are_not_waited_for_and_folders_behind_links_count(tmp_path: Path) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    model.mkdir(), elsewhere.mkdir()
    os.mkfifo(model / "pipe")
    (model / "pooling").symlink_to(elsewhere)
    (elsewhere / "config.json").write_text("mean")
    before = model_snapshot._state(tuple(model_snapshot._files(model)))
    (elsewhere / "config.json").write_text("last")
    assert model_snapshot._state(tuple(model_snapshot._files(model))) != before
    for i in range(model_snapshot.MAX_FILES):
        (model / str(i)).touch()
    assert len(tuple(model_snapshot._files(model))) > model_snapshot.MAX_FILES


def test_a_model_that_changes_is_loaded_anew(folder: Path, tiny_path: Path) -> None:
    before = bits(language_model(tiny_path))
    file = tiny_path / "model.safetensors"
    status = file.stat()
    tiny_llama.write(tiny_path, seed=1)
    assert file.stat().st_size == status.st_size
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # who hides a change hides it from others
    settle()
    model = language_model(tiny_path)
    assert not is_kept(model) and bits(model) != before
    after = language_model(tiny_path)
    assert is_kept(after) and bits(after) == bits(model)
    assert len(stored_files(folder)) == 1  # the start of what it was is gone


@pytest.mark.parametrize("name", ["config.json", "profile.toml", "tokenizer.json"])
def test_files_next_to_the_weights_count(folder: Path, tiny_path: Path, name: str) -> None:
    language_model(tiny_path)
    path = tiny_path / name
    path.write_text(path.read_text() + "\n" if path.exists() else '[fusion]\npolicy = "direct"\n' * (name[0] == "p"))
    settle()
    if name == "tokenizer.json":
        with pytest.raises(Exception, match=r"tokenizer\.json"):
            load(tiny_path)
    else:
        assert not is_kept(language_model(tiny_path)) and is_kept(language_model(tiny_path))


@pytest.mark.parametrize("settings", [{"context": 100}, {"cache": "f16"}, {"profile": "decode"}])
def test_other_settings_have_a_start_of_their_own(folder: Path, tiny_path: Path, settings: dict[str, Any]) -> None:
    language_model(tiny_path)
    other = language_model(tiny_path, **settings)
    assert not is_kept(other)
    again = language_model(tiny_path, **settings)
    assert is_kept(again) and bits(again) == bits(other) and again.context == other.context
    assert is_kept(language_model(tiny_path, threads=1))  # of which nothing that is kept depends


def test_a_patched_model_and_families_of_others_are_not_kept(
    folder: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    language_model(tiny_path, patch=lambda flow: flow)
    assert stored_files(folder) == []
    language_model(tiny_path)
    foreign = family.Family("own", "decoder", (), ("own",), object, {}, lambda *_: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(family.FAMILIES, "own", foreign)
    assert not is_kept(language_model(tiny_path))


def test_a_file_that_has_just_changed_is_not_trusted_yet(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_snapshot, "SETTLED_NS", 10**12)
    tiny_llama.write(tmp_path / "new")
    assert not is_kept(language_model(tmp_path / "new")) and stored_files(folder) == []


# -- where it may not be ------------------------------------------------------------------------------------------
def test_off_keeps_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLX_CACHE", "off")
    first, second = language_model(tiny_path), language_model(tiny_path)
    assert not is_kept(second) and bits(first) == bits(second)


def test_readonly_uses_what_is_there_and_writes_nothing(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "rlx"

    def choose(setting: str) -> None:
        monkeypatch.setenv("RLX_CACHE", setting)
        cache_folder._open.cache_clear()

    choose("readonly")
    language_model(tiny_path)
    assert not folder.exists()
    choose("")
    forget_code(monkeypatch)
    expected = bits(language_model(tiny_path))
    choose("readonly")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    model = language_model(tiny_path)
    assert is_kept(model) and bits(model) == expected
    (path,) = stored_files(folder)
    path.write_bytes(cut(path.read_bytes()))
    assert not is_kept(language_model(tiny_path))
    assert before.keys() == {p: 0 for p in folder.rglob("*")}.keys()
    choose(os.environ["RLX_CACHE"])


def test_a_disk_that_takes_nothing_is_no_error(folder: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_snapshot.container, "write", full)
    assert not is_kept(language_model(tiny_path)) and not is_kept(language_model(tiny_path))


def test_snapshots_have_a_limit_and_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cache_folder.current()
    for i, name in enumerate(("a", "b", "c")):
        path = store.room(name, 1000)
        assert path is not None
        path.write_bytes(bytes(1000))
        os.utime(path, (i, i))
    path = store.snapshot("a")
    assert path is not None
    store.used(path)
    monkeypatch.setenv("RLX_CACHE_LIMIT", "0.0000031")
    assert store.room("d", 1500) is not None
    assert [p.name for p in stored_files(folder)] == ["a"]
    assert store.room("e", 4000) is None and store.snapshot("a") is not None
    assert dict((k, (n, size)) for k, n, size in store.kinds())[cache_folder.SNAPSHOTS] == (1, 1000)
    monkeypatch.setenv("RLX_CACHE_LIMIT", "0")
    assert store.room("f", 1) is None


def test_room_is_made_of_other_states_alone(folder: Path) -> None:
    store = cache_folder.current()
    for key in ("a-1", "a-1", "b-1"):
        path = store.room(key, 10)
        assert path is not None
        path.write_bytes(bytes(10))
        assert store.room(key, 10) == path and path.exists()  # another process may have written it
    assert store.room("a-2", 10) is not None
    assert [p.name for p in stored_files(folder)] == ["b-1"]


# -- several processes --------------------------------------------------------------------------------------------
def test_a_start_that_another_process_has_written_meanwhile_is_used(
    folder: Path, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(language_model(tiny_path))
    (path,) = stored_files(folder)
    theirs, keep = path.rename(tmp_path / "theirs"), model_snapshot.write

    def late(model: Any, start: model_snapshot.ModelSnapshot) -> bool:
        path.hardlink_to(theirs)
        return keep(model, start)

    monkeypatch.setattr(model_snapshot, "write", late)
    model = language_model(tiny_path)
    assert isinstance(model._checkpoint, SnapshotCheckpoint) and not is_kept(model) and bits(model) == expected
    assert stored_files(folder) == [path] and path.samefile(theirs)
    assert is_kept(language_model(tiny_path))


def test_a_damaged_start_that_cannot_be_removed_is_not_waited_for(
    folder: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, opened = bits(language_model(tiny_path)), []
    (path,) = stored_files(folder)
    path.write_bytes(cut(path.read_bytes()))
    build = load_module.open_model

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(load_module, "open_model", lambda *args: opened.append(args) or build(*args))
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(model_snapshot.container, "write", refuse)
    model = language_model(tiny_path)
    assert len(opened) == 1 and bits(model) == expected


def test_a_damaged_start_that_another_process_has_replaced_is_not_removed(
    folder: Path, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(language_model(tiny_path))
    (path,) = stored_files(folder)
    theirs, read = Path(shutil.copy(path, tmp_path / "theirs")), model_snapshot.container.read
    path.write_bytes(cut(path.read_bytes()))
    arriving = [theirs]

    def late(*args: Any) -> Any:
        try:
            return read(*args)
        finally:
            while arriving:  # once
                path.unlink()
                path.hardlink_to(arriving.pop())

    monkeypatch.setattr(model_snapshot.container, "read", late)
    model = language_model(tiny_path)
    assert isinstance(model._checkpoint, SnapshotCheckpoint) and not is_kept(model) and bits(model) == expected
    assert path.samefile(theirs)


@pytest.mark.parametrize("text", ["much", "-1", "nan"])
def test_a_limit_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_LIMIT", text)
    with pytest.raises(CapabilityError, match="RLX_CACHE_LIMIT: expected gigabytes"):
        cache_folder.snapshot_limit()
