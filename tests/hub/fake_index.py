"""Test packages: a folder of wheels that serves as pip's index, and catalogue entries for them.

`python fake_index.py FOLDER NAME [WHEN]` pulls a model in a separate process; WHEN says where it is killed.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

from rlx.hub import archives, catalogue, pull
from rlx.hub.catalogue import Archive, Entry, File, Piece, Terms
from rlx.hub.progress import Tick

ENVIRONMENT = ("PIP_", "UV_", "HF_", "HUGGINGFACE_", "RLX_OFFLINE", "RLX_HOME", "RLX_ACCEPT", "npm_")
PART_SIZES = (300_000, 200_000, 100_000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content(label: str, size: int) -> bytes:
    """Deterministic pseudo-random bytes."""
    return hashlib.shake_256(label.encode()).digest(size)


def make_wheel(folder: Path, project: str, members: dict[str, bytes], version: str = "1.0") -> Archive:
    """Write a wheel; returns its record."""
    module = project.replace("-", "_")
    about = f"{module}-{version}.dist-info"
    extra = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    path = folder / f"{module}-{version}-py3-none-any.whl"
    unfinished = folder / f".{os.getpid()}-{path.name}"  # another process may be reading the old file
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in (members | extra).items():
            wheel.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    data = unfinished.read_bytes()
    unfinished.replace(path)
    return Archive("pypi", project, version, len(data), sha256(data))


def as_file(archive: Archive, member: str, data: bytes, name: str | None = None) -> File:
    file_name = name or member.rsplit("/", 1)[-1]
    return File(file_name, len(data), sha256(data), (Piece(archive, member, len(data), sha256(data)),))


def entry(name: str, *files: File, **options: Any) -> Entry:
    return Entry(name, f"{name} for tests", "chat", "llama", "MIT", "tests", files, **options)


def table(folder: Path) -> dict[str, Entry]:
    """Write the wheels to the folder and return their catalogue; deterministic."""
    small = content("small", 50_000)
    config = b'{"model_type": "none"}'
    pooling = b'{"pooling": "mean"}'
    parts = [content(f"part{i}", size) for i, size in enumerate(PART_SIZES, 1)]
    one = make_wheel(folder, "test-one", {"test_one/small.gguf": small, "test_one/__init__.py": b"raise SystemExit"})
    many = make_wheel(folder, "test-many", {"m/w.safetensors": small, "m/config.json": config, "m/1/p.json": pooling})
    pieces = []
    for i, data in enumerate(parts, 1):
        wheel = make_wheel(folder, f"test-part{i}", {f"part{i}/data/part{i:02}.bin": data})
        pieces.append(Piece(wheel, f"part{i}/data/part{i:02}.bin", len(data), sha256(data)))
    joined = File("joined.gguf", sum(PART_SIZES), sha256(b"".join(parts)), tuple(pieces))
    entries = (
        entry("one", as_file(one, "test_one/small.gguf", small), aliases=("uno",)),
        entry(
            "many",
            as_file(many, "m/w.safetensors", small, "model.safetensors"),
            as_file(many, "m/config.json", config),
            as_file(many, "m/1/p.json", pooling, "1_Pooling/config.json"),
        ),
        entry("joined", joined),
        entry("terms", as_file(one, "test_one/small.gguf", small), terms=Terms("gemma", "Terms of Test", "Be kind.\n")),
    )
    return {e.name: e for e in entries}


def expected(item: Entry) -> dict[str, str]:
    """Names and hashes of the files of a model."""
    return {f.name: f.sha256 for f in item.files}


def file_hashes(folder: Path) -> dict[str, str]:
    """Names and hashes of all files in a model's folder that are not hidden."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    names = {p.relative_to(folder).as_posix(): p for p in files}
    return {n: sha256(p.read_bytes()) for n, p in names.items() if not n.startswith(".")}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, name: str, when: str = "") -> None:
    catalogue.CATALOGUE = table(folder)
    download, copy = archives.download, archives._copy

    def killed_before_part_2(archive: Archive, folder: Path, tick: Tick) -> Path:
        if archive.project == "test-part2":
            _kill()
        return download(archive, folder, tick)

    def killed_in_part_2(source: Any, target: Any, size: int, *digests: Any) -> str:
        if target is not None and size == PART_SIZES[1]:
            copy(source, target, size // 2)
            target.flush()
            _kill()
        return copy(source, target, size, *digests)

    match when:
        case "before part 2":
            archives.download = killed_before_part_2
        case "in part 2":
            archives._copy = killed_in_part_2
    print(pull.resolve(name).path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
