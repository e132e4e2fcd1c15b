"""What goes wrong for users: each trouble has its exit code, and a message that names the way out; no tracebacks."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_llama
from stub_model import StubModel

from rlx.cli import console, embed, run
from rlx.cli.main import main
from rlx.errors import FormatError, RlxError
from rlx.hub import archives, catalogue, store
from rlx.profile import CompileProfile

SOURCE = Path(__file__).parents[2] / "src"
ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")


@pytest.fixture(autouse=True)
def nobody_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No stdin, no models, no network."""
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("RLX_OFFLINE", "1")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err
    return err


# -- models that cannot be had (3) -----------------------------------------------------------------------------------
def test_offline_names_three_ways_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hello there"]) == 3
    err = said(capsys)
    assert "smollm2-135m: not on this machine, and offline" in err
    assert "rlx pull smollm2-135m" in err and str(tmp_path / "home") in err and "give a path" in err
    assert main(["run", "some/model", "hello"]) == 3
    assert "unset RLX_OFFLINE" in said(capsys)


def test_a_changed_file_is_not_called_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "home" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"something else")
    assert main(["run", "hello there"]) == 3
    assert "exists but does not match the catalogue" in said(capsys)


@pytest.mark.parametrize(
    ("name", "help_"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("./x.gguf", "no such file or folder"),
        ("qqqqqqqq", "rlx models lists the catalogue"),
    ],
)
def test_an_unknown_name_has_its_nearest(name: str, help_: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", name]) == 3
    err = said(capsys)
    assert help_ in err and f"rlx run -p {name}" in err


def test_without_a_home_a_folder_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless(*arguments: object, **options: object) -> str:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("RLX_HOME")
    monkeypatch.delenv("RLX_OFFLINE")
    monkeypatch.setattr("platformdirs.user_data_dir", homeless)
    assert main(["run", "hello there"]) == 1
    assert "set RLX_HOME to a folder" in said(capsys)
    assert main(["models"]) == 0


def test_a_home_that_cannot_be_written_asks_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    monkeypatch.delenv("RLX_OFFLINE")
    assert main(["pull", "minilm-l6"]) == 1
    err = said(capsys)
    assert "cannot be written" in err and "set RLX_HOME" in err


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_home_where_no_folder_can_be_asks_for_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLX_HOME", "/proc/nope")
    monkeypatch.delenv("RLX_OFFLINE")
    assert main(["pull", "minilm-l6"]) == 1
    assert "set RLX_HOME" in said(capsys)


def test_what_rlx_cannot_run_is_said_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RLX_OFFLINE")
    monkeypatch.setattr(archives, "download", lambda *a: pytest.fail("it was fetched"))
    entry = replace(catalogue.CATALOGUE["gemma3-270m"], family="gemma9", supported=False)
    monkeypatch.setitem(catalogue.CATALOGUE, "gemma3-270m", entry)
    assert main(["run", "gemma3-270m", "hello"]) == 1
    assert "architecture 'gemma9' is not supported yet" in said(capsys)
    assert main(["models"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gemma3-270m")]
    assert "not supported yet" in line


def test_a_full_disk_is_found_before_the_first_byte(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RLX_OFFLINE")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: _Usage())
    assert main(["pull", "minilm-l6"]) == 1
    err = said(capsys)
    assert "is full" in err and "5.0 MB free" in err and "rlx rm" in err


class _Usage:
    free = 5_000_000


def test_a_disk_that_fills_up_meanwhile_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.delenv("RLX_OFFLINE")
    monkeypatch.setattr(archives, "download", fails)
    assert main(["pull", "minilm-l6", "-q"]) == 1
    assert "is full" in said(capsys)


def test_retries_of_pip_are_told_once() -> None:
    lines = [f"WARNING: Retrying (Retry(total={n}))" for n in range(5)]
    assert archives.last_lines("\n".join(["Looking", *lines, "ERROR: none"])) == ["Looking", lines[0], "ERROR: none"]


# -- input without end (2) -------------------------------------------------------------------------------------------
class Endless(io.RawIOBase):
    """Gives zeros for ever, and counts them."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.bytes_read += len(buffer)
        buffer[:] = bytes(len(buffer))
        return len(buffer)


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["run", "-m", "x", "hello"], run.MAX_BYTES),
        (["embed", "--file", "-"], embed.MAX_BYTES),
        (["embed"], embed.MAX_BYTES),
    ],
)
def test_an_endless_stdin_is_read_up_to_a_bound(
    words: list[str], most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Endless()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(source)))
    assert main(words) == 2
    assert f"stdin has more than {most >> 20} MiB" in said(capsys)
    assert most < source.bytes_read < most + (4 << 20)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no /dev/zero")
def test_an_endless_file_is_read_up_to_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "--file", "/dev/zero"]) == 2
    assert "/dev/zero has more than 256 MiB" in said(capsys)
    (tmp_path / "zero.rlx").symlink_to("/dev/zero")
    assert main(["inspect", str(tmp_path / "zero.rlx")]) == 2
    assert "zero.rlx has more than 256 MiB" in said(capsys)
    with pytest.raises(FormatError, match="more than 1048576 characters"):
        CompileProfile.from_toml("/dev/zero")


def test_the_bound_is_for_all_files_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embed, "MAX_BYTES", 1 << 20)
    (tmp_path / "a.txt").write_bytes(b"x" * 600_000)
    for name in ("b.bin", "b2.bin"):  # no text: passed over, and takes no room
        (tmp_path / name).write_bytes(b"\xff" * 400_000)
    assert len(embed.read_texts([str(tmp_path)], None)) == 1
    (tmp_path / "c.txt").write_bytes(b"y" * 600_000)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"z" * 600_000)))
    for words in ([str(tmp_path)], ["--file", str(tmp_path / "a.txt"), "--file", str(tmp_path / "c.txt")]):
        assert main(["embed", *words]) == 2
        assert "c.txt and what was read before it have more than 1 MiB" in said(capsys)
    assert main(["embed", "--file", str(tmp_path / "a.txt"), "--file", "-"]) == 2
    assert "stdin and what was read before it have more than 1 MiB" in said(capsys)


@needs_stories
def test_a_prompt_that_is_too_long_is_no_bad_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello world\n" * 1_700_000)))
    assert main(["run", str(STORIES / "stories260K.bin")]) == 1
    err = said(capsys)
    assert "the prompt of 20,399,999 characters has more tokens than the context" in err and "--context" in err


def test_the_bounds_of_input_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, bound in (("run", "64 MiB"), ("embed", "256 MiB")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert bound in " ".join(capsys.readouterr().out.split())


# -- bad files (4) ---------------------------------------------------------------------------------------------------
def test_bad_files_are_named_with_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, noise, folder = tmp_path / "empty.gguf", tmp_path / "noise.gguf", tmp_path / "folder"
    empty.touch()
    noise.write_bytes(bytes(range(256)) * 9)
    folder.mkdir()
    for path, wrong in ((empty, "the file is empty"), (noise, "not a known model file"), (folder, "found none")):
        assert main(["run", str(path), "hello"]) == 4
        err = said(capsys)
        assert str(path) in err and wrong in err


@needs_stories
def test_a_cut_file_names_the_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (STORIES / "tinyllamas-stories-260k-f32.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    assert main(["run", str(tmp_path / "cut.gguf"), "hello"]) == 4
    err = said(capsys)
    assert "byte " in err and "expected" in err and "found" in err


def test_a_model_that_lacks_a_weight_is_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    small_llama.write_folder(
        tmp_path, small_llama.random_weights(small_llama.SETTINGS), small_llama.SETTINGS | {"num_hidden_layers": 3}
    )
    assert main(["run", str(tmp_path), "hello"]) == 4
    err = said(capsys)
    assert "model.safetensors: weight 'model.layers.2." in err and "in stage: layers.2.attn" in err


def test_weights_without_their_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ASSETS / "tiny-random" / "tiny_llama3" / "model.safetensors"
    if not source.exists():
        pytest.skip(f"{source} is absent")
    (tmp_path / "model.safetensors").symlink_to(source)
    assert main(["run", str(tmp_path), "hello"]) == 4
    assert "config.json" in said(capsys)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ASSETS / "tiny-random" / "tiny_llama3" / "model.safetensors"
    if not source.exists():
        pytest.skip(f"{source} is absent")
    (tmp_path / "model.safetensors").symlink_to(source)
    (tmp_path / "config.json").write_text('{"model_type": "quux9"}')
    assert main(["run", str(tmp_path), "hello"]) == 1
    err = said(capsys)
    assert "'quux9' is not supported" in err and "llama" in err


@needs_stories
def test_dumps_that_cannot_be_written_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that was loaded before, too."""
    model = str(STORIES / "stories260K.bin")
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    assert main(["run", model, "hello there", "--max-tokens", "1"]) == 0
    capsys.readouterr()
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLX_DUMP", str(tmp_path / "file"))
    assert main(["run", model, "hello there", "--max-tokens", "1"]) == 1
    assert f"RLX_DUMP: the folder '{tmp_path / 'file'}' cannot be written" in said(capsys)


# -- memory (5), defects (1), interruption (130) ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MemoryError("Unable to allocate 9 TiB"), 5, "not enough memory: Unable to allocate 9 TiB"),
        (MemoryError(), 5, "not enough memory\n"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), 5, "not enough memory"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
        (RlxError("plain", hint="this way"), 1, "rlx: plain\n  hint: this way\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "the output cannot be written"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 1, "rlx: [Errno 2] No such file: 'x'"),
        (ZeroDivisionError("oops"), 1, "rlx: ZeroDivisionError: oops\n  hint: this is a defect of rlx"),
    ],
)
def test_every_error_has_its_code_and_no_traceback(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(run, "open_model", fails)
    monkeypatch.setattr("rlx.cli.main._drop_output", lambda: None)
    assert main(["run", "hello there"]) == code
    assert text in said(capsys)


@needs_stories
@pytest.mark.skipif(sys.platform != "linux", reason="limits on addresses are Linux's")
def test_a_compiler_that_has_no_room_is_a_lack_of_memory() -> None:
    """A cold start with so few addresses left that LLVM cannot be mapped."""
    code = f"""
import resource, sys
from rlx.cli import run
from rlx.cli.main import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (90 << 20), resource.RLIM_INFINITY))
sys.exit(main(["run", "{STORIES / "stories260K.bin"}", "hello there", "--max-tokens", "1", "--threads", "1"]))
"""
    own = os.environ | {"PYTHONPATH": str(SOURCE), "RLX_CACHE": "off"}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "LLVM: " in done.stderr and "MiB are free" in done.stderr and "ulimit -v" in done.stderr


@pytest.mark.parametrize("words", [["--debug", "run", "a b"], ["run", "a b", "--debug"]])
def test_debug_shows_where_it_happened(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "open_model", fails)
    with pytest.raises(ZeroDivisionError):
        main(words)


@pytest.mark.parametrize("words", [["frobnicate"], ["run", "--max-tokens", "many"], ["inspect"]])
def test_argparse_and_we_agree_on_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


# -- the terminal ----------------------------------------------------------------------------------------------------
def test_controls_of_a_model_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "is_terminal", lambda stream: stream is sys.stdout)
    console.write("a\x1b[2Jb\x07\tc\n\x9bd")
    assert capsys.readouterr().out == "a\ufffd[2Jb\ufffd\tc\n\ufffdd"


def test_without_stderr_nothing_lands_in_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "open_model", lambda name, arguments: StubModel(["yes"]))
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["run", "hello there"]) == 0
    assert capsys.readouterr().out == "yes\n"


@needs_stories
def test_an_output_that_ends_early_and_one_in_ascii() -> None:
    own = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "ascii"}
    command = f"{sys.executable} -m rlx.cli.main inspect {STORIES / 'stories260K.bin'} --level lir --seq 4"
    piped = subprocess.run(
        ["bash", "-c", f"{command} | head -c 100; exit ${{PIPESTATUS[0]}}"], env=own, capture_output=True, check=False
    )
    assert (piped.returncode, len(piped.stdout), piped.stderr) == (0, 100, b"")
    complete = subprocess.run(command.split(), env=own, capture_output=True, check=False)
    assert complete.returncode == 0 and b"4?64" in complete.stdout  # 4×64


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["run", "--temprature", "0.5", "hi"], "run: unknown argument '--temprature'", "did you mean '--temperature'"),
        (["models", "--josn"], "models: unknown argument '--josn'", "did you mean '--json'"),
        (["embed", "a text", "--query", " "], "embed: --query is empty", "rlx embed FOLDER --query"),
    ],
)
def test_a_wrong_option_is_named_by_its_command(
    words: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown and hint in shown
