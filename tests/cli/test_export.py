"""`rlx export`: a model becomes a file that other commands take, and its manifest can be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import resigned

from rlx.cli.main import BAD_FILE, FAILED, NOT_FOUND, OK, USAGE, main

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K" / "stories260K.bin"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is absent")
    path = tmp_path_factory.mktemp("export") / "stories.rlxp"
    assert main(["export", str(STORIES), "-o", str(path), "--weights", "--context", "100"]) == OK
    return path


def test_an_export_is_written_and_its_path_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is absent")
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(STORIES)]) == OK
    said = capsys.readouterr()
    assert said.out == "stories260K.rlxp\n" and Path("stories260K.rlxp").exists()
    assert "kernels for" in said.err and f"weights stay in {STORIES}" in said.err


def test_run_takes_an_export(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["Once upon a time", "--raw", "--temperature", "0", "--max-tokens", "16"]
    assert main(["run", str(exported), *prompt]) == OK
    told = capsys.readouterr().out
    assert main(["run", str(STORIES), *prompt]) == OK
    assert told == capsys.readouterr().out and "Lily" in told


def test_the_manifest_says_what_is_inside(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--manifest", str(exported)]) == OK
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["kind"] == "decoder" and manifest["model"]["context"] == 100
    assert manifest["model"]["files"][0]["name"] == STORIES.name
    assert any(name.startswith("matmul") for name in manifest["kernels"])
    assert "weights" in manifest["sections"]


def test_a_manifest_with_wrong_members_is_a_bad_file(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, body = resigned.parts_of(exported)
    for member, value in (("sections", {"x": 1}), ("bytes", "many"), ("kernels", None)):
        path = resigned.write(exported.with_name("wrong.rlxp"), manifest | {member: value}, body)
        assert main(["export", str(path), "--manifest"]) == 4
        assert f"manifest: {member}" in capsys.readouterr().err


def test_the_manifest_of_a_damaged_file_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(exported.read_bytes())
    data[-1000] ^= 1
    (tmp_path / "damaged.rlxp").write_bytes(data)
    assert main(["export", "--manifest", str(tmp_path / "damaged.rlxp")]) == BAD_FILE
    assert "section 'weights' is damaged" in capsys.readouterr().err


def test_what_cannot_be_meant_is_said(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(exported), "-o", str(tmp_path / "x.bin")]) == USAGE
    assert "ends in .rlxp" in capsys.readouterr().err
    assert main(["export", str(exported), "-o", str(tmp_path / "no" / "x.rlxp")]) == USAGE
    assert "there is no folder" in capsys.readouterr().err
    assert main(["export", "no-such-model", "-o", str(tmp_path / "x.rlxp")]) == NOT_FOUND
    assert main(["export", str(exported), "-o", str(tmp_path / "x.rlxp")]) == FAILED
    assert "is itself an export" in capsys.readouterr().err
    assert main(["run", str(exported), "hello", "--context", "50"]) == FAILED
    assert "context is 50, but exported with 100" in capsys.readouterr().err
