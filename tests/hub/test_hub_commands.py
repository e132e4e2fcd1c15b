"""`rlx pull`, `models`, `show` and `rm`: their output, and that only `pull` uses the network."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_index
import pytest
from fake_index import as_file, content, entry, make_wheel, sha256

from rlx.cli import models, pull, rm, show
from rlx.errors import FormatError, NotFoundError
from rlx.hub import catalogue, store


def run(*words: str) -> int:
    top = argparse.ArgumentParser()
    commands = top.add_subparsers(required=True)
    for command in (pull, models, show, rm):
        command.add(commands)
    arguments = top.parse_args(words)
    return int(arguments.run(arguments))


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a real header, in the model folder."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"a": "b"}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(24)
    item = entry("tiny", as_file(make_wheel(index, "tiny", {"m": data}), "m", data, "model.safetensors"))
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", item)
    monkeypatch.setattr(models, "CATALOGUE", catalogue.CATALOGUE)
    folder = store.home() / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(data)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        pytest.fail("it went out")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_pull_prints_the_path_and_nothing_else(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "one") == 0
    out, err = capsys.readouterr()
    assert out == f"{store.home() / 'models' / 'one' / 'small.gguf'}\n"
    assert "fetched one" in err
    assert run("pull", "one", "-q") == 0
    assert capsys.readouterr() == (out, "")
    assert run("pull", "one") == 0
    assert "already here, 50.0 kB" in capsys.readouterr().err


def test_pull_takes_both_spellings_of_licence(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFoundError, match="not accepted"):
        run("pull", "terms", "-q")
    assert run("pull", "terms", "-q", "--accept-license") == 0


@pytest.mark.usefixtures("no_network")
def test_models_lists_what_is_known_and_what_is_here(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == ["name", "one", "many", "joined", "terms", "tiny"]
    assert "yes" in lines["tiny"] and "yes" not in lines["one"]
    assert run("models", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["tiny"]["present"] and rows["tiny"]["folder"] == str(tiny)
    assert not rows["joined"]["present"]
    assert [p["project"] for p in rows["joined"]["packages"]] == ["test-part1", "test-part2", "test-part3"]
    assert rows["one"]["files"] == [{"name": "small.gguf", "size": 50_000, "sha256": sha256(content("small", 50_000))}]


@pytest.mark.usefixtures("no_network")
def test_show_of_a_model_that_is_here(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "tiny", "--check") == 0
    out = capsys.readouterr().out
    assert str(tiny) in out
    assert "  ok" in out
    assert "safetensors: 1 tensors (1 f32)" in out
    assert run("show", "tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out)["header"]["elements"] == 6


@pytest.mark.usefixtures("no_network")
def test_show_of_a_model_that_is_not_here(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "joined") == 0
    assert "not here: rlx pull joined" in capsys.readouterr().out
    assert run("show", "org/name") == 0
    assert "not here: rlx pull org/name" in capsys.readouterr().out
    with pytest.raises(NotFoundError, match="'joinde' is not a catalogue model"):
        run("show", "joinde")


@pytest.mark.usefixtures("no_network")
def test_show_of_a_file_of_the_user(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tiny, tiny / "model.safetensors"):
        assert run("show", str(path), "--check") == 0
        assert "sha256" in capsys.readouterr().out
    with pytest.raises(FormatError):
        run("show", str(Path(fake_index.__file__)))


@pytest.mark.usefixtures("no_network")
def test_show_check_finds_what_was_changed_behind_our_back(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("show", "tiny")
    path = tiny / "model.safetensors"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FormatError, match=r"tiny: not as in the catalogue: model.safetensors"):
        run("show", "tiny", "--check")
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.usefixtures("no_network")
def test_rm_asks_and_keeps_without_an_answer(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rm", "tiny") == 1
    assert "use -y" in capsys.readouterr().err
    answers = iter(["no\n", "y\n"])
    monkeypatch.setattr(sys, "stdin", argparse.Namespace(isatty=lambda: True, readline=lambda: next(answers)))
    assert run("rm", "tiny") == 1
    assert tiny.exists()
    assert run("rm", "tiny") == 0
    assert not tiny.exists()
    assert "freed" in capsys.readouterr().err


@pytest.mark.usefixtures("no_network")
def test_rm_of_what_is_not_here_says_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFoundError, match="'nosuch' is not a catalogue model"):
        run("rm", "nosuch")  # and asks nothing
    assert run("rm", "-y", "joined") == 0
    assert "was not here" in capsys.readouterr().err
