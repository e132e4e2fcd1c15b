"""Files that are cut short under a command: it says which one it was. Other bus errors are left to others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small_bert
from limits import LONGEST_S

import rlx
from rlx.backends.cpu import bus_errors

SOURCE = Path(rlx.__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the handler knows the signals of Linux")

# Files are cut short before a request looks at them (early), or after that and before kernels read them (late).
EMBED = """
import os, sys
from rlx.cli.main import main
from rlx.engine.model import Model

look, (when, model, *files) = Model.check_usable, sys.argv[1:]
def look_and_cut(self):
    if when == "late":
        look(self)
    for file in files:
        os.truncate(file, 0)
    look(self) if when == "early" else None
Model.check_usable = look_and_cut
code = main(["embed", "-m", model, "bal bam"])
from rlx.backends.cpu import bus_errors
print("llvmlite" in sys.modules, bool(bus_errors._installed), file=sys.stderr)
sys.exit(code)
"""
ELSEWHERE = """
import ctypes, faulthandler, mmap, os, signal, sys, tempfile
from rlx.backends.cpu import bus_errors
{before}
assert bus_errors.install(4, "before ", " after") and bus_errors.install(4, "", "")
def fault():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(10000))
        file.flush()
        plain = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.ftruncate(file.fileno(), 0)
        return plain[5000]
{then}
print("went on")
"""


def python(code: str, *arguments: object, cache: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONFAULTHANDLER": ""} | ({"RLX_CACHE": cache} if cache else {})
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bus") / "encoder"
    small_bert.write(folder, files=small_bert.sentence_transformers("cls"))
    return folder


def test_a_command_names_the_model_file_that_was_cut_short(tmp_path: Path) -> None:
    copy = tmp_path / "encoder"
    small_bert.write(copy, files=small_bert.sentence_transformers("cls"))
    done = python(EMBED, "late", copy, copy / "model.safetensors")
    assert done.returncode == 4, done.stderr
    assert f"\nrlx: {copy}/model.safetensors: the file was cut short" in done.stderr
    assert "Traceback" not in done.stderr and "hint: run the command again" in done.stderr


def test_a_command_names_the_start_that_was_cut_short_and_loads_no_llvm(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = python(EMBED, "late", model, cache=str(tmp_path))
        assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False True"  # no LLVM, but the handler
    (start,) = (tmp_path / "starts").iterdir()
    done = python(EMBED, "late", model, start, cache=str(tmp_path))
    assert done.returncode == 4 and f"\nrlx: {start}: the file was cut short" in done.stderr, done.stderr


def test_a_file_that_was_cut_short_before_a_request_is_an_error_as_any_other(tmp_path: Path) -> None:
    copy = tmp_path / "encoder"
    small_bert.write(copy, files=small_bert.sentence_transformers("cls"))
    done = python(EMBED, "early", copy, copy / "model.safetensors")
    assert done.returncode == 4, done.stderr
    assert "model.safetensors: the file has changed since it was loaded: it had" in done.stderr


@pytest.mark.parametrize(
    ("before", "then", "code", "says"),
    [
        ("", "fault()", -signal.SIGBUS, ""),
        ("", "os.kill(os.getpid(), signal.SIGBUS)", -signal.SIGBUS, ""),
        ("faulthandler.enable()", "fault()", -signal.SIGBUS, "Fatal Python error: Bus error"),
        ("signal.signal(signal.SIGBUS, signal.SIG_IGN)", "fault()", -signal.SIGBUS, ""),
        ("signal.signal(signal.SIGBUS, signal.SIG_IGN)", "os.kill(os.getpid(), signal.SIGBUS)", 0, "went on"),
        (
            "signal.signal(signal.SIGBUS, lambda *a: print('mine'))", "os.kill(os.getpid(), signal.SIGBUS)", 0,
            "mine\nwent on",
        ),
    ],
)  # fmt: skip
def test_other_bus_errors_go_where_they_went_before(before: str, then: str, code: int, says: str) -> None:
    done = python(ELSEWHERE.format(before=before, then=then))
    assert (done.returncode, "before" in done.stderr) == (code, False), done.stderr
    assert says in done.stdout + done.stderr


def test_a_fault_in_a_thread_is_reported_too() -> None:
    then = """
import threading
from rlx.formats.tensor_file import open_bytes
with tempfile.NamedTemporaryFile() as file:
    file.write(bytes(10000))
    file.flush()
    array = open_bytes(file.name).array(0, 10000)
    os.truncate(file.name, 0)
    print(file.name, flush=True)
    thread = threading.Thread(target=array.sum)
    thread.start()
    thread.join()
"""
    done = python(ELSEWHERE.format(before="faulthandler.enable()", then=then))
    assert done.returncode == 4
    assert done.stderr == f"before {done.stdout.strip()} after"


def test_a_library_leaves_signals_alone(model: Path) -> None:
    code = f"import rlx; rlx.load({str(model)!r}).embed('bal'); from rlx.backends.cpu import bus_errors"
    done = python(code + "; print(bus_errors._installed)")
    assert done.stdout == "[]\n", done.stderr


def test_without_the_code_in_the_cache_nothing_is_compiled() -> None:
    code = "import sys; from rlx.backends.cpu import bus_errors; print(bus_errors.install(4, '', '', compiling=False))"
    assert python(code + "; print('llvmlite' in sys.modules)", cache="off").stdout == "False\nFalse\n"


def test_elsewhere_there_is_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_errors, "_installed", [])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not bus_errors.install(4, "", "")
